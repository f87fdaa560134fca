"""The engine, turned by hand; with its thread where the thread is the subject."""

from __future__ import annotations

import logging
import random
import signal
import sys
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import neuron_streams
from neuron_streams.decode import (
    DecodeEngine,
    DecodeLoop,
    RequestOutput,
    RequestStream,
    SamplingParams,
)
from neuron_streams.testing import EmulatedRuntime, use_runtime
from tests.decode.compiled_hash_model import CompiledHashModel
from tests.decode.engines import (
    check_rest,
    limited,
    make_engine,
    oracle,
    queued,
    run,
    tokens_of,
    turns,
)
from tests.decode.harness import MODES, check_invariants, make_loop, modes, work_of


@modes
def test_requests_at_different_times_get_their_tokens(options: dict[str, Any]) -> None:
    engine, model, _ = make_engine(**options)
    streams = {}
    for number in range(6):
        params = limited(3 + number, number)
        streams[number] = engine.add_request(str(number), [number + 1, 4], params)
        turns(engine, 2)
        check_invariants(engine._core.loop, model)
    run(engine)
    for number, stream in streams.items():
        want = oracle([number + 1, 4], limited(3 + number, number))
        assert tokens_of(list(stream)) == want
    check_rest(engine)
    assert engine.stats.generated_tokens == sum(range(3, 9))
    assert engine.close() == ()


# Requests that cannot be


def test_what_cannot_run_is_refused_where_it_is_asked_for() -> None:
    engine, _, _ = make_engine()
    for prompt, options, sentence in [
        ([], {}, "Request 'x' has an empty prompt"),
        ([99], {}, "Request 'x' has token ids from 99 to 99"),
        ([1], {"stop": "a"}, "Request 'x' has stop strings, and the loop no tokenizer"),
    ]:
        with pytest.raises(ValueError, match=f"^{sentence}"):
            engine.add_request("x", prompt, limited(3, **options))
    with pytest.raises(ValueError, match="^max_queued is 0"):
        engine.add_request("x", [1], limited(3), max_queued=0)
    stream = engine.add_request("x", [1], limited(3))
    with pytest.raises(ValueError, match="^Request id 'x' is in use"):
        engine.add_request("x", [1])
    run(engine)
    assert len(tokens_of(list(stream))) == 3


def test_what_cannot_be_an_engine_is_refused() -> None:
    loop, _, _ = make_loop()
    with pytest.raises(ValueError, match="^max_queued is 0; it must be 1 or more"):
        DecodeEngine(loop, max_queued=0, thread=False)
    loop.add_request("a", [1])
    with pytest.raises(ValueError, match=r"^The loop has unfinished requests, \('a',\)"):
        DecodeEngine(loop, thread=False)


def test_what_only_the_loop_can_refuse_reaches_the_stream() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(3))
    engine._core.loop.add_request("a", [2], limited(2))
    run(engine)
    with pytest.raises(ValueError, match="^Request id 'a' is in use"):
        next(stream)
    check_rest(engine)


# Ends


@pytest.mark.parametrize("again", [False, True])
@modes
@pytest.mark.parametrize("state", ["waiting", "paused", "in prefill", "one step", "two steps"])
def test_abort_in_any_state(state: str, options: dict[str, Any], again: bool) -> None:
    chunks = state == "in prefill"
    prompt = [1 + n % 9 for n in range(15)] if chunks else [1, 2]
    engine, model, _ = make_engine(chunks=chunks, sizes={"prompt_buckets": (4,)}, **options)
    other = engine.add_request("b", [3], limited(12, 5))
    turns(engine, 3)
    if state == "waiting":
        engine._core.loop.scheduler.capacity.max_batch_size = 1
    stream = engine.add_request("a", prompt, limited(9))
    turns(engine, {"in prefill": 2, "one step": 1, "two steps": 2}.get(state, 1))
    if state == "paused":
        engine.pause("a")
        turns(engine, 6)
    (request,) = [r for r in engine._core.loop.scheduler._by_id.values() if r.request_id == "a"]
    assert request.is_prefilling == (state == "in prefill")
    assert (request.slot is None) == (state == "waiting")
    assert engine.abort("a")
    assert not engine.abort("a"), "its id is nobody's"
    assert engine.unfinished_request_ids == ("b",)
    next_one = engine.add_request("a", [7], limited(4, 8)) if again else None
    while engine.turn():
        check_invariants(engine._core.loop, model)
    outputs = list(stream)
    got = tokens_of(outputs)
    assert got == oracle(prompt, limited(9))[: len(got)]
    assert len(got) < 9
    assert outputs[-1].finish_reason == "abort"
    assert tokens_of(list(other)) == oracle([3], limited(12, 5))
    if next_one is not None:
        assert tokens_of(list(next_one)) == oracle([7], limited(4, 8))
    check_rest(engine)


def test_abort_of_what_has_finished_or_never_was_is_false() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(2))
    run(engine)
    assert not engine.abort("a")
    assert not engine.abort("nobody")
    assert not stream.abort()
    assert tokens_of(list(stream)) == oracle([1], limited(2))


def test_an_abort_that_comes_too_late_changes_nothing() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(2))
    while len(stream._queue) < 2:
        engine._core.turn(wait=False)
        if len(stream._queue) == 1:
            engine._core.loop.drain()
    engine._core._abort(stream._queue)
    run(engine)
    assert [out.finish_reason for out in stream] == [None, "length"]
    check_rest(engine)


def finish_together(
    params: SamplingParams, fail_at: int | None = None
) -> tuple[RequestStream, list[str | None], bool]:
    """A request is aborted between the step that ends it and the delivery of that end."""
    engine, model, _ = make_engine(sizes={"prefill_batch": 2, "batch_buckets": (2,)}, depth=1)
    model.fail_at = set() if fail_at is None else {fail_at}
    aborted: list[bool] = []
    heard: list[str | None] = []

    def abort_the_other(output: RequestOutput) -> None:
        if output.finished:
            aborted.append(engine.abort("a"))

    engine.add_request("first", [1], params, on_output=abort_the_other)
    stream = engine.add_request("a", [1], params, on_output=lambda o: heard.append(o.finish_reason))
    run(engine)
    assert len(aborted) == 1
    check_rest(engine)
    return stream, heard, aborted[0]


@pytest.mark.parametrize("end", ["length", "stop", "error"])
def test_a_request_that_comes_to_its_own_end_after_an_abort_was_promised_ends_by_it(
    end: str,
) -> None:
    tokens = oracle([1], limited(3))
    params = limited(3, **({"stop_token_ids": (tokens[-1],)} if end == "stop" else {}))
    stream, heard, promised = finish_together(params, 2 if end == "error" else None)
    assert promised
    outputs = list(stream)
    assert outputs[-1].finish_reason == heard[-1] == "abort"
    assert outputs[-1].stop_reason is outputs[-1].error is None
    assert tokens_of(outputs) == (tokens[:-1] if end == "error" else tokens)


def test_a_request_cannot_be_aborted_by_the_callback_that_hears_of_its_end() -> None:
    """Its id is free by then, for the callback too."""
    engine, _, _ = make_engine()
    heard: list[Any] = []

    def at_the_end(output: RequestOutput) -> None:
        if output.finished and not heard:
            heard.append(engine.abort("a"))
            heard.append(engine.add_request("a", [2], limited(2)))

    stream = engine.add_request("a", [1], limited(2), on_output=at_the_end)
    run(engine)
    assert heard[0] is False
    assert [output.finish_reason for output in stream] == [None, "length"]
    assert tokens_of(list(heard[1])) == oracle([2], limited(2))
    check_rest(engine)


def test_an_abort_that_comes_behind_the_next_bearer_of_the_id_is_not_its_own() -> None:
    """A thread that drops the first stream is held up where its id is free, its abort not there."""
    engine, _, _ = make_engine()
    first = engine.add_request("a", [1], limited(9))
    engine._core.turn(wait=False)
    first._queue.unread = True
    second = engine.add_request("a", [2], limited(3))
    engine._core.turn(wait=False)
    engine._core._abort(first._queue)
    run(engine)
    assert tokens_of(list(second)) == oracle([2], limited(3))
    check_rest(engine)


def test_the_id_is_free_for_whoever_reads_of_the_end() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(3))
    found = []

    def look(output: RequestOutput) -> None:
        found.append(engine.unfinished_request_ids)

    stream._queue.put, put = (lambda *args: (look(args[0]), put(*args))), stream._queue.put
    run(engine)
    assert found[-1] == ()
    assert engine.add_request("a", [1], limited(1))
    run(engine)


@modes
def test_a_failed_step_reaches_its_stream_and_no_other(options: dict[str, Any]) -> None:
    engine, model, _ = make_engine(**options)
    stream = engine.add_request("a", [1, 2], limited(9))
    model.fail_at = {2}
    run(engine)
    other = engine.add_request("b", [3], limited(4))
    run(engine)
    with pytest.raises(ArithmeticError, match="the device failed in call 2"):
        list(stream)
    assert tokens_of(list(other)) == oracle([3], limited(4))
    check_rest(engine)


# Room


@modes
@pytest.mark.parametrize("max_queued", [1, 2, 3, 5])
def test_a_slow_reader_pauses_its_own_request_alone(
    options: dict[str, Any], max_queued: int
) -> None:
    engine, model, _ = make_engine(**options)
    slow = engine.add_request("slow", [1], limited(15), max_queued=max_queued)
    quick = engine.add_request("quick", [2], limited(20))
    while engine.turn():
        check_invariants(engine._core.loop, model)
        assert len(slow._queue) <= max_queued
    assert len(slow._queue) == max_queued, "as much as fits, no less"
    assert tokens_of(list(quick)) == oracle([2], limited(20))
    assert engine.unfinished_request_ids == ("slow",)
    assert not engine.turn(), "it sleeps meanwhile"
    got: list[int] = []
    while "slow" in engine.unfinished_request_ids:
        got += tokens_of([next(slow)])
        run(engine)
        assert len(slow._queue) <= max_queued
    assert got + tokens_of(list(slow)) == oracle([1], limited(15))
    check_rest(engine)


def test_a_reader_that_keeps_up_never_pauses_its_request() -> None:
    """Its rows would come and go with every token, and no step be async."""
    engine, _, _ = make_engine(max_queued=8, sizes={"batch_buckets": (1,)})
    stream = engine.add_request("a", [1], limited(20))
    paused = []
    while engine.turn():
        queued(stream)
        paused.append(engine._core.loop.scheduler._by_id.get("a"))
    assert not any(request.paused for request in paused if request)
    assert engine.stats.async_steps == 19


def test_half_must_be_free_before_it_goes_on() -> None:
    engine, _, _ = make_engine(max_queued=6)
    stream = engine.add_request("a", [1], limited(20))
    run(engine)
    steps = engine.stats.steps
    for _ in range(2):
        next(stream)
        assert not engine.turn()
    assert engine.stats.steps == steps == 6
    next(stream)
    run(engine)
    assert engine.stats.steps == 9


def test_an_end_without_a_token_needs_no_room() -> None:
    engine, _, _ = make_engine(max_queued=2)
    stream = engine.add_request("a", [1], limited(20))
    run(engine)
    engine.abort("a")
    run(engine)
    assert [out.finish_reason for out in stream] == [None, None, "abort"]
    check_rest(engine)


def crowded(state: str, size: int) -> DecodeEngine:
    """An engine that runs one request, while `size` others are in a state in which none runs."""
    engine, _, _ = make_engine(
        policy="gather", sizes={"max_length": 4000, "num_slots": size + 9, "batch_buckets": (1,)}
    )
    engine.kept = []  # type: ignore[attr-defined]
    for number in range(size) if state != "waiting" else ():
        name, room = f"other {number}", 1 if state == "full" else 9
        engine.kept.append(  # type: ignore[attr-defined]
            engine.add_request(name, [1], limited(3000), max_queued=room)
        )
        if state == "paused":
            turns(engine, 1)
            engine.pause(name)
        run(engine)
    engine.add_request("runs", [1], limited(3000), on_output=lambda _: None, priority=-1)
    turns(engine, 8)
    for number in range(size) if state == "waiting" else ():
        engine.kept.append(  # type: ignore[attr-defined]
            engine.add_request(f"other {number}", [1], limited(3000), max_queued=1)
        )
    turns(engine, 2)
    return engine


@pytest.mark.parametrize("state", ["full", "paused", "waiting"])
def test_a_turn_costs_the_same_however_many_others_do_not_run(state: str) -> None:
    def least(size: int) -> int:
        engine = crowded(state, size)
        work = min(work_of(engine.turn) for _ in range(6))
        assert len(engine._core.loop.batch_queue) == 1
        return work

    assert least(100) <= 1.02 * least(10)


def test_pause_and_resume_go_together_with_a_slow_reader() -> None:
    engine, _, _ = make_engine(max_queued=2)
    stream = engine.add_request("a", [1], limited(6))
    assert engine.pause("a")
    run(engine)
    assert engine.stats.steps == 0
    assert engine.drain() == ("a",)
    assert engine.resume("a")
    run(engine)
    assert len(stream._queue) == 2
    assert engine.pause("a")
    got = queued(stream)
    run(engine)
    assert len(stream._queue) == 0, "there is room, but it was asked to pause"
    assert engine.resume("a")
    run(engine)
    assert engine.resume("a")
    run(engine)
    assert len(stream._queue) == 2, "it was asked to go on, but there is no room"
    while "a" in engine.unfinished_request_ids:
        got += queued(stream)
        run(engine)
    assert tokens_of(got + list(stream)) == oracle([1], limited(6))
    assert not engine.pause("a")
    assert not engine.resume("a")
    check_rest(engine)


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_any_readers_lose_nothing(seed: int) -> None:
    """Requests come, are read in bursts, aborted and dropped; whoever stays gets all tokens."""
    rng = random.Random(seed)
    engine, model, streams = make_engine(**rng.choice(list(MODES.values())))
    open_: dict[RequestStream, list[int]] = {}
    wanted: dict[RequestStream, list[int]] = {}
    for number in range(rng.randint(1, 12)):
        prompt, params = [rng.randrange(31)], limited(rng.randint(1, 12), number)
        stream = engine.add_request(
            f"{number}", prompt, params, max_queued=rng.randint(1, 6), priority=rng.randint(0, 1)
        )
        open_[stream], wanted[stream] = [], oracle(prompt, params)
    del stream
    while open_:
        for stream in list(open_):
            for _ in range(rng.choice([0, 0, 1, len(stream._queue)])):
                if len(stream._queue):
                    open_[stream] += tokens_of([next(stream)])
            if stream._queue.ended and not len(stream._queue):
                assert open_.pop(stream) == wanted.pop(stream)
            elif rng.random() < 0.01:
                open_.pop(stream), wanted.pop(stream)
                if rng.random() < 0.5:
                    stream.close()
            elif rng.random() < 0.02:
                engine._core.loop.scheduler.preempt_request(stream.request_id)
        del stream
        streams.run(rng.randint(0, 6))
        engine.turn()
        check_invariants(engine._core.loop, model)
        assert all(len(each._queue) <= each._queue.max_queued for each in open_)
    run(engine)
    check_rest(engine)
    assert engine.close() == ()


# Callbacks


def test_callbacks_come_ahead_of_the_stream_and_hear_the_same() -> None:
    engine, _, _ = make_engine()
    heard: list[RequestOutput] = []
    stream = engine.add_request("a", [1], limited(5), on_output=heard.append)
    run(engine)
    assert list(stream) == heard
    assert len(heard) == 5


def test_a_callback_alone_needs_no_stream(caplog: pytest.LogCaptureFixture) -> None:
    engine, _, _ = make_engine(max_queued=2)
    heard: list[RequestOutput] = []
    stream = engine.add_request("a", [1], limited(8), on_output=heard.append)
    run(engine)
    turns(engine, 2)
    assert len(heard) == 2, "nobody reads the stream, and it is there"
    del stream
    run(engine)
    assert tokens_of(heard) == oracle([1], limited(8))
    engine.add_request("b", [1], limited(8), on_output=lambda _: 1 // 0)
    with pytest.raises(ValueError, match="^Request id 'b' is in use"):
        engine.add_request("b", [1])
    run(engine)
    assert "a callback of request 'b' failed: ZeroDivisionError" in caplog.text
    check_rest(engine)


@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_exception_of_a_callback_reaches_that_stream_alone(at: int) -> None:
    engine, _, _ = make_engine()
    heard: list[int] = []

    def fail(output: RequestOutput) -> None:
        heard.append(output.num_output_tokens)
        if output.num_output_tokens == at:
            raise LookupError("of the caller's")

    stream = engine.add_request("a", [1], limited(5), on_output=fail)
    other = engine.add_request("b", [2], limited(7))
    run(engine)
    got = queued(stream)
    with pytest.raises(LookupError, match="of the caller's"):
        next(stream)
    assert tokens_of(got) == oracle([1], limited(5))[:at]
    assert heard == list(range(1, at + 1)), "it is called no more"
    assert got[-1].finish_reason == ("length" if at == 5 else "error")
    assert tokens_of(list(other)) == oracle([2], limited(7))
    check_rest(engine)


WAITS = ("turn", "wait for", "close")


def test_a_callback_may_add_and_abort_but_not_wait() -> None:
    engine, _, _ = make_engine(thread=True)
    added: list[RequestStream] = []
    refused: list[str] = []

    def more(output: RequestOutput) -> None:
        if output.num_output_tokens != 1:
            return
        added.append(engine.add_request("b", [2], limited(3)))
        for wait in (added[0].result, engine.drain, engine.close):
            try:
                wait()
            except RuntimeError as error:
                refused.append(str(error))
        assert engine.abort("c")

    with engine:
        last = engine.add_request("c", [3], limited(20), max_queued=1)
        engine.add_request("a", [1], limited(4), on_output=more).result(60)
        assert added[0].result(60).new_token_ids == tuple(oracle([2], limited(3)))
        assert last.result(60).finish_reason == "abort"
    waiting = "A callback must not wait for the engine that is calling it."
    assert refused == [waiting, waiting, "A callback must not close the engine that is calling it."]


def test_a_callback_may_not_drive_an_engine_that_is_driven_by_hand() -> None:
    engine, _, _ = make_engine()
    refused: list[str] = []

    def more(output: RequestOutput) -> None:
        for call in (engine.turn, engine.drain, engine.close):
            with pytest.raises(RuntimeError) as caught:
                call()
            refused.append(str(caught.value))

    stream = engine.add_request("a", [1], limited(2), on_output=more)
    run(engine)
    assert stream.result().new_token_ids == tuple(oracle([1], limited(2)))
    ends = "the engine that is calling it."
    assert refused == [f"A callback must not {what} {ends}" for what in WAITS] * 2
    assert engine.close() == ()


def test_an_engine_with_a_thread_is_driven_by_no_other() -> None:
    engine, _, _ = make_engine(thread=True)
    with engine, pytest.raises(RuntimeError, match="only with thread=False turn"):
        engine.turn()


# Rest, failure, the end


def test_drain_returns_when_nothing_is_in_flight() -> None:
    engine, _, _ = make_engine()
    streams = [engine.add_request(str(n), [n + 1], limited(5)) for n in range(3)]
    assert engine.drain() == ()
    check_rest(engine)
    assert all(len(tokens_of(list(stream))) == 5 for stream in streams)
    slow = engine.add_request("slow", [1], limited(20), max_queued=3)
    assert engine.drain() == ("slow",)
    assert not engine._core.loop.batch_queue
    assert len(slow._queue) == 3


def test_drain_in_time_or_named() -> None:
    engine, _, streams = make_engine(thread=True, output_thread=True)
    with engine, Held(streams) as held:
        stream = engine.add_request("a", [1], limited(3))
        held.wait()
        with pytest.raises(TimeoutError, match=r"^The engine has not come to rest .*are 'a'\."):
            engine.drain(0.01)
        held.release()
        assert engine.drain(60) == ()
        assert len(tokens_of(list(stream))) == 3


def test_drain_by_hand_looks_at_the_time_between_turns() -> None:
    engine, _, _ = make_engine()
    engine.add_request("a", [1], limited(20))
    with pytest.raises(TimeoutError, match=r"^The engine has not come to rest .*are 'a'\."):
        engine.drain(0.0)
    assert engine.drain(600.0) == ()


class Held:
    """Holds whoever waits for the device."""

    def __init__(self, streams: Any) -> None:
        self.streams, self.reach = streams, streams.reach
        self.waiting, self.free = threading.Event(), threading.Event()

    def __enter__(self) -> Held:
        self.streams.reach = self._reach
        return self

    def _reach(self, stream: Any, value: int) -> None:
        self.waiting.set()
        assert self.free.wait(60)
        self.reach(stream, value)

    def wait(self) -> None:
        assert self.waiting.wait(60)

    def release(self) -> None:
        self.free.set()

    def __exit__(self, *_: object) -> None:
        self.release()
        del self.streams.reach


@pytest.mark.parametrize("thread", [False, True])
def test_what_ends_the_loop_reaches_every_stream_and_every_later_call(
    thread: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _, fake = make_engine(thread=thread)
    refuse = threading.Event()
    enter = fake.stream

    def refused(stream: Any) -> Any:
        if refuse.is_set():
            raise OSError("launch refused")
        return enter(stream)

    fake.stream = refused  # type: ignore[method-assign]
    streams = [engine.add_request(str(n), [n + 1], limited(20), max_queued=2) for n in range(2)]
    if not thread:
        turns(engine, 6)
        refuse.set()
        turn_until_it_fails(engine, streams)
    else:
        engine.drain(60)
        refuse.set()
    for stream in streams:
        with pytest.raises(OSError, match="launch refused"):
            list(stream)
        with pytest.raises(OSError, match="launch refused"):
            stream.result()
    for call in (
        lambda: engine.add_request("x", [1]),
        lambda: engine.abort("0"),
        lambda: engine.pause("0"),
        lambda: engine.resume("0"),
        engine.drain,
    ):
        with pytest.raises(OSError, match="launch refused"):
            call()
    assert engine.close() == ()
    if thread:
        assert "the decode engine has ended: OSError('launch refused')" in caplog.text
        assert not engine._core.driver.is_alive()


def turn_until_it_fails(engine: DecodeEngine, streams: list[RequestStream]) -> None:
    for stream in streams:
        queued(stream)
    with pytest.raises(OSError, match="launch refused"):
        run(engine)


def test_a_thread_that_is_ended_by_force_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine, _, _ = make_engine(thread=True)

    def leave(output: RequestOutput) -> None:
        raise SystemExit(3)

    stream = engine.add_request("a", [1], limited(5), on_output=leave)
    with pytest.raises(RuntimeError, match=r"^The engine's thread was ended by SystemExit\(3\)"):
        stream.result(60)
    assert engine.close() == (), "and the callback is not called again"


def test_who_waits_for_rest_hears_of_the_failure() -> None:
    engine, _, streams = make_engine(thread=True, output_thread=True)
    with Held(streams) as held:
        engine.add_request("a", [1], limited(5), on_output=lambda _: sys.exit())
        stream = engine.add_request("b", [1], limited(5))
        held.wait()
        quiet = engine._core.drained()
        held.release()
        assert isinstance(quiet.exception(60), RuntimeError)
    with pytest.raises(RuntimeError, match="^The engine's thread was ended by SystemExit"):
        stream.result(60)
    engine.close()


@pytest.mark.parametrize("thread", [False, True])
def test_close_reports_what_is_pending_and_leaves_what_has_arrived(thread: bool) -> None:
    engine, _, _ = make_engine(thread=thread)
    done = engine.add_request("done", [1], limited(2))
    slow = engine.add_request("slow", [1], limited(9), max_queued=2)
    engine.drain()
    aborted = engine.add_request("aborted", [1], limited(9))
    engine.abort("aborted")
    assert engine.close() == ("slow",)
    assert engine.close() == ()
    assert tokens_of(list(done)) == oracle([1], limited(2))
    assert next(slow).num_output_tokens == 1
    assert next(slow).num_output_tokens == 2
    for stream in [slow] if thread else [slow, aborted]:
        with pytest.raises(RuntimeError, match="^The decode engine is closed; make another"):
            list(stream)
    for call in (lambda: engine.add_request("x", [1]), lambda: engine.abort("x"), engine.drain):
        with pytest.raises(RuntimeError, match="^The decode engine is closed"):
            call()
    assert engine._core.loop._life.closed


def test_close_returns_though_the_device_hangs(caplog: pytest.LogCaptureFixture) -> None:
    engine, _, streams = make_engine(thread=True, async_scheduling=False)
    with Held(streams) as held:
        stream = engine.add_request("a", [1], limited(5))
        held.wait()
        assert engine.close(timeout=0.05) == ("a",)
        with pytest.raises(RuntimeError, match="^The decode engine is closed"):
            stream.result(60)
        assert "was closed while its thread waits for the device" in caplog.text
        held.release()
        engine._core.driver.join(60)
        assert not engine._core.driver.is_alive()
    engine._core.loop.close()


def test_an_interrupt_reaches_a_reader_and_a_closed_engine_ends() -> None:
    engine, _, streams = make_engine(thread=True, output_thread=True)
    with engine, Held(streams) as held:
        stream = engine.add_request("a", [1], limited(5))
        held.wait()
        with pytest.raises(KeyboardInterrupt):
            interrupted(stream)
        held.release()
        assert stream.result(60).new_token_ids == tuple(oracle([1], limited(5)))


def interrupted(stream: RequestStream) -> None:
    main = threading.main_thread().ident
    threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGINT)).start()
    next(stream)


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_admission_leaves_its_id_free(
    thread: bool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, _ = make_engine(thread=thread)
    admit = engine._core._admit

    def interrupted(*what: Any) -> None:
        if when == "after":
            admit(*what)
        raise KeyboardInterrupt

    heard: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "_admit", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:
            engine.add_request("a", [1], limited(5), on_output=heard.append)
    stream = engine.add_request("a", [2], limited(3))
    assert kept.value.__traceback__ is not None, "which holds all that was made"
    engine.drain()
    assert tokens_of(list(stream)) == oracle([2], limited(3))
    assert [out.finish_reason for out in heard if out.finished] in ([], ["abort"])
    check_rest(engine)
    engine.close()


@pytest.mark.parametrize("which", ["output", "engine"])
def test_an_engine_that_gets_no_thread_says_so_and_leaves_the_loop_usable(
    monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    loop, _, _ = make_loop(output_thread=True)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.endswith(which):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                DecodeEngine(loop)
    with DecodeEngine(loop) as engine:
        assert tokens_of(list(engine.add_request("a", [1], limited(3)))) == oracle([1], limited(3))


def test_an_engine_whose_start_was_interrupted_leaves_the_loop_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, _, _ = make_loop(output_thread=True)
    loop.output_handler.start()
    start, started = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            DecodeEngine(loop)
    started[0].join(60)
    assert not started[0].is_alive()
    with DecodeEngine(loop) as engine:
        assert tokens_of(list(engine.add_request("a", [1], limited(3)))) == oracle([1], limited(3))


@pytest.mark.parametrize("thread", [False, True])
def test_an_interrupted_close_refuses_what_comes_and_is_done_by_the_next(thread: bool) -> None:
    engine, _, _ = make_engine(thread=thread)
    stream = engine.add_request("a", [1], limited(9), max_queued=2)
    engine.drain()
    with pytest.MonkeyPatch.context() as patch:

        def interrupted() -> None:
            raise KeyboardInterrupt

        patch.setattr(engine._core, "wake", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    with pytest.raises(RuntimeError, match="^The decode engine is closed"):
        engine.add_request("b", [1])
    assert engine.close() == ("a",)
    with pytest.raises(RuntimeError, match="^The decode engine is closed"):
        stream.result(60)
    assert engine._core.loop._life.closed


def test_an_engine_that_is_dropped_leaves_no_thread() -> None:
    engine, _, _ = make_engine(thread=True)
    list(engine.add_request("a", [1], limited(3)))
    driver, kept = engine._core.driver, weakref.ref(engine)
    del engine
    assert kept() is None
    driver.join(60)
    assert not driver.is_alive()


def test_an_idle_engine_sleeps() -> None:
    engine, _, _ = make_engine(thread=True)
    with engine:
        engine.add_request("a", [1], limited(20), max_queued=2)
        engine.drain(60)
        turn, turned = engine._core.turn, []
        engine._core.turn = lambda **wait: turned.append(wait) or turn(**wait)  # type: ignore
        used = time.thread_time()
        engine.drain(60)
        engine.drain(60)
        assert len(turned) < 10
        assert time.thread_time() - used < 1.0


def test_the_thread_runs_on_the_loops_stream_and_in_its_makers_modes() -> None:
    loop, model, streams = make_loop(output_thread=True)
    seen: list[Any] = []
    mine = streams.Stream()
    decode = model.decode

    def watched(*args: Any) -> Any:
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        seen.append((streams.current_stream(), *modes))
        return decode(*args)

    with streams.stream(mine):
        loop = DecodeLoop(model, streams=streams)
    model.decode = watched  # type: ignore[method-assign]
    with torch.inference_mode():
        engine = DecodeEngine(loop)
    heard: list[Any] = []
    with engine:
        hear = lambda _: heard.append(streams.current_stream())  # noqa: E731
        stream = engine.add_request("a", [1], limited(3), on_output=hear)
        assert stream.result(60).num_output_tokens == 3
    assert seen == [(mine, True, False)] * 2
    assert heard == [mine] * 3, "between the steps, too"


@pytest.mark.slow
def test_on_a_runtime_with_threads_of_its_own() -> None:
    with use_runtime(EmulatedRuntime()):
        model = CompiledHashModel(neuron_streams.compile, "neuron:1", num_slots=4)
        with DecodeEngine(DecodeLoop(model), max_queued=2) as engine:
            prompts = [[n + 1, n] for n in range(6)]
            streams = [
                engine.add_request(str(n), prompt, limited(9, n))
                for n, prompt in enumerate(prompts)
            ]
            for n, stream in enumerate(streams):
                assert tokens_of(list(stream)) == oracle(prompts[n], limited(9, n))


def test_the_engine_logs_nothing_when_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), make_engine(thread=True)[0] as engine:
        engine.add_request("a", [1], limited(3)).result(60)
    assert caplog.text == ""
