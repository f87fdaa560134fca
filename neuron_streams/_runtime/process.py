"""The one runtime of this process: chosen once, refused after a fork, closed before the end.

`NEURON_STREAMS_RUNTIME` chooses: `auto` (emulated, as long as nrt has not run on hardware),
`emulated`, `manual`, `nrt`. A reason of its own: streams, events and executables all ask for the
runtime, and none of them should know how it came to be.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading

from neuron_streams._runtime import extension
from neuron_streams._runtime.emulated import EXIT_SECONDS, EmulatedRuntime
from neuron_streams._runtime.manual import ManualRuntime
from neuron_streams._runtime.port import Runtime

__all__ = [
    "chosen",
    "create",
    "in_bad_fork",
    "is_started",
    "replace",
    "runtime",
    "start",
    "why",
]

log = logging.getLogger(__name__)

# The words of torch.cuda, since code that forks looks for them.
FORKED = (
    "Cannot re-initialize neuron_streams in forked subprocess. To use neuron_streams with "
    "multiprocessing, you must use the 'spawn' start method"
)

_lock = threading.Lock()
_runtime: Runtime | None = None
_forked = False
_hooked = False


def chosen() -> str:
    """The runtime that the environment asks for, checked."""
    name = os.environ.get("NEURON_STREAMS_RUNTIME", "auto").strip().lower() or "auto"
    if name not in ("auto", "emulated", "manual", "nrt"):
        raise ValueError(
            f"NEURON_STREAMS_RUNTIME={name!r} names no runtime; use auto, emulated, manual or nrt"
        )
    return name


def why() -> str:
    """One clause that says why the runtime in use is the one in use."""
    asked = chosen()
    if asked != "auto":
        return f"NEURON_STREAMS_RUNTIME={asked}"
    return "the CPU plays the device; NEURON_STREAMS_RUNTIME=nrt drives one, untried on hardware"


def _device_count() -> int:
    text = os.environ.get("NEURON_STREAMS_DEVICE_COUNT", "2")
    if not text.strip().isdigit() or not 1 <= int(text) <= 64:
        raise ValueError(
            f"NEURON_STREAMS_DEVICE_COUNT={text!r} is no number of devices; use 1 to 64"
        )
    return int(text)


def create(name: str) -> Runtime:
    """A new runtime of a kind; `auto` is the emulated one until nrt was seen to drive hardware."""
    if name in ("auto", "emulated"):
        return EmulatedRuntime(_device_count())
    if name == "manual":
        return ManualRuntime(_device_count())
    if name == "nrt":
        from neuron_streams._runtime.nrt.runtime import NrtRuntime

        return NrtRuntime()
    raise ValueError(f"init: {name!r} names no runtime; use auto, emulated, manual or nrt")


def is_started() -> bool:
    return _runtime is not None and not _forked


def in_bad_fork() -> bool:
    """Whether this is the child of a fork that came after the first use."""
    return _forked


def runtime() -> Runtime:
    """The runtime of this process, started at first use."""
    found = _runtime
    return found if found is not None else start()


def start(wanted: Runtime | str | None = None) -> Runtime:
    """Start the runtime of this process, or check that it is the one wanted."""
    global _runtime
    if _forked:
        raise RuntimeError(FORKED)
    with _lock:
        if _runtime is None:
            made = create(wanted or chosen()) if isinstance(wanted, str | None) else wanted
            _hook()
            _runtime = made
            log.info("runtime %s, %d devices: %s", made.name, made.device_count(), why())
        elif wanted not in (None, "auto", _runtime, _runtime.name):
            raise RuntimeError(
                f"init(runtime={wanted!r}): this process already uses the {_runtime.name} runtime, "
                "and it is chosen once; call init before anything else, or set "
                "NEURON_STREAMS_RUNTIME"
            )
        return _runtime


def replace(new: Runtime | None) -> Runtime | None:
    """Put another runtime in the place of this process's, which is returned unclosed (tests)."""
    global _runtime
    with _lock:
        if new is not None:
            _hook()
        old, _runtime = _runtime, new
        return old


def _hook() -> None:
    """Have the runtime closed at exit and refused after a fork; once."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    # Before the interpreter joins threads: a thread that waits for an event would never be joined.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_close)
    os.register_at_fork(after_in_child=_after_fork)


def _close() -> None:
    extension.begin_exit()
    if _runtime is not None and not _forked:
        _runtime.close(EXIT_SECONDS)


def _after_fork() -> None:
    global _forked
    _forked = _forked or _runtime is not None
