"""The C++ extension: lanes, memory and commands, and the device that torch sees.

Compiled once, at first use, and kept in the cache by its sources, torch, Python, the compiler and
its flags. Its sources are the native worker here (worker/*.c, native.c) and the backend beside it
(../_torch/csrc): one library, since each command passes through both.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from neuron_streams._runtime import cache, toolchain

__all__ = ["NoExtensionError", "begin_exit", "build", "load"]

log = logging.getLogger(__name__)

_NAME = "_neuron"
_HERE = Path(__file__).parent
_BACKEND = _HERE.parent / "_torch" / "csrc"
# Files compiled as one, so that the headers of torch, which take most of the time, are read once
# for each group; the groups take about as long as each other.
_GROUPS = (
    ("window", "copy", "shape", "operator", "autocast", "random", "execute"),
    ("buffer", "command", "native", "stream", "guard", "engine", "foreign", "python"),
)
_CXX = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden")
_C = ("-x", "c", "-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread")


class NoExtensionError(RuntimeError):
    """The extension is neither in the cache nor can it be compiled here."""


_loading = threading.Lock()
_loaded: Any = None


def load() -> Any:
    """The extension module, compiled at first use. Host: waits for the compiler, some 15 seconds.

    Where the cache cannot be used it is compiled for this process alone, each time.

    Raises:
        NoExtensionError: there is no C++ compiler, or it fails; the message says what to do.
    """
    global _loaded
    if _loaded is None:
        with _loading:
            if _loaded is None:
                try:
                    path = build()
                except cache.CacheError as error:
                    path = _build_for_this_process(error)
                _loaded = _imported(path)
    return _loaded


def begin_exit() -> None:
    """Have daemon threads that come back from a wait sleep on: the process ends."""
    if _loaded is not None:
        _loaded.begin_exit([x.ident for x in threading.enumerate() if x.daemon])


def build() -> Path:
    """Compile the extension unless it is in the cache, and return its path."""
    compiler = toolchain.cxx_compiler()
    key = _key(compiler)
    name = f"{_NAME}.so"
    found = cache.find("extension", key, name, toolchain.loads)
    if found is not None:
        return found
    if compiler is None:
        raise NoExtensionError(
            "neuron_streams needs a C++ compiler at its first use, as torch.compile does on a CPU, "
            "and there is none. Install one (Debian: apt-get install g++; Amazon Linux: dnf install "
            "gcc-c++), set CXX, or set NEURON_STREAMS_CACHE to a folder that `neuron-streams build` "
            "has filled on a machine with the same Python, torch and processor."
        )
    try:
        return cache.keep(
            "extension", key, name, functools.partial(_compile_kept, compiler), toolchain.loads
        )
    except RuntimeError as error:
        raise NoExtensionError(
            f"The extension of neuron_streams does not compile. {error}"
        ) from error


def _build_for_this_process(reason: cache.CacheError) -> Path:
    """Compile the extension outside of the cache, in a folder that no other user may write."""
    compiler = toolchain.cxx_compiler()
    if compiler is None:
        raise NoExtensionError(f"{reason} There is no C++ compiler either.") from reason
    log.warning("neuron_streams is compiled for this process alone: %s", reason)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{_NAME}-", dir=_executable_folder()))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        target = folder / f"{_NAME}.so"
        _compile(compiler, folder, target)
    except (OSError, RuntimeError) as error:
        raise NoExtensionError(f"{reason} Nor can it be compiled without: {error}") from error
    return target


def _executable_folder() -> str | None:
    """A folder for temporary files whose file system runs code; None for the default one."""
    for folder in (tempfile.gettempdir(), "/var/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            cache.refuse_noexec(Path(folder))
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    return None


def _compile_kept(compiler: tuple[str, ...], target: Path) -> None:
    with cache.scratch() as folder:
        _compile(compiler, folder, target)


def _key(compiler: tuple[str, ...] | None) -> str:
    """What the extension depends on. Without a compiler any in the cache that fits will do."""
    parts = [torch.__version__, sys.version, toolchain.machine(), *_CXX, *_C]
    texts = [path.read_bytes() for path in _sources()]
    return hashlib.sha256(b"\0".join([*(part.encode() for part in parts), *texts])).hexdigest()


def _sources() -> list[Path]:
    folders = (_HERE / "worker", _BACKEND)
    found = [path for folder in folders for path in folder.iterdir() if path.suffix in _SUFFIXES]
    return sorted([*found, _HERE / "native.c"])


_SUFFIXES = (".c", ".h", ".cpp")


def _includes() -> list[str]:
    root = Path(torch.__file__).parent / "include"
    folders = (root, root / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    return [f"-I{folder}" for folder in folders]


def _compile(compiler: tuple[str, ...], folder: Path, target: Path) -> None:
    with _progress("compiling neuron_streams, once"):
        jobs: list[tuple[list[str], Path]] = []
        for number, group in enumerate(_GROUPS):
            whole = folder / f"group{number}.cpp"
            whole.write_text("".join(f'#include "{_BACKEND / name}.cpp"\n' for name in group))
            made = folder / f"group{number}.o"
            jobs.append(([*compiler, *_CXX, *_includes(), "-c", str(whole), "-o", str(made)], made))
        for source in (*sorted((_HERE / "worker").glob("*.c")), _HERE / "native.c"):
            made = folder / f"{source.stem}.o"
            jobs.append(([*compiler, *_C, "-c", str(source), "-o", str(made)], made))
        _run_all(jobs)
        libraries = Path(torch.__file__).parent / "lib"
        link = [*compiler, "-shared", "-pthread", *(str(made) for _, made in jobs)]
        link += [f"-L{libraries}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
        toolchain.run([*link, f"-Wl,-rpath,{libraries}", "-o", str(target)], target)


def _run_all(jobs: Sequence[tuple[list[str], Path]]) -> None:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        waiting = [pool.submit(toolchain.run, command, made) for command, made in jobs]
        try:
            for done in concurrent.futures.as_completed(waiting):
                done.result()
        except BaseException:
            for job in waiting:
                job.cancel()
            toolchain.stop()
            raise


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """Say on a terminal what takes so long; in a log otherwise."""
    log.info("%s", what)
    shown = sys.stderr is not None and sys.stderr.isatty()
    if shown:
        print(f"{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _imported(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
