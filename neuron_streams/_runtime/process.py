"""The one runtime of this process: chosen once, refused after a fork, closed before the end.

`NEURON_STREAMS_RUNTIME` chooses: `auto` (emulated, as long as nrt has not run on hardware),
`emulated`, `manual`, `nrt`. A reason of its own: streams, events and executables all ask for the
runtime, and none of them should know how it came to be.
"""

from __future__ import annotations

import atexit

# It registers with `threading` when imported, which is refused once the main thread has ended;
# and torch imports it when it first compiles, which a thread may ask for after that.
import concurrent.futures.process  # noqa: F401
import logging
import os
import threading

from neuron_streams._runtime import extension
from neuron_streams._runtime.emulated import EXIT_SECONDS, EmulatedRuntime, close_living
from neuron_streams._runtime.manual import ManualRuntime
from neuron_streams._runtime.port import Runtime

__all__ = [
    "FORKED",
    "check_fork",
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


def check_fork() -> None:
    """
    Raises:
        RuntimeError: This is such a child, which has none of its parent's threads.
    """
    if _forked:
        raise RuntimeError(FORKED)


def runtime() -> Runtime:
    """The runtime of this process, started at first use."""
    found = _runtime
    return found if found is not None else start()


def start(wanted: Runtime | str | None = None) -> Runtime:
    """Start the runtime of this process, or check that it is the one wanted."""
    global _runtime
    check_fork()
    with _lock:
        if _runtime is None:
            made = create(wanted or chosen()) if isinstance(wanted, str | None) else wanted
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
        old, _runtime = _runtime, new
        return old


# The order of teardown, all of it:
#
# 1. The main thread ends. Nothing else does: threads that are no daemons work on, and the device
#    for them. A wait that nothing can end any more raises (`_exit.py`), so this comes to an end;
#    Ctrl-C ends it at once.
# 2. `atexit`, the newest first: what users registered since they imported us, then the decode
#    engines, whose threads submit, and then `_close`, registered here, at import.
# 3. `_close`: what runs may end within EXIT_SECONDS. Then, per runtime: no more submissions; what
#    has not completed fails with CancelledError; all waits for it end; the threads of the worker
#    are joined; lanes let go of their commands, and commands of buffers. A thread that submits or
#    comes back from a wait now was overtaken, and sleeps on without a word, autograd's among them
#    (`extension.begin_exit`).
# 4. The interpreter frees modules and objects. The extension is never unloaded, since tensors free
#    their memory through it until the very end.
# 5. Destructors of C++ run, unless a thread sleeps in the middle of something or a command could
#    not be stopped and still runs beside them: then the process leaves by `_exit`, with its exit
#    code (`leave` in _torch/csrc/exit.cpp).
#
# A forked child has none of the threads, so nothing in it is closed.
def _close() -> None:
    if _forked:
        return
    extension.begin_exit()
    if _runtime is not None:
        _runtime.close(EXIT_SECONDS)
    close_living()


def _after_fork() -> None:
    global _forked, _lock
    _forked = _forked or _runtime is not None
    _lock = threading.Lock()  # another thread may have held it


atexit.register(_close)
os.register_at_fork(after_in_child=_after_fork)
