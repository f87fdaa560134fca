"""Device memory: nrt tensors under a caching allocator.

A buffer lives until the last command that names it has completed: that is a law of the port. So
memory that comes back is in use by no command of any lane, and may be given to any; nothing has to
be recorded for streams, and what `record_stream` asks for holds by itself.

Memory comes back in destructors, which run anywhere: those only put it into a queue.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from neuron_streams._runtime.nrt.lib import Library
from neuron_streams._runtime.nrt.status import NrtError, Status, check

__all__ = ["Block", "Lease", "Memory", "Tally"]

_DEVICE = 0  # nrt_tensor_placement_t
_EXHAUSTED = (Status.RESOURCE, Status.FAIL_HOST_MEM_ALLOC)


def rounded(nbytes: int) -> int:
    """The size of the block for so many bytes: at most an eighth is lost, or 512 bytes."""
    grain = max(512, 1 << max(nbytes.bit_length() - 4, 0))
    return max(-(-nbytes // grain), 1) * grain


class Tally:
    """One figure over time."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, amount: int) -> None:
        self.allocated += amount
        self.current += amount
        self.peak = max(self.peak, self.current)

    def remove(self, amount: int) -> None:
        self.freed += amount
        self.current -= amount

    def reset(self, peak: bool, accumulated: bool) -> None:
        if peak:
            self.peak = self.current
        if accumulated:
            self.allocated = self.freed = 0

    @property
    def values(self) -> tuple[int, int, int, int]:
        return self.current, self.peak, self.allocated, self.freed


class Block:
    """An nrt tensor of a rounded size, and the slices of it that were made."""

    __slots__ = ("nbytes", "slices", "tensor")

    def __init__(self, tensor: int, nbytes: int) -> None:
        self.tensor = tensor
        self.nbytes = nbytes
        self.slices: dict[tuple[int, int], int] = {}


class Memory:
    """The memory of one device. Thread-safe: a step is one operation on a deque or dict, or locks.

    Args:
        lock: the runtime's.
        forget: lets go of whatever else names tensors, before any is freed; called with the lock.
        drain: waits until nothing is in flight, so that all that can come back has come back.
    """

    def __init__(
        self,
        library: Library,
        device: int,
        lock: threading.RLock,
        forget: Callable[[], None],
        drain: Callable[[], None],
    ) -> None:
        self._library = library
        self._device = device
        self._lock = lock
        self._forget = forget
        self._drain = drain
        self._free: defaultdict[int, deque[Block]] = defaultdict(deque)
        self._blocks: dict[int, Block] = {}
        self.segments, self.reserved = Tally(), Tally()
        self.closed = False

    def allocate(self, nbytes: int) -> Block:
        """A block of at least so many bytes. Raises torch.OutOfMemoryError."""
        size = rounded(nbytes)
        found = self._take(size)
        if found is None:
            self._drain()
            found = self._take(size)
        if found is None:
            raise self._out_of_memory(nbytes)
        return found

    def _take(self, size: int) -> Block | None:
        found = self._pop(size) or self._make(size)
        if found is None and self.trim():
            found = self._make(size)
        return found

    def _pop(self, size: int) -> Block | None:
        try:
            return self._free[size].pop()  # the one used last is the likeliest to have its slices
        except IndexError:
            return None

    def _make(self, size: int) -> Block | None:
        tensor = ctypes.c_void_p()
        status = self._library.nrt_tensor_allocate(
            _DEVICE, self._device, size, None, ctypes.byref(tensor)
        )
        if status in _EXHAUSTED:
            return None
        check(status, f"nrt_tensor_allocate ({size} bytes on neuron:{self._device})")
        block = Block(tensor.value or 0, size)
        with self._lock:
            self._blocks[block.tensor] = block
            self.segments.add(1)
            self.reserved.add(size)
        return block

    def give_back(self, block: Block) -> None:
        """Called by destructors: takes no lock."""
        if not self.closed:
            self._free[block.nbytes].append(block)

    def slice(self, block: Block, offset: int, nbytes: int) -> int:
        """An nrt tensor of exactly these bytes of a block; it lives as long as the block."""
        if offset == 0 and nbytes == block.nbytes:
            return block.tensor
        found = block.slices.get((offset, nbytes))
        if found is None:
            made = ctypes.c_void_p()
            self._library.call(
                "nrt_tensor_allocate_slice",
                block.tensor,
                offset,
                nbytes,
                None,
                ctypes.byref(made),
            )
            found = block.slices[(offset, nbytes)] = made.value or 0
        return found

    @property
    def cached(self) -> int:
        """Bytes that are held for the next allocation."""
        return sum(block.nbytes for free in list(self._free.values()) for block in list(free))

    def trim(self) -> bool:
        """Give what is cached back to the device; whether that was anything."""
        freed = 0
        with self._lock:
            self._forget()
            for size in list(self._free):
                while (block := self._pop(size)) is not None:
                    self._destroy(block)
                    freed += 1
        return freed > 0

    def _destroy(self, block: Block) -> None:
        del self._blocks[block.tensor]
        self.segments.remove(1)
        self.reserved.remove(block.nbytes)
        for tensor in (*block.slices.values(), block.tensor):
            self._library.nrt_tensor_free(ctypes.byref(ctypes.c_void_p(tensor)))

    def close(self) -> None:
        """Free everything, also what Buffers still stand on: they cannot be used again."""
        self.closed = True
        self._free.clear()
        for block in list(self._blocks.values()):
            self._destroy(block)

    def _out_of_memory(self, nbytes: int) -> torch.OutOfMemoryError:
        leased = sum(block.nbytes for block in list(self._blocks.values())) - self.cached
        try:
            used, limit = self._library.memory(self._device)
            figures = f"the runtime has {used} of {limit} bytes in use there"
        except NrtError:
            figures = "the runtime does not say how much there is"
        return torch.OutOfMemoryError(
            f"neuron:{self._device} is out of memory: {nbytes} bytes were asked for, {figures}, "
            f"{leased} bytes of it in tensors and {self.cached} cached; "
            "free tensors, load fewer models, or use a smaller batch"
        )


class Lease:
    """What a buffer keeps of its memory: when it is let go of, the memory has come back.

    `address` is where the host reaches the memory directly: 0, it does not.
    """

    __slots__ = ("__weakref__", "_memory", "address", "block")

    def __init__(self, memory: Memory, block: Block, address: int = 0) -> None:
        self._memory = memory
        self.block = block
        self.address = address

    def __del__(self) -> None:
        self._memory.give_back(self.block)
