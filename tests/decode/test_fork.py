"""A forked child has the parent's loop and engine, but none of its threads: every call says so."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable

import pytest

from neuron_streams.decode import DecodeEngine
from tests.decode.engines import limited, make_engine, oracle, run, tokens_of
from tests.decode.harness import drive, make_loop

SENTENCE = "Cannot re-initialize neuron_streams in forked subprocess"

policies = pytest.mark.parametrize("policy", ["materialize", "gather"])
threads = pytest.mark.parametrize("thread", [False, True], ids=["by hand", "thread"])


def in_child(body: Callable[[], object]) -> None:
    """Run it in a forked child, which must end well and soon."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where threads are
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refused(calls: dict[str, Callable[[], object]]) -> None:
    """Check that each of them raises the sentence of a forked child."""
    for name, call in calls.items():
        print(name, file=sys.stderr)  # the last one is the culprit
        with pytest.raises(RuntimeError, match=f"^{SENTENCE}"):
            call()


class Held:
    """A lock in the hands of another thread, as it may be at the moment of a fork."""

    def __init__(self, lock: threading.Lock) -> None:
        self.held, self.over = threading.Event(), threading.Event()
        self.holder = threading.Thread(target=self.hold, args=[lock])

    def hold(self, lock: threading.Lock) -> None:
        with lock:
            self.held.set()
            self.over.wait()

    def __enter__(self) -> None:
        self.holder.start()
        self.held.wait()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.holder.join()


@policies
@threads
def test_every_call_of_a_loop_raises_in_a_forked_child(policy: str, thread: bool) -> None:
    loop, model, _ = make_loop(policy=policy, output_thread=thread)
    loop.add_request("a", [1, 2], limited(6))
    outputs = loop.step()
    iterator = loop.generate([[5]], limited(3))
    next(iterator)
    loop.step()
    (*_, newest) = loop.batch_queue
    calls: dict[str, Callable[[], object]] = {
        "step": loop.step,
        "drain": loop.drain,
        "drain with a timeout": lambda: loop.drain(1.0),
        "close": loop.close,
        "add_request": lambda: loop.add_request("b", [5, 7]),
        "abort_request": lambda: loop.abort_request("a"),
        "fail_request": lambda: loop.fail_request("a", ValueError()),
        "pause_request": lambda: loop.pause_request("a"),
        "resume_request": lambda: loop.resume_request("a"),
        "has_unfinished_requests": loop.has_unfinished_requests,
        "pump": loop.pump,
        "trace": loop.trace,
        "generate": lambda: loop.generate([[1]]),
        "an iterator": lambda: next(iterator),
        "an iterator's close": iterator.close,  # type: ignore[attr-defined]
    }
    with Held(newest.output._one_at_a_time._lock):  # type: ignore[union-attr]
        in_child(lambda: refused(calls))
    iterator.close()  # type: ignore[attr-defined]
    outputs += drive(loop, model)
    assert [out for out in outputs if out.request_id == "a"][-1].finish_reason == "length"
    loop.close()


@policies
@threads
def test_every_call_of_an_engine_and_its_streams_raises_in_a_forked_child(
    policy: str, thread: bool
) -> None:
    engine, _, _ = make_engine(thread=thread, policy=policy)
    going = engine.add_request("a", [1, 2], limited(6))
    engine.pause("a")
    read = engine.add_request("read", [1], limited(2))
    engine.drain()
    calls: dict[str, Callable[[], object]] = {
        "add_request": lambda: engine.add_request("b", [5, 7]).result(),
        "drain": engine.drain,
        "drain with a timeout": lambda: engine.drain(1.0),
        "turn": engine.turn,
        "close": engine.close,
        "pause": lambda: engine.pause("a"),
        "resume": lambda: engine.resume("a"),
        "abort": lambda: engine.abort("a"),
        "unfinished_request_ids": lambda: engine.unfinished_request_ids,
        "a stream's next": lambda: next(going),
        "a stream's next that is there": lambda: next(read),
        "a stream's result": going.result,
        "a stream's result with a timeout": lambda: going.result(1.0),
        "a stream's abort": going.abort,
        "a stream's close": going.close,
        "a stream's anext": lambda: asyncio.run(anext(going)),  # type: ignore[arg-type]
        "a stream's aresult": lambda: asyncio.run(going.aresult()),
        "a stream's aclose": lambda: asyncio.run(going.aclose()),
    }
    with Held(engine._core._exclusive._lock):  # type: ignore[arg-type]
        in_child(lambda: refused(calls))
    engine.resume("a")
    if not thread:
        run(engine)
    assert list(going.result(60).new_token_ids) == oracle([1, 2], limited(6))
    assert tokens_of(list(read)) == oracle([1], limited(2))
    engine.close()


@threads
def test_leaving_the_parents_blocks_or_dropping_its_objects_is_no_call(thread: bool) -> None:
    engine, _, _ = make_engine(thread=thread)
    stream = engine.add_request("a", [1], limited(3))
    loop, model, _ = make_loop(output_thread=thread)
    loop.add_request("a", [1], limited(3))
    loop.step()
    made: list[object] = [engine, stream, loop]

    def leave() -> None:
        with pytest.raises(ZeroDivisionError), loop, engine, stream:
            raise ZeroDivisionError
        made.clear()
        gc.collect()

    with Held(engine._core._exclusive._lock):  # type: ignore[arg-type]
        in_child(leave)
    engine.close()
    drive(loop, model)
    loop.close()


AT_EXIT = """
import os, signal, sys
from tests.decode.engines import limited, make_engine

engine, _, _ = make_engine(thread=True)
stream = engine.add_request("a", [1], limited(3))
with engine:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(stream.result().new_token_ids))
"""


@pytest.mark.slow
def test_a_child_that_exits_leaves_the_engine_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=110, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "7 3\n")


def test_an_engine_made_in_a_child_works() -> None:
    def serve() -> None:
        loop, _, _ = make_loop(output_thread=True)
        with DecodeEngine(loop) as engine:
            tokens = engine.add_request("a", [1], limited(3)).result(30).new_token_ids
        assert list(tokens) == oracle([1], limited(3))

    in_child(serve)
