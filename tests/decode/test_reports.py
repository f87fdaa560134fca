"""How loops like this one have failed in public: one test for each report that applies.

The numbers are the rows of docs/reports.md, "Decode loops". What concerns streams and events alone
is in tests/contract, what concerns grammars is refused, what concerns several hosts is not ours.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

from neuron_streams.decode import (
    AsyncModelRunnerOutput,
    DecodeLoop,
    RequestOutput,
    SamplingParams,
    SchedulerOutput,
)
from neuron_streams.errors import UnsupportedError
from tests.decode.fake_streams import UNWRITTEN, FakeStreams
from tests.decode.harness import check_idle, check_invariants, make_loop, make_worker
from tests.decode.hash_model import FakeHashModel, reference

ASYNC: dict[str, dict[str, Any]] = {
    f"{policy} {depth}": {"policy": policy, "depth": depth}
    for policy in ("materialize", "gather")
    for depth in (2, 4)
}
policies = pytest.mark.parametrize("options", ASYNC.values(), ids=ASYNC)


def limited(max_tokens: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def tokens_of(outputs: list[RequestOutput], request_id: str) -> list[int]:
    return [t for out in outputs if out.request_id == request_id for t in out.new_token_ids]


def run(loop: DecodeLoop, model: FakeHashModel, limit: int = 500) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(limit):
        if not loop.has_unfinished_requests():
            return outputs
        outputs += loop.step()
        check_invariants(loop, model)
    raise AssertionError("the loop spins")


def steps(loop: DecodeLoop, count: int) -> list[RequestOutput]:
    return [output for _ in range(count) for output in loop.step()]


def oracle(prompt: list[int], params: SamplingParams) -> list[int]:
    return reference(prompt, params, 24)[0]


# Stale, doubled, lost, swapped tokens


def test_row_1_a_fallback_to_host_ids_materializes_first() -> None:
    worker = make_worker(sizes={"batch_buckets": (4,)})
    worker.scheduler.add_request("a", [1, 2], limited(9))
    worker.launch()
    with (
        worker.streams.hold(worker.runner.copy_stream),
        pytest.raises(RuntimeError, match="deadlock"),
    ):
        worker.launch()
    assert len(worker.model.calls) == 1, "nothing was launched with what the host does not know"
    worker = make_worker(sizes={"batch_buckets": (4,)})
    worker.scheduler.add_request("a", [1, 2], limited(9))
    worker.launch()
    worker.launch()
    assert worker.model.calls[1].host_ids == [*oracle([1, 2], limited(1)), 0, 0, 0]


@policies
def test_row_2_a_reorder_at_every_step(options: dict[str, Any]) -> None:
    loop, _model, _ = make_loop(**options)
    for number in range(4):
        loop.add_request(str(number), [number], limited(9, number))
    outputs = []
    while loop.has_unfinished_requests():
        batch = loop.runner.input_batch
        for row in range(batch.num_reqs - 1):
            batch.swap_states(row, row + 1)
        outputs += loop.step()
    for number in range(4):
        assert tokens_of(outputs, str(number)) == oracle([number], limited(9, number))


@policies
def test_row_4_padding_never_lands_on_a_live_row(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(sizes={"batch_buckets": (4,)}, **options)
    for number in range(3):
        loop.add_request(str(number), [number], limited(9, number))
    outputs = steps(loop, 5)
    loop.runner.input_batch.swap_states(0, 2)
    outputs += run(loop, model)
    for number in range(3):
        assert tokens_of(outputs, str(number)) == oracle([number], limited(9, number))
    for call in model.of("remap"):
        assert call.positions.tolist()[3:] == [3], "padding stays where it is"


@policies
def test_row_5_padding_rows_come_last(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(sizes={"batch_buckets": (4,)}, **options)
    for number in range(5):
        loop.add_request(str(number), [number], limited(2 + number, number))
    run(loop, model)
    for call in model.of("decode"):
        live = [slot != 0 for slot in call.slots]
        assert live == sorted(live, reverse=True)


@policies
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a decode"])
def test_row_7_a_piece_of_a_prompt_yields_no_token(options: dict[str, Any], beside: bool) -> None:
    sizes = {"prompt_buckets": (2,), "max_length": 24}
    loop, model, _ = make_loop(chunks=True, sizes=sizes, **options)
    outputs = []
    if beside:
        loop.add_request("b", [9], limited(6, 2))
        outputs += steps(loop, 2)
    loop.add_request("a", [1, 2, 3, 4, 5], limited(4))
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == oracle([1, 2, 3, 4, 5], limited(4))
    assert loop.stats.generated_tokens == 4 + 6 * beside
    assert loop.stats.extra_tokens_dropped == 0


@policies
def test_row_8_no_placeholder_reaches_the_device(options: dict[str, Any]) -> None:
    """The model refuses a negative id; the gather's own is replaced before it gets there."""
    loop, model, _streams = make_loop(**options)
    loop.add_request("a", [1], limited(9))
    steps(loop, 2)
    loop.pause_request("a")
    loop.add_request("b", [2], limited(3, 2))
    outputs = steps(loop, 2)
    loop.resume_request("a")
    outputs += run(loop, model)
    assert all(call.output.error is None for call in model.calls)


@policies
def test_row_9_a_resumed_request_is_in_no_previous_batch(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1], limited(9, 1))
    loop.add_request("b", [2], limited(12, 2))
    outputs = steps(loop, 5)
    loop.pause_request("a")
    loop.scheduler.preempt_request("a")
    outputs += steps(loop, 2)
    loop.resume_request("a")
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == oracle([1], limited(9, 1))
    assert tokens_of(outputs, "b") == oracle([2], limited(12, 2))


@policies
def test_row_11_each_position_is_given_out_once(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    for number in range(4):
        loop.add_request(str(number), [number], limited(5, number))
    counts = Counter(
        (out.request_id, out.num_output_tokens) for out in run(loop, model) if out.new_token_ids
    )
    assert set(counts.values()) == {1}
    assert len(counts) == 20


def test_row_13_a_request_leaves_the_schedule_before_it_is_reported_finished() -> None:
    worker = make_worker()
    for number in range(2):
        worker.scheduler.add_request(str(number), [number + 1], limited(3 + 3 * number, number))
    launched = [worker.launch() for _ in range(5)]
    schedule, _ = launched[-1]
    assert len(schedule.num_scheduled_tokens) == 1
    assert not schedule.finished_req_ids
    assert worker.runner.stats.fallback_reasons["composition"] == 2
    assert worker.model.calls[-1].host_ids is not None
    assert worker.model.calls[-1].host_ids[0] >= 0


# Preemption, pause, resume


@policies
@pytest.mark.parametrize("after", [3, 4, 5, 7])
def test_row_14_counts_stay_exact_over_a_preemption(options: dict[str, Any], after: int) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2], limited(9, 1))
    loop.add_request("b", [3], limited(9, 2))
    outputs = steps(loop, after)
    loop.scheduler.preempt_request("a")
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == oracle([1, 2], limited(9, 1))
    assert tokens_of(outputs, "b") == oracle([3], limited(9, 2))


@policies
def test_row_15_a_preemption_with_nothing_in_flight_discards_nothing(
    options: dict[str, Any],
) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2], limited(9))
    outputs = steps(loop, 3) + loop.drain()
    loop.scheduler.preempt_request("a")
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == oracle([1, 2], limited(9))


@policies
def test_row_16_a_result_from_before_a_preemption_is_not_applied_after_it(
    options: dict[str, Any],
) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2], limited(9))
    outputs = steps(loop, 4)
    old = loop.scheduler.running[0].key
    loop.scheduler.preempt_request("a")
    while not loop.scheduler.running:
        outputs += loop.step()
    (running,) = loop.scheduler.running
    assert running.key != old
    assert old not in loop.runner.requests, "the runner knows it under its new key alone"
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == oracle([1, 2], limited(9))


@policies
def test_row_17_a_preemption_repeats_no_token(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2], limited(9))
    steps(loop, 4)
    loop.scheduler.preempt_request("a")
    run(loop, model)
    assert loop.stats.steps == 9
    assert loop.stats.extra_tokens_dropped == 0


@policies
def test_row_19_nothing_is_left_counted_after_a_drain(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    for number in range(3):
        loop.add_request(str(number), [number], limited(9, number))
    steps(loop, 6)
    loop.scheduler.preempt_request("0")
    loop.pause_request("1")
    loop.abort_request("2")
    loop.drain()
    for request in (*loop.scheduler.waiting, *loop.scheduler.running):
        assert request.num_in_flight == request.num_output_placeholders == 0
    loop.resume_request("1")
    run(loop, model)
    check_idle(loop)


def test_row_20_one_slot_is_taken_for_one_request() -> None:
    """The victim's step in flight holds its slot; that must not cost another request its own."""
    loop, model, _ = make_loop(depth=4, sizes={"num_slots": 4})
    for number in range(3):
        loop.add_request(str(number), [number], limited(12, number), priority=1)
    steps(loop, 8)
    loop.add_request("urgent", [9], limited(3, 9))
    steps(loop, 4)
    assert loop.stats.preemptions == 1
    run(loop, model)
    assert loop.stats.preemptions == 1


@policies
def test_row_21b_positions_are_those_of_the_oracle(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2, 3], limited(6))
    run(loop, model)
    assert [call.positions.tolist() for call in model.calls] == [[3], [3], [4], [5], [6], [7]]


@policies
def test_row_22_a_token_reaches_a_paused_request_once(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2], limited(9))
    outputs = steps(loop, 4)
    loop.pause_request("a")
    outputs += loop.drain()
    loop.resume_request("a")
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == oracle([1, 2], limited(9))


# Finish, abort, identity


@policies
def test_row_23_an_old_output_is_not_applied_to_a_new_request_of_the_same_id(
    options: dict[str, Any],
) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2], limited(9))
    steps(loop, 4)
    loop.abort_request("a")
    loop.add_request("a", [3], limited(5, 2))
    notice, *outputs = loop.step()
    assert notice.finish_reason == "abort"
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == oracle([3], limited(5, 2))


@policies
def test_row_25_a_slot_is_not_given_away_while_a_step_uses_it(options: dict[str, Any]) -> None:
    loop, model, streams = make_loop(sizes={"num_slots": 2}, **options)
    loop.add_request("a", [1, 2], limited(9))
    steps(loop, 4)
    with streams.hold(loop.runner.compute_stream):
        in_flight = len(loop.batch_queue)
        assert in_flight
        loop.abort_request("a")
        assert not loop.scheduler.capacity.free_slots
    loop.add_request("b", [3], limited(5, 2))
    outputs = run(loop, model)
    assert tokens_of(outputs, "b") == oracle([3], limited(5, 2))


@policies
def test_row_27_a_late_result_of_a_request_that_is_gone_is_dropped_and_counted(
    options: dict[str, Any],
) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2], limited(9))
    steps(loop, 5)
    in_flight = len(loop.batch_queue)
    loop.abort_request("a")
    outputs = run(loop, model)
    assert tokens_of(outputs, "a") == []
    assert loop.stats.extra_tokens_dropped == in_flight


@policies
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_row_30_no_step_goes_beyond_max_tokens(options: dict[str, Any], max_tokens: int) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2], limited(max_tokens))
    run(loop, model)
    assert len(model.calls) == max_tokens


@policies
def test_row_32_drain_returns_when_the_device_has_nothing_left(options: dict[str, Any]) -> None:
    loop, model, _streams = make_loop(**options)
    for number in range(3):
        loop.add_request(str(number), [number], limited(9, number))
    steps(loop, 6)
    for number in range(3):
        loop.abort_request(str(number))
    loop.drain()
    assert model.executed == len(model.calls)
    assert len(loop.scheduler.capacity.free_slots) == model.num_slots - 1


# Empty batch, hang, end


@policies
def test_row_34_the_last_step_is_read_although_no_other_follows(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1], limited(1))
    assert tokens_of(run(loop, model, limit=3), "a") == oracle([1], limited(1))


@policies
def test_row_35_a_consumer_that_reads_late_blocks_nothing(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1], limited(9))
    depth = loop.max_concurrent_batches
    steps(loop, depth - 1)
    assert len(model.calls) == depth - 1
    assert all(not step.future.done() for step in loop.batch_queue)
    assert tokens_of(run(loop, model), "a") == oracle([1], limited(9))


def test_row_37_an_empty_start_is_legal() -> None:
    loop, model, _ = make_loop(output_thread=True)
    assert steps(loop, 3) == []
    loop.add_request("a", [1], limited(3))
    assert tokens_of(run(loop, model), "a") == oracle([1], limited(3))
    loop.close()


def test_row_38_the_event_comes_behind_the_copy_and_the_copy_behind_the_step() -> None:
    worker = make_worker()
    worker.scheduler.add_request("a", [1], limited(9))
    _, output = worker.launch()
    assert not output.ready()
    assert worker.streams.run(1) == 1
    assert not output.ready()
    worker.streams.run()
    assert output.ready()


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_rows_39_and_61_every_step_has_an_event_of_its_own(depth: int) -> None:
    worker = make_worker(max_concurrent_batches=depth)
    worker.scheduler.add_request("a", [1], limited(9))
    outputs = [worker.launch()[1] for _ in range(depth)]
    assert len({id(output._copied) for output in outputs}) == depth
    outputs[0].get_output()
    assert [output.done for output in outputs] == [True] + [False] * (depth - 1)


def test_row_40_close_returns_with_what_is_pending() -> None:
    class Hanging(FakeStreams):
        release = threading.Event()

        def reach(self, stream: Any, value: int) -> None:
            self.release.wait()
            super().reach(stream, value)

    streams = Hanging()
    loop, _, _ = make_loop(streams, output_thread=True)
    loop.add_request("slow", [1], limited(9))
    loop.step()
    assert loop.close(timeout=0.05) == ("slow",)
    streams.release.set()


@policies
def test_row_41_the_outputs_of_pieces_are_read_too(options: dict[str, Any]) -> None:
    loop, model, streams = make_loop(chunks=True, sizes={"prompt_buckets": (2,)}, **options)
    loop.add_request("a", list(range(20)), limited(2))
    outputs = run(loop, model)  # whose invariants bound what is pending
    assert tokens_of(outputs, "a") == oracle(list(range(20)), limited(2))
    assert streams.copies == loop.stats.steps == 11


# Exceptions, and who reads


@policies
def test_row_42_the_first_exception_surfaces(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    model.fail_at = {3}
    loop.add_request("a", [1], limited(9))
    (end,) = [output for output in run(loop, model) if output.finished]
    assert str(end.error) == "the device failed in call 3"
    frames = end.error.__traceback__ if end.error else None
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    assert frames is not None
    assert frames.tb_frame.f_code.co_name == "command", "where it was raised on the device"


def test_row_43_a_failure_of_the_output_thread_reaches_the_caller_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("in the output thread")

    monkeypatch.setattr(AsyncModelRunnerOutput, "get_output", broken)
    loop, _, _ = make_loop(output_thread=True)
    loop.add_request("a", [1], limited(9))
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        steps(loop, 3)
    with pytest.raises(ZeroDivisionError):
        loop.step()
    loop.close()
    assert time.monotonic() - start < 1


def test_rows_44_and_45_sixteen_readers_make_one_copy_and_one_write() -> None:
    worker = make_worker()
    worker.scheduler.add_request("a", [1], limited(9))
    schedule, output = worker.launch()
    barrier, seen = threading.Barrier(16), list[Any]()

    def read() -> None:
        barrier.wait()
        seen.append(output.get_output())

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(value) for value in seen}) == 1
    assert worker.streams.copies == 1
    worker.finish((schedule, output))
    worker.launch()
    (state,) = worker.runner.requests.values()
    assert state.output_token_ids == oracle([1], limited(1))


def test_row_46_only_the_loops_own_thread_writes_the_batch() -> None:
    loop, model, _ = make_loop(output_thread=True)
    writers = set()
    write = loop.runner.input_batch.append_token

    def watched(*args: Any) -> None:
        writers.add(threading.current_thread())
        write(*args)

    loop.runner.input_batch.append_token = watched  # type: ignore[method-assign]
    for number in range(3):
        loop.add_request(str(number), [number], limited(4 + number, number))
    run(loop, model)
    loop.close()
    assert writers == {threading.main_thread()}


# Sampling


def test_row_51_what_is_not_async_has_a_name() -> None:
    loop, model, _ = make_loop()
    for number in range(3):
        loop.add_request(str(number), [number], limited(4 + number, number))
    run(loop, model)
    assert sum(loop.stats.fallback_reasons.values()) == loop.stats.sync_fallback_steps > 0
    assert "" not in loop.stats.fallback_reasons


def test_row_52_a_grammar_is_refused() -> None:
    worker = make_worker()
    with pytest.raises(UnsupportedError, match="knows no grammar"):
        worker.runner.sample_tokens(object())  # type: ignore[arg-type]


# Streams and buffers


@policies
def test_rows_55_to_57_what_a_launched_step_reads_is_never_written_again(
    options: dict[str, Any],
) -> None:
    loop, model, _ = make_loop(**options)
    seen: list[tuple[torch.Tensor, list[Any]]] = []
    submit = model._submit

    def watched(kind: str, input_ids: Any, positions: torch.Tensor, *rest: Any) -> Any:
        for tensor in (input_ids, positions):
            if isinstance(tensor, torch.Tensor):
                assert not any(tensor is other for other, _ in seen)
                seen.append((tensor, tensor.tolist()))
        return submit(kind, input_ids, positions, *rest)

    model._submit = watched  # type: ignore[method-assign]
    for number in range(3):
        loop.add_request(str(number), [number], limited(4 + number, number))
    run(loop, model)
    assert all(tensor.tolist() == values for tensor, values in seen)


def test_rows_59_60_and_71_nothing_is_read_before_its_event() -> None:
    """The host tensor of a copy holds what no token is until the device gets there."""
    worker = make_worker()
    worker.scheduler.add_request("a", [1], limited(9))
    _, output = worker.launch()
    assert output._host_tokens is not None
    assert output._host_tokens.tolist() == [UNWRITTEN]
    assert output.get_output().sampled_token_ids == [oracle([1], limited(1))]


def test_row_63_the_device_tensor_is_kept_until_its_copy_has_ended() -> None:
    worker = make_worker()
    worker.scheduler.add_request("a", [1], limited(9))
    _, output = worker.launch()
    assert output._device_tokens is worker.model.calls[0].output
    output.get_output()
    assert output._device_tokens is None


@policies
def test_row_70_nothing_on_the_device_is_read_but_by_outputs(options: dict[str, Any]) -> None:
    loop, model, streams = make_loop(**options)
    for number in range(3):
        loop.add_request(str(number), [number], limited(4 + number, number))
    run(loop, model)
    assert streams.blocking_reads == 0
    assert streams.copies == loop.stats.steps


def test_row_72_there_is_nothing_to_synchronize_a_whole_device_with() -> None:
    """The loop runs on a namespace of four names."""
    names = {name for name in vars(FakeStreams) if not name.startswith("_")}
    assert {"Stream", "Event", "current_stream", "stream"} <= names
    assert "synchronize" not in names


@policies
def test_row_75_a_late_result_wakes_nobody(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1], limited(9))
    steps(loop, 4)
    loop.scheduler.preempt_request("a")
    loop.abort_request("a")
    outputs = run(loop, model)
    assert [output.finish_reason for output in outputs] == ["abort"]
    assert loop.scheduler.schedule() == SchedulerOutput()
    check_idle(loop)
