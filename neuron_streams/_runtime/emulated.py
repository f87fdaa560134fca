"""The emulated runtime: a CPU plays the device, on the threads of the native worker.

Each device has a few threads, started when work needs them; one that finishes a command goes on
with what is ready (a wake-up costs the waker some 20 µs and arrives some 60 µs later) and wakes
another only for work that it cannot take itself. None of them needs the GIL.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

from neuron_streams._runtime import extension
from neuron_streams._runtime.port import Handle, Payload

__all__ = ["EXIT_SECONDS", "EmulatedRuntime", "close_living"]

EXIT_SECONDS = 0.75  # for work in flight at interpreter exit; the process is gone within two


class EmulatedRuntime:
    """Emulates `devices` NeuronCores on this machine's CPU.

    Its functions are those of the extension's port (`_torch/csrc/native.cpp`), bound as they are.
    """

    name = "emulated"

    busy_intervals: Callable[..., Any]
    close_lane: Callable[..., Any]
    complete: Callable[..., Any]
    completed: Callable[..., Any]
    completed_at: Callable[..., Any]
    device_count: Callable[..., Any]
    drain: Callable[..., Any]
    failures: Callable[..., Any]
    lanes: Callable[..., Any]
    open_lane: Callable[..., Any]
    submit: Callable[..., Any]
    submitted: Callable[..., Any]
    wait: Callable[..., Any]
    wait_for_room: Callable[..., Any]

    def __init__(self, devices: int = 2) -> None:
        self.port = port = extension.load().NativePort(devices)
        for function in EmulatedRuntime.__annotations__:
            setattr(self, function, getattr(port, function))
        _living.add(self)

    def load(self, payload: Payload, device: int) -> Handle:
        from neuron_streams._runtime.program import load_on_cpu

        return load_on_cpu(payload, device)

    def close(self, timeout: float | None = None) -> None:
        """Run what can run until `timeout` seconds (None: to the end), then cancel the rest."""
        self.port.close(timeout)
        if self.port.in_flight:
            _leave_alone(self)
        else:
            _living.discard(self)


_living: set[EmulatedRuntime] = set()


def close_living() -> None:
    """Close what is not closed: threads must not outlive what the interpreter frees at its end."""
    for runtime in list(_living):
        runtime.close(EXIT_SECONDS)
    if _living:
        gc.freeze()  # to look for garbage in all of torch, beside a busy thread, takes seconds


def _leave_alone(runtime: EmulatedRuntime) -> None:
    """A thread that cannot be stopped runs a command: free nothing of it, not at exit either.

    C++ destructors must not run beside it, so the process ends by `_exit`, with its exit code.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(runtime))
    extension.load().leave_at_once()
