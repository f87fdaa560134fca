"""The C++ extension: lanes, memory and commands, and the device that torch sees.

Compiled once, at first use, and kept in the cache by its sources, torch, Python, the compiler and
its flags. Its sources are the native worker here (worker/*.c, chain.c) and the backend beside it
(../_torch/csrc): one library, since each command passes through both. The backend of process groups
(../_torch/c10d) is another, since few programs need it.
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
from typing import Any, NamedTuple

import torch

from neuron_streams._runtime import cache, toolchain

__all__ = [
    "EXTENSION",
    "PROCESS_GROUP",
    "Library",
    "NoExtensionError",
    "begin_exit",
    "build",
    "load",
]

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_BACKEND = _HERE.parent / "_torch"


class Library(NamedTuple):
    """A module of Python to compile.

    Each of `groups` is compiled as one file, so that the headers of torch, which take most of the
    time, are read once for each; the groups take about as long as each other.
    """

    name: str
    folder: Path
    groups: tuple[tuple[str, ...], ...]
    others: tuple[Path, ...]  # in C, and headers of other folders

    @property
    def sources(self) -> list[Path]:
        found = [path for path in self.folder.iterdir() if path.suffix in (".h", ".cpp")]
        return sorted([*found, *self.others])


EXTENSION = Library(
    "_neuron",
    _BACKEND / "csrc",
    (
        (
            "window",
            "copy",
            "staging",
            "shape",
            "operator",
            "autocast",
            "attention",
            "recurrent",
            "random",
            "execute",
            "collective",
        ),
        ("buffer", "command", "native", "stream", "guard", "engine", "exit", "foreign", "python"),
    ),
    (*sorted((_HERE / "worker").glob("*.[ch]")), _HERE / "chain.c"),
)
PROCESS_GROUP = Library(
    "_neuron_c10d",
    _BACKEND / "c10d",
    (("group",),),
    (_BACKEND / "csrc" / "collective.h",),
)
_CXX = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden")
_C = ("-x", "c", "-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread")


class NoExtensionError(RuntimeError):
    """The extension is neither in the cache nor can it be compiled here."""


_loading = threading.Lock()
_loaded: dict[str, Any] = {}


def _after_fork() -> None:
    global _loading
    _loading = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_after_fork)


def load(library: Library = EXTENSION) -> Any:
    """A library as a module, compiled at first use. Host: waits for the compiler, some 15 seconds.

    Where the cache cannot be used it is compiled for this process alone, each time.

    Raises:
        NoExtensionError: there is no C++ compiler, or it fails; the message says what to do.
    """
    if library.name not in _loaded:
        with _loading:
            if library.name not in _loaded:
                try:
                    path = build(library)
                except cache.CacheError as error:
                    path = _build_for_this_process(library, error)
                _loaded[library.name] = _imported(library, path)
    return _loaded[library.name]


def begin_exit() -> None:
    """Have threads that use the device, or come back from it, sleep: the process ends."""
    if EXTENSION.name in _loaded:
        threads = [thread.native_id for thread in threading.enumerate()]
        _loaded[EXTENSION.name].begin_exit([number for number in threads if number is not None])


def build(library: Library = EXTENSION) -> Path:
    """Compile a library unless it is in the cache, and return its path."""
    compiler = toolchain.cxx_compiler()
    key = _key(library)
    name = f"{library.name}.so"
    found = cache.find("extension", key, name, toolchain.loads)
    if found is not None:
        return found
    if compiler is None:
        raise NoExtensionError(
            "neuron_streams needs a C++ compiler at its first use, as torch.compile does on a "
            "CPU, and there is none. Install one (Debian: apt-get install g++; Amazon Linux: dnf "
            "install gcc-c++), set CXX, or set NEURON_STREAMS_CACHE to a folder that "
            "`neuron-streams build` has filled on a machine with the same Python, torch and "
            "processor."
        )
    try:
        compiling = functools.partial(_compile_kept, library, compiler)
        return cache.keep("extension", key, name, compiling, toolchain.loads)
    except RuntimeError as error:
        raise NoExtensionError(
            f"The extension of neuron_streams does not compile. {error}"
        ) from error


def _build_for_this_process(library: Library, reason: cache.CacheError) -> Path:
    """Compile a library outside of the cache, in a folder that no other user may write."""
    compiler = toolchain.cxx_compiler()
    if compiler is None:
        raise NoExtensionError(f"{reason} There is no C++ compiler either.") from reason
    log.warning("neuron_streams is compiled for this process alone: %s", reason)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{library.name}-", dir=_executable_folder()))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        target = folder / f"{library.name}.so"
        _compile(library, compiler, folder, target)
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


def _compile_kept(library: Library, compiler: tuple[str, ...], target: Path) -> None:
    with cache.scratch() as folder:
        _compile(library, compiler, folder, target)


def _key(library: Library) -> str:
    """What a library depends on. Without a compiler any in the cache that fits will do."""
    parts = [torch.__version__, sys.version, toolchain.machine(), *_CXX, *_C]
    texts = [path.read_bytes() for path in library.sources]
    return hashlib.sha256(b"\0".join([*(part.encode() for part in parts), *texts])).hexdigest()


def _includes() -> list[str]:
    root = Path(torch.__file__).parent / "include"
    folders = (root, root / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    return [f"-I{folder}" for folder in folders]


def _compile(library: Library, compiler: tuple[str, ...], folder: Path, target: Path) -> None:
    with _progress("compiling neuron_streams, once"):
        jobs: list[tuple[list[str], Path]] = []
        for number, group in enumerate(library.groups):
            whole = folder / f"group{number}.cpp"
            whole.write_text("".join(f'#include "{library.folder / name}.cpp"\n' for name in group))
            made = folder / f"group{number}.o"
            jobs.append(([*compiler, *_CXX, *_includes(), "-c", str(whole), "-o", str(made)], made))
        for source in (path for path in library.others if path.suffix == ".c"):
            made = folder / f"{source.stem}.o"
            jobs.append(([*compiler, *_C, "-c", str(source), "-o", str(made)], made))
        _run_all(jobs)
        libraries = Path(torch.__file__).parent / "lib"
        link = [*compiler, "-shared", "-pthread", *(str(made) for _, made in jobs)]
        link += [f"-L{libraries}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
        toolchain.run([*link, f"-Wl,-rpath,{libraries}", "-o", str(target)], target)


def _run_all(jobs: Sequence[tuple[list[str], Path]]) -> None:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        waiting = [
            toolchain.submitted(pool, toolchain.run, command, made) for command, made in jobs
        ]
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
        sys.stderr.write(f"{what} ...")
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _imported(library: Library, path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(library.name, str(path))
    spec = importlib.util.spec_from_file_location(library.name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
