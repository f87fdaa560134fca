"""Compilers, and the folder where what they made is kept.

Everything built is kept by a key that says what went into it, is put in place by one rename and
is checked against its digest when it is read, so that processes may race and a damaged file is
noticed. `NEURON_STREAMS_CACHE` names the folder, `CC` and `CXX` the compilers, and
`NEURON_STREAMS_COMPILER=none` pretends that there are none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import getpass
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no lock, so two processes may build the same thing twice
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "c_compiler",
    "cache_folder",
    "cxx_compiler",
    "digest",
    "exclusive",
    "find",
    "keep",
    "machine",
    "native",
    "run",
]

log = logging.getLogger(__name__)


def c_compiler() -> str | None:
    """The path of a C compiler, None where there is none."""
    return _first("CC", "cc", "gcc", "clang")


def cxx_compiler() -> str | None:
    """The path of a C++ compiler, None where there is none."""
    return _first("CXX", "g++", "c++", "clang++")


def _first(variable: str, *names: str) -> str | None:
    if os.environ.get("NEURON_STREAMS_COMPILER") == "none":
        return None
    candidates = (os.environ.get(variable, ""), *names)
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def run(command: list[str]) -> None:
    """Run a compiler. Raises RuntimeError with its words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed ({done.returncode}): {done.stderr[-2000:]}")


def cache_folder() -> Path:
    """The folder of what was built, which may not be there yet.

    NEURON_STREAMS_CACHE, else one under the user's cache, else one for temporary files.
    """
    chosen = os.environ.get("NEURON_STREAMS_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "neuron_streams"
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(nearest, os.W_OK):
        return folder
    return Path(tempfile.gettempdir()) / f"neuron_streams-{getpass.getuser()}"


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"{folder} cannot be made ({error.strerror}). "
            "Name a folder that can be written in NEURON_STREAMS_CACHE."
        ) from error
    return folder


def digest(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find(kind: str, key: str, filename: str) -> Path | None:
    """What is kept under `key`, or None if nothing is or it is damaged."""
    path = cache_folder() / kind / key / filename
    try:
        if digest(path) == path.with_suffix(".sha256").read_text():
            return path
    except OSError:
        return None
    log.info("%s in the cache is damaged and is built again.", path)
    return None


def keep(kind: str, key: str, filename: str, build: Callable[[Path], None]) -> Path:
    """What is kept under `key`; if nothing is, `build(path)` makes it first."""
    found = find(kind, key, filename)
    if found is not None:
        return found
    folder = _made(cache_folder() / kind) / key
    fresh = Path(tempfile.mkdtemp(prefix=f".{key[:16]}-", dir=folder.parent))
    try:
        build(fresh / filename)
        (fresh / filename).with_suffix(".sha256").write_text(digest(fresh / filename))
        while not _settle(fresh, folder) and find(kind, key, filename) is None:
            _discard(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder / filename


def _settle(fresh: Path, folder: Path) -> bool:
    # A folder is never renamed onto a full one: another process was faster, or it is damaged.
    try:
        fresh.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _discard(folder: Path) -> None:
    doomed = Path(tempfile.mkdtemp(prefix=".old-", dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):
        folder.rename(doomed / "damaged")
    shutil.rmtree(doomed, ignore_errors=True)


@contextlib.contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Only one process at a time is inside; the others wait. Ends with the process, too."""
    with (_made(cache_folder()) / f"{name}.lock").open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


_TRAITS = "vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features"


@functools.cache
def machine() -> str:
    """What compiled code depends on in this processor, as a digest."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
        lines = [line for line in text.splitlines() if line.split("\t")[0].strip() in _TRAITS]
    except OSError:
        lines = [platform.processor()]
    return hashlib.sha256("\n".join([platform.machine(), *lines]).encode()).hexdigest()[:16]


@functools.cache
def native() -> ctypes.CDLL | None:
    """Our C library, compiled at first use: `native.c`, which runs programs, and the worker.

    None where there is no C compiler.
    """
    folder = Path(__file__).parent
    sources = [folder / "native.c", *sorted(folder.glob("worker/*.c"))]
    path = c_compiler()
    if path is None:
        return None
    texts = [file.read_bytes() for file in (*sources, folder / "worker" / "worker.h")]
    key = hashlib.sha256(b"".join(texts) + machine().encode()).hexdigest()
    flags = ["-std=c11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"]
    try:
        built = keep(
            "native",
            key,
            "native.so",
            lambda target: run([path, *flags, *map(str, sources), "-o", str(target)]),
        )
    except RuntimeError as error:
        log.info("Our C library does not compile here; Python takes its place. %s", error)
        return None
    return ctypes.CDLL(str(built))
