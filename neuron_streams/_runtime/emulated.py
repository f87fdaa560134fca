"""The emulated runtime: a CPU plays the device.

Two kinds of workers play it, alike but for one thing: those in C (`native.py`) start the next
command whatever Python is doing, those in Python (below) when the GIL is free. What both do: each
device has a few workers, started when work needs them; one that finishes a command goes on with
what is ready (a wake-up costs the waker some 20 µs and arrives some 60 µs later) and wakes another
only for work that it cannot take itself. Compiled steps run without the GIL.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque

import torch
from typing_extensions import Self

from neuron_streams._runtime.cpu import run
from neuron_streams._runtime.lanes import Entry, Lanes
from neuron_streams._runtime.port import Runtime, Unit

__all__ = ["EmulatedRuntime", "PythonWorkers", "skip_destructors"]

log = logging.getLogger(__name__)

MOST_WORKERS = sum(unit.queues for unit in Unit)


class EmulatedRuntime(Runtime):
    """Emulates `devices` NeuronCores on this machine's CPU.

    Args:
        devices: how many.
        worker: `"native"`, `"python"`, or `"auto"`: native where a C compiler is; None asks
            NEURON_STREAMS_WORKER.

    `worker` says which it is, `why` why.
    """

    name = "emulated"
    worker: str
    why: str

    def __new__(cls, devices: int = 2, worker: str | None = None) -> Self:
        if cls is not EmulatedRuntime:
            return super().__new__(cls)
        kind, why = _choose(worker)
        made: Self = super().__new__(kind)  # type: ignore[type-var]
        made.why = why
        log.info("the workers of the emulated runtime are %s: %s", kind.worker, why)
        return made


def _choose(asked: str | None) -> tuple[type[EmulatedRuntime], str]:
    from neuron_streams._runtime.worker.library import why_not

    variable = os.environ.get("NEURON_STREAMS_WORKER", "").strip().lower()
    wanted = asked or variable or "python"
    if wanted not in ("auto", "native", "python"):
        raise ValueError(f"NEURON_STREAMS_WORKER={wanted!r} names no worker; use auto, native or python")
    if wanted == "python":
        return PythonWorkers, "asked for" if asked else "NEURON_STREAMS_WORKER=python"
    missing = why_not()
    if missing is None:
        from neuron_streams._runtime.native import NativeWorkers

        return NativeWorkers, "there is a C compiler" if wanted == "auto" else f"{wanted} asked for"
    if wanted == "native":
        raise RuntimeError(
            f"NEURON_STREAMS_WORKER=native: {missing}; install one, or use auto or python"
        )
    return PythonWorkers, missing


def skip_destructors() -> None:
    """Have the process end without C++ destructors: a thread that nobody can stop runs libtorch.

    The exit code stays. Without glibc's on_exit nothing is done.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


class _Crew:
    """The workers of one device. `idle` holds a lock per sleeping worker: releasing it wakes it."""

    __slots__ = ("called", "idle", "size")

    def __init__(self) -> None:
        self.idle: deque[threading.Lock] = deque()
        self.called = 0
        self.size = 0


class PythonWorkers(EmulatedRuntime, Lanes):
    """The emulated runtime where no C compiler is."""

    worker = "python"
    why = "asked for"

    def __init__(self, devices: int = 2, worker: str | None = None) -> None:
        super().__init__(devices)
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
        called = True
        with torch.inference_mode():
            while True:
                with self._lock:
                    if called:
                        self._crews[device].called -= 1
                        called = False
                    if entry is not None:
                        self._finish(entry, error, time.perf_counter())
                    finished, entry = entry, self._next(device, bell)
                    if entry is None and self._closed:
                        return
                del finished  # what it kept alive dies here, outside the lock
                if entry is None:
                    bell.acquire()
                    called = True
                else:
                    error = self._run(entry)

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

    def _run(self, entry: Entry) -> BaseException | None:
        if entry.failure is None:
            try:
                run(entry.command)
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
            if any(any(device.running.values()) for device in self._devices):
                skip_destructors()
            self._cancel_pending(running=True)
            self._room.notify_all()
            for crew in self._crews:
                while crew.idle:
                    crew.idle.pop().release()

    def _any_moving(self) -> bool:
        return any(device.moving for device in self._devices)
