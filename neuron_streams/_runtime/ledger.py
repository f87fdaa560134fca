"""How much memory a device has given out: counted as buffers are made and die.

A buffer may die anywhere, also inside a lock, and is made for each output of each call, so both are
only noted in a queue; whoever looks next counts them. A file of its own because every runtime
counts the same way.
"""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["Count", "Ledger"]

MOST_NOTED = 4096  # then they are counted although nobody looks


class Count:
    """One figure over time: now, at most, and how much came and went since the last reset."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def _add(self, amount: int) -> None:
        self.current += amount
        self.allocated += amount
        self.peak = max(self.peak, self.current)

    def _remove(self, amount: int) -> None:
        self.current -= amount
        self.freed += amount

    def copy(self) -> Count:
        made = Count()
        for name in self.__slots__:
            setattr(made, name, getattr(self, name))
        return made


class Ledger:
    """The allocations of one memory: how many, and how many bytes. Thread-safe.

    `born` and `dead` only note what happened, in order; whoever reads the counts settles it.
    """

    def __init__(self) -> None:
        self._noted: deque[int] = deque()  # bytes that came, or -1 - bytes that went
        self._lock = threading.RLock()
        self._number, self._bytes = Count(), Count()

    def born(self, nbytes: int) -> None:
        """Note an allocation."""
        noted = self._noted
        noted.append(nbytes)
        if len(noted) > MOST_NOTED:
            self._settle()

    def dead(self, nbytes: int) -> None:
        """Note its end. It may come in a destructor, inside any lock: it takes none."""
        self._noted.append(-1 - nbytes)

    def _settle(self) -> None:
        noted = self._noted
        with self._lock:
            while noted:
                nbytes = noted.popleft()
                if nbytes >= 0:
                    self._number._add(1)
                    self._bytes._add(nbytes)
                else:
                    self._number._remove(1)
                    self._bytes._remove(-1 - nbytes)

    def read(self) -> tuple[Count, Count]:
        """Copies of the counts of allocations and of bytes."""
        with self._lock:
            self._settle()
            return self._number.copy(), self._bytes.copy()

    def reset(self, *, peak: bool = False, accumulated: bool = False) -> None:
        """Start the peaks at what is current, or the accumulated counts at 0."""
        with self._lock:
            self._settle()
            for count in (self._number, self._bytes):
                if peak:
                    count.peak = count.current
                if accumulated:
                    count.allocated = count.freed = 0
