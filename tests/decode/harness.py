"""Loops to test with, a driver that checks the invariants after each step, and scripts to fuzz."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from neuron_streams.decode import (
    AsyncModelRunnerOutput,
    DecodeLoop,
    ModelRunner,
    ModelRunnerOutput,
    RequestOutput,
    SamplingParams,
    Scheduler,
    SchedulerOutput,
)
from tests.decode.fake_streams import FakeStreams
from tests.decode.hash_model import VOCAB, FakeHashModel, Sizes


@dataclass
class Results:
    """Per request, in order of admission under its id: tokens and finish reason."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)
    admitted: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    total: int = 0

    def admit(self, request_id: str) -> tuple[str, int]:
        name = (request_id, self.admitted[request_id])
        self.admitted[request_id] += 1
        self.tokens[name] = []
        return name

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            name = (output.request_id, self.ended[output.request_id])
            self.tokens[name] += output.new_token_ids
            self.total += len(output.new_token_ids)
            assert output.num_output_tokens == len(self.tokens[name])
            if output.finish_reason is not None:
                self.reasons[name] = output.finish_reason
                self.ended[output.request_id] += 1


def make_loop(
    streams: FakeStreams | None = None, *, sizes: dict[str, Any] | None = None, **options: Any
) -> tuple[DecodeLoop, FakeHashModel, FakeStreams]:
    streams = streams or FakeStreams()
    model = FakeHashModel(streams, **(sizes or {}))
    options.setdefault("output_thread", False)
    return DecodeLoop(model, streams=streams, **options), model, streams


def run_to_end(loop: DecodeLoop, model: Sizes, results: Results | None = None) -> Results:
    results = results or Results()
    while loop.has_unfinished_requests():
        results.take(loop.step())
        check_invariants(loop, model)
    check_idle(loop)
    return results


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
    named = Counter(key for _, step in loop.batch_queue for key in step.num_scheduled_tokens)
    in_flight = {key: request.num_in_flight for key, request in scheduler._in_flight.items()}
    assert named == in_flight
    holders = {*scheduler.running, *scheduler._in_flight.values()}
    slots = [request.slot or 0 for request in holders]
    assert sorted([*slots, *scheduler.free_slots]) == list(range(1, model.num_slots))
    for request in holders:
        assert len(request.output_token_ids) + request.num_in_flight <= request.max_tokens


def check_idle(loop: DecodeLoop) -> None:
    assert not loop.batch_queue
    assert not loop.scheduler._in_flight
    assert not loop.scheduler.running
    assert not loop.scheduler.waiting
    assert not loop.scheduler.unfinished_request_ids


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


@dataclass
class Scripted:
    """A request of a script: arrives once so many tokens are out, may be aborted after its own."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrives_at: int
    abort_after: int | None = None


def make_script(seed: int) -> list[Scripted]:
    rng = random.Random(seed)
    script = []
    for _ in range(rng.randint(1, 9)):
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 3, 5, 8, 13, 40]),
            temperature=rng.choice([0.0, 0.5]),
            top_k=rng.choice([0, 3]),
            top_p=rng.choice([1.0, 0.75]),
            seed=rng.randint(-(2**63), 2**63 - 1),
            stop_token_ids=rng.choice([(), (3,), (1, 20)]),
            ignore_eos=rng.random() < 0.3,
        )
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        arrives, aborted = rng.choice([0, 0, rng.randint(0, 40)]), rng.random() < 0.3
        script.append(
            Scripted(
                rng.choice("abcdefg"),
                prompt,
                params,
                arrives,
                rng.randint(0, 4) if aborted else None,
            )
        )
    return sorted(script, key=lambda one: one.arrives_at)


def play(
    script: list[Scripted], loop: DecodeLoop, model: Sizes, device: Any, seed: int
) -> tuple[Results, dict[tuple[str, int], Scripted]]:
    """Run a script; rows are exchanged and the device moves on at random between the steps."""
    rng, results = random.Random(seed), Results()
    waiting, named = list(script), dict[tuple[str, int], Scripted]()

    def admit() -> None:
        idle = not loop.has_unfinished_requests()
        in_use = set(loop.scheduler.unfinished_request_ids)
        for one in list(waiting):
            if one.request_id not in in_use and (idle or one.arrives_at <= results.total):
                loop.add_request(one.request_id, one.prompt, one.params)
                named[results.admit(one.request_id)] = one
                in_use.add(one.request_id)
                waiting.remove(one)
                idle = False

    def abort() -> None:
        for name, one in named.items():
            due = one.abort_after is not None and len(results.tokens[name]) >= one.abort_after
            if due and results.ended[name[0]] == name[1]:
                loop.abort_request(one.request_id)
                # Its id is free at once: whoever waits for it may come now.
                results.take(loop._undelivered)
                loop._undelivered.clear()

    while waiting or loop.has_unfinished_requests():
        admit()
        abort()
        device.run(rng.randint(0, 6))
        batch = loop.runner.input_batch
        if batch.num_reqs > 1 and rng.random() < 0.4:
            batch.swap_states(*rng.sample(range(batch.num_reqs), 2))
        results.take(loop.step())
        check_invariants(loop, model)
    check_idle(loop)
    return results, named
