"""The emulated runtime's workers in Python: where no C compiler is, or where they are asked for.

Compiled steps run without the GIL, but the next one starts only when the GIL is free.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from neuron_streams._runtime.complaints import worker
from neuron_streams._runtime.cpu import prepare
from neuron_streams._runtime.lanes import Entry, Lanes
from neuron_streams._runtime.port import Unit

__all__ = ["PythonWorkers"]


def _nothing() -> None: ...


MOST_WORKERS = sum(unit.queues for unit in Unit)


class _Crew:
    """The workers of one device. `idle` holds a lock per sleeping worker: releasing it wakes it."""

    __slots__ = ("called", "idle", "size")

    def __init__(self) -> None:
        self.idle: deque[threading.Lock] = deque()
        self.called = 0
        self.size = 0


class PythonWorkers(Lanes):
    """Lanes whose commands threads of Python run."""

    def __init__(self, name: str, devices: int) -> None:
        super().__init__(devices)
        self.name = name
        self.in_flight = False
        self._over: list[threading.Lock] | None = None  # waits that end with what is being finished
        self._crews = [_Crew() for _ in range(devices)]
        self._idle = threading.Condition(self._lock)

    def _dispatch(self, device: int) -> None:
        crew = self._crews[device]
        for _ in range(self._takeable(device) - crew.called):
            if crew.idle:
                crew.idle.pop().release()
            elif crew.size < MOST_WORKERS and not self._closed:
                crew.size += 1
                name = f"neuron_streams worker {device}.{crew.size}"
                threading.Thread(target=self._work, args=(device,), name=name, daemon=True).start()
            else:
                return
            crew.called += 1

    def _work(self, device: int) -> None:
        bell = threading.Lock()
        bell.acquire()
        entry: Entry | None = None
        error: BaseException | None = None
        called = worker.here = True
        with torch.inference_mode():
            while True:
                over: list[threading.Lock] = []
                with self._lock:
                    if called:
                        self._crews[device].called -= 1
                        called = False
                    if entry is not None:
                        self._over = over
                        self._finish(entry, error, time.perf_counter())
                        self._over = None
                    finished, entry = entry, self._next(device, bell)
                    ended = entry is None and self._closed
                del finished  # what it kept alive dies here, outside the lock
                error = self._run(entry, over)
                if ended:
                    return
                if entry is None:
                    bell.acquire()
                    called = True

    def _next(self, device: int, bell: threading.Lock) -> Entry | None:
        if self._closed:
            self._cancel_pending()
            self._idle.notify_all()
            return None
        entry = self._take(device)
        if entry is None:
            self._crews[device].idle.append(bell)
            self._idle.notify_all()
        elif not entry.quick:
            self._dispatch(device)
        return entry

    def _wake(self, waiter: threading.Lock) -> None:
        if self._over is None:
            waiter.release()
        else:
            self._over.append(waiter)

    def _run(self, entry: Entry | None, over: list[threading.Lock]) -> BaseException | None:
        """Run what was taken; those whose wait is over are woken when all but the run is done."""
        go: Callable[[], None] = _nothing
        try:
            try:
                if entry is not None and entry.failure is None:
                    go = prepare(entry.command)
            finally:
                for waiter in over:
                    waiter.release()
            go()
        except BaseException as error:  # kept for whoever reads the outputs
            return error
        return None

    def close(self, timeout: float | None = None) -> None:
        """Run what can run until `timeout` seconds (None: to the end), then cancel the rest."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self._any_moving() and not self._closed:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._idle.wait(left)
            self._closed = True
            self.in_flight = any(any(device.running.values()) for device in self._devices)
            self._cancel_pending(running=True)
            self._room.notify_all()
            for crew in self._crews:
                while crew.idle:
                    crew.idle.pop().release()

    def _any_moving(self) -> bool:
        return any(device.moving for device in self._devices)
