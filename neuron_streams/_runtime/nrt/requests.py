"""Commands as requests: which queue a command goes to, and the calls that carry it out.

A command that is one request of one queue is *direct*: it may be queued behind its producers, if
those are on the same queue. All others (copies that change the dtype or the layout, or cross
devices) are a sequence of requests with work of the host in between, and start when what they wait
for has completed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch

from neuron_streams._runtime.nrt.lib import Abi, Library
from neuron_streams._runtime.nrt.memory import Block, Lease, Memory
from neuron_streams._runtime.nrt.model import Model
from neuron_streams._runtime.nrt.queue import Queue, Request
from neuron_streams._runtime.nrt.sets import Sets
from neuron_streams._runtime.port import Buffer, Command, Copy, Execute, Kind, Unit, View
from neuron_streams._runtime.program import contiguous

__all__ = ["Requests", "Route", "block_of"]

HOST = torch.device("cpu")  # said each time: the user may have torch default to another device


class Route(NamedTuple):
    """The queue of a command's first request, and whether it is its only one."""

    queue: Queue
    direct: bool


class Requests:
    """Makes the requests of commands.

    Args:
        queue: finds the queue of a device, a number of `nrta_xu_t` and an index.
    """

    def __init__(
        self,
        library: Library,
        memories: Sequence[Memory],
        sets: Sets,
        queue: Callable[[int, int, int], Queue],
    ) -> None:
        self._library = library
        self._memories = memories
        self._sets = sets
        self._queue = queue
        self._names_core = library.abi is not Abi.SDK_2_28

    def route(self, command: Command, device: int, lane: int) -> Route:
        """Where a command of a lane goes. One lane keeps to one queue of a unit."""
        units = self._library.units
        if command.kind == Kind.EXECUTE:
            return Route(self._queue(device, units.compute, 0), True)
        if command.kind == Kind.SLEEP:
            unit = units.copy if command.unit == Unit.TENSOR_OP else units.compute
            return Route(self._queue(device, unit, 0), False)
        if not hasattr(command, "source"):
            raise NotImplementedError(
                f"{command.name}: a Neuron device runs executables and copies, and this is neither"
            )
        source, target = cast("Copy", command).source, cast("Copy", command).target
        direct = _is_direct(source, target)
        if isinstance(source, torch.Tensor):
            kind = units.write
        else:
            kind = units.read if isinstance(target, torch.Tensor) or not direct else units.copy
        place = target if isinstance(source, torch.Tensor) else source
        at = device if isinstance(place, torch.Tensor) else place.buffer.device
        return Route(self._queue(at, kind, lane % Unit.TENSOR_OP.queues), direct)

    def of(self, command: Copy | Execute, queue: Queue) -> Iterator[Request]:
        """The requests, each to be taken when the one before has completed."""
        if command.kind == Kind.EXECUTE:
            yield self._execute(cast("Execute", command), queue)
            return
        source, target = cast("Copy", command).source, cast("Copy", command).target
        if not _is_direct(source, target):
            yield from self._staged(source, target, queue)
        elif isinstance(source, torch.Tensor):
            yield self._write(source, cast("View", target), queue)
        elif isinstance(target, torch.Tensor):
            yield self._read(source, target, queue)
        else:
            yield self._copy(source, target, queue)

    def _execute(self, command: Execute, queue: Queue) -> Request:
        model, memory = _model_of(command, queue.device), self._memories[queue.device]
        given, made = list(model.constants), []
        for position, (slot, (buffer, start)) in enumerate(
            zip(model.inputs, command.inputs, strict=True)
        ):
            tensor = memory.slice(block_of(buffer, queue.device), start, slot.nbytes)
            given.append((slot.name, tensor))
            if position in model.aliases:
                made.append((model.aliases[position].name, tensor))
        for slot, buffer in zip(model.outputs, command.outputs, strict=True):
            tensor = memory.slice(block_of(buffer, queue.device), 0, slot.nbytes)
            made.append((slot.name, tensor))
        sets = self._sets.take(model.handle)
        try:
            sets.fill(given, made)
        except BaseException:
            sets.give_back()
            raise
        arguments = model.handle, sets.inputs, sets.outputs
        schedule = self._library.nrta_execute_schedule
        return Request(queue, schedule, arguments, (command, model), sets)

    def _at(self, view: View) -> tuple[int, int]:
        """The nrt tensor of a view, and where in it the view begins."""
        block = block_of(view.buffer, view.buffer.device)
        return block.tensor, view.offset * view.dtype.itemsize

    def _core(self, queue: Queue) -> tuple[int, ...]:
        return (queue.device,) if self._names_core else ()

    def _write(
        self, source: torch.Tensor, target: View, queue: Queue, offset: int | None = None
    ) -> Request:
        tensor, start = self._at(target)
        if offset is not None:
            start = offset * target.dtype.itemsize
        arguments = (tensor, source.data_ptr(), start, source.nbytes, *self._core(queue))
        return Request(queue, self._library.nrta_tensor_write, arguments, (source, target))

    def _read(self, source: View, target: torch.Tensor, queue: Queue) -> Request:
        tensor, start = self._at(source)
        arguments = (target.data_ptr(), tensor, start, target.nbytes, *self._core(queue))
        return Request(queue, self._library.nrta_tensor_read, arguments, (source, target))

    def _copy(self, source: View, target: View, queue: Queue) -> Request:
        arguments = (*self._at(source), *self._at(target), source.nbytes, *self._core(queue))
        return Request(queue, self._library.nrta_tensor_copy, arguments, (source, target))

    def _staged(
        self, source: View | torch.Tensor, target: View | torch.Tensor, queue: Queue
    ) -> Iterator[Request]:
        """Read the source's bytes, lay them out on the host, and write them where they belong."""
        if not isinstance(source, torch.Tensor):
            last = sum((n - 1) * step for n, step in zip(source.size, source.stride, strict=True))
            length = 0 if 0 in source.size else last + 1
            read = torch.empty(length, dtype=source.dtype, device=HOST)
            if length:
                yield self._read(source, read, queue)
            source = read.as_strided(source.size, source.stride)
        with torch.inference_mode():
            if isinstance(target, torch.Tensor):
                target.copy_(source)
                return
            written = torch.empty(target.size, dtype=target.dtype, device=HOST).copy_(source)
        to = self._queue(target.buffer.device, self._library.units.write, queue.index)
        start = target.offset
        for part, offset in _runs(written, target.size, target.stride, start):
            yield self._write(part, target, to, offset)


def _is_contiguous(end: View | torch.Tensor) -> bool:
    if isinstance(end, torch.Tensor):
        return end.is_cpu and end.is_contiguous() and not end.is_conj() and not end.is_neg()
    return end.stride == contiguous(end.size)


def _is_direct(source: View | torch.Tensor, target: View | torch.Tensor) -> bool:
    """Whether a copy is one request: of as many bytes, in the same order, within one core."""
    views = [end for end in (source, target) if not isinstance(end, torch.Tensor)]
    for view in views:
        if view.lazy:
            raise NotImplementedError(
                "a copy of a conjugated or negated view of a Neuron tensor; use .resolve_conj() or "
                ".resolve_neg() on the host"
            )
    sizes = [tuple(e.shape if isinstance(e, torch.Tensor) else e.size) for e in (source, target)]
    return (
        bool(views)
        and views[0].nbytes > 0
        and source.dtype == target.dtype
        and sizes[0] == sizes[1]
        and len({view.buffer.device for view in views}) == 1
        and _is_contiguous(source)
        and _is_contiguous(target)
    )


def _runs(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """A tensor in the pieces that are contiguous in a view, and where in its buffer each begins."""
    if 0 in size:
        return
    if tuple(stride) == contiguous(size):
        yield tensor, offset
        return
    for index in range(size[0]):
        yield from _runs(tensor[index], size[1:], stride[1:], offset + index * stride[0])


def block_of(buffer: Buffer, device: int) -> Block:
    """The memory of a buffer, checked to be a device's."""
    lease = buffer.peer
    if not isinstance(lease, Lease):
        raise ValueError("a buffer of another runtime; make the tensor again on this one")
    if buffer.device != device:
        raise ValueError(
            f"it was submitted to neuron:{device} and a tensor of it is on neuron:{buffer.device}; "
            "a core runs what is in its own memory, so copy it there first"
        )
    return lease.block


def _model_of(command: Execute, device: int) -> Model:
    model = command.handle
    if not isinstance(model, Model):
        raise TypeError(
            f"{command.name}: {type(model).__name__} was not loaded by the nrt runtime; load the "
            "executable again"
        )
    if model.device != device:
        raise ValueError(
            f"{command.name}: it is loaded on neuron:{model.device} and was submitted to "
            f"neuron:{device}; load it there, too"
        )
    return model
