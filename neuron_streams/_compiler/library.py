"""Segments compiled to shared libraries, once for each content, and kept on disk.

Inductor writes the C++ in this process, one segment after the other; compilers turn it into
libraries beside it, as many at a time as there are processors. What Inductor writes comes in two
parts, a wrapper and its kernels. The wrapper is compiled against our `model.h` and without
optimising hard, which takes a fifth of the time; should that ever fail, all of it is compiled as
torch would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shlex
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from neuron_streams._compiler.plan import Plan
from neuron_streams._compiler.saved import Layouts, layouts_text
from neuron_streams._compiler.segment import Segment
from neuron_streams._runtime import cache, toolchain
from neuron_streams._runtime.program import Layout, Library, Program, Run

__all__ = ["UnsupportedOperatorError", "libraries", "program"]

log = logging.getLogger(__name__)

_FORMAT = 2
_KIND, _FILE = "executables", "library.so"
_MODEL = Path(__file__).with_name("model.h")
_KERNEL_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
_INTERFACE = "// Definition of AOTI runtime interface functions"


class UnsupportedOperatorError(Exception):
    """An operator that AOTInductor can run from Python only; never reaches the user."""


def libraries(segments: Sequence[Segment]) -> list[Library]:
    """A library for each segment; those of equal content are the same file.

    Host: waits, for seconds for each one that the cache does not have.
    """
    keys = [_key(segment) for segment in segments]
    found = {key: _find(key) for key in dict.fromkeys(keys)}
    missing = {k: s for k, s in zip(keys, segments, strict=True) if found[k] is None}
    if missing:
        with cache.exclusive("compile"):
            found.update(_build(missing))
    paths = [path for key in keys if (path := found[key]) is not None]
    return [Library(path, s.outputs) for path, s in zip(paths, segments, strict=True)]


def program(name: str, plan: Plan) -> Program:
    """The program of a plan, each distinct library once. Host: waits for the compilers."""
    made = libraries(plan.segments)
    distinct = list({library.path: library for library in made}.values())
    place = [[d.path for d in distinct].index(library.path) for library in made]
    steps = tuple(
        dataclasses.replace(step, library=place[step.library]) if isinstance(step, Run) else step
        for step in plan.steps
    )
    return Program(name, plan.inputs, plan.weights, tuple(distinct), steps, plan.results)


def _find(key: str) -> Path | None:
    return cache.find(_KIND, key, _FILE, toolchain.loads)


def _key(segment: Segment) -> str:
    """A digest of all that a library depends on."""
    prefixes = ("TORCHINDUCTOR_", "AOT_INDUCTOR_", "CXX")
    settings = sorted(item for item in os.environ.items() if item[0].startswith(prefixes))
    parts = [_FORMAT, torch.__version__, torch.get_num_threads(), toolchain.machine(), settings]
    text = repr(parts) + _MODEL.read_text() + _canonical(segment.graph)
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(graph: fx.Graph) -> str:
    """The graph as text that says what it computes and no names."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}

    def spell(value: Any) -> Any:
        return fx.node.map_arg(value, lambda node: _Number(f"%{numbers[node]}"))

    lines = []
    for node in graph.nodes:
        made = node.meta.get("val") if node.op == "placeholder" else None
        form = "" if made is None else (made.dtype, tuple(made.size()), made.stride())
        target = "" if node.op == "placeholder" else str(node.target)
        lines.append(f"{node.op} {target} {spell(node.args)} {spell(node.kwargs)} {form}")
    return "\n".join(lines)


class _Number(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _build(missing: dict[str, Segment]) -> dict[str, Path]:
    """Build what another process has not built meanwhile."""
    started, jobs = time.perf_counter(), dict[str, Future[Path]]()
    found: dict[str, Path] = {}
    headers: dict[str, Future[Path]] = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        try:
            for number, (key, segment) in enumerate(missing.items(), 1):
                path = _find(key)
                if path is not None:
                    found[key] = path
                    continue
                log.info("compiling part %d of %d", number, len(missing))
                source = _generate(segment)
                for name in () if headers else _HEADERS:
                    headers[name] = toolchain.submitted(pool, _header, name, source.compile)
                jobs[key] = toolchain.submitted(pool, _assemble, key, source, headers)
            found.update((key, job.result()) for key, job in jobs.items())
        except (KeyboardInterrupt, SystemExit):
            pool.shutdown(wait=False, cancel_futures=True)
            toolchain.stop()
            raise
    log.info("compiled %d parts in %.1f s", len(jobs), time.perf_counter() - started)
    return found


@dataclass(frozen=True, slots=True)
class _Source:
    """What Inductor wrote for a segment, and how it wants it compiled and linked."""

    text: str
    compile: tuple[str, ...]
    link: tuple[str, ...]
    constants_suffix: str
    constants: str


def _generate(segment: Segment) -> _Source:
    import torch._inductor

    module = fx.GraphModule({}, segment.graph)
    inputs = [node.meta["val"] for node in segment.graph.find_nodes(op="placeholder")]
    with _plain_folder() as folder:
        with _inductor_settings(folder):
            own = {"aot_inductor.output_path": folder, "cpp.cxx": (_stand_in(folder),)}
            options = {**_OPTIONS, **own}
            files = torch._inductor.aot_compile(module, tuple(inputs), options=options)
        assert isinstance(files, list)
        paths = [Path(str(file)) for file in files]
        by_end = {path.name.partition(".wrapper")[2] or path.suffix: path for path in paths}
        if ".json" in by_end:
            raise UnsupportedOperatorError(_first_operator(by_end[".json"]))
        made = by_end[".o"]
        (constants,) = made.parent.glob(f"{made.name}.*")
        return _Source(
            by_end[".cpp"].read_text() + layouts_text(_layouts(segment)),
            _flags(by_end["_compile_flags.json"]),
            _flags(by_end["_linker_flags.json"]),
            constants.suffix,
            constants.read_text(),
        )


_OPTIONS = {
    "aot_inductor.package": True,
    "aot_inductor.package_cpp_only": True,
    "aot_inductor.precompile_headers": False,
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.enable_frame_pointer": False,
    "cpp.vec_isa_ok": True,  # else it compiles a program to see whether the processor can AVX
}


def _layouts(segment: Segment) -> Layouts:
    values = [node.meta["val"] for node in segment.graph.find_nodes(op="placeholder")]
    inputs = [Layout(value.dtype, tuple(value.size()), value.stride()) for value in values]
    return Layouts(tuple(inputs), segment.outputs)


# Inductor takes no arguments with its compiler, runs it without a bound and knows it by its path.
_STAND_IN = """#!/bin/sh
case $1 in
--version) printf '%s\\n' {version}; exit ;;
-dump*) printf '%s\\n' {number}; exit ;;
esac
for word; do
    case $word in *.S | *.s | *.cpp) source=$word ;; esac
    [ "$last" = -o ] && target=$word
    last=$word
done
while IFS= read -r line; do printf '%s\\n' "$line"; done <"$source" >"$target.${{source##*.}}"
: >"$target"
"""


def _stand_in(folder: str) -> str:
    """A program that says what the compiler says of itself, and keeps what it is to compile."""
    gcc = toolchain.is_gcc(_cxx())
    version = toolchain.run([*_cxx(), "--version"])
    number = toolchain.run([*_cxx(), "-dumpfullversion", "-dumpversion"]) if gcc else ""
    script = Path(folder) / ("g++" if gcc else "clang++")
    text = _STAND_IN.format(version=shlex.quote(version), number=shlex.quote(number))
    script.write_text(text, encoding="utf-8")
    script.chmod(0o700)
    return str(script)


@contextlib.contextmanager
def _plain_folder() -> Iterator[str]:
    """A folder for what Inductor writes, which puts its path into commands without quotes."""
    with cache.scratch() as own, contextlib.ExitStack() as stack:
        if _is_plain(str(own)):
            yield str(own)
        else:
            parent = tempfile.gettempdir()
            parent = parent if _is_plain(parent) else "/tmp"
            yield stack.enter_context(tempfile.TemporaryDirectory(dir=parent))


def _is_plain(path: str) -> bool:
    return shlex.quote(path) == path and "clang" not in path


@contextlib.contextmanager
def _inductor_settings(folder: str) -> Iterator[None]:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own internals
            yield
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def _first_operator(path: Path) -> str:
    nodes = json.loads(path.read_text()).get("nodes") or [{}]
    return str(nodes[0].get("node", nodes[0]).get("target", "an operator"))


def _flags(path: Path) -> tuple[str, ...]:
    """The flags that Inductor saved, without warnings and levels of optimisation."""
    saved = json.loads(path.read_text())
    plain = [flag for flag in saved["cflags"] if not flag.startswith(("W", "O", "pedantic", "g"))]
    return (
        *(f"-D{name.strip()}" for name in saved["definitions"]),
        *(f"-{flag}" for flag in (*plain, *saved["ldflags"])),
        *(f"-I{folder}" for folder in saved["include_dirs"]),
        *(f"-L{folder}" for folder in saved["libraries_dirs"]),
        *(flag for flags in saved["passthrough_args"] for flag in flags.split()),
        *(f"-l{name}" for name in saved["libraries"]),
        "-w",
    )


def _assemble(key: str, source: _Source, headers: dict[str, Future[Path]]) -> Path:
    def build(target: Path) -> None:
        try:
            _compile_split(source, target, {n: h.result() for n, h in headers.items()})
        except toolchain.StuckError:
            raise
        except (RuntimeError, ValueError) as error:
            log.info("compiling as torch does, since the short way failed: %s", error)
            _compile_whole(source, target)

    return cache.keep(_KIND, key, _FILE, build, toolchain.loads)


def _compile_split(source: _Source, target: Path, headers: dict[str, Path]) -> None:
    wrapper, kernels = _split(source.text)
    objects = []
    for name, text in (("wrapper", wrapper), ("kernels", kernels)):
        file = target.with_name(f"{name}.cpp")
        file.write_text(text)
        objects.append(file.with_suffix(".o"))
        command = [*_cxx(), _HEADERS[name], *source.compile, "-include", str(headers[name])]
        toolchain.run([*command, "-c", str(file), "-o", str(objects[-1])], objects[-1])
        file.unlink()
    _link(source, objects, target)


def _split(text: str) -> tuple[str, str]:
    """The wrapper without the interface that model.h has, and the kernels.

    Raises ValueError if the text is not as this torch is known to write it.
    """
    start = text.index(_INTERFACE)
    end = text.index('\n} // extern "C"\n', start) + len('\n} // extern "C"\n')
    middle = text.find(_KERNEL_HEADER)
    if middle < 0:
        middle = len(text)
    return text[end:middle], text[middle:]


def _compile_whole(source: _Source, target: Path) -> None:
    objects = []
    for name, text in (
        ("whole.cpp", source.text),
        (f"constants{source.constants_suffix}", source.constants),
    ):
        file = target.with_name(name)
        file.write_text(text)
        objects.append(file.with_suffix(".o"))
        command = [*_cxx(), "-O2", *source.compile, "-c", str(file), "-o", str(objects[-1])]
        toolchain.run(command, objects[-1])
        file.unlink()
    _link(source, objects, target)


def _link(source: _Source, objects: Sequence[Path], target: Path) -> None:
    command = [*_cxx(), *map(str, objects), "-shared", "-o", str(target), *source.link]
    toolchain.run(command, target)
    for file in objects:
        file.unlink()


def _cxx() -> tuple[str, ...]:
    command = toolchain.cxx_compiler()
    if command is None:
        raise RuntimeError(
            "there is no C++ compiler, and the cache has not what is to be compiled. Install g++, "
            "set CXX, or set NEURON_STREAMS_CACHE to a folder that was filled elsewhere."
        )
    return command


# The headers that the parts of a library begin with, and how hard each part is optimised.
_HEADERS = {"wrapper": "-O1", "kernels": "-O3"}


def _header(name: str, flags: Sequence[str]) -> Path:
    """The header of a part of a library, compiled ahead where the compiler is gcc."""
    text = _MODEL.read_text() if name == "wrapper" else _KERNEL_HEADER + "\n"
    command = [*_cxx(), _HEADERS[name], *flags]
    parts = [text, toolchain.machine(), torch.__version__, *command]

    def build(target: Path) -> None:
        target.write_text(text)
        if toolchain.is_gcc(_cxx()):
            ahead = target.with_suffix(".h.gch")
            toolchain.run([*command, "-x", "c++-header", str(target), "-o", str(ahead)], ahead)

    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache.keep("precompiled", key, f"{name}.h", build)
