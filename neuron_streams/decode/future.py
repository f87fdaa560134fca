"""A result that comes once, and a lock, for threads that may be interrupted anywhere.

`concurrent.futures.Future` and `threading.Condition` are Python code around a lock: an interrupt
between two bytecodes of theirs leaves it held, and every other thread waits for ever. What is here
waits in one call of C, which an interrupt ends with nothing taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

__all__ = ["Exclusive", "Future"]

T = TypeVar("T")


class Future(Generic[T]):
    """As `concurrent.futures.Future`, without cancellation; the first outcome that is set counts.

    One thread waits at a time.
    """

    def __init__(self) -> None:
        self._outcomes: list[tuple[T, None] | tuple[None, BaseException]] = []
        self._signal: SimpleQueue[None] = SimpleQueue()

    def done(self) -> bool:
        """Whether there is an outcome. Host: returns at once."""
        return bool(self._outcomes)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether there is an outcome within `timeout` seconds. Host: blocks until then."""
        if not self._outcomes:
            with suppress(Empty):
                self._signal.get(timeout=timeout)
        return self.done()

    def result(self, timeout: float | None = None) -> T:
        """The result. Host: blocks until there is one.

        Raises:
            TimeoutError: There is none within `timeout` seconds.
            BaseException: What was set instead.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._outcomes[0][0]  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The exception, None where there is a result. Host: blocks until there is either."""
        if not self.wait(timeout):
            raise TimeoutError(f"There is no result within {timeout} s.")
        return self._outcomes[0][1]

    def set_result(self, result: T) -> None:
        """Give the result. Host: returns at once."""
        self._outcomes.append((result, None))
        self._signal.put(None)

    def set_exception(self, error: BaseException) -> None:
        """Give an exception for the result. Host: returns at once."""
        self._outcomes.append((None, error))
        self._signal.put(None)


class Exclusive:
    """Runs one section at a time, and is free after it whatever the section was ended by.

    `with lock:` is not quite that: an exception between the last bytecode of its body and the call
    of `__exit__` leaves the lock held. No signal handler runs there, but a trace function does. A
    section must not run another one of the same lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __call__(self, section: Callable[[], T]) -> T:
        """Run a section. Host: blocks until other threads are out of theirs."""
        try:
            try:
                self._lock.acquire()
                return section()
            finally:
                self._free()
        finally:
            self._free()

    def _free(self) -> None:
        with suppress(RuntimeError):  # it is free, or another thread's
            self._lock.release()
