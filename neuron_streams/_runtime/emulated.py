"""The emulated runtime: a CPU plays the device.

Two kinds of workers play it, alike but for one thing: those in C (`native.py`) start the next
command whatever Python is doing, those in Python (`python.py`) when the GIL is free. What both do:
each device has a few workers, started when work needs them; one that finishes a command goes on
with what is ready (a wake-up costs the waker some 20 µs and arrives some 60 µs later) and wakes
another only for work that it cannot take itself.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from neuron_streams._runtime.ledger import Ledger
from neuron_streams._runtime.port import (
    Buffer,
    Command,
    Failure,
    Handle,
    Payload,
    Runtime,
    Ticket,
    Unit,
)
from neuron_streams._runtime.python import PythonWorkers

if TYPE_CHECKING:
    from neuron_streams._runtime.native import NativeWorkers

__all__ = ["EmulatedRuntime"]

log = logging.getLogger(__name__)

EXIT_SECONDS = 0.75  # for work in flight at interpreter exit; the process is gone within two


class EmulatedRuntime(Runtime):
    """Emulates `devices` NeuronCores on this machine's CPU.

    Args:
        devices: how many.
        worker: `"native"`, `"python"`, or `"auto"`: native where a C compiler is; None asks
            NEURON_STREAMS_WORKER.

    `worker` then says which it is, `why` why.
    """

    name = "emulated"

    def __init__(self, devices: int = 2, worker: str | None = None) -> None:
        self.worker, self.why = _choose(worker)
        self._workers = workers = _make(self.worker, self.name, devices)
        self._pid = os.getpid()
        # The three that decode loops call most, without a call in between.
        self.submit = workers.submit  # type: ignore[method-assign]
        self.completed = workers.completed  # type: ignore[method-assign]
        self.allocate = workers.allocate  # type: ignore[method-assign]
        _living.add(self)
        _close_at_exit()
        log.info("the workers of the emulated runtime are %s: %s", self.worker, self.why)

    def device_count(self) -> int:
        return self._workers.device_count()

    def open_lane(self, device: int, priority: int = 0, *, host: bool = False) -> int:
        return self._workers.open_lane(device, priority, host=host)

    def close_lane(self, lane: int) -> None:
        self._workers.close_lane(lane)

    def lanes(self, device: int) -> Sequence[int]:
        return self._workers.lanes(device)

    def submit(
        self, lane: int, command: Command, after: Sequence[Ticket] = (), wait: bool = True
    ) -> Ticket:
        return self._workers.submit(lane, command, after, wait)

    def wait_for_room(self, lane: int) -> None:
        self._workers.wait_for_room(lane)

    def complete(self, ticket: Ticket, error: BaseException | None = None) -> None:
        self._workers.complete(ticket, error)

    def submitted(self, lane: int) -> int:
        return self._workers.submitted(lane)

    def completed(self, lane: int) -> int:
        return self._workers.completed(lane)

    def completed_at(self, ticket: Ticket) -> float | None:
        return self._workers.completed_at(ticket)

    def wait(self, ticket: Ticket, timeout: float | None = None) -> None:
        self._workers.wait(ticket, timeout)

    def failures(self, ticket: Ticket, since: int = 0) -> tuple[Failure, ...]:
        return self._workers.failures(ticket, since)

    def allocate(self, device: int, nbytes: int) -> Buffer:
        return self._workers.allocate(device, nbytes)

    def ledger(self, device: int) -> Ledger:
        return self._workers.ledger(device)

    def load(self, payload: Payload, device: int) -> Handle:
        from neuron_streams._runtime.program import load_on_cpu

        return load_on_cpu(payload, device)

    def busy_intervals(self) -> Sequence[tuple[int, Unit, float, float, str]]:
        return self._workers.busy_intervals()

    def close(self, timeout: float | None = None) -> None:
        """Run what can run until `timeout` seconds (None: to the end), then cancel the rest."""
        if os.getpid() != self._pid:
            return  # a fork has the lanes but not the threads
        self._workers.close(timeout)
        if self._workers.in_flight:
            _leave_alone(self)
        else:
            _living.discard(self)


def _choose(asked: str | None) -> tuple[str, str]:
    """Which worker, and why."""
    from neuron_streams._runtime.worker.library import why_not

    variable = os.environ.get("NEURON_STREAMS_WORKER", "").strip().lower()
    wanted = asked or variable or "auto"
    if wanted not in ("auto", "native", "python"):
        raise ValueError(
            f"NEURON_STREAMS_WORKER={wanted!r} names no worker; use auto, native or python"
        )
    why = "asked for" if asked else f"NEURON_STREAMS_WORKER={wanted}"
    missing = None if wanted == "python" else why_not()
    if wanted == "native" and missing:
        raise RuntimeError(
            f"the native worker cannot be had: {missing}; use NEURON_STREAMS_WORKER=auto or python"
        )
    if wanted == "auto":
        return ("native", "there is a C compiler") if missing is None else ("python", missing)
    return wanted, why


def _make(worker: str, name: str, devices: int) -> NativeWorkers | PythonWorkers:
    if worker == "python":
        return PythonWorkers(name, devices)
    from neuron_streams._runtime.native import NativeWorkers

    return NativeWorkers(name, devices)


_living: set[EmulatedRuntime] = set()
_registered = False


def _close_living() -> None:
    for runtime in list(_living):
        runtime.close(EXIT_SECONDS)
    if _living:
        gc.freeze()  # to look for garbage in all of torch, beside a busy thread, takes seconds


def _close_at_exit() -> None:
    """Threads must not outlive what Python frees at its end; those it would wait for must end."""
    global _registered
    if not _registered:
        _registered = True
        threading._register_atexit(_close_living)  # type: ignore[attr-defined]


def _leave_alone(runtime: EmulatedRuntime) -> None:
    """A thread that nobody can stop runs a command: free nothing of it, not at exit either.

    C++ destructors must not run beside it, so the process ends by `_exit`, with its exit code.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(runtime))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):  # glibc
            libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
