"""Whether native Neuron streams keep the contract of torch.cuda, so that this package can go.

Two streams with different ids prove nothing: native streams that were seen took `elapsed_time` from
the host's clock at `record()`, had a second record move a wait made before it, and handed a few
streams out in turn. So each point is tried, on the device, with work that takes a while.

A file of its own: it is about another package, and knows nothing of this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["MATMULS", "faults"]

Work = Callable[[int], None]
LONG = 0.02  # seconds by which work must outlast its submission, to tell the one from the other
MATMULS = 8
MANY = 8  # streams that must all differ


class _Doubt(Exception):  # noqa: N818  (a point that could not be decided)
    pass


def faults(native: Any, work: Work | None = None) -> list[str]:
    """What of the contract a module like `torch.neuron` does not keep, a sentence each.

    Args:
        native: has Stream, Event, stream, current_stream and synchronize.
        work: submits so many parts of work to the current stream, each of about a millisecond or
            more; None multiplies matrices on the device "neuron".

    Host: waits for the work, seconds at most.
    """
    found: list[str] = []
    for check in (_distinct, _entered, _timed, _frozen):
        try:
            found += check(native, work or _matmuls)
        except _Doubt as doubt:
            found.append(f"{_name(check)} could not be told: {doubt}")
        except Exception as error:  # whatever a package raises that is not ours
            found.append(f"{_name(check)} could not be tried: {type(error).__name__}: {error}")
    return found


def _name(check: Callable[..., object]) -> str:
    return (check.__doc__ or "").partition(".")[0]


def _distinct(native: Any, work: Work) -> Iterator[str]:
    """Whether new streams differ."""
    streams = [native.Stream() for _ in range(MANY)]
    default = getattr(native, "default_stream", native.current_stream)()
    if len({stream.stream_id for stream in (*streams, default)}) <= MANY:
        yield f"{MANY} new streams are not {MANY} streams beside the default one"


def _entered(native: Any, work: Work) -> Iterator[str]:
    """Whether `with stream:` makes it current."""
    first, second, before = native.Stream(), native.Stream(), native.current_stream()
    with first:
        with second:
            inner = native.current_stream()
        outer = native.current_stream()
    if (inner, outer, native.current_stream()) != (second, first, before):
        yield "`with stream:` does not make it current, and the one before current again"


def _timed(native: Any, work: Work) -> Iterator[str]:
    """Whether elapsed time is that of completion."""
    for parts in _more_and_more():
        start, end = native.Event(enable_timing=True), native.Event(enable_timing=True)
        native.synchronize()
        began = time.perf_counter()
        start.record()
        work(parts)
        end.record()
        submitted = time.perf_counter() - began
        end.synchronize()
        whole = time.perf_counter() - began
        if whole - submitted >= LONG:
            elapsed = start.elapsed_time(end) / 1e3
            if elapsed < (submitted + whole) / 2:
                yield (
                    f"elapsed_time says {elapsed * 1e3:.1f} ms for work that was submitted in "
                    f"{submitted * 1e3:.1f} ms and took {whole * 1e3:.1f} ms: it is that of "
                    "record(), not of completion"
                )
            return


def _frozen(native: Any, work: Work) -> Iterator[str]:
    """Whether a second record leaves earlier waits alone."""
    for parts in _more_and_more():
        busy, waiting, event = native.Stream(), native.Stream(), native.Event()
        native.synchronize()
        event.record(busy)
        waiting.wait_event(event)
        with native.stream(busy):
            work(parts)
        event.record(busy)
        began = time.perf_counter()
        waiting.synchronize()
        waited = time.perf_counter() - began
        busy.synchronize()
        whole = time.perf_counter() - began
        if whole >= LONG:
            if waited > whole / 2:
                yield "a second record of an event moves a wait that was made before it"
            return


def _more_and_more() -> Iterator[int]:
    for power in range(6):
        yield MATMULS * 4**power
    raise _Doubt(f"no work outlasts its own submission by {LONG * 1e3:.0f} ms")


def _matmuls(parts: int) -> None:
    import torch

    made = torch.ones(1024, 1024, device="neuron")
    for _ in range(parts):
        made = made @ made
