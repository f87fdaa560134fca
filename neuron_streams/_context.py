"""The runtime of the process as the stream layer sees it, and the device that torch sees.

Importing neuron_streams makes "neuron" a device name; the first use of anything loads the extension
and starts the runtime. The current device and the current streams of each thread live in the
extension, where torch's own guards find them.

Two switches of the environment are read when a context begins: NEURON_LAUNCH_BLOCKING=1 has every
submission wait, and raise what fails, where it is made; NEURON_STREAMS_TRACE_SUBMISSIONS=1 puts the
place of submission into the message of a failure. TORCH_LOGS="+neuron_streams" logs submissions.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import backend_registration

from neuron_streams import _exit
from neuron_streams._runtime import extension, process
from neuron_streams._runtime.port import (
    CancelledError,
    Command,
    Failure,
    Kind,
    Runtime,
    Ticket,
)
from neuron_streams._torch import before_use, distributed, dlpack, dynamo
from neuron_streams.errors import AcceleratorError

__all__ = [
    "Context",
    "DeviceLike",
    "begin",
    "context",
    "core",
    "has_name",
    "index_of",
    "lazy_call",
    "raise_first",
    "register_name",
    "replace",
]

log = logging.getLogger("neuron_streams")

DeviceLike: TypeAlias = "torch.device | str | int | None"


class Context:
    """What hangs on one runtime: its port in the extension."""

    def __init__(self, runtime: Runtime, port: Any) -> None:
        self.runtime = runtime
        self.port = port
        self.count: int = port.device_count()
        self.kept: list[Any] = []  # objects of the default streams, which live as long
        self.blocking = _switched_on("NEURON_LAUNCH_BLOCKING")
        self.tracing = _switched_on("NEURON_STREAMS_TRACE_SUBMISSIONS")
        self.logging = log.isEnabledFor(logging.DEBUG)
        wanted = _switched_on("NEURON_STREAMS_IMPLICIT_WAITS", default="1")
        port.implicit_waits = wanted or getattr(runtime, "needs_implicit_waits", False)
        port.fills_unfinished = _switched_on("NEURON_STREAMS_FILL_UNFINISHED")
        port.host_operators = _switched_on("NEURON_STREAMS_HOST_OPERATORS")
        self.memory = _capacity(runtime)
        for device in range(self.count):
            port.set_capacity(device, self.memory)
        if self.blocking or self.tracing or self.logging:
            port.watch(self._watch)

    def _watch(
        self, state: Any, command: Command, ticket: Ticket | None, after: Sequence[Ticket]
    ) -> None:
        """Called before (without a ticket) and after each submission."""
        if ticket is None:
            if self.tracing:
                command.name = f"{command.name.partition(SUBMITTED)[0]}{SUBMITTED}{_caller()}"
            return
        if self.logging:
            what = f"{Kind(command.kind).name.title()} {command.name!r} to neuron:{state.device}"
            log.debug("submit %s as %s, after %s", what, ticket, after)
        if self.blocking:
            self.runtime.wait(ticket)
            raise_first(state.failures(ticket))


def _switched_on(name: str, default: str = "0") -> bool:
    return os.environ.get(name, default).strip() not in ("", "0")


def _capacity(runtime: Runtime) -> int:
    """Bytes of a device: NEURON_STREAMS_MEMORY, else its own, or where it has none the host's."""
    text = os.environ.get("NEURON_STREAMS_MEMORY", "").strip()
    if not text:
        if hasattr(runtime, "memory_info"):
            total: int = runtime.memory_info(0)[1]
            return total
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not text.isdigit() or int(text) == 0:
        raise ValueError(
            f"NEURON_STREAMS_MEMORY={text!r} is no number of bytes; write it out, as 17179869184"
        )
    return int(text)


class _Held:
    """The context of the process: an attribute, so that every module sees it change."""

    __slots__ = ("context",)

    def __init__(self) -> None:
        self.context: Context | None = None


_held = _Held()
_lock = threading.RLock()
_core: Any = None


def core() -> Any:
    """The extension, loaded and bound at the first use of anything."""
    return _core if _core is not None else _load()


def _load() -> Any:
    global _core
    with _lock:
        if _core is None:
            _check_name()
            made = extension.load()
            cancelled = CancelledError
            forked = process.FORKED
            made.bind(context, Ticket, raise_first, _say_on_host, cancelled, _exit, forked)
            dynamo.prepare()
            dlpack.register(_reaches_memory, made.note_shared)
            _core = made
    return _core


def _reaches_memory() -> bool:
    return getattr(context().runtime, "reaches_memory", True)


def context() -> Context:
    """The context of the process's runtime; starts both at first use."""
    found = _held.context
    return found if found is not None else begin(None)


def begin(wanted: Runtime | str | None) -> Context:
    """Start the runtime of this process, or check that it is the one wanted."""
    process.check_fork()
    native = core()
    runtime = process.start(wanted)
    with _lock:
        found = _held.context
        if found is None or found.runtime is not runtime:
            port = getattr(runtime, "port", None) or native.ForeignPort(runtime)
            found = Context(runtime, port)
            native.set_port(port)
            native.start_autograd_threads()
            _held.context = found
            if not _reaches_memory():
                from neuron_streams._torch import printing

                printing.register(_reaches_memory)
    if _waiting:
        _call_waiting()
    return found


_waiting: dict[object, Callable[[], object]] = {}


def lazy_call(function: Callable[[], object], key: object = None) -> None:
    """Call a function now, or at the first use if that has not come yet.

    Of the functions with one key only the last is called: a program that seeds a million times and
    never uses a device keeps one.
    """
    if _held.context is not None:
        function()
        return
    key = object() if key is None else key
    _waiting.pop(key, None)
    _waiting[key] = function


def _call_waiting() -> None:
    """Call all that waits, in its order, and then raise the first error."""
    errors = []
    while _waiting:
        function = _waiting.pop(next(iter(_waiting)))
        try:
            function()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def replace(runtime: Runtime | None) -> Runtime | None:
    """Swap the process's runtime and start with fresh streams; returns the old one (tests)."""
    before = _held.context
    if before is not None:
        before.port.close_streams()
    old = process.replace(runtime)
    _held.context = None
    core().set_port(None)
    if runtime is not None:
        begin(None)
    return old


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it
    _held.context = None
    if _core is not None:
        _core.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork)


# -- the device name ----------------------------------------------------------------------------


def register_name(module: Any) -> None:
    """Make "neuron" the name of a device, and nothing more, unless another package has done so."""
    if torch._C._get_privateuse1_backend_name() != "privateuseone" or hasattr(torch, "neuron"):
        return
    backend_registration.rename_privateuse1_backend("neuron")
    torch._register_device_module("neuron", module)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(unsupported_dtype=[])
    before_use.register(lazy_call, context)
    distributed.register(lazy_call, core)


def has_name() -> bool:
    """Whether the device "neuron" of this process is ours."""
    return getattr(torch, "neuron", None) is sys.modules["neuron_streams"]


def _check_name() -> None:
    """Step aside where a native backend, or another one, has the device."""
    if has_name():
        return
    name = torch._C._get_privateuse1_backend_name()
    raise RuntimeError(
        f"neuron_streams: the device slot PrivateUse1 of this process is taken by {name!r}, "
        "and torch has one; use neuron_streams in a process of its own"
        + (" (native torch-neuronx has torch.neuron.Stream)" if name == "neuron" else "")
    )


def index_of(device: DeviceLike, *, optional: bool = True) -> int:
    """The device index that an argument means; where it names none, that of the current device.

    Raises:
        ValueError: it is no device of ours, or it names none and that is not `optional`.
        AcceleratorError: there is no such device.
    """
    index = device if type(device) is int else _index_in(device)
    if index is None:
        if not optional:
            raise ValueError(
                f"Expected a neuron device with a specified index or an integer, but got: {device}"
            )
        current: int = core().current_device()
        return current
    if not 0 <= index < context().count:
        raise AcceleratorError(
            f"invalid device ordinal: there is no neuron:{index}, the devices are "
            f"neuron:0 to neuron:{context().count - 1}"
        )
    return index


def _index_in(device: object) -> int | None:
    if device is None or isinstance(device, int):
        return None if device is None else int(device)  # True is device 1, as in torch
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type in ("neuron", "privateuseone"):
        return device.index
    index = getattr(device, "idx", None)  # a context of `device`, as torch.cuda takes one
    if not isinstance(index, int):
        raise ValueError(f"Expected a neuron device, but got: {device}")
    return index


# -- failures -----------------------------------------------------------------------------------


def raise_first(failures: Iterable[Failure]) -> None:
    """Raise the first cause with its first traceback, and name the others."""
    found = list(failures)
    if found:
        first, *others = found
        _note(first.error, _where(first))
        for number, other in enumerate(others):
            log.error("also failed, %s: %r", _where(other), other.error)
            if number < MOST_NOTES:
                _note(first.error, f"also failed, {_where(other)}: {other.error!r}")
        if len(others) > MOST_NOTES:
            _note(first.error, f"also failed: {len(others) - MOST_NOTES} more, see the log")
        raise first.error.with_traceback(first.traceback)


MOST_NOTES = 8
SUBMITTED = " submitted at "  # between a command's name and the place, if that is traced


def _where(failure: Failure) -> str:
    return f"in {failure.what!r}, command {failure.ticket.value} of lane {failure.ticket.lane}"


def _note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)
    elif SUBMITTED in text and text not in str(error):  # Python 3.10 has no notes
        error.args = (f"{error} ({text})", *error.args[1:])


def _caller() -> str:
    """The innermost frame outside this package and torch: `train.py:12 in step`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("neuron_streams", "torch")


def _say_on_host(operator: str) -> None:
    log.warning(
        "%s runs on the host, after all that its stream has queued: the device lacks it",
        operator,
    )
