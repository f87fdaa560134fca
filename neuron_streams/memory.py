"""Copies between the host and a device, and within devices.

Pageable host memory is read at the call, before `copy_` returns, so the caller may change it at
once: a fresh device buffer, which no command has named yet, is written on the spot; any other goes
through a command of the current stream. Pinned host memory (`tensor.pin_memory()`) is read when the
stream gets there, as in CUDA. Copies to the host are commands where the memory is pinned, as what
`to("cpu", non_blocking=True)` makes is; into pageable memory the host copies and waits, as in CUDA.
"""

from __future__ import annotations

import math
import weakref

import torch

from neuron_streams._runtime.cpu import HOST, tensor_of
from neuron_streams._runtime.ledger import Ledger
from neuron_streams._runtime.port import Buffer, Copy, Ticket, View
from neuron_streams.context import context, raise_first
from neuron_streams.device import check_sync
from neuron_streams.stream import current_stream

__all__ = [
    "contiguous",
    "copy_between",
    "copy_into",
    "empty",
    "from_host",
    "is_pinned",
    "mark_pinned",
    "pin",
    "pinned",
    "to_host",
    "wait_for",
]

pinned = Ledger()
_pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether copies from a host tensor read it only when the stream gets there."""
    return bool(_pinned) and tensor.untyped_storage() in _pinned


def mark_pinned(tensor: torch.Tensor) -> None:
    """Count a host tensor's memory as pinned, for as long as it lives."""
    storage = tensor.untyped_storage()
    if storage not in _pinned:
        _pinned.add(storage)
        pinned.born(storage.nbytes())
        weakref.finalize(storage, pinned.dead, storage.nbytes()).atexit = False


def pin(source: torch.Tensor) -> torch.Tensor:
    """A copy of a host tensor in pinned memory. Host: copies, waits for nobody."""
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty_like(source, memory_format=torch.contiguous_format).copy_(source)
    mark_pinned(made)
    return made


def contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: int) -> View:
    """A view of a fresh buffer with room for exactly these strides."""
    reach = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    elements = 0 if math.prod(size) == 0 else reach
    buffer = context().runtime.allocate(device, elements * dtype.itemsize)
    return View(buffer, dtype, size, stride)


def write_fresh(view: View, source: torch.Tensor) -> None:
    """Write host data into a buffer that no command has named. Host: copies, waits for nobody."""
    with torch.inference_mode():
        tensor_of(view).copy_(source.detach())


def from_host(source: torch.Tensor, device: int) -> View:
    """A contiguous device copy of a host tensor. Host: copies at once. Stream: nobody."""
    size = tuple(source.shape)
    view = empty(size, contiguous(size), source.dtype, device)
    view.buffer.fill(source)
    return view


def to_host(view: View, out: torch.Tensor, non_blocking: bool) -> None:
    """Copy a view into host memory.

    Host: `non_blocking` into pinned memory returns at once; else waits. Stream: the current one of
    the view's device copies into pinned memory, since queued copies may still read it. Pageable
    memory the host fills itself once the view's own writer is done: what else is queued has nothing
    to do with either.
    """
    buffer, queued = view.buffer, is_pinned(out)
    if not non_blocking:
        check_sync()
    if not (queued and non_blocking):
        wait_for(buffer)
    if not queued:
        with torch.no_grad():
            out.copy_(tensor_of(view))
        return
    command = Copy(view, out, name="copy to host")
    ticket = current_stream(buffer.device)._submit(command, reads=(buffer,))
    if not non_blocking:
        _finish(ticket)


def _finish(ticket: Ticket) -> None:
    """Wait for a copy and raise what it failed with."""
    runtime = context().runtime
    runtime.wait(ticket)
    raise_first(runtime.failures(ticket, ticket.value - 1))


def copy_into(target: View, source: torch.Tensor, non_blocking: bool) -> None:
    """Copy host memory into a view; pageable memory may be changed when the call returns.

    Host: waits for the copy unless `non_blocking`. Stream: copies.
    """
    buffer = target.buffer
    if is_pinned(source):
        kept = source.detach()
    elif not buffer.named:
        write_fresh(target, source)
        return
    else:
        kept = torch.empty(source.shape, dtype=target.dtype, device=HOST).copy_(source.detach())
    command = Copy(kept, target, name="copy from host")
    ticket = current_stream(buffer.device)._submit(command, writes=(buffer,))
    if not non_blocking:
        check_sync()
        _finish(ticket)


def copy_between(target: View, source: View) -> None:
    """Copy a view into another, on the current stream of the target's device.

    Between devices the copy starts behind the current stream of the source's device, too, and what
    is submitted there afterwards, which may overwrite the source, starts behind the copy.
    Host: returns at once. Stream: copies.
    """
    stream = current_stream(target.buffer.device)
    command = Copy(source, target, name="copy")
    if source.buffer.device == target.buffer.device:
        stream._submit(command, reads=(source.buffer,), writes=(target.buffer,))
        return
    giver = current_stream(source.buffer.device)
    stream.wait_stream(giver)
    giver._state.wait(stream._submit(command, reads=(source.buffer,), writes=(target.buffer,)))


def wait_for(buffer: Buffer) -> None:
    """Wait for a buffer's own writer and raise what poisons it. Host: waits. Stream: nobody."""
    runtime = context().runtime  # raises in the child of a fork, where memory is a stale copy
    if buffer.writer is not None:
        runtime.wait(buffer.writer)
    if buffer.failure is not None:
        raise_first((buffer.failure,))
