"""Streams, most of them of an engine that the test turns by hand."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from neuron_streams.decode import DecodeEngine, RequestOutput, RequestStream, SamplingParams
from neuron_streams.decode.life import OwnProcess
from neuron_streams.decode.request_stream import OutputQueue
from tests.decode.engines import (
    check_rest,
    limited,
    make_engine,
    oracle,
    run,
    tokens_of,
    turns,
)


def make_queue(max_queued: int = 4) -> tuple[OutputQueue, list[str]]:
    told: list[str] = []
    return OutputQueue("a", max_queued, lambda: told.append("room")), told


def output(number: int, reason: str | None = None, error: Exception | None = None) -> Any:
    return RequestOutput("a", (number,), number, reason, error)


class Waits:
    """What drives a queue; its reader may wait."""

    process = OwnProcess()

    def check_may_wait(self) -> None: ...

    def abort(self, queue: OutputQueue) -> bool:
        raise NotImplementedError

    def abandon(self, queue: OutputQueue) -> None: ...

    def is_held(self, queue: OutputQueue) -> bool:
        return False

    def device_is_held(self) -> bool:
        return False


class Unowned(Waits):
    def check_may_wait(self) -> None:
        raise AssertionError("it would have to wait")


def take(queue: OutputQueue) -> int:
    number, output = queue.first(None, Unowned())
    queue.claim(number)
    del queue.outputs[number]
    return output.num_output_tokens


def test_a_queue_gives_in_order_and_then_its_end() -> None:
    queue, _ = make_queue()
    queue.put(output(1))
    queue.put(output(2, "stop"))
    assert queue.ended
    queue.put(output(3))
    assert [take(queue), take(queue)] == [1, 2]
    for _ in range(2):
        with pytest.raises(StopIteration):
            take(queue)


def test_an_error_comes_after_all_that_has_arrived_and_stays() -> None:
    queue, _ = make_queue()
    error = ArithmeticError("no")
    queue.put(output(1))
    queue.put(output(2, "error", error))
    queue.end(LookupError("too late"))
    assert [take(queue), take(queue)] == [1, 2]
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="no"):
            take(queue)


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
def test_an_error_cannot_pass_for_the_end(kind: type[Exception]) -> None:
    queue, _ = make_queue()
    cause = kind("from a callback")
    queue.put(output(1, "error", cause))
    take(queue)
    with pytest.raises(RuntimeError, match="^The request was ended by Stop") as caught:
        take(queue)
    assert caught.value.__cause__ is cause


def test_a_full_queue_stays_full_until_half_is_read_and_says_so() -> None:
    queue, told = make_queue(4)
    for number in range(2):
        queue.put(output(number))
    assert not queue.hold(1)
    assert queue.hold(2), "two there, two in flight, no room for a fifth"
    queue.put(output(2))
    queue.put(output(3))
    take(queue)
    assert told == []
    assert queue.hold(0)
    take(queue)
    assert told == ["room"]
    assert not queue.hold(0)
    take(queue)
    assert told == ["room"], "once there is room nobody needs to be told"


def test_a_queue_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="^max_queued is 0; it must be 1 or more"):
        make_queue(0)


def test_a_queue_that_nobody_will_read_keeps_nothing() -> None:
    queue, _ = make_queue()
    queue.unread = True
    assert queue.abandoned
    queue.put(output(1))
    assert not queue.hold(9)
    queue.put(output(2, "abort"))
    assert len(queue) == 0
    assert queue.ended


def test_a_deadline_names_the_request() -> None:
    queue, _ = make_queue()
    with pytest.raises(TimeoutError, match="^Request 'a' has not finished in time; it goes on"):
        queue.first(0.0, Waits())


def test_a_stream_gives_all_outputs_and_ends() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1, 2], limited(5))
    assert repr(stream) == "<RequestStream 'a', open, 0 queued>"
    run(engine)
    assert repr(stream) == "<RequestStream 'a', ended, 5 queued>"
    outputs = list(stream)
    assert tokens_of(outputs) == oracle([1, 2], limited(5))
    assert [out.finish_reason for out in outputs] == [None] * 4 + ["length"]
    assert list(stream) == []
    check_rest(engine)


def test_waiting_for_an_engine_that_nothing_drives_is_refused() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(2))
    with pytest.raises(RuntimeError, match="^Nothing drives this engine"):
        next(stream)


def test_the_result_is_all_that_has_not_been_read() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(6))
    run(engine)
    first = next(stream)
    result = stream.result()
    want = oracle([1], limited(6))
    assert first.new_token_ids + result.new_token_ids == tuple(want)
    assert (result.finish_reason, result.num_output_tokens) == ("length", 6)
    assert result.metrics is not None
    assert stream.result() == result, "again"


def test_the_result_has_the_log_probabilities_of_its_tokens() -> None:
    engine, _, _ = make_engine()
    params = SamplingParams(max_tokens=6, seed=0, ignore_eos=True, logprobs=1)
    stream = engine.add_request("a", [1], params)
    run(engine)
    result = stream.result()
    assert result.logprobs is not None
    pairs = zip(result.new_token_ids, result.logprobs, strict=True)
    assert [token in each for token, each in pairs] == [True] * 6


def test_a_result_in_time_or_later_loses_nothing() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(6))
    turns(engine, 4)
    engine._core.driver = threading.Thread()  # somebody who never comes
    with pytest.raises(TimeoutError, match="^Request 'a' has not finished in time"):
        stream.result(0.0)
    engine._core.driver = None
    run(engine)
    assert stream.result().new_token_ids == tuple(oracle([1], limited(6)))


def test_an_aborted_stream_gives_what_has_arrived_and_says_that_it_was() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(9))
    turns(engine, 4)
    assert stream.abort()
    assert not stream.abort()
    run(engine)
    outputs = list(stream)
    count = len(tokens_of(outputs))
    assert tokens_of(outputs) == oracle([1], limited(9))[:count]
    assert (count > 0, outputs[-1].finish_reason) == (True, "abort")
    check_rest(engine)


@pytest.mark.parametrize("how", ["close", "with", "drop", "async with"])
def test_a_stream_that_is_given_up_aborts_its_request(how: str) -> None:
    engine, model, _ = make_engine()
    stream = engine.add_request("a", [1], limited(20))
    turns(engine, 4)
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            pass
    elif how == "async with":
        asyncio.run(in_a_with(stream))
    if how != "drop":
        assert list(stream) == [], "what was there is forgotten"
        with pytest.raises(RuntimeError, match="^The stream of request 'a' was closed"):
            stream.result()
    del stream
    launched = len(model.calls)
    run(engine)
    assert len(model.calls) <= launched
    check_rest(engine)


async def in_a_with(stream: RequestStream) -> None:
    async with stream:
        pass
    await stream.aclose()


def test_a_dropped_streams_id_is_free_at_once() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(20))
    turns(engine, 3)
    del stream
    again = engine.add_request("a", [5], limited(3, seed=2))
    run(engine)
    assert tokens_of(list(again)) == oracle([5], limited(3, seed=2))
    check_rest(engine)


def test_an_id_may_be_asked_for_while_its_stream_is_being_collected() -> None:
    """By another thread, between the two halves of `abandon`."""
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(20))
    turns(engine, 3)
    stream._queue.unread = True
    again = engine.add_request("a", [5], limited(3, seed=2))
    engine.turn()
    del stream
    run(engine)
    assert tokens_of(list(again)) == oracle([5], limited(3, seed=2))
    check_rest(engine)


def test_a_stream_dropped_after_its_end_asks_nothing_of_the_engine() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(2))
    run(engine)
    del stream
    assert engine._core._inbox.empty()


def test_a_stream_keeps_its_engine() -> None:
    stream = make_engine()[0].add_request("a", [1], limited(2))
    assert isinstance(stream._keep_alive, DecodeEngine)
    run(stream._keep_alive)
    assert len(tokens_of(list(stream))) == 2


# On event loops


async def spin(engine: DecodeEngine) -> None:
    """Turn the engine until it has nothing to do, with the other tasks in between."""
    while engine.turn():
        await asyncio.sleep(0)


async def collect(stream: RequestStream) -> list[int]:
    return tokens_of([output async for output in stream])


def test_several_tasks_read_their_streams_as_the_tokens_come() -> None:
    engine, _, _ = make_engine()

    async def main() -> list[Any]:
        streams = [engine.add_request(str(n), [n + 1], limited(6, n)) for n in range(3)]
        return await asyncio.gather(*map(collect, streams), spin(engine))

    *got, _ = asyncio.run(main())
    assert got == [oracle([n + 1], limited(6, n)) for n in range(3)]
    check_rest(engine)


def test_tasks_that_share_a_stream_share_its_outputs() -> None:
    engine, _, _ = make_engine()

    async def main() -> list[Any]:
        stream = engine.add_request("a", [1], limited(9))
        return await asyncio.gather(collect(stream), collect(stream), spin(engine))

    one, two, _ = asyncio.run(main())
    assert sorted(one + two) == sorted(oracle([1], limited(9)))


def test_the_result_can_be_awaited() -> None:
    engine, _, _ = make_engine()

    async def main() -> RequestOutput:
        stream = engine.add_request("a", [1], limited(4))
        result, _ = await asyncio.gather(stream.aresult(), spin(engine))
        return result

    assert asyncio.run(main()).new_token_ids == tuple(oracle([1], limited(4)))


def test_a_cancelled_reader_aborts_its_request() -> None:
    engine, _, _ = make_engine()

    async def main() -> None:
        stream = engine.add_request("a", [1], limited(20))
        other = engine.add_request("b", [2], limited(6))
        reader = asyncio.create_task(collect(stream))
        turns(engine, 2)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert engine.unfinished_request_ids == ("b",)
        await asyncio.gather(collect(other), spin(engine))
        assert [output async for output in stream] == []

    asyncio.run(main())
    check_rest(engine)


def test_an_error_reaches_the_task() -> None:
    engine, model, _ = make_engine()
    model.fail_at = {2}

    async def main() -> None:
        stream = engine.add_request("a", [1], limited(20))
        with pytest.raises(ArithmeticError, match="the device failed in call 2"):
            await asyncio.gather(stream.aresult(), spin(engine))
        with pytest.raises(ArithmeticError):
            await anext(stream)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["next", "anext", "result", "aresult"])
def test_a_reader_whose_output_another_has_taken_goes_on_with_the_next(how: str) -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(3))
    run(engine)
    queue = stream._queue
    claim = queue.claim

    def claim_too_late(number: int) -> None:
        claim(number)
        if number == 0:
            del queue.outputs[0]

    queue.claim = claim_too_late  # type: ignore[method-assign]
    second, third = oracle([1], limited(3))[1:]
    read = {
        "next": lambda: next(stream),
        "anext": lambda: asyncio.run(anext(stream)),  # type: ignore[arg-type]
        "result": stream.result,
        "aresult": lambda: asyncio.run(stream.aresult()),
    }[how]
    expected = (second, third) if "result" in how else (second,)
    assert read().new_token_ids == expected


def test_a_reader_that_is_interrupted_finds_its_output_again() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(3))
    run(engine)
    queue = stream._queue
    for read in (stream.__next__, stream.result):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(queue, "claim", interrupt)
            with pytest.raises(KeyboardInterrupt):
                read()
    assert tokens_of([stream.result()]) == oracle([1], limited(3))
    check_rest(engine)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_reader_whose_event_loop_is_gone_breaks_nothing() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(4))
    gone = asyncio.new_event_loop()
    reading = stream._queue.first_async()
    task = gone.create_task(reading)
    gone.run_until_complete(asyncio.sleep(0))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    gone.close()
    run(engine)
    assert tokens_of(list(stream)) == oracle([1], limited(4))
    del task, reading
    gc.collect()


# On threads


@pytest.mark.parametrize("awaiting", [False, True])
def test_readers_of_many_threads_and_event_loops(awaiting: bool) -> None:
    engine, _, _ = make_engine(thread=True)
    prompts = {str(n): [n + 1, 2] for n in range(8)}

    def read(request_id: str) -> list[int]:
        stream = engine.add_request(request_id, prompts[request_id], limited(12))
        return asyncio.run(collect(stream)) if awaiting else tokens_of(list(stream))

    with engine, ThreadPoolExecutor(8) as pool:
        got = list(pool.map(read, prompts))
    assert got == [oracle(prompt, limited(12)) for prompt in prompts.values()]
    check_rest(engine)


def test_each_output_goes_to_one_thread() -> None:
    engine, _, _ = make_engine(thread=True)
    stream = engine.add_request("a", [1], limited(20))
    with engine, ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda _: tokens_of(list(stream)), range(4)))
    assert sorted(token for part in parts for token in part) == sorted(oracle([1], limited(20)))
