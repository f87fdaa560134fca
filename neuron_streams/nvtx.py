"""Ranges of time with a name, spelled as in torch.cuda.nvtx.

There is no NVTX: a range is a user annotation of torch.profiler, and a span in the trace of a
decode loop, wherever one of them is on.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.profiler import record_function

__all__ = ["mark", "range", "range_end", "range_pop", "range_push", "range_start"]

Listener = Callable[[str, float, float], object]  # name, begin and end in seconds (perf_counter)

listeners: builtins.list[Listener] = []


class _Range:
    """One that is open. The profiler's part of it is there only where a profiler is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._annotation: Any = None
        if torch._C._autograd._profiler_enabled():
            self._annotation = record_function(name)
        self._begin = time.perf_counter()
        if self._annotation is not None:
            self._annotation.__enter__()

    def end(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        end = time.perf_counter()
        for listener in tuple(listeners):
            listener(self._name, self._begin, end)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.ranges: builtins.list[_Range] = []


_stack = _Stack()
_started: dict[int, _Range] = {}
_numbers = itertools.count(1)


def range_push(msg: str) -> int:
    """Begin a range inside those of this thread; returns how deep it is, from 0.

    Host: returns at once. Source: torch.cuda.nvtx.range_push.
    """
    _stack.ranges.append(_Range(msg))
    return len(_stack.ranges) - 1


def range_pop() -> int:
    """End the innermost range of this thread; returns how deep it was, -1 without one.

    Host: returns at once. Source: torch.cuda.nvtx.range_pop.
    """
    if _stack.ranges:
        _stack.ranges.pop().end()
        return len(_stack.ranges)
    return -1


def range_start(msg: str) -> int:
    """Begin a range that any thread may end; returns the handle for `range_end`.

    Host: returns at once. Source: torch.cuda.nvtx.range_start.
    """
    number = next(_numbers)
    _started[number] = _Range(msg)
    return number


def range_end(range_id: int) -> None:
    """End a range of `range_start`; an unknown handle changes nothing.

    Host: returns at once. Source: torch.cuda.nvtx.range_end.
    """
    found = _started.pop(range_id, None)
    if found is not None:
        found.end()


def mark(msg: str) -> None:
    """A range without a length. Host: returns at once. Source: torch.cuda.nvtx.mark."""
    _Range(msg).end()


@contextlib.contextmanager
def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:  # noqa: A001
    """A range around a `with`, or a function; its name is `msg.format(*args, **kwargs)`.

    Host: returns at once. Source: torch.cuda.nvtx.range.
    """
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()
