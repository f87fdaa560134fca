"""Whether a loop can go on: the one place that decides that it has ended, and of what.

An interrupt may come between any two bytecodes. So whatever changes more than one thing is done
inside `changing`, which leaves a mark until all of it is done. A mark that is found at the next
call means that the change was left in the middle: the loop has ended, and says so. What is outside
can be done again; above all waiting.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType

from neuron_streams.errors import FORKED

__all__ = ["Life", "OwnProcess"]


class OwnProcess:
    """The process in which something was made, and can be used.

    In a forked child its threads do not run, and its locks may be held for ever.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __bool__(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """
        Raises:
            RuntimeError: This is a forked child.
        """
        if not self:
            raise RuntimeError(FORKED)


class Life:
    """The life of a loop.

    Args:
        release: Called when it ends: forgets the requests. It may be called again.
    """

    def __init__(self, release: Callable[[], object]) -> None:
        self.process = OwnProcess()
        self.closed = False
        self.cause: BaseException | None = None
        self.step_error: Exception | None = None
        self._release = release
        self._mark: str | None = None

    @property
    def goes_on(self) -> bool:
        """Whether nothing has ended the loop, and no change was left in the middle."""
        return not self.closed and self.cause is None and self._mark is None

    @property
    def was_interrupted(self) -> bool:
        """Whether an interrupt has ended it, which the caller need not have noticed."""
        return not (self.closed or self.goes_on or isinstance(self.cause, Exception))

    def check(self, what: str) -> None:
        """Refuse a call of a loop that has ended.

        Raises:
            RuntimeError: It is closed, was interrupted in the middle of a change, or belongs to
                another process.
            Exception: What has ended it.
        """
        self.process.check()
        if self.closed:
            raise RuntimeError(f"{what}: the decode loop is closed; make another.")
        if self._mark is not None and self.cause is None:
            self.end(KeyboardInterrupt())
        if isinstance(self.cause, Exception):
            raise self.cause
        if self.cause is not None:
            raise RuntimeError(
                f"{what}: the decode loop has ended, since {self.cause!r} interrupted it while it"
                f" was {self._mark}. close() it, and make another."
            ) from self.cause

    def changing(self, what: str) -> _Ending:
        """Around a change that must not be left in the middle: any exception ends the loop."""
        return _Ending(self, what)

    def waiting(self) -> _Ending:
        """Around a wait: an error ends the loop, an interrupt does not."""
        return _Ending(self, None)

    def end(self, error: BaseException) -> None:
        """End the loop.

        Raises:
            Exception: An earlier failure, where what the device refuses now it refuses because of
                that.
        """
        first = self.step_error if isinstance(error, Exception) else None
        if self.cause is None:
            self.cause = first or error
        self._release()
        if first is not None and first is not error:
            raise first from error


class _Ending:
    """The context manager of `changing` and `waiting`."""

    __slots__ = ("_life", "_what")

    def __init__(self, life: Life, what: str | None) -> None:
        self._life = life
        self._what = what

    def __enter__(self) -> None:
        self._life._mark = self._what

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._life._mark = None
        elif self._what is not None or isinstance(error, Exception):
            self._life.end(error)
