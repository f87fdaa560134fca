"""Loops to test with, a driver that checks the invariants after each step, and scripts to fuzz."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from neuron_streams.decode import (
    AsyncModelRunnerOutput,
    DecodeLoop,
    ModelRunner,
    ModelRunnerOutput,
    RequestOutput,
    Scheduler,
    SchedulerOutput,
)
from neuron_streams.decode.logprobs import TokenLogprobs
from neuron_streams.decode.policy import MOST_OVERTAKEN
from neuron_streams.decode.request import Request
from tests.decode.fake_streams import FakeStreams
from tests.decode.hash_model import FakeChunkModel, FakeHashModel, FakePackedModel, Sizes

MODES: dict[str, dict[str, Any]] = {
    "sync": {"async_scheduling": False},
    "materialize": {},
    "materialize 4": {"depth": 4},
    "gather": {"policy": "gather"},
    "gather 4": {"policy": "gather", "depth": 4},
}
modes = pytest.mark.parametrize("options", MODES.values(), ids=MODES)


@dataclass
class Results:
    """Per request, in order of admission under its id: what came of it."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], list[TokenLogprobs]] = field(default_factory=dict)
    emissions: Counter[tuple[str, int]] = field(default_factory=Counter)
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)
    errors: dict[tuple[str, int], Exception] = field(default_factory=dict)
    texts: dict[tuple[str, int], str] = field(default_factory=dict)
    stop_reasons: dict[tuple[str, int], int | str | None] = field(default_factory=dict)
    admitted: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    total: int = 0

    def admit(self, request_id: str) -> tuple[str, int]:
        name = (request_id, self.admitted[request_id])
        self.admitted[request_id] += 1
        self.tokens[name] = []
        self.texts[name] = ""
        return name

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            name = (output.request_id, self.ended[output.request_id])
            assert name not in self.reasons, f"{name} was told more after its end"
            assert output.new_token_ids or output.finished
            self.tokens[name] += output.new_token_ids
            if output.logprobs is not None:
                assert len(output.logprobs) == len(output.new_token_ids)
                self.logprobs.setdefault(name, []).extend(output.logprobs)
            self.texts[name] += output.text
            self.emissions[name] += 1
            self.total += len(output.new_token_ids)
            assert output.num_output_tokens == len(self.tokens[name])
            if output.finish_reason is not None:
                self.reasons[name] = output.finish_reason
                self.stop_reasons[name] = output.stop_reason
                if output.error is not None:
                    self.errors[name] = output.error
                self.ended[output.request_id] += 1


def make_loop(
    streams: FakeStreams | None = None,
    *,
    sizes: dict[str, Any] | None = None,
    chunks: bool = False,
    packs: bool = False,
    **options: Any,
) -> tuple[DecodeLoop, FakeHashModel, FakeStreams]:
    streams = streams or FakeStreams()
    kind = FakePackedModel if packs else FakeChunkModel if chunks else FakeHashModel
    model = kind(streams, **(sizes or {}))
    options.setdefault("output_thread", False)
    loop = DecodeLoop(model, streams=streams, **options)
    check_choices(loop.scheduler)
    check_bound(loop.scheduler, options.get("max_num_batched_tokens"), kind)
    return loop, model, streams


def check_choices(scheduler: Scheduler) -> None:
    """From here on, check what the scheduler chooses at the moment at which it does."""
    capacity = scheduler.capacity
    schedule, start = scheduler.schedule, capacity.start

    def checked_start(request: Request) -> None:
        needs_row = [r for r in scheduler.running if not (r.paused or r.is_ending)]
        ahead = [r for r in needs_row if r.priority <= request.priority]
        assert len(ahead) < capacity.max_batch_size, "no row for it among those as urgent"
        start(request)

    def checked_schedule() -> SchedulerOutput:
        step = schedule()
        scheduled = [scheduler._in_flight[key] for key in step.num_scheduled_tokens]
        assert len(scheduled) <= capacity.max_batch_size
        assert not any(request.paused for request in scheduled)
        rowless = capacity._rowless.first
        if scheduled and rowless is not None:
            assert max(request.order for request in scheduled) < rowless.order
        return step

    scheduler.schedule = checked_schedule  # type: ignore[method-assign]
    capacity.start = checked_start  # type: ignore[method-assign]


def check_bound(scheduler: Scheduler, bound: int | None, kind: type[FakeHashModel]) -> None:
    """From here on, check that no running request waits longer than the bound says."""
    schedule, after_prompts = scheduler.schedule, False

    def checked_schedule() -> SchedulerOutput:
        nonlocal after_prompts
        step = schedule()
        scheduled = [scheduler._in_flight[key] for key in step.num_scheduled_tokens]
        prompts = {r for r in scheduled if _takes_prompt(r, step)}
        takes_prompts, carries = bool(prompts), len(prompts) < len(scheduled)
        others = scheduler.capacity.rows.keys() - scheduled
        waits = any(not r.is_prefilling for r in others)
        if bound is not None and takes_prompts and carries:
            assert step.total_num_scheduled_tokens <= bound
        if bound is not None and takes_prompts and waits:
            assert kind is not FakePackedModel, "a row that decodes was left out"
            assert not after_prompts, "two prefill steps while a row decodes"
            if kind is FakeChunkModel:
                assert step.total_num_scheduled_tokens <= bound
        after_prompts = takes_prompts and waits
        assert all(r.num_overtaken <= MOST_OVERTAKEN for r in scheduler.capacity.rows)
        return step

    scheduler.schedule = checked_schedule  # type: ignore[method-assign]


def _takes_prompt(request: Request, step: SchedulerOutput) -> bool:
    return step.num_computed_tokens[request.key] < len(request.prefill_token_ids)


def run_to_end(loop: DecodeLoop, model: Sizes, results: Results | None = None) -> Results:
    results = results or Results()
    for outputs in steps_of(loop, model):
        results.take(outputs)
    return results


def drive(loop: DecodeLoop, model: Sizes) -> list[RequestOutput]:
    return [output for outputs in steps_of(loop, model) for output in outputs]


def steps_of(loop: DecodeLoop, model: Sizes) -> Iterator[list[RequestOutput]]:
    """What each step gives, to the end; the invariants hold after each."""
    while loop.has_unfinished_requests():
        yield loop.step()
        check_invariants(loop, model)
    check_idle(loop)


def check_invariants(loop: DecodeLoop, model: Sizes) -> None:
    stats, scheduler = loop.stats, loop.scheduler
    launched = len(model.of("prefill")) + len(model.of("decode"))
    assert stats.steps == launched
    if loop.runner.use_async_scheduling:
        assert stats.async_steps + stats.sync_fallback_steps == launched
        assert sum(stats.fallback_reasons.values()) == stats.sync_fallback_steps
    else:
        assert stats.async_steps == stats.sync_fallback_steps == 0
    assert len(loop.batch_queue) <= loop.max_concurrent_batches
    assert len(loop.runner._pending_outputs) <= loop.max_concurrent_batches
    named = Counter(
        key for step in loop.batch_queue for key in step.scheduler_output.num_scheduled_tokens
    )
    in_flight = {key: request.num_in_flight for key, request in scheduler._in_flight.items()}
    assert named == in_flight
    holders = {*scheduler.running, *scheduler._in_flight.values()}
    slots = [request.slot or 0 for request in holders]
    assert sorted([*slots, *scheduler.capacity.free_slots]) == list(range(1, model.num_slots))
    for request in holders:
        most = request.num_in_flight * loop.scheduler._policy.steps_per_launch
        assert 0 <= request.num_output_placeholders <= most
        got = len(request.output_token_ids)
        assert got + request.num_output_placeholders <= request.max_tokens
    check_capacity(scheduler)


def check_capacity(scheduler: Scheduler) -> None:
    """Each unfinished request is in the queues in which its state says that it is."""
    capacity = scheduler.capacity
    assert list(capacity.waiting) == [r for r in scheduler.waiting if not r.paused]
    holders = {r for r in scheduler.running if not r.is_ending}
    assert set(capacity._holders) == holders
    rows, rowless = set(capacity.rows), set(capacity._rowless)
    assert rows | rowless == {r for r in holders if not r.paused}
    assert not rows & rowless
    assert len(rows) <= capacity.max_batch_size
    assert scheduler.has_work == any(not r.paused for r in scheduler._by_id.values())


def check_idle(loop: DecodeLoop) -> None:
    assert not loop.batch_queue
    assert not loop.scheduler._in_flight
    assert not loop.scheduler.running
    assert not loop.scheduler.waiting
    assert not loop.scheduler.unfinished_request_ids
    assert not loop.scheduler._paused
    check_capacity(loop.scheduler)


def work_of(action: Callable[[], object]) -> int:
    """Bytecode instructions of the package that a call runs: its host cost, without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal count
        if frame.f_globals["__name__"].startswith("neuron_streams."):
            frame.f_trace_opcodes = True
            count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


@dataclass
class Worker:
    """A runner that a test feeds schedules by hand: one rank, no loop."""

    runner: ModelRunner
    scheduler: Scheduler
    model: FakeHashModel
    streams: FakeStreams

    def launch(
        self, schedule: SchedulerOutput | None = None
    ) -> tuple[SchedulerOutput, AsyncModelRunnerOutput]:
        schedule = schedule or self.scheduler.schedule()
        self.runner.execute_model(schedule)
        output = self.runner.sample_tokens()
        assert isinstance(output, AsyncModelRunnerOutput)
        return schedule, output

    def finish(self, launched: tuple[SchedulerOutput, AsyncModelRunnerOutput]) -> list[Any]:
        schedule, output = launched
        return self.scheduler.update_from_output(schedule, output.get_output())

    def step_sync(self) -> ModelRunnerOutput:
        schedule = self.scheduler.schedule()
        self.runner.execute_model(schedule)
        output = self.runner.sample_tokens()
        assert isinstance(output, ModelRunnerOutput)
        self.scheduler.update_from_output(schedule, output)
        return output


def make_worker(
    streams: FakeStreams | None = None, *, sizes: dict[str, Any] | None = None, **options: Any
) -> Worker:
    streams = streams or FakeStreams()
    model = FakeHashModel(streams, **(sizes or {}))
    runner = ModelRunner(model, streams, **options)
    return Worker(runner, Scheduler(model), model, streams)
