"""Commands as messages of 64-bit words, the way `ns_submit` in lanes.c reads them."""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch

from neuron_streams._runtime.lanes import SMALL_COPY
from neuron_streams._runtime.port import (
    Command,
    Copy,
    Execute,
    Marker,
    Pledge,
    Sleep,
    Ticket,
    Unit,
    View,
)
from neuron_streams._runtime.worker.buffers import NativeBuffer

__all__ = ["Messages", "may_need_python"]

MARKER, PLEDGE, SLEEP, COPY, EXECUTE, PYTHON = range(6)
QUICK, OVERWRITES, OFFSETS = 1, 2, 4
UNITS = tuple(Unit)
COMPUTE = UNITS[0]  # an attribute of an enum costs ten times a global


def may_need_python(command: Command) -> bool:
    """Whether a thread of Python must be there for the command: to run it, or should it fail."""
    return not isinstance(command, Marker | Pledge | Sleep)


class Messages:
    """Writes the messages of one runtime. Thread-safe."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self._lock = threading.Lock()
        self._packers: dict[int, Any] = {}

    def write(self, command: Command, key: int, after: Sequence[Ticket]) -> bytes:
        """The command, known by `key`, behind the tickets of `after`."""
        name = self.names.get(command.name)
        if name is None:
            with self._lock:
                name = self.names.setdefault(command.name, len(self.names))
        words = [PYTHON, 0, 0, key, name, len(after)]
        for ticket in after:
            words += ticket
        if type(command) is Execute:
            _add_execute(command, words)
        else:
            words[0], words[2], others = self._words(command)
            words += others
        if words[0] >= SLEEP and command.unit is not COMPUTE:  # type: ignore[union-attr]
            words[1] = UNITS.index(command.unit)  # type: ignore[union-attr]
        count = len(words)
        pack = self._packers.get(count)
        if pack is None:
            pack = self._packers[count] = struct.Struct(f"={count}q").pack
        packed: bytes = pack(*words)
        return packed

    def _words(self, command: Command) -> tuple[int, int, Sequence[int]]:
        """Kind, flags and the words that go by kind, of what is no Execute."""
        if isinstance(command, Copy):
            words = self._copy(command)
            if words is None:
                return PYTHON, 0, ()
            target = command.target
            whole = isinstance(target, View) and target.whole
            return COPY, (words[4] <= SMALL_COPY) * QUICK | whole * OVERWRITES, words
        if isinstance(command, Marker):
            return MARKER, 0, (0 if command.cell is None else command.cell.buffer_info()[0],)
        if isinstance(command, Sleep):
            return SLEEP, 0, (int(command.seconds * 1e9),)
        return (PLEDGE if isinstance(command, Pledge) else PYTHON), 0, ()

    def _copy(self, command: Copy) -> list[int] | None:
        source, target = command.source, command.target
        if source.dtype is not target.dtype or _size(source) != _size(target):
            return None
        begin, end = _end_of_copy(source), _end_of_copy(target)
        if begin is None or end is None:
            return None
        if isinstance(target, torch.Tensor) and not target.is_inference():
            # What autograd has saved of it is void, and memory written by C does not say so.
            torch.autograd.graph.increment_version(target)
        return [*begin, *end, target.nbytes]


def _add_execute(command: Execute, words: list[int]) -> None:
    """Kind, flags and words of an Execute; left as they are if only Python can run it.

    Plain loops: this is the path of each step, and they take a third of what comprehensions do.
    """
    program = getattr(command.handle, "address", None)
    if program is None:
        return
    add, header = words.append, len(words)
    inputs, offset = command.inputs, 0
    try:
        add(program)
        add(len(inputs))
        add(len(command.outputs))
        for view in inputs:
            add(view.buffer.address)  # type: ignore[attr-defined]
            offset |= view.offset
        for buffer in command.outputs:
            add(buffer.address)  # type: ignore[attr-defined]
    except AttributeError:  # not a buffer of ours
        del words[header:]
        return
    words[0] = EXECUTE
    if offset:
        words[2] = OFFSETS
        for view in inputs:
            add(view.offset * view.dtype.itemsize)


def _end_of_copy(end: View | torch.Tensor) -> tuple[int, int] | None:
    """Buffer and offset, or 0 and an address; None if the memory is not in one plain piece."""
    if isinstance(end, View):
        if type(end.buffer) is not NativeBuffer or not _is_plain(end.size, end.stride):
            return None
        return end.buffer.address, end.offset * end.dtype.itemsize
    plain = type(end) is torch.Tensor and end.is_contiguous() and end.device.type == "cpu"
    return (0, end.data_ptr()) if plain and not (end.is_neg() or end.is_conj()) else None


@functools.lru_cache(maxsize=4096)
def _is_plain(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements lie one behind the other."""
    step = 1
    for extent, found in zip(reversed(size), reversed(stride), strict=True):
        if extent != 1 and found != step and 0 not in size:
            return False
        step *= extent
    return True


def _size(end: View | torch.Tensor) -> tuple[int, ...]:
    return end.size if isinstance(end, View) else tuple(end.shape)
