"""The compilers of this machine, and how they are run.

`CC` and `CXX` name them, with arguments if need be, and `NEURON_STREAMS_COMPILER=none` pretends
that there are none. Everything that is compiled here, by whichever part, is compiled by these.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from neuron_streams._runtime import cache

__all__ = [
    "StoppedError",
    "StuckError",
    "c_compiler",
    "cxx_compiler",
    "is_gcc",
    "loads",
    "machine",
    "run",
    "stop",
    "submitted",
]

log = logging.getLogger(__name__)

_SAID = 2000  # characters of a compiler's output that an error repeats


class StuckError(RuntimeError):
    """A compiler did not end in time, so trying again is no use."""


class StoppedError(Exception):
    """A compiler was ended by `stop`; never reaches the user."""


def c_compiler() -> tuple[str, ...] | None:
    """The command of the C compiler, a path and perhaps arguments; None where there is none."""
    return _compiler("CC", "cc", "gcc", "clang")


def cxx_compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler, a path and perhaps arguments; None where there is none."""
    return _compiler("CXX", "g++", "c++", "clang++")


def _compiler(variable: str, *names: str) -> tuple[str, ...] | None:
    if os.environ.get("NEURON_STREAMS_COMPILER") == "none":
        return None
    return _first(variable, os.environ.get(variable, ""), os.environ.get("PATH"), names)


@functools.cache
def _first(
    variable: str, chosen: str, path: str | None, names: Sequence[str]
) -> tuple[str, ...] | None:
    """The first command that is there, in this order: the user's choice, then our names."""
    for words in (*_readings(chosen), *((name,) for name in names)):
        found = shutil.which(words[0], path=path)
        if found is not None:
            if chosen.strip() and words[0] in names:
                log.warning("%s=%r names no program, so %s is used.", variable, chosen, found)
            return (os.path.abspath(found), *words[1:])
    return None


def _readings(chosen: str) -> list[tuple[str, ...]]:
    """A path that may have spaces in it, or a command with arguments, as in make."""
    if not chosen.strip():
        return []
    with contextlib.suppress(ValueError):  # a quote that is not closed
        return [(chosen,), tuple(shlex.split(chosen))]
    return [(chosen,)]


def run(command: Sequence[str], made: Path | None = None) -> str:
    """Run a compiler, for `NEURON_STREAMS_COMPILE_SECONDS` (1800) at most, and return its output.

    Raises RuntimeError, with its output, if it fails or does not leave the file `made`, StuckError
    if it does not end.
    """
    seconds = _bound()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run: {error.strerror or error}.") from error
    _running.add(process)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        _abandon(process)
        raise StuckError(
            f"{command[0]} did not end within {seconds:g} s and was stopped; set NEURON_STREAMS_"
            f"COMPILE_SECONDS if it needs longer: {_text(late.output or b'')}"
        ) from None
    except BaseException:
        _abandon(process)
        raise
    finally:
        _running.discard(process)
    if process in _stopped:
        raise StoppedError(f"{command[0]} was stopped")
    fault = None
    if process.returncode:
        fault = f"failed ({process.returncode})"
    elif made is not None and not made.exists():
        fault = f"ended well and has not made {made}"
    if fault:
        raise RuntimeError(f"{command[0]} {fault}: {_text(output)}")
    return _text(output)


def _text(output: bytes) -> str:
    """What a compiler has printed, its end at least, whatever encoding it speaks."""
    return output.decode("utf-8", errors="replace").strip()[-_SAID:] or "it printed nothing."


def _bound() -> float:
    text = os.environ.get("NEURON_STREAMS_COMPILE_SECONDS", "1800")
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= threading.TIMEOUT_MAX:
            return float(text)
    raise ValueError(
        f"NEURON_STREAMS_COMPILE_SECONDS={text!r} is no number of seconds above 0. Use 1800, or "
        "leave it out."
    )


_running: set[subprocess.Popen[bytes]] = set()
_stopped: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def stop() -> None:
    """End the compilers that run: those of other threads would keep an interrupt waiting."""
    for process in list(_running):
        _stopped.add(process)
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a compiler with all that it has started: `g++` is a driver of other programs.

    They share our process group, so that whatever ends that, a terminal for one, ends them too.
    Each is stopped before its children are listed, or it might start another in between, which
    would live on with the compiler's output open.
    """
    if process.poll() is not None:
        return  # and its number may be another's by now
    found = [process.pid]
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGSTOP)
            _await_stop(pid)
        found += _children(pid)
    process.kill()
    for pid in found[1:]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _status(pid: int | str) -> tuple[str, int]:
    """The state of a process, a letter, and its parent; raises OSError where there is none."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


def _await_stop(pid: int) -> None:
    """Wait until a process that was sent SIGSTOP has stopped or is gone, for a second at most."""
    until = time.monotonic() + 1.0
    with contextlib.suppress(OSError):
        while _status(pid)[0] not in "TtZX" and time.monotonic() < until:
            time.sleep(0.001)


def _children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _status(path.name)[1] == pid:
                found.append(int(path.name))
    return found


def _abandon(process: subprocess.Popen[bytes]) -> None:
    _kill(process)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


P = ParamSpec("P")
R = TypeVar("R")


def submitted(
    pool: ThreadPoolExecutor, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> Future[R]:
    """Run by the pool, or here where it takes nothing: the system gives it no thread, or the main
    thread has ended, after which Python lets no pool take anything.
    """
    try:
        return pool.submit(function, *args, **kwargs)
    except RuntimeError:
        done: Future[R] = Future()
        done.set_result(function(*args, **kwargs))
        return done


@functools.cache
def is_gcc(command: tuple[str, ...]) -> bool:
    """Whether a compiler is gcc, by its own word: `c++` may be anything."""
    return "Free Software Foundation" in run([*command, "--version"])


_TRAITS = "vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features"


@functools.cache
def machine() -> str:
    """What compiled code depends on in this processor and its C library, as a digest."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0]
        lines = [line for line in text.splitlines() if line.split("\t")[0].strip() in _TRAITS]
    except OSError:
        lines = [platform.processor()]
    parts = [platform.machine(), *platform.libc_ver(), *lines]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def loads(path: Path) -> ctypes.CDLL:
    """Load a shared library.

    Raises CacheError where its file system runs no code, OSError if it is fit for nothing.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        cache.refuse_noexec(path)
        raise
