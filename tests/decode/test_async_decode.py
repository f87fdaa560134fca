"""docs/async-decode.md, section by section: a test for each numbered step and row of its tables.

The comments are its headings, and a test's name has the number that it shows. The device is
`FakeStreams`, which moves only when stepped or waited for, and never orders two streams by itself.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from neuron_streams.decode import (
    AsyncModelRunnerOutput,
    CachedRequestState,
    DecodeLoop,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
)
from tests.decode.fake_streams import FakeStreams, FakeTensor
from tests.decode.harness import Worker, make_loop, make_worker
from tests.decode.hash_model import FakeHashModel, reference

LONG = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)


def spy(target: Any, *names: str, log: list[str] | None = None) -> list[str]:
    """The names of the methods as they are called, in order."""
    calls: list[str] = [] if log is None else log

    def watch(name: str) -> None:
        method = getattr(target, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return method(*args, **kwargs)

        setattr(target, name, watched)

    for name in names:
        watch(name)
    return calls


class WatchedBuffer(dict[str, Any]):
    """Notes which keys are read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reads: list[str] = []

    def __getitem__(self, key: str) -> Any:
        self.reads.append(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.reads.append(key)
        return super().get(key, default)


def watch_buffer(worker: Worker) -> WatchedBuffer:
    buffer = WatchedBuffer(worker.runner.async_execution_buffer)
    worker.runner.async_execution_buffer = buffer  # type: ignore[assignment]
    return buffer


def steady(*prompts: list[int], **sizes: Any) -> Worker:
    """A worker whose requests have been prefilled and have run one decode step, all read."""
    worker = make_worker(sizes=sizes)
    for number, prompt in enumerate(prompts or ([1, 2],)):
        worker.scheduler.add_request(f"r{number}", prompt, LONG)
    for _ in range(len(prompts or ([1, 2],)) + 1):
        worker.finish(worker.launch())
    return worker


def decode_inputs(model: FakeHashModel) -> list[Any]:
    return [call.input_ids for call in model.of("decode")]


# Overview


def test_overview_1_the_engine_schedules_one_step_ahead() -> None:
    loop, model, streams = make_loop()
    loop.add_request("a", [1, 2], LONG)
    with streams.hold(loop.runner.compute_stream):
        assert loop.step() == []
        assert len(model.calls) == 1
        assert model.executed == 0
        streams.run()
        assert loop.max_concurrent_batches == 2
    loop.step()
    assert [call.kind for call in model.calls] == ["prefill", "decode"]


def test_overview_2_the_future_is_the_next_input_without_a_host_roundtrip() -> None:
    worker = make_worker()
    worker.scheduler.add_request("a", [1, 2], LONG)
    for _ in range(4):
        worker.launch()
    outputs = [call.output for call in worker.model.calls]
    assert decode_inputs(worker.model)[-1] is outputs[-2]
    assert worker.streams.blocking_reads == 0


def threads_that_read(loop: DecodeLoop) -> list[str]:
    """The thread of each `get_output` while the loop generates."""
    readers = []
    get_output = AsyncModelRunnerOutput.get_output

    def watched(output: AsyncModelRunnerOutput) -> ModelRunnerOutput:
        readers.append(threading.current_thread().name)
        return get_output(output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncModelRunnerOutput, "get_output", watched)
        for _ in loop.generate([[1, 2]], LONG):
            pass
    return readers


def test_overview_3_tokens_are_materialized_on_a_separate_thread() -> None:
    loop, _, _ = make_loop(output_thread=True)
    readers = threads_that_read(loop)
    assert readers.count("neuron-streams-decode-output") == loop.stats.steps
    loop.close()


def test_async_scheduling_is_on_by_default_and_can_be_disabled() -> None:
    streams = FakeStreams()
    model = FakeHashModel(streams)
    assert DecodeLoop(model, streams=streams).runner.use_async_scheduling
    off, model, _ = make_loop(async_scheduling=False)
    for _ in off.generate([[1, 2]], LONG):
        pass
    assert off.stats.async_steps == 0
    assert off.stats.steps == 16


def test_async_scheduling_requires_on_device_sampling() -> None:
    with pytest.raises(ValueError, match="^async_scheduling=True needs a model that samples on"):
        make_loop(sizes={"on_device_sampling": False})
    make_loop(sizes={"on_device_sampling": False}, async_scheduling=False)


# Where it helps


def test_longer_responses_have_a_larger_async_share() -> None:
    shares = []
    for max_tokens in (2, 8, 20):
        loop, _, _ = make_loop()
        params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
        for _ in loop.generate([[1], [2]], params):
            pass
        shares.append(loop.stats.async_share)
    assert shares == sorted(set(shares))


# Futures


def test_futures_1_futures_are_held_across_steps_in_the_buffer() -> None:
    worker = steady()
    _, output = worker.launch()
    buffer = worker.runner.async_execution_buffer
    assert buffer["futures_sampled_token_ids"] is worker.model.calls[-1].output
    assert buffer["async_output"] is output


def test_futures_2_the_flow_is_broken_on_purpose_when_the_composition_changes() -> None:
    worker = steady()
    worker.launch()
    worker.scheduler.add_request("late", [3], LONG)
    worker.launch()
    assert worker.runner.requests[worker.runner.input_batch.req_ids[0]].key.request_id == "late"
    assert not worker.runner._pending_outputs[0].done
    assert len(worker.runner._pending_outputs) == 1  # the newest only: the rest has been read


def test_futures_3_a_lock_per_object_prevents_double_materialization() -> None:
    worker = steady()
    _, output = worker.launch()
    barrier, seen = threading.Barrier(16), list[ModelRunnerOutput]()
    reads = spy(output, "_read_copy")

    def read() -> None:
        barrier.wait()
        seen.append(output.get_output())

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 16
    assert len({id(value) for value in seen}) == 1
    assert len(reads) == 1


# The synchronous step


def sync_worker() -> Worker:
    worker = make_worker(async_scheduling=False)
    worker.scheduler.add_request("a", [1, 2], LONG)
    return worker


def test_synchronous_1_the_scheduler_produces_a_scheduler_output() -> None:
    schedule = sync_worker().scheduler.schedule()
    assert isinstance(schedule, SchedulerOutput)
    assert [key.request_id for key in schedule.num_scheduled_tokens] == ["a"]
    assert schedule.total_num_scheduled_tokens == 2


def test_synchronous_2_to_6_the_engine_calls_the_parts_in_order() -> None:
    loop, _, _ = make_loop(async_scheduling=False)
    log = spy(loop.scheduler, "schedule", "update_from_output")
    spy(loop.runner, "execute_model", "sample_tokens", log=log)
    loop.add_request("a", [1, 2], LONG)
    loop.step()
    loop.step()
    assert log == ["schedule", "execute_model", "sample_tokens", "update_from_output"] * 2


def test_synchronous_3_execute_model_does_its_parts_in_order() -> None:
    worker = sync_worker()
    log = spy(worker.runner, "_update_states", "_prepare_model_input", "_execute_model_forward")
    worker.step_sync()
    assert log == ["_update_states", "_prepare_model_input", "_execute_model_forward"]


def test_synchronous_3a_update_states_applies_the_schedulers_decisions() -> None:
    worker = sync_worker()
    worker.step_sync()
    worker.step_sync()
    (state,) = worker.runner.requests.values()
    assert state.num_computed_tokens == 2
    assert state.slot == 1
    worker.scheduler.abort_request("a")
    worker.runner.execute_model(worker.scheduler.schedule())
    assert not worker.runner.requests
    assert not worker.runner.input_batch.num_reqs


def test_synchronous_3b_inputs_are_built_from_the_input_batch() -> None:
    worker = sync_worker()
    token = worker.step_sync().sampled_token_ids[0][0]
    worker.step_sync()
    call = worker.model.of("decode")[0]
    assert call.host_ids == [token]
    assert call.positions.tolist() == [2]
    assert call.slots == [1]


def test_synchronous_3c_the_forward_blocks_until_the_result_is_on_the_host() -> None:
    worker = sync_worker()
    worker.runner.execute_model(worker.scheduler.schedule())
    assert worker.streams.blocking_reads == 1
    assert worker.model.executed == 1


def test_synchronous_3d_the_result_is_kept_and_none_is_returned() -> None:
    worker = sync_worker()
    assert worker.runner.execute_model(worker.scheduler.schedule()) is None  # type: ignore[func-returns-value]
    assert worker.runner.execute_model_state is not None


def test_synchronous_5_sample_tokens_unpacks_the_state_and_updates_the_batch() -> None:
    worker = sync_worker()
    worker.runner.execute_model(worker.scheduler.schedule())
    output = worker.runner.sample_tokens()
    assert isinstance(output, ModelRunnerOutput)
    assert worker.runner.execute_model_state is None
    (state,) = worker.runner.requests.values()
    assert state.output_token_ids == output.sampled_token_ids[0]
    row = worker.runner.input_batch.token_ids_cpu[0]
    assert row[:4] == [1, 2, *state.output_token_ids, -1]


def test_synchronous_6_update_from_output_finishes_requests_and_frees_their_slots() -> None:
    worker = make_worker(async_scheduling=False)
    worker.scheduler.add_request("a", [1, 2], SamplingParams(max_tokens=1))
    worker.step_sync()
    assert not worker.scheduler.running
    assert 1 in worker.scheduler.capacity.free_slots


def test_synchronous_every_transfer_is_blocking() -> None:
    loop, model, streams = make_loop(async_scheduling=False)
    for _ in loop.generate([[1, 2], [3]], LONG):
        assert model.executed == len(model.calls)
    assert streams.blocking_reads == streams.copies == loop.stats.steps


# The asynchronous step: step N


def test_step_n_1_the_first_step_takes_its_ids_from_the_host() -> None:
    worker = make_worker()
    worker.scheduler.add_request("a", [1, 2], LONG)
    worker.launch()
    assert worker.model.calls[0].host_ids == [[1, 2, 0, 0]]
    assert dict(worker.runner.stats.fallback_reasons) == {"prefill": 1}


def test_step_n_2_and_3_the_output_stays_on_the_device() -> None:
    worker = steady()
    worker.runner.execute_model(worker.scheduler.schedule())
    assert worker.runner.execute_model_state is worker.model.calls[-1].output
    assert isinstance(worker.runner.execute_model_state, FakeTensor)
    assert worker.streams.blocking_reads == 0


def test_step_n_4_the_ids_are_a_snapshot() -> None:
    worker = steady([1, 2], [3, 4])
    _, output = worker.launch()
    before = list(output.req_ids)
    worker.runner.input_batch.swap_states(0, 1)
    worker.scheduler.abort_request("r0")
    worker.launch()
    assert output.req_ids == before
    assert output.get_output().req_ids == before


def test_step_n_4_the_next_update_waits_for_this_bookkeeping() -> None:
    worker = steady()
    worker.runner.execute_model(worker.scheduler.schedule())
    log = spy(worker.runner, "_update_states")
    with pytest.raises(RuntimeError, match="^execute_model was called twice"):
        worker.runner.execute_model(worker.scheduler.schedule())
    assert log == []


def test_step_n_4_sampling_needs_a_launched_step_and_knows_no_grammar() -> None:
    worker = steady()
    with pytest.raises(RuntimeError, match="^sample_tokens needs a launched step"):
        worker.runner.sample_tokens()
    worker.runner.execute_model(worker.scheduler.schedule())
    with pytest.raises(NotImplementedError, match="^sample_tokens\\(grammar_output"):
        worker.runner.sample_tokens(object())  # type: ignore[arg-type]


def test_step_n_5_the_future_is_stored_and_the_output_wrapped() -> None:
    worker = steady()
    _, output = worker.launch()
    assert worker.runner.async_execution_buffer == {
        "futures_sampled_token_ids": worker.model.calls[-1].output,
        "prev_req_ids_ordered": output.req_ids,
        "async_output": output,
    }


def test_step_n_6_the_output_thread_reads_while_the_engine_schedules() -> None:
    loop, _model, _streams = make_loop(output_thread=True)
    loop.add_request("a", [1, 2], LONG)
    loop.step()
    (future,) = (step.future for step in loop.batch_queue)
    assert future.wait(10), "the output thread read the step with no step() to ask for it"
    loop.close()


def test_step_n_6_the_tokens_reach_the_batch_state() -> None:
    worker = steady()
    _, output = worker.launch()
    token = output.get_output().sampled_token_ids[0][0]
    (state,) = worker.runner.requests.values()
    known = len(state.output_token_ids)
    worker.launch()
    assert state.output_token_ids[known:] == [token]
    assert worker.runner.input_batch.token_ids_cpu[0][2 + known] == token


def test_step_n_7_the_queue_is_filled_before_the_engine_blocks() -> None:
    loop, _model, _streams = make_loop()
    loop.add_request("a", [1, 2], LONG)
    log = spy(loop.scheduler, "schedule", "update_from_output")
    for _ in range(3):
        loop.step()
    assert log == [
        "schedule", "schedule", "update_from_output", "schedule", "update_from_output",
    ]  # fmt: skip
    assert len(loop.batch_queue) == 1


# The asynchronous step: step N+1


def test_step_n1_1_the_ids_built_on_the_host_are_stale() -> None:
    worker = steady()
    worker.launch()
    built = []
    prepare = worker.runner._prepare_model_input
    worker.runner._prepare_model_input = lambda out: built.append(prepare(out)) or built[-1]  # type: ignore
    worker.launch()
    assert built[0].input_ids.tolist() == [-1]


@pytest.mark.parametrize("why", ["no buffer", "prefill", "composition", "eligible"])
def test_step_n1_2_the_swap_needs_a_buffer_a_decode_step_and_the_same_batch(why: str) -> None:
    worker = steady([1, 2], [3])
    worker.launch()
    future = worker.model.calls[-1].output
    if why == "no buffer":
        worker.runner._materialize_pending_async_output("test")
        worker.runner.async_execution_buffer = {}
    elif why == "prefill":
        worker.scheduler.add_request("late", [3], LONG)
    elif why == "composition":
        worker.scheduler.abort_request("r0")
    worker.launch()
    assert (worker.model.calls[-1].input_ids is future) == (why == "eligible")


def test_step_n1_3_and_4_the_future_replaces_the_stale_ids() -> None:
    worker = steady()
    worker.launch()
    future = worker.runner.async_execution_buffer["futures_sampled_token_ids"]
    steps = worker.runner.stats.async_steps
    worker.launch()
    assert worker.model.calls[-1].input_ids is future
    assert worker.runner.stats.async_steps == steps + 1


def test_step_n1_5_a_reordered_batch_remaps_the_future() -> None:
    worker = steady([1, 2], [3], [4, 4], batch_buckets=(4,))
    worker.launch()
    slots = worker.model.calls[-1].slots
    future = worker.runner.async_execution_buffer["futures_sampled_token_ids"]
    stats = worker.runner.stats
    fallbacks, async_steps = stats.sync_fallback_steps, stats.async_steps
    worker.runner.input_batch.swap_states(0, 2)
    prepared = spy(worker.runner, "_prepare_model_input")
    worker.launch()
    remap, decode = worker.model.calls[-2:]
    assert remap.input_ids is future
    assert remap.positions.tolist() == [2, 1, 0, 3], "the padding row is unchanged"
    assert decode.input_ids is remap.output
    assert decode.slots == [*slots[2::-1], 0]
    assert len(prepared) == 1, "a remap rebuilds no inputs"
    assert stats.sync_fallback_steps == fallbacks + 1
    assert stats.fallback_reasons["reorder"] == 1
    assert stats.async_steps == async_steps


def test_step_n1_5_condense_moves_rows_and_their_tokens_follow() -> None:
    loop, model, _ = make_loop()
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (2, 9, 12)]
    prompts = [[1], [2, 2], [3, 3, 3]]
    tokens: dict[str, list[int]] = {"0": [], "1": [], "2": []}
    for output in loop.generate(prompts, params):
        tokens[output.request_id] += output.new_token_ids
    for number, prompt in enumerate(prompts):
        want, _ = reference(prompt, params[number], model.max_length)
        assert tokens[str(number)] == want


def test_step_n1_6_and_7_the_cycle_repeats_without_a_host_read() -> None:
    worker = steady()
    worker.launch()
    for _ in range(3):
        before = worker.model.calls[-1].output
        worker.launch()
        assert worker.model.calls[-1].input_ids is before
    assert worker.streams.blocking_reads == 0


# The buffer between steps


def test_buffer_row_futures_sampled_token_ids_is_read_in_steady_state() -> None:
    worker = steady()
    worker.launch()
    buffer = watch_buffer(worker)
    worker.launch()
    assert "futures_sampled_token_ids" in buffer.reads


def test_buffer_row_prev_req_ids_ordered_is_the_order_that_made_the_future() -> None:
    worker = steady([1, 2], [3])
    orders = []
    for _ in range(2):
        worker.runner.input_batch.swap_states(0, 1)
        worker.launch()
        ordered = worker.runner.async_execution_buffer["prev_req_ids_ordered"]
        orders.append([key.request_id for key in ordered])
    assert sorted(orders) == [["r0", "r1"], ["r1", "r0"]]


def test_buffer_without_prev_req_ids_ordered_is_a_composition_change() -> None:
    worker = steady()
    worker.launch()
    del worker.runner.async_execution_buffer["prev_req_ids_ordered"]
    worker.launch()
    assert worker.runner._batch_composition_changed
    assert worker.runner.stats.fallback_reasons["composition"] == 1


def test_buffer_async_output_is_read_only_to_break_the_flow() -> None:
    worker = steady()
    worker.launch()
    buffer = watch_buffer(worker)
    worker.launch()
    assert "async_output" not in buffer.reads
    buffer = watch_buffer(worker)
    worker.scheduler.add_request("late", [3], LONG)
    worker.launch()
    assert "async_output" in buffer.reads


# Breaking the flow


def test_a_finish_is_found_when_the_next_step_is_already_in_flight() -> None:
    loop, model, _ = make_loop()
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    stop = reference([1, 2], params, model.max_length)[0][3]
    cut = reference([1, 2], params, model.max_length)[0].index(stop) + 1
    ends = SamplingParams(max_tokens=12, seed=3, ignore_eos=True, stop_token_ids=(stop,))
    results = list(loop.generate([[1, 2]], ends))
    assert results[-1].finish_reason == "stop"
    assert results[-1].num_output_tokens == cut
    assert loop.stats.steps == cut + 1
    assert loop.stats.extra_tokens_dropped == 1


def test_when_the_set_changes_the_ids_come_from_the_scheduler() -> None:
    worker = steady([1, 2], [3])
    worker.launch()
    worker.scheduler.abort_request("r0")
    worker.launch()
    (state,) = worker.runner.requests.values()
    assert worker.model.calls[-1].host_ids == [state.output_token_ids[-1]]


def test_when_the_shape_differs_the_pending_output_is_read_and_inputs_rebuilt() -> None:
    worker = make_worker(sizes={"batch_buckets": (4,)})
    worker.scheduler.add_request("a", [1, 2], LONG)
    _, first = worker.launch()
    prepared = spy(worker.runner, "_prepare_model_input")
    worker.launch()
    assert len(prepared) == 2
    assert worker.model.calls[-1].host_ids == [first.get_output().sampled_token_ids[0][0], 0, 0, 0]
    assert dict(worker.runner.stats.fallback_reasons) == {"prefill": 1, "shape": 1}


def test_when_the_dtype_differs_the_pending_output_is_read_and_inputs_rebuilt() -> None:
    worker = make_worker(sizes={"batch_buckets": (1,), "prefill_dtype": torch.int64})
    worker.scheduler.add_request("a", [1, 2], LONG)
    worker.launch()
    prepared = spy(worker.runner, "_prepare_model_input")
    worker.launch()
    worker.launch()
    assert len(prepared) == 3
    assert dict(worker.runner.stats.fallback_reasons) == {"prefill": 1, "dtype": 1}
    assert worker.runner.stats.async_steps == 1


def test_a_mismatch_rebuilds_even_if_the_output_thread_has_read_already() -> None:
    worker = make_worker(sizes={"batch_buckets": (4,)})
    worker.scheduler.add_request("a", [1, 2], LONG)
    _, first = worker.launch()
    prepare, prepared = worker.runner._prepare_model_input, []

    def read_in_between(schedule: SchedulerOutput) -> Any:
        prepared.append(prepare(schedule))
        first.get_output()
        return prepared[-1]

    worker.runner._prepare_model_input = read_in_between  # type: ignore[method-assign, assignment]
    worker.launch()
    assert [built.input_ids[0].item() for built in prepared] == [
        -1,
        first.get_output().sampled_token_ids[0][0],
    ]


# The guard


def test_guard_comes_before_any_state_changes() -> None:
    worker = steady()
    worker.launch()
    worker.scheduler.add_request("late", [3], LONG)
    log = spy(
        worker.runner,
        "_materialize_pending_async_output",
        "_update_states",
        "_prepare_model_input",
    )
    worker.launch()
    assert log == [
        "_materialize_pending_async_output", "_update_states", "_prepare_model_input",
    ]  # fmt: skip


def test_guard_with_an_empty_buffer_sees_no_change() -> None:
    worker = make_worker()
    worker.scheduler.add_request("a", [1, 2], LONG)
    worker.launch()
    assert not worker.runner._batch_composition_changed


@pytest.mark.parametrize("cause", ["finished", "joined", "unscheduled"])
def test_guard_catches_every_cause_of_a_changed_set(cause: str) -> None:
    worker = steady([1, 2], [3])
    worker.launch()
    if cause == "finished":
        worker.scheduler.abort_request("r0")
    elif cause == "joined":
        worker.scheduler.add_request("late", [3], LONG)
    schedule = worker.scheduler.schedule()
    if cause == "unscheduled":
        key = next(iter(schedule.num_scheduled_tokens))
        del schedule.num_scheduled_tokens[key]
    worker.launch(schedule)
    assert worker.runner._batch_composition_changed


def test_guard_catches_the_max_tokens_gap() -> None:
    """A request leaves the schedule one step before it is reported finished."""
    worker = make_worker()
    worker.scheduler.add_request("short", [1, 2], SamplingParams(max_tokens=3, seed=1))
    worker.scheduler.add_request("long", [3], LONG)
    worker.finish(worker.launch())
    worker.finish(worker.launch())
    worker.finish(worker.launch())
    last = worker.launch()
    assert len(last[0].num_scheduled_tokens) == 2
    gap, _ = worker.launch()
    assert [key.request_id for key in gap.num_scheduled_tokens] == ["long"]
    assert not gap.finished_req_ids
    assert worker.runner._batch_composition_changed
    assert [out.finish_reason for out in worker.finish(last)] == ["length", None]
    after, _ = worker.launch()
    assert [key.request_id for key in after.finished_req_ids] == ["short"]
    assert not worker.runner._batch_composition_changed


def test_guard_reads_every_pending_output_in_order() -> None:
    worker = make_worker(max_concurrent_batches=4)
    worker.scheduler.add_request("a", [1, 2], LONG)
    launched = [worker.launch() for _ in range(3)]
    worker.scheduler.add_request("late", [3], LONG)
    worker.launch()
    assert all(output.done for _, output in launched)
    state = next(s for s in worker.runner.requests.values() if s.key.request_id == "a")
    assert state.output_token_ids == reference([1, 2], LONG, worker.model.max_length)[0][:3]


def test_guard_makes_rejoining_requests_see_the_materialized_tokens() -> None:
    worker = steady()
    worker.launch()
    worker.scheduler.add_request("late", [3], LONG)
    worker.launch()
    seen = {}
    add = worker.runner.input_batch.add_request

    def watched(state: CachedRequestState) -> int:
        seen[state.key.request_id] = list(state.output_token_ids)
        return add(state)

    worker.runner.input_batch.add_request = watched  # type: ignore[method-assign]
    worker.launch()
    assert seen == {"r0": reference([1, 2], LONG, worker.model.max_length)[0][:3]}


def test_guard_leaves_inputs_that_need_no_rebuilding() -> None:
    worker = steady([1, 2], [3])
    worker.launch()
    worker.scheduler.abort_request("r0")
    prepared = spy(worker.runner, "_prepare_model_input")
    worker.launch()
    assert len(prepared) == 1


# The swap decision


@pytest.mark.parametrize(
    ("bucket", "reasons"), [(4, {"prefill": 1, "shape": 1}), (1, {"prefill": 1})]
)
def test_swap_after_prefill_falls_back_once_unless_the_rows_agree(
    bucket: int, reasons: dict[str, int]
) -> None:
    loop, _, _ = make_loop(sizes={"batch_buckets": (bucket,)})
    for _ in loop.generate([[1, 2]], LONG):
        pass
    assert dict(loop.stats.fallback_reasons) == reasons
    assert loop.stats.async_steps == 16 - sum(reasons.values())


def test_swap_is_decided_on_the_batch_after_its_update() -> None:
    """The first decode step is one although the step before was a prefill."""
    worker = make_worker()
    worker.scheduler.add_request("a", [1, 2], LONG)
    worker.launch()
    assert not worker.runner._is_decode()
    worker.launch()
    assert worker.model.calls[-1].kind == "decode"
    assert worker.runner.stats.async_steps == 1


def test_swap_uses_the_host_ids_as_they_are_when_a_condition_fails() -> None:
    worker = steady()
    worker.scheduler.add_request("late", [3], LONG)
    worker.launch()
    assert worker.model.calls[-1].host_ids == [[3, 0, 0, 0]]


# Reinstatement


def test_reinstatement_1_the_forward_never_copies_in_async_mode() -> None:
    worker = steady()
    worker.scheduler.add_request("late", [3], LONG)
    worker.launch()
    assert worker.streams.blocking_reads == 0


def test_reinstatement_2_and_3_the_buffer_is_refilled_after_a_fallback() -> None:
    worker = steady()
    worker.launch()
    worker.scheduler.add_request("late", [3], LONG)
    _, output = worker.launch()
    buffer = worker.runner.async_execution_buffer
    assert buffer["async_output"] is output
    assert buffer["futures_sampled_token_ids"] is worker.model.calls[-1].output


def test_reinstatement_the_step_after_a_fallback_is_async_again() -> None:
    worker = steady([1, 2], [3])
    worker.launch()
    worker.scheduler.abort_request("r0")
    worker.launch()
    steps = worker.runner.stats.async_steps
    worker.launch()
    assert worker.runner.stats.async_steps == steps + 1


def test_the_scheduler_cannot_tell_the_modes_apart() -> None:
    """With one step in flight, both modes see the same schedules."""
    schedules = []
    for is_async in (False, True):
        loop, _model, _ = make_loop(async_scheduling=is_async, depth=1)
        seen: list[Any] = []
        execute = loop.runner.execute_model
        loop.runner.execute_model = lambda out, s=seen, e=execute: s.append(out) or e(out)  # type: ignore
        for number in range(3):
            loop.add_request(str(number), [1 + number], SamplingParams(max_tokens=4, seed=number))
        while loop.has_unfinished_requests():
            loop.step()
        schedules.append([(s.num_scheduled_tokens, s.num_computed_tokens) for s in seen])
    assert schedules[0] == schedules[1]


# Tensor-parallel ranks


def test_ranks_output_rank_is_read_by_the_output_thread_on_every_step() -> None:
    loop, _, _ = make_loop(output_thread=True)
    log = threads_that_read(loop)
    on_thread = log.count("neuron-streams-decode-output")
    assert on_thread == loop.stats.steps
    assert len(log) - on_thread <= 1, "the flush of an empty schedule is the one break here"
    loop.close()


def test_ranks_others_are_read_on_a_break_alone_and_retired_otherwise() -> None:
    worker = make_worker(is_output_rank=False)
    worker.scheduler.add_request("a", [1, 2], LONG)
    calls: list[str] = []
    outputs = []

    def launch() -> None:
        schedule, output = worker.launch()
        spy(output, "get_output", log=calls)
        outputs.append((schedule, output))
        assert len(worker.runner._pending_outputs) <= 2

    for _ in range(6):
        launch()
    assert calls == []
    assert all(output.done for _, output in outputs[:-2]), "retired, not overwritten"
    worker.scheduler.add_request("late", [3], LONG)
    launch()
    assert calls, "a break reads what is pending"
    state = next(s for s in worker.runner.requests.values() if s.key.request_id == "a")
    assert state.output_token_ids == reference([1, 2], LONG, worker.model.max_length)[0][:6]


def test_ranks_of_one_schedule_have_equal_histories() -> None:
    """Eight runners, each on its own thread and device, fed the same schedules."""
    lead = make_worker()
    others = [make_worker(FakeStreams(rank), is_output_rank=False) for rank in range(1, 8)]
    for number in range(3):
        lead.scheduler.add_request(
            f"r{number}", [number + 1], SamplingParams(max_tokens=4 + 3 * number, seed=number)
        )
    schedules = []
    while lead.scheduler.unfinished_request_ids:
        launched = lead.launch()
        schedules.append(launched[0])
        lead.finish(launched)

    def follow(worker: Worker) -> None:
        for schedule in schedules:
            worker.runner.execute_model(schedule)
            worker.runner.sample_tokens()

    threads = [threading.Thread(target=follow, args=(worker,)) for worker in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in others:
        worker.streams.run()
        assert worker.model.history == lead.model.history
