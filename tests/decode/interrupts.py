"""Raises KeyboardInterrupt at every bytecode of the decode loop in turn, and looks at what is left.

`python -m tests.decode.interrupts [SCENARIO...]` tries all of them, the tests a sample. A scenario
is a short script. For each bytecode that it executes in `neuron_streams/decode` it is run once, up
to that one, where a trace function raises. Then the loop or engine either goes on and gives exactly
what was asked of it, or it has ended and says so; and `close` returns.

Not tried is the last line of a call that hands outputs over, `return outputs`: whether the caller
has them by then only the caller knows. CPython runs no signal handler there.
"""

from __future__ import annotations

import argparse
import itertools
import linecache
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import neuron_streams.decode
from neuron_streams.decode import DecodeEngine, DecodeLoop, RequestOutput, RequestStream
from tests.decode.engines import limited, oracle, tokens_of
from tests.decode.harness import check_idle, check_invariants, make_loop

PACKAGE = str(Path(neuron_streams.decode.__file__).parent)
PROMPTS = {"a": [1, 2], "b": [3], "c": [4, 5, 6]}
LENGTHS = {"a": 5, "b": 3, "c": 4}
MODES: dict[str, dict[str, Any]] = {
    "sync": {"async_scheduling": False},
    "materialize": {},
    "gather": {"policy": "gather"},
    "materialize thread": {"output_thread": True},
    "gather thread": {"policy": "gather", "output_thread": True},
}


class Interrupt:
    """Raises KeyboardInterrupt ahead of the `at`-th bytecode, counted from 1, while it is entered.

    It swallows the interrupt; `where` is then the place. With `at` 0 it counts only.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.where = ""
        self.places: dict[tuple[CodeType, int], list[int]] = {}  # the positions of each bytecode

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> bool:
        sys.settrace(self._before)
        return bool(self.where) and kind is KeyboardInterrupt

    def _enter_frame(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and not _hands_over(frame):
            self.count += 1
            code = frame.f_code
            if not self.at:
                self.places.setdefault((code, frame.f_lasti), []).append(self.count)
            elif self.count == self.at:
                place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
                self.where = f"{place}, bytecode {frame.f_lasti}, the {self.at}th"
                raise KeyboardInterrupt
        return self._in_frame


def _hands_over(frame: FrameType) -> bool:
    """Whether all that is left is to return what the caller has asked for."""
    caller = frame.f_back
    if caller is None or caller.f_code.co_filename.startswith(PACKAGE):
        return False
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).strip()
    return line in ("return outputs", "return output")


class Run:
    """A loop, what was asked of it, and what came."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.loop, self.model, self.streams = make_loop(**options)
        self.asked: dict[str, bool] = {}  # by id, whether add_request returned
        self.aborted: set[str] = set()
        self.outputs: list[RequestOutput] = []
        self.heard: list[RequestOutput] = []
        self.iterator: Iterator[RequestOutput] | None = None
        self.closed = False

    def add(self, request_id: str, **options: Any) -> None:
        self.asked[request_id] = False
        params = limited(LENGTHS[request_id])
        self.loop.add_request(request_id, PROMPTS[request_id], params, **options)
        self.asked[request_id] = True

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.loop.abort_request(request_id)

    def steps(self, count: int = 100) -> None:
        for _ in range(count):
            if not self.loop.has_unfinished_requests():
                return
            try:
                self.outputs += self.loop.step()
            except RuntimeError as error:
                if not str(error).startswith("The callback of request"):
                    raise
        assert count < 100, "it spins"

    def iterate(self) -> None:
        assert self.iterator is not None
        for output in self.iterator:
            self.outputs.append(output)

    def check(self) -> None:
        """Go on after the interrupt, and look at what came of it."""
        for request_id in self.asked:
            self.loop.resume_request(request_id)
        ended = self.closed or said(self._finish)
        if ended and not self.closed:
            check_ended(self.loop, ended)
        elif not self.closed:
            check_invariants(self.loop, self.model)
            check_idle(self.loop)
        self._check_outputs(exactly=not ended)
        start = time.monotonic()
        self.loop.close()
        assert time.monotonic() - start < 9, "close() waited for what did not come"
        assert self.loop.close() == ()

    def _finish(self) -> None:
        if self.iterator is not None:
            self.iterate()
        self.steps()

    def _check_outputs(self, *, exactly: bool) -> None:
        for request_id, was_asked in self.asked.items():
            outputs = [out for out in self.outputs if out.request_id == request_id]
            tokens = tokens_of(outputs)
            expected = oracle(PROMPTS[request_id], limited(LENGTHS[request_id]))
            assert tokens == expected[: len(tokens)], f"{request_id}: {tokens}, not {expected}"
            ends = [out.finish_reason for out in outputs if out.finished]
            assert len(ends) <= 1
            if not exactly or not (was_asked or outputs):
                continue
            assert len(ends) == 1, f"{request_id} has no end"
            if ends == ["length"]:
                assert tokens == expected, f"{request_id}: {tokens}, not {expected}"
            elif ends == ["error"]:
                assert self.model.fail_at or "was interrupted" in str(outputs[-1].error)
            else:
                assert ends == ["abort"]
                assert request_id in self.aborted


def said(call: Callable[[], object]) -> str:
    """The words of the RuntimeError that a call raises; none where it raises none."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def check_ended(loop: DecodeLoop, words: str) -> None:
    """Every call says that the loop has ended."""
    calls: list[Callable[[], object]] = [
        loop.step,
        loop.drain,
        loop.has_unfinished_requests,
        lambda: loop.add_request("z", [1]),
        lambda: loop.generate([[1]]),
    ]
    for words_again in (words, *map(said, calls)):
        assert "the decode loop has ended, since KeyboardInterrupt" in words_again


# Scripts


def stepping(run: Run) -> None:
    run.add("a")
    run.add("b", on_output=run.heard.append)
    run.steps(2)
    run.add("c", priority=-1)
    run.loop.pause_request("a")
    run.steps(2)
    run.loop.resume_request("a")
    run.abort("c")
    run.steps()


def draining(run: Run) -> None:
    run.add("a")
    run.add("b")
    run.steps(2)
    run.outputs += run.loop.drain()
    run.outputs += run.loop.drain(timeout=60)
    run.steps()


def generating(run: Run) -> None:
    run.add("c")
    ids = ["a", "b"]
    run.asked |= dict.fromkeys(ids, False)
    params = [limited(LENGTHS[request_id]) for request_id in ids]
    prompts = [PROMPTS[request_id] for request_id in ids]
    run.iterator = run.loop.generate(prompts, params, request_ids=ids)
    run.asked |= dict.fromkeys(ids, True)
    run.iterate()
    run.steps()


def dropping(run: Run) -> None:
    run.add("c")
    outputs = run.loop.generate([[1], [2]], limited(5))
    next(outputs)
    del outputs
    run.steps()


def failing(run: Run) -> None:
    run.model.fail_at = {2}
    run.add("a")
    run.add("b")
    run.steps()


def closing(run: Run) -> None:
    run.add("a")
    run.add("b")
    run.steps(3)
    run.closed = True
    run.loop.close()


SCRIPTS = {
    script.__name__: script
    for script in (stepping, draining, generating, dropping, failing, closing)
}


def interrupt_loop(script: Callable[[Run], None], options: dict[str, Any], at: int) -> Interrupt:
    """Run a script up to a bytecode, and check what is left."""
    run = Run(options)
    interrupt = Interrupt(at)
    try:
        with interrupt:
            script(run)
        run.check()
    except BaseException as error:
        raise AssertionError(f"after an interrupt at {interrupt.where}: {error!r}") from error
    return interrupt


# Engines


class Service:
    """An engine, what was asked of it, and what came."""

    def __init__(self, options: dict[str, Any], thread: bool) -> None:
        self.loop, _, _ = make_loop(output_thread=thread, **options)
        self.thread = thread
        self.engine: DecodeEngine | None = None
        self.asked: str | None = None  # what is being admitted
        self.streams: dict[str, RequestStream] = {}
        self.tokens: dict[str, tuple[int, ...]] = {}

    def script(self) -> None:
        self.engine = engine = DecodeEngine(self.loop, thread=self.thread)
        for request_id, prompt in PROMPTS.items():
            self.asked = request_id
            stream = engine.add_request(request_id, prompt, limited(LENGTHS[request_id]))
            self.streams[request_id], self.asked = stream, None
        engine.pause("a")
        engine.abort("c")
        engine.resume("a")
        self.turn()
        self.tokens["a"] = next(self.streams["a"]).new_token_ids
        self.tokens["b"] = self.streams["b"].result(60).new_token_ids
        engine.drain(60)
        engine.close()

    def turn(self) -> None:
        assert self.engine is not None
        while not self.thread and self.engine.turn():
            pass

    def check(self) -> None:
        """Go on after the interrupt, and look at what came of it."""
        ended = said(self._finish)
        assert not ended or "ended" in ended or "closed" in ended, ended
        start = time.monotonic()
        if self.engine is not None:
            self.engine.close()
            assert self.engine.close() == ()
            core = self.engine._core
            assert not core._by_id
            assert not core._open
            assert not core._drains
            assert core.driver is None or not core.driver.is_alive()
        self.loop.close()
        assert time.monotonic() - start < 9, "close() waited for what did not come"
        for request_id, stream in self.streams.items():
            self._check_stream(request_id, stream, ended)

    def _finish(self) -> None:
        if self.engine is None:
            return
        # The id of an admission that was interrupted is free.
        stream = self.engine.add_request(self.asked or "again", [7], limited(3, 9))
        self.engine.resume("a")
        self.turn()
        assert stream.result(60).new_token_ids == tuple(oracle([7], limited(3, 9)))
        self.engine.drain(60)

    def _check_stream(self, request_id: str, stream: RequestStream, ended: str) -> None:
        tokens = list(self.tokens.get(request_id, ()))
        if request_id == "a":
            failed = said(lambda: tokens.extend(t for out in stream for t in out.new_token_ids))
        elif not tokens:  # what an interrupted result() has gathered comes with the next one
            failed = said(lambda: tokens.extend(stream.result().new_token_ids))
        else:
            failed = ""
        assert ended or not failed, failed
        expected = oracle(PROMPTS[request_id], limited(LENGTHS[request_id]))
        whole = not ended and (request_id != "c" or stream._last.finish_reason == "length")
        assert tokens == (expected if whole else expected[: len(tokens)])


def interrupt_engine(options: dict[str, Any], at: int, *, thread: bool) -> Interrupt:
    """Use an engine up to a bytecode, and check what is left."""
    service = Service(options, thread)
    interrupt = Interrupt(at)
    try:
        with interrupt:
            service.script()
        service.check()
    except BaseException as error:
        raise AssertionError(f"after an interrupt at {interrupt.where}: {error!r}") from error
    return interrupt


def try_all(once: Callable[[int], Interrupt], sample: int | None, every: bool = False) -> int:
    """Interrupt a script, in one run after the other; how many there were.

    At each of its bytecodes, at one of the times at which it is executed, or at `every` one; or at
    a sample of those, evenly spread.
    """
    counted = once(0)
    if every:
        positions = list(range(1, counted.count + 1))
    else:
        positions = [random.choice(times) for times in counted.places.values()]
    stride = 1 if sample is None else max(1, len(positions) // sample)
    tried = positions[random.randrange(stride) :: stride]
    for at in tried:
        once(at)
    return len(tried)


def cases() -> Iterator[tuple[str, Callable[[int], Interrupt]]]:
    """All scripts in all modes."""
    for (name, script), (mode, options) in itertools.product(SCRIPTS.items(), MODES.items()):
        yield f"{name}, {mode}", lambda at, s=script, o=options: interrupt_loop(s, o, at)  # type: ignore[misc]
    for policy, thread in itertools.product(("materialize", "gather"), (True, False)):
        yield (
            f"engine, {policy}, {'thread' if thread else 'by hand'}",
            lambda at, p=policy, t=thread: interrupt_engine({"policy": p}, at, thread=t),  # type: ignore[misc]
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--sample", type=int, help="how many bytecodes of each; all by default")
    parser.add_argument("--every", action="store_true", help="every time that one is executed")
    options = parser.parse_args(argv)
    for name, once in cases():
        if not options.names or any(wanted in name for wanted in options.names):
            start = time.monotonic()
            tried = try_all(once, options.sample, options.every)
            print(f"{time.monotonic() - start:6.1f} s  {tried:6} bytecodes  {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
