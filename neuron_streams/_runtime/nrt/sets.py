"""Tensor sets: which tensors an execution is given, by name, kept for the next one of the model.

Most tensors of a step are those of the step before (weights, caches), and adding one to a set
replaces what had its name, so a set that an execution has done with is used again and only what
differs is added. A tensor must outlive the sets that name it: `clear` comes before any is freed.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence

from neuron_streams._runtime.nrt.lib import Library
from neuron_streams._runtime.nrt.status import check

__all__ = ["Members", "SetPair", "Sets"]

Members = Sequence[tuple[bytes, int]]  # names of a model's tensors, and nrt tensors


class SetPair:
    """The two sets of an execution. Whoever took it gives it back when that has completed."""

    __slots__ = ("_given", "_library", "_pool", "inputs", "outputs")

    def __init__(self, library: Library, pool: list[SetPair]) -> None:
        self._library = library
        self._pool = pool
        self._given: dict[int, list[tuple[bytes, int]]] = {}
        self.inputs, self.outputs = ctypes.c_void_p(), ctypes.c_void_p()
        for handle in (self.inputs, self.outputs):
            library.call("nrt_allocate_tensor_set", ctypes.byref(handle))

    def fill(self, inputs: Members, outputs: Members) -> None:
        self._put(self.inputs, inputs)
        self._put(self.outputs, outputs)

    def _put(self, handle: ctypes.c_void_p, members: Members) -> None:
        given = self._given.setdefault(handle.value or 0, [(b"", 0)] * len(members))
        add = self._library.nrt_add_tensor_to_tensor_set
        for position, member in enumerate(members):
            if given[position] != member:
                check(add(handle, *member), "nrt_add_tensor_to_tensor_set")
                given[position] = member

    def give_back(self) -> None:
        self._pool.append(self)

    def destroy(self) -> None:
        for handle in (self.inputs, self.outputs):
            self._library.nrt_destroy_tensor_set(ctypes.byref(handle))


class Sets:
    """The sets that no execution uses, by model. Called with the runtime's lock."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._pools: defaultdict[int, list[SetPair]] = defaultdict(list)

    def take(self, model: int) -> SetPair:
        pool = self._pools[model]
        return pool.pop() if pool else SetPair(self._library, pool)

    def clear(self) -> None:
        """Destroy them all."""
        for pool in self._pools.values():
            while pool:
                pool.pop().destroy()
