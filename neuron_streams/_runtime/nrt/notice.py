"""How completion is noticed, by ABI; each is waited on by one thread, without the GIL.

SDK 2.30 and later signal an eventfd per queue, all in one epoll. It is registered before the first
submission, so that none is missed, once, however many threads wait for whatever completes: libnrt
delivers to one reader, and a second registration would lose a wake-up. On 2.29 the queues are asked
again and again, with pauses that grow. On 2.28 the oldest request in flight of each queue has a
handle; handles may only be polled and closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from collections.abc import Callable, Iterable
from typing import Protocol

from neuron_streams._runtime.nrt.lib import Abi, Library
from neuron_streams._runtime.nrt.queue import Queue

__all__ = ["Eventfds", "Handles", "Notice", "Polling", "notice_for"]

SHORTEST, LONGEST = 20e-6, 500e-6  # seconds between two looks


class Notice(Protocol):
    """`wait` and what it needs. All but `wait` and `wake` are called with the runtime's lock."""

    def open(self, queue: Queue) -> None:
        """The queue will be used, for the first time."""

    def arm(self, queue: Queue) -> None:
        """The queue may have something in flight."""

    def wait(self, timeout: float | None) -> None:
        """Return when something may have completed, or after `timeout`, or when woken."""

    def wake(self) -> None: ...

    def close(self, queues: Iterable[Queue]) -> None: ...


class _Epoll:
    """An epoll with an eventfd of its own, to wake who waits."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)

    def _poll(self, timeout: float | None) -> list[int]:
        fds = [fd for fd, _ in self._epoll.poll(timeout)]
        if self._bell in fds:
            fds.remove(self._bell)
            _reset(self._bell)
        return fds

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _close(self) -> None:
        self._epoll.close()
        os.close(self._bell)


def _reset(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(fd)


class Eventfds(_Epoll):
    """SDK 2.30 and later."""

    def open(self, queue: Queue) -> None:
        queue.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._register(queue, queue.fd)
        self._epoll.register(queue.fd, select.EPOLLIN)

    def _register(self, queue: Queue, fd: int) -> None:
        self._library.call(
            "nrta_event_register_xu_completion", queue.device, queue.unit, queue.index, fd
        )

    def arm(self, queue: Queue) -> None:
        pass

    def wait(self, timeout: float | None) -> None:
        for fd in self._poll(timeout):
            _reset(fd)

    def close(self, queues: Iterable[Queue]) -> None:
        for queue in queues:
            self._register(queue, -1)  # then close: the library must not signal what is gone
            os.close(queue.fd)
        self._close()


class Polling(_Epoll):
    """SDK 2.29."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self._busy: set[Queue] = set()
        self._pause = SHORTEST

    def open(self, queue: Queue) -> None:
        pass

    def arm(self, queue: Queue) -> None:
        if queue.flight:
            if not self._busy:
                self.wake()
            self._busy.add(queue)
        else:
            self._busy.discard(queue)
        self._pause = SHORTEST

    def wait(self, timeout: float | None) -> None:
        if not self._busy:
            self._poll(timeout)
            return
        select.select((), (), (), min(self._pause, timeout or LONGEST))
        self._pause = min(self._pause * 1.5, LONGEST)

    def close(self, queues: Iterable[Queue]) -> None:
        self._close()


class Handles(_Epoll):
    """SDK 2.28."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self._queues: dict[int, Queue] = {}
        self._asked: dict[Queue, int] = {}  # a sequence that has fired may not be harvested yet

    def open(self, queue: Queue) -> None:
        pass

    def arm(self, queue: Queue) -> None:
        if queue.flight and queue.fd < 0 and queue.front != self._asked.get(queue):
            fd = ctypes.c_int()
            self._library.call("nrta_get_completion_handle", queue.front, ctypes.byref(fd))
            self._asked[queue] = queue.front
            queue.fd = fd.value
            self._queues[queue.fd] = queue
            self._epoll.register(queue.fd, select.EPOLLIN)

    def wait(self, timeout: float | None) -> None:
        for fd in self._poll(timeout):
            queue = self._queues.pop(fd)
            self._epoll.unregister(fd)
            os.close(fd)
            queue.fd = -1

    def close(self, queues: Iterable[Queue]) -> None:
        for fd in self._queues:
            os.close(fd)
        self._close()


def notice_for(library: Library) -> Notice:
    kinds: dict[Abi, Callable[[Library], Notice]] = {
        Abi.SDK_2_28: Handles,
        Abi.SDK_2_29: Polling,
        Abi.SDK_2_30: Eventfds,
    }
    return kinds[library.abi](library)
