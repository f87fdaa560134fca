"""A compiled program: a chain of AOTInductor libraries over numbered values.

The Python runner of AOTInductor holds the GIL for the whole call; its C ABI, called by ctypes,
does not. So a program is data: libraries, weights, and steps that say which values a library
takes and makes. Values are numbered: the inputs, then the weights, then what the steps make.
Weights are inputs like any other to a library, which is how all programs of a model share them
and how thirty layers share one library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .port import Handle, Payload

__all__ = ["Layout", "Library", "Program", "Run", "Slice", "contiguous", "load_on_cpu", "words"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Dtype, sizes and strides (in elements) of a tensor that begins where its storage does."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library with AOTInductor's C ABI, and the outputs it was promised to make."""

    path: Path
    outputs: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Run a library on values, making values."""

    library: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Make a value that is a strided window on another; `offset` counts from its first element."""

    source: int
    target: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Program:
    """The content of a payload of format `"program"`."""

    name: str
    inputs: tuple[Layout, ...] = field(repr=False)
    weights: tuple[torch.Tensor, ...] = field(repr=False)
    libraries: tuple[Library, ...] = field(repr=False)
    steps: tuple[Run | Slice, ...] = field(repr=False)
    results: tuple[int, ...]

    @property
    def value_count(self) -> int:
        made = [v for step in self.steps for v in _made(step)]
        return max([len(self.inputs) + len(self.weights) - 1, *made]) + 1


def contiguous(size: Iterable[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this size."""
    strides, step = [], 1
    for length in reversed(tuple(size)):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def words(program: Program) -> Iterator[list[int]]:
    """The steps as chain.c reads them, each value moved or dropped at its last use."""
    for step, doomed in zip(program.steps, _doomed(program), strict=True):
        if isinstance(step, Slice):
            yield [1, step.source, step.target, len(step.size), *step.size, *step.stride]
            yield [step.offset]
        else:
            taken = [~v if v in doomed and step.inputs.count(v) == 1 else v for v in step.inputs]
            outputs = program.libraries[step.library].outputs
            made = zip(step.outputs, outputs, strict=True)
            yield [0, step.library, len(taken), *taken, len(outputs)]
            yield from ([v, len(o.size), *o.size, *o.stride] for v, o in made)
            doomed = [v for v in doomed if ~v not in taken]
        yield from ([2, value] for value in doomed)


def _doomed(program: Program) -> list[list[int]]:
    """For each step, the values that nothing needs after it; weights and results stay."""
    kept = set(range(len(program.inputs), len(program.inputs) + len(program.weights)))
    seen = kept.union(program.results)
    doomed: list[list[int]] = []
    for step in reversed(program.steps):
        last = dict.fromkeys(v for v in (*_taken(step), *_made(step)) if v not in seen)
        seen.update(last)
        doomed.append(list(last))
    return doomed[::-1]


def _taken(step: Run | Slice) -> tuple[int, ...]:
    return step.inputs if isinstance(step, Run) else (step.source,)


def _made(step: Run | Slice) -> tuple[int, ...]:
    return step.outputs if isinstance(step, Run) else (step.target,)


def load_on_cpu(payload: Payload, device: int) -> Handle:
    """Load a payload where the CPU plays the device. Raises ValueError for a foreign format."""
    if payload.format == "program":
        from .chain import ProgramHandle

        return ProgramHandle(payload.content)
    if payload.format == "exported":
        from .exported import ExportedHandle

        return ExportedHandle(payload.name, payload.content)
    raise ValueError(
        f"{payload.name}: the CPU cannot run the payload format {payload.format!r} on device "
        f"{device}. Compile with target=None, or run it with NEURON_STREAMS_RUNTIME=nrt."
    )
