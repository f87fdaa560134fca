"""Waits that outlive the main thread, and which of them are in vain.

The interpreter ends when the threads that are not daemons have ended. One that waits for what
neither the device nor another thread can bring any more would hold it for ever, so that wait is
given up with an error. A file of its own, without imports of ours, because the runtime waits and
so does the decode engine, which knows no runtime.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from typing_extensions import Self

__all__ = ["LastWait", "is_stuck", "main_thread_has_ended"]

# For a wait beside a thread that is busy with something else, and might end it.
PATIENCE_SECONDS = 30.0
_waits: dict[int, LastWait] = {}


def main_thread_has_ended() -> bool:
    """Whether the interpreter only waits for threads, or is past that."""
    ending: bool = getattr(threading, "_SHUTTING_DOWN", False)
    return ending or not threading.main_thread().is_alive()


class LastWait:
    """The calling thread's wait, from when the main thread has ended.

    Args:
        stuck: Whether what is waited for is not there and cannot come unless a thread acts. Asked
            by any thread.
        seems_stuck: Where that cannot be told: whether it looks like it.
    """

    def __init__(self, stuck: Callable[[], bool], seems_stuck: Callable[[], bool] = bool) -> None:
        self._stuck = stuck
        self._seems_stuck = seems_stuck
        self._since: float | None = None

    def __enter__(self) -> Self:
        _waits[threading.get_ident()] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _waits.pop(threading.get_ident(), None)

    def in_vain(self) -> bool:
        """Whether to give up: every thread that keeps the interpreter is stuck, or this one has
        been, or has seemed to be, for a long time.

        Never on a daemon thread, which keeps nothing and ends with the process.
        """
        stuck = self._stuck()
        if not stuck and not self._seems_stuck():
            self._since = None
            return False
        if threading.current_thread().daemon:
            return False
        now = time.monotonic()
        self._since = self._since or now
        lasts = now - self._since >= PATIENCE_SECONDS
        return lasts or (stuck and all(map(is_stuck, _keepers())))


def _keepers() -> list[threading.Thread]:
    """The threads that the interpreter waits for."""
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if thread is not main and not thread.daemon]


def is_stuck(thread: threading.Thread) -> bool:
    """Whether a thread is inside a last wait for what cannot come unless another one acts."""
    wait = _waits.get(thread.ident or 0)
    return wait is not None and wait._stuck()
