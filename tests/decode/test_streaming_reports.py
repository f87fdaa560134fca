"""Stop strings, callbacks, streams and aborts, as such loops have got them wrong in public.

The numbers are the rows of docs/reports.md, "Decode loops", as in test_reports.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from neuron_streams.decode import DecodeLoop, RequestOutput, SamplingParams
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
from tests.decode.harness import check_idle, drive, make_loop, modes
from tests.decode.hash_model import reference
from tests.decode.toy_tokenizer import ToyTokenizer, reference_text


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def stopping_at_six(**options: Any) -> SamplingParams:
    """Whose stop string ends with the text of the sixth token and begins with an earlier one's."""
    for seed in range(1000):
        texts = [
            ToyTokenizer().decode(oracle([1, 2], limited(20, seed))[:count]) for count in range(21)
        ]
        stop = texts[6][len(texts[5]) - 1 :]
        if stop.isascii() and len(stop) > 1 and len(texts[5]) > 2 and stop not in texts[5]:
            return limited(20, seed, stop=stop, **options)
    raise AssertionError("no such text")


# Stop strings


@modes
@pytest.mark.parametrize("include", [False, True])
def test_row_54_text_ends_at_the_stop_string_and_later_tokens_are_discarded(
    options: dict[str, Any], include: bool
) -> None:
    params = stopping_at_six(include_stop_str_in_output=include)
    loop, model, _ = make_loop(tokenizer=ToyTokenizer(), **options)
    outputs = list(loop.generate([[1, 2]], params))
    want = reference_text(oracle([1, 2], params), "length", params)
    last = outputs[-1]
    assert (tokens_of(outputs), last.finish_reason, text_of(outputs), last.stop_reason) == want
    assert last.stop_reason == params.stop[0]
    assert last.new_token_ids == (want[0][-1],), "the token that completed it is given out"
    assert last.num_output_tokens == len(want[0]) == 6
    launched = len(model.of("prefill")) + len(model.of("decode"))
    assert loop.stats.extra_tokens_dropped == launched - 6
    assert loop.stats.generated_tokens == 6
    assert (loop.stats.extra_tokens_dropped > 0) == (loop.max_concurrent_batches > 1)
    check_idle(loop)


@modes
def test_row_54_over_a_preemption_nothing_is_said_twice(options: dict[str, Any]) -> None:
    params = stopping_at_six()
    loop, _, _ = make_loop(tokenizer=ToyTokenizer(), **options)
    loop.add_request("a", [1, 2], params)
    outputs: list[RequestOutput] = []
    while loop.has_unfinished_requests():
        outputs += loop.step()
        if sum(len(out.new_token_ids) for out in outputs) in (2, 5):
            loop.scheduler.preempt_request("a")
    assert loop.stats.preemptions
    tokens, reason, text, _ = reference_text(oracle([1, 2], params), "length", params)
    assert (tokens_of(outputs), outputs[-1].finish_reason, text_of(outputs)) == (
        tokens,
        reason,
        text,
    )


@modes
def test_row_54_a_stop_string_goes_before_what_else_the_token_ends(options: dict[str, Any]) -> None:
    params = stopping_at_six()
    loop, _, _ = make_loop(tokenizer=ToyTokenizer(), **options)
    at_the_limit = replace(params, max_tokens=6)
    last = list(loop.generate([[1, 2]], at_the_limit))[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", params.stop[0])


@modes
def test_an_aborted_request_gives_the_text_that_was_held_back(options: dict[str, Any]) -> None:
    loop, _, _ = make_loop(tokenizer=ToyTokenizer(), **options)
    first = ToyTokenizer().decode(oracle([1, 2], limited(3)))
    loop.add_request("a", [1, 2], limited(20, stop=first + "never"))
    outputs: list[RequestOutput] = []
    while sum(len(out.new_token_ids) for out in outputs) < 2:
        outputs += loop.step()
    assert text_of(outputs) == ""
    loop.abort_request("a")
    outputs += loop.step()
    assert outputs[-1].finish_reason == "abort"
    assert text_of(outputs) == ToyTokenizer().decode(tokens_of(outputs))


@modes
def test_a_stop_token_is_told_of_and_an_end_of_sequence_is_not(options: dict[str, Any]) -> None:
    loop, _, _ = make_loop(tokenizer=ToyTokenizer(), **options)
    tokens = oracle([1, 2], limited(5))
    fourth = limited(20, stop_token_ids=[tokens[3]])
    outputs = list(loop.generate([[1, 2]], fourth))
    assert tokens_of(outputs) == tokens[: tokens.index(tokens[3]) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", tokens[3])
    assert text_of(outputs) == ToyTokenizer().decode(tokens_of(outputs)[:-1])
    ended = next(
        (prompt, SamplingParams(max_tokens=20, seed=1))
        for prompt in ([n] for n in range(31))
        if reference(prompt, SamplingParams(max_tokens=20, seed=1), 24)[1] == "stop"
    )
    last = list(loop.generate([ended[0]], ended[1]))[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", None)


def test_without_a_tokenizer_there_is_no_text_and_stop_strings_are_refused() -> None:
    loop, _, _ = make_loop()
    with pytest.raises(
        ValueError, match="^Request 'a' has stop strings, and the loop no tokenizer"
    ):
        loop.add_request("a", [1], limited(5, stop="x"))
    outputs = list(loop.generate([[1]], limited(5)))
    assert text_of(outputs) == ""
    assert len(tokens_of(outputs)) == 5


@modes
def test_a_tokenizer_that_fails_ends_its_request_alone(options: dict[str, Any]) -> None:
    tokenizer = ToyTokenizer()
    loop, model, _ = make_loop(tokenizer=tokenizer, **options)
    tokens = oracle([1, 2], limited(9))
    other = [3, 4]
    tokenizer.fails_at = next(t for t in tokens[2:] if t not in oracle(other, limited(9, 2)))
    count = tokens.index(tokenizer.fails_at) + 1
    outputs = list(loop.generate([[1, 2], other], [limited(9), limited(9, 2)]))
    ends = {out.request_id: out for out in outputs if out.finished}
    assert ends["0"].finish_reason == "error"
    assert isinstance(ends["0"].error, LookupError)
    first = [out for out in outputs if out.request_id == "0"]
    assert tokens_of(first) == tokens[:count]
    assert text_of(first) == ToyTokenizer().decode(tokens[: count - 1])
    assert ends["1"].finish_reason == "length"
    drive(loop, model)
    assert len(list(loop.generate([other], limited(3, 2)))) == 3, "and the loop goes on"


@modes
def test_an_interrupt_in_the_middle_of_a_step_ends_the_loop(options: dict[str, Any]) -> None:
    class Interrupted(ToyTokenizer):
        def decode(self, token_ids: Sequence[int], /) -> str:
            raise KeyboardInterrupt

    loop, _, _ = make_loop(tokenizer=Interrupted(), **options)
    loop.add_request("a", [1], limited(5))
    with pytest.raises(KeyboardInterrupt):
        steps(loop, 6)
    for call in (loop.step, loop.drain, loop.has_unfinished_requests):
        with pytest.raises(RuntimeError, match="the decode loop has ended, since KeyboardInterr"):
            call()
    assert loop.scheduler.unfinished_request_ids == ()
    assert loop.close() == ()


def steps(loop: DecodeLoop, count: int) -> None:
    for _ in range(count):
        loop.step()


# Callbacks


@modes
def test_row_11_a_callback_hears_each_token_once(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    heard: dict[str, list[RequestOutput]] = {"a": [], "b": []}
    for n, (request_id, mine) in enumerate(heard.items()):
        loop.add_request(request_id, [n + 1], limited(6), on_output=mine.append)
    outputs = drive(loop, model)
    for n, (request_id, mine) in enumerate(heard.items()):
        assert tokens_of(mine) == oracle([n + 1], limited(6))
        assert [out for out in outputs if out.request_id == request_id] == mine
        assert mine[-1].finish_reason == "length"


@modes
@pytest.mark.parametrize("at", [1, 3, 6])
def test_row_43_an_exception_of_a_callback_is_raised_and_nothing_is_lost(
    options: dict[str, Any], at: int
) -> None:
    loop, model, _ = make_loop(**options)
    heard: list[int] = []

    def fail(output: RequestOutput) -> None:
        heard.append(output.num_output_tokens)
        if len(heard) == at:
            raise LookupError("of the caller's")

    loop.add_request("a", [1], limited(6), on_output=fail)
    loop.add_request("b", [2], limited(8))
    outputs: list[RequestOutput] = []
    raised = []
    while loop.has_unfinished_requests():
        try:
            outputs += loop.step()
        except LookupError as error:
            raised.append(error)
    check_idle(loop)
    assert len(raised) == 1
    assert heard == list(range(1, at + 1))
    first = [out for out in outputs if out.request_id == "a"]
    assert tokens_of(first) == oracle([1], limited(6))[:at]
    end = ("length", None) if at == 6 else ("error", raised[0])
    assert (first[-1].finish_reason, first[-1].error) == end
    assert tokens_of([out for out in outputs if out.request_id == "b"]) == oracle([2], limited(8))
    assert not model.fail_at


def test_each_exception_is_raised_by_a_step_of_its_own() -> None:
    loop, _, _ = make_loop(sizes={"prefill_batch": 2})
    for request_id in "ab":
        loop.add_request(request_id, [1], limited(5), on_output={}.__getitem__)
    raised = []
    outputs: list[RequestOutput] = []
    while loop.has_unfinished_requests():
        try:
            outputs += loop.step()
        except KeyError as error:
            raised.append(error)
    assert len(raised) == 2
    ends = [(out.request_id, out.error) for out in outputs if out.finished]
    assert ends == list(zip("ab", raised, strict=True))


def test_an_exception_in_a_drain_is_raised_there_and_in_a_close_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, _, _ = make_loop()
    loop.add_request("a", [1], limited(5), on_output={}.__getitem__)
    loop.step()
    with pytest.raises(KeyError):
        loop.drain()
    assert [out.finish_reason for out in loop.drain()] == [None, "error"]
    loop, _, streams = make_loop(sizes={"prefill_batch": 2})
    loop.add_request("a", [1], limited(5), on_output={}.__getitem__)
    loop.add_request("b", [1], limited(5), on_output=[].pop)  # type: ignore[arg-type]
    loop.step()
    streams.run()
    loop.pump()
    loop.close()
    assert "KeyError" in caplog.text
    assert "TypeError" in caplog.text


def test_row_23_a_callback_may_abort_and_use_its_id_again() -> None:
    loop, model, _ = make_loop(depth=4)
    heard: list[tuple[str, int]] = []

    def first(output: RequestOutput) -> None:
        heard.append(("first", output.num_output_tokens))
        if output.num_output_tokens == 2 and not output.finished:
            loop.abort_request("a")
            loop.add_request("a", [5], limited(3), on_output=second)

    def second(output: RequestOutput) -> None:
        heard.append(("second", output.num_output_tokens))
        assert output.new_token_ids == (oracle([5], limited(3))[output.num_output_tokens - 1],)

    loop.add_request("a", [1], limited(9), on_output=first)
    drive(loop, model)
    firsts = [count for name, count in heard if name == "first"]
    assert firsts == [1, 2, 2], "told of the abort, and of no late token"
    assert heard[3:] == [("second", n) for n in (1, 2, 3)]


# Streams and aborts


@modes
def test_row_23_a_late_token_reaches_no_stream_of_the_same_id(options: dict[str, Any]) -> None:
    engine, _, _ = make_engine(**options)
    old = engine.add_request("a", [1], limited(20))
    turns(engine, 4)
    assert old.abort()
    new = engine.add_request("a", [9], limited(6, 5))
    assert not old.abort(), "the id is another's now"
    run(engine)
    assert tokens_of(list(new)) == oracle([9], limited(6, 5))
    got = list(old)
    assert tokens_of(got) == oracle([1], limited(20))[: len(tokens_of(got))]
    assert got[-1].finish_reason == "abort"
    check_rest(engine)


def test_row_32_after_abort_and_drain_the_device_is_at_rest() -> None:
    engine, model, streams = make_engine(depth=4)
    stream = engine.add_request("a", [1], limited(20))
    turns(engine, 3)
    stream.abort()
    assert engine.drain() == ()
    assert model.executed == len(model.calls)
    assert streams.run() == 0
    check_rest(engine)


def test_row_34_the_last_token_of_a_stream_comes_without_further_work() -> None:
    engine, _, _ = make_engine()
    stream = engine.add_request("a", [1], limited(1))
    run(engine)
    assert [out.finish_reason for out in queued(stream)] == ["length"]


def test_row_37_an_engine_may_start_empty_and_wait() -> None:
    engine, _, _ = make_engine(thread=True)
    with engine:
        assert engine.drain(60) == ()
        assert engine.add_request("a", [1], limited(3)).result(60).num_output_tokens == 3


def test_row_43_the_output_threads_failure_reaches_every_stream() -> None:
    engine, _, streams = make_engine(thread=True)
    added = threading.Event()
    ready = threading.Barrier(2, added.set)

    def read(request_id: str) -> str:
        stream = engine.add_request(request_id, [1], limited(20))
        ready.wait(60)
        with pytest.raises(OSError, match="the reader's own") as caught:
            stream.result(60)
        return str(caught.value)

    def fail(*_: Any) -> None:
        added.wait(60)
        raise OSError("the reader's own")

    streams.wait = fail  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, "ab")) == ["the reader's own"] * 2
    with pytest.raises(OSError, match="the reader's own"):
        engine.add_request("c", [1])
    assert engine.close() == ()


@modes
def test_row_75_an_aborted_request_comes_to_life_no_more(options: dict[str, Any]) -> None:
    engine, model, _ = make_engine(**options)
    stream = engine.add_request("a", [1], limited(20))
    turns(engine, 4)
    engine._core.loop.scheduler.preempt_request("a")
    engine.abort("a")
    assert not engine.resume("a")
    run(engine)
    launched = len(model.calls)
    run(engine)
    assert len(model.calls) == launched
    assert next(out for out in stream if out.finished).finish_reason == "abort"
    check_rest(engine)
