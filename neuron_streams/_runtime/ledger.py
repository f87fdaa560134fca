"""How much memory a device has given out: counted as buffers are made and die.

A buffer may die anywhere, also inside a lock, so its end is only noted in a queue; whoever looks
next takes it into account. A file of its own because every runtime counts the same way.
"""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["Count", "Ledger"]


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
    """The allocations of one memory: how many, and how many bytes. Thread-safe."""

    def __init__(self) -> None:
        self.dead: deque[int] = deque()  # bytes of each allocation that died, not yet counted
        self._lock = threading.RLock()
        self._number, self._bytes = Count(), Count()

    def add(self, nbytes: int) -> None:
        """Count an allocation; append its bytes to `dead` at its end."""
        with self._lock:
            self._settle()
            self._number._add(1)
            self._bytes._add(nbytes)

    def _settle(self) -> None:
        while self.dead:
            self._number._remove(1)
            self._bytes._remove(self.dead.popleft())

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
