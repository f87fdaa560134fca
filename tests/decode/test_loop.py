from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from neuron_streams.decode import DecodeLoop, RequestOutput, SamplingParams
from tests.decode.fake_streams import FakeStreams
from tests.decode.harness import Results, drive, make_loop, modes, run_to_end
from tests.decode.hash_model import EOS, FakeHashModel, reference

LONG = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)


def limited(max_tokens: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def tokens_of(outputs: list[RequestOutput], request_id: str) -> list[int]:
    return [t for out in outputs if out.request_id == request_id for t in out.new_token_ids]


# Arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "eager"}, ValueError, "^policy is 'eager'; choose 'materialize' or 'gather'"),
        ({"depth": 0}, ValueError, "^depth is 0; it must be 1 or more"),
        ({"max_batch_size": 0}, ValueError, "^max_batch_size is 0"),
        ({"watchdog": 1.0}, ValueError, "^watchdog needs the output thread"),
    ],
)
def test_bad_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_loop(**options)


def test_bad_input_leaves_other_requests_alone() -> None:
    loop, model, _ = make_loop()
    loop.add_request("a", [1, 2], LONG)
    for bad in ([], [1] * 9, [99]):
        with pytest.raises(ValueError, match="^Request 'b'"):
            loop.add_request("b", bad, LONG)
    with pytest.raises(ValueError, match="^Request id 'a' is in use"):
        loop.add_request("a", [3], LONG)
    results = Results()
    results.admit("a")
    run_to_end(loop, model, results)
    assert results.tokens["a", 0] == reference([1, 2], LONG, model.max_length)[0]


# Steps


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_max_tokens_launches_exactly_as_many_steps(max_tokens: int, is_async: bool) -> None:
    loop, model, _ = make_loop(async_scheduling=is_async)
    outputs = list(loop.generate([[1, 2]], limited(max_tokens)))
    assert len(model.calls) == loop.stats.steps == max_tokens
    assert len(tokens_of(outputs, "0")) == max_tokens
    assert outputs[-1].finish_reason == "length"
    assert loop.stats.extra_tokens_dropped == 0


def test_a_request_is_capped_by_the_models_length() -> None:
    loop, _, _ = make_loop(sizes={"max_length": 6})
    outputs = list(loop.generate([[1, 2]], limited(100)))
    assert outputs[-1].num_output_tokens == 4
    assert outputs[-1].finish_reason == "length"


def test_tokens_arrive_one_step_at_a_time() -> None:
    loop, _, _ = make_loop()
    loop.add_request("a", [1, 2], limited(4))
    arrivals = []
    while loop.has_unfinished_requests():
        arrivals.append(len(tokens_of(loop.step(), "a")))
    assert arrivals == [0, 1, 1, 1, 1]


def test_starting_empty_is_legal() -> None:
    loop, _, _ = make_loop()
    assert loop.step() == []
    assert not loop.has_unfinished_requests()
    loop.add_request("a", [1], limited(1))
    assert loop.has_unfinished_requests()


def test_an_empty_schedule_flushes_what_is_pending() -> None:
    loop, _, _ = make_loop()
    loop.add_request("a", [1], limited(2))
    loop.step()
    loop.step()
    assert loop.runner._pending_outputs
    assert tokens_of(loop.step(), "a") == [reference([1], limited(2), 24)[0][1]]
    assert not loop.runner._pending_outputs
    assert not loop.runner.async_execution_buffer
    assert not loop.has_unfinished_requests()


def test_the_async_loop_runs_ahead_of_a_held_device_and_the_sync_loop_does_not() -> None:
    loop, model, streams = make_loop()
    loop.add_request("a", [1, 2], LONG)
    with streams.hold(loop.runner.compute_stream):
        loop.step()
        with pytest.raises(RuntimeError, match="deadlock"):
            loop.step()
    first, second = model.calls
    assert second.input_ids is first.output
    assert streams.blocking_reads == 0
    loop, model, streams = make_loop(async_scheduling=False)
    loop.add_request("a", [1, 2], LONG)
    with (
        streams.hold(loop.runner.compute_stream),
        pytest.raises(RuntimeError, match="deadlock"),
    ):
        loop.step()
    assert len(model.calls) == 1


# Counters, exactly


@pytest.mark.parametrize(
    ("sizes", "prompts", "lengths", "reasons", "async_steps"),
    [
        # One request: prefill, then a chain (the bucket has as many rows as the prefill).
        ({}, 1, [6], {"prefill": 1}, 5),
        # The bucket is larger: one more fallback.
        ({"batch_buckets": (4,)}, 1, [6], {"prefill": 1, "shape": 1}, 4),
        # Two prefills in a row, and the batch that holds both is new.
        ({}, 2, [6, 6], {"prefill": 2, "composition": 1}, 4),
        # One leaves at its limit: the set changes once more.
        ({}, 2, [4, 6], {"prefill": 2, "composition": 2}, 3),
        # Both in one prefill: the set of the first decode is the same.
        ({"prefill_batch": 2}, 2, [6, 6], {"prefill": 1}, 5),
        ({"prefill_batch": 2, "batch_buckets": (4,)}, 2, [6, 6], {"prefill": 1, "shape": 1}, 4),
        # Three requests for two slots: the third is prefilled when the first two have ended.
        ({"num_slots": 3}, 3, [3, 3, 3], {"prefill": 3, "composition": 1}, 3),
    ],
)
def test_counters_of_a_script(
    sizes: dict[str, Any],
    prompts: int,
    lengths: list[int],
    reasons: dict[str, int],
    async_steps: int,
) -> None:
    loop, _, _ = make_loop(sizes=sizes)
    params = [limited(length, seed) for seed, length in enumerate(lengths)]
    for _ in loop.generate([[n + 1] for n in range(prompts)], params):
        pass
    assert dict(loop.stats.fallback_reasons) == reasons
    assert loop.stats.async_steps == async_steps
    assert loop.stats.sync_fallback_steps == sum(reasons.values())
    assert loop.stats.generated_tokens == sum(lengths)


def test_an_end_of_sequence_is_found_one_step_late_and_the_extra_token_dropped() -> None:
    seed = next(
        seed
        for seed in range(1000)
        if EOS in reference([1], SamplingParams(max_tokens=9, seed=seed), 24)[0][2:5]
    )
    params = SamplingParams(max_tokens=9, seed=seed)
    want, _ = reference([1], params, 24)
    loop, _, _ = make_loop()
    outputs = list(loop.generate([[1]], params))
    assert tokens_of(outputs, "0") == want
    assert want[-1] == EOS
    assert outputs[-1].finish_reason == "stop"
    assert loop.stats.extra_tokens_dropped == 1
    assert loop.stats.steps == len(want) + 1


def test_time_is_split_into_work_and_waiting() -> None:
    loop, _, _ = make_loop()
    for _ in loop.generate([[1]], LONG):
        pass
    assert loop.stats.host_time > 0
    assert loop.stats.wait_time > 0


# Abort


@pytest.mark.parametrize("steps", range(6))
def test_abort_in_any_state_and_reuse_of_the_id_at_once(steps: int) -> None:
    loop, _model, _streams = make_loop()
    loop.add_request("other", [5, 5], limited(12, 2))
    loop.add_request("a", [1, 2], limited(12, 3))
    outputs: list[RequestOutput] = []
    for _ in range(steps):
        outputs += loop.step()
    got = tokens_of(outputs, "a")
    assert loop.abort_request("a")
    loop.add_request("a", [3], limited(5, 4))
    notice, *rest = loop.step()
    assert (notice.request_id, notice.finish_reason) == ("a", "abort")
    assert notice.num_output_tokens == len(got)
    while loop.has_unfinished_requests():
        rest += loop.step()
    assert got == reference([1, 2], limited(12, 3), 24)[0][: len(got)]
    assert tokens_of(rest, "a") == reference([3], limited(5, 4), 24)[0]
    assert tokens_of(outputs + rest, "other") == reference([5, 5], limited(12, 2), 24)[0]


def test_abort_of_an_unknown_id_is_told() -> None:
    loop, _, _ = make_loop()
    assert not loop.abort_request("nobody")
    list(loop.generate([[1]], limited(1)))
    assert not loop.abort_request("0")


# generate


def test_generate_takes_ids_and_parameters_for_each() -> None:
    loop, model, _ = make_loop()
    params = [limited(3, 1), limited(4, 2)]
    outputs = list(loop.generate([[1], [2]], params, request_ids=["x", "y"]))
    assert tokens_of(outputs, "x") == reference([1], params[0], model.max_length)[0]
    assert tokens_of(outputs, "y") == reference([2], params[1], model.max_length)[0]
    with pytest.raises(ValueError, match="^generate got 2 prompts, 1 sampling_params and 2"):
        loop.generate([[1], [2]], [LONG])


def test_generate_queues_nothing_when_one_prompt_is_bad() -> None:
    loop, _, _ = make_loop()
    with pytest.raises(ValueError, match="empty prompt"):
        loop.generate([[1], []], LONG)
    assert not loop.has_unfinished_requests()


def test_generate_dropped_early_aborts_its_requests() -> None:
    loop, _, _ = make_loop()
    outputs = loop.generate([[1], [2]], LONG)
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    assert not loop.scheduler.unfinished_request_ids
    assert list(loop.generate([[1], [2]], limited(2)))


@modes
def test_an_iterator_that_is_dropped_takes_its_requests_and_outputs_with_it(
    options: dict[str, Any],
) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("mine", [4], limited(3, 9))
    outputs = loop.generate([[1], [2]], LONG)
    while not any(out.request_id != "mine" for out in loop._outbox.outputs):
        next(outputs)
    del outputs
    rest = drive(loop, model)
    assert {out.request_id for out in rest} == {"mine"}
    assert tokens_of(rest, "mine") == reference([4], limited(3, 9), 24)[0]


def test_an_iterator_that_was_interrupted_goes_on() -> None:
    loop, _, _ = make_loop()
    outputs = loop.generate([[1]], limited(4))
    got = [next(outputs)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.batch_queue, "oldest", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(outputs)
    got += outputs
    assert tokens_of(got, "0") == reference([1], limited(4), 24)[0]


def interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


def test_an_interrupted_generate_queues_nothing() -> None:
    loop, _, _ = make_loop()
    loop.add_request("1", [4], limited(3, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neuron_streams.decode.generate.Generated", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.generate([[1], [2]], LONG, request_ids=["0", "2"])
    assert loop.scheduler.unfinished_request_ids == ("1",)


def test_two_iterators_and_the_caller_each_get_their_own() -> None:
    loop, _, _ = make_loop()
    loop.add_request("mine", [4], limited(3, 9))
    first = loop.generate([[1]], limited(6, 1), request_ids=["first"])
    second = loop.generate([[2]], limited(4, 2), request_ids=["second"])
    got: dict[str, list[int]] = {"first": [], "second": []}
    turns = [first, second]
    while turns:
        for outputs in list(turns):
            output = next(outputs, None)
            if output is None:
                turns.remove(outputs)
            else:
                assert output.request_id == ("first" if outputs is first else "second")
                got[output.request_id] += output.new_token_ids
    rest: list[RequestOutput] = []
    while loop.has_unfinished_requests():
        rest += loop.step()
    assert got["first"] == reference([1], limited(6, 1), 24)[0]
    assert got["second"] == reference([2], limited(4, 2), 24)[0]
    assert tokens_of(rest, "mine") == reference([4], limited(3, 9), 24)[0]


def paused_prompt(*others: str) -> tuple[DecodeLoop, Iterator[RequestOutput], FakeStreams]:
    """A `generate` of one prompt, paused after its first token; others run beside it."""
    loop, _, streams = make_loop()
    for number, name in enumerate(others):
        loop.add_request(name, [9], limited(3 + number, 9))
    outputs = loop.generate([[1]], limited(9), request_ids=["mine"])
    next(outputs)
    loop.pause_request("mine")
    return loop, outputs, streams


def test_generate_ends_where_its_own_are_paused_though_others_have_left_outputs() -> None:
    loop, outputs, _ = paused_prompt()
    rest = list(outputs)
    loop.add_request("other", [2], limited(1, 2))
    loop.step()
    loop._outbox.outputs = loop.drain()
    outputs = loop.generate([[3]], limited(9), request_ids=["more"])
    loop.pause_request("more")
    assert list(outputs) == []
    assert [output.request_id for output in loop.step()] == ["other"]
    assert loop.scheduler.unfinished_request_ids == ("mine", "more")
    assert 1 + len(rest) == loop.scheduler._by_id["mine"].num_computed_tokens


def test_generate_ends_where_its_own_are_paused_though_others_run() -> None:
    loop, outputs, _ = paused_prompt("short", "long")
    rest = list(outputs)
    assert {output.request_id for output in rest} <= {"mine"}
    assert "mine" in loop.scheduler.unfinished_request_ids
    got: list[RequestOutput] = []
    while loop.has_unfinished_requests():
        got += loop.step()
    assert tokens_of(got, "long") == reference([9], limited(4, 9), 24)[0]
    loop.resume_request("mine")
    while loop.has_unfinished_requests():
        rest += loop.step()
    want = reference([1], limited(9), 24)[0]
    assert tokens_of(rest, "mine") == want[1:]


def test_generate_gives_what_is_in_flight_and_what_another_iterator_has_left_before_it_ends() -> (
    None
):
    loop, _, _ = make_loop(policy="gather", depth=4)
    first = loop.generate([[1]], limited(9, 1), request_ids=["first"])
    second = loop.generate([[2]], limited(9, 2), request_ids=["second"])
    next(second)
    in_flight = {r.request_id: r.num_output_placeholders for r in loop.scheduler.running}
    assert in_flight["first"]
    got = len(tokens_of(loop._outbox.outputs, "first"))
    loop.pause_request("first")
    loop.pause_request("second")
    assert len(list(second)) == in_flight["second"]
    assert not loop.batch_queue
    assert len(list(first)) == got + in_flight["first"]
    assert set(loop.scheduler.unfinished_request_ids) == {"first", "second"}


def test_generate_goes_on_with_those_that_are_not_paused() -> None:
    loop, _, _ = make_loop(max_batch_size=1)
    outputs = loop.generate([[n] for n in range(4)], limited(3))
    for paused in "013":
        loop.pause_request(paused)
    assert tokens_of(list(outputs), "2") == reference([2], limited(3), 24)[0]
    assert loop.scheduler.unfinished_request_ids == ("0", "1", "3")


def test_generate_ends_with_nothing_in_flight() -> None:
    loop, model, _ = make_loop()
    params = SamplingParams(max_tokens=9, seed=1, stop_token_ids=tuple(range(31)))
    assert len(list(loop.generate([[1]], params))) == 1
    assert not loop.batch_queue
    assert loop.stats.extra_tokens_dropped == 1
    assert model.executed == len(model.calls)


# Drain and close


def test_drain_retires_steps_and_launches_none() -> None:
    loop, model, _ = make_loop()
    loop.add_request("a", [1, 2], limited(6))
    loop.step()
    outputs = loop.drain()
    assert len(tokens_of(outputs, "a")) == 1
    assert len(model.calls) == 1
    assert not loop.batch_queue
    while loop.has_unfinished_requests():
        outputs += loop.step()
    assert tokens_of(outputs, "a") == reference([1, 2], limited(6), 24)[0]


class HeldEvents(FakeStreams):
    """Waits block until `release`, as on a device that hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def reach(self, stream: Any, value: int) -> None:
        self.release.wait()
        super().reach(stream, value)


def test_drain_times_out_and_names_what_is_pending() -> None:
    streams = HeldEvents()
    loop, _, _ = make_loop(streams, output_thread=True)
    loop.add_request("slow", [1, 2], limited(6))
    loop.step()
    message = (
        "^1 steps are in flight and the oldest has not ended; it is step 1, of requests 'slow'"
    )
    with pytest.raises(TimeoutError, match=message):
        loop.drain(timeout=0.01)
    streams.release.set()
    assert len(tokens_of(loop.drain(timeout=10), "slow")) == 1
    assert loop.close() == ("slow",)


def test_drain_times_out_without_an_output_thread_too() -> None:
    loop, _, streams = make_loop(depth=3)
    loop.add_request("slow", [1, 2], limited(6))
    with streams.hold(loop.runner.compute_stream):
        loop.step()
        loop.step()
        message = "^2 steps are in flight and the oldest has not ended; it is step 1, of requests"
        for timeout in (0.0, 0.01):
            with pytest.raises(TimeoutError, match=message):
                loop.drain(timeout)
    streams.run()
    assert len(tokens_of(loop.drain(timeout=0.0), "slow")) == 2
    assert not loop.batch_queue
    assert loop.drain(timeout=0.0) == []


@pytest.mark.parametrize("output_thread", [True, False])
def test_close_returns_although_the_device_hangs(output_thread: bool) -> None:
    streams = HeldEvents()
    loop, _, _ = make_loop(streams, output_thread=output_thread)
    loop.add_request("slow", [1, 2], limited(6))
    loop.step()
    assert loop.close(timeout=0.01) == ("slow",)
    assert loop.close() == ()
    streams.release.set()
    if loop.output_handler._thread is not None:
        loop.output_handler._thread.join(10)
        assert not loop.output_handler._thread.is_alive()


def test_a_closed_loop_says_so() -> None:
    loop, _, _ = make_loop()
    with loop:
        pass
    for call in (loop.step, loop.drain, lambda: loop.add_request("a", [1])):
        with pytest.raises(RuntimeError, match="the decode loop is closed; make another"):
            call()
    assert not loop.abort_request("a")


def test_a_loop_that_is_dropped_leaves_no_thread() -> None:
    loop, _, _ = make_loop(output_thread=True)
    list(loop.generate([[1]], limited(2)))
    thread = loop.output_handler._thread
    assert thread is not None
    del loop
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


# Failures after which the loop cannot go on; those of a single step are in test_failures.py


def test_a_failure_of_the_output_thread_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("in the output thread")

    monkeypatch.setattr("neuron_streams.decode.output.AsyncModelRunnerOutput.get_output", broken)
    loop, _, _ = make_loop(output_thread=True)
    with pytest.raises(ZeroDivisionError, match="in the output thread"):
        list(loop.generate([[1, 2]], limited(9)))
    assert loop.close() == ()
    assert loop.output_handler._thread is not None
    assert not loop.output_handler._thread.is_alive()


def test_an_interrupted_wait_can_be_taken_up_again() -> None:
    streams = FakeStreams()
    loop, _, _ = make_loop(streams)
    loop.add_request("a", [1, 2], limited(5))
    loop.step()
    with pytest.MonkeyPatch.context() as patch:

        def interrupted() -> bool:
            raise KeyboardInterrupt

        patch.setattr(loop.output_handler, "pump", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    outputs = loop.drain()
    while loop.has_unfinished_requests():
        outputs += loop.step()
    assert tokens_of(outputs, "a") == reference([1, 2], limited(5), 24)[0]


def test_an_interrupted_pump_loses_no_output() -> None:
    loop, model, _ = make_loop()
    loop.add_request("a", [1, 2], limited(5))
    loop.step()
    loop.output_handler.async_output_queue.get_nowait()  # and there the interrupt came
    outputs = drive(loop, model)
    assert tokens_of(outputs, "a") == reference([1, 2], limited(5), 24)[0]


@pytest.mark.parametrize("at", ["_flush", "_release"])
def test_a_close_that_was_interrupted_is_done_by_the_next(at: str) -> None:
    loop, _, _ = make_loop(output_thread=True)
    loop.add_request("a", [1, 2], limited(5))
    loop.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, at, interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.close()
    assert loop.close() == ("a",)
    assert loop.close() == ()
    assert loop.output_handler._thread is not None
    assert not loop.output_handler._thread.is_alive()


@modes
def test_an_interrupted_launch_ends_the_loop_which_says_so(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2], limited(5))
    model.prefill = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    for call in (loop.step, loop.drain, loop.has_unfinished_requests):
        with pytest.raises(RuntimeError, match="the decode loop has ended, since KeyboardInterr"):
            call()
    assert not loop.abort_request("a")
    assert loop.close() == ()


def test_a_thread_that_cannot_start_costs_nothing() -> None:
    loop, model, _ = make_loop(output_thread=True)
    loop.add_request("a", [1, 2], limited(5))
    with pytest.MonkeyPatch.context() as patch:

        def no_thread(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            loop.step()
    assert tokens_of(drive(loop, model), "a") == reference([1, 2], limited(5), 24)[0]
    loop.close()


def test_nothing_happens_before_the_first_request() -> None:
    streams = FakeStreams()
    loop = DecodeLoop(FakeHashModel(streams), streams=streams)
    assert loop.output_handler._thread is None
    assert loop.close() == ()
