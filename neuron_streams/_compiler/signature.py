"""What an executable promises: its name, its inputs and outputs, what it updates in place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from neuron_streams._runtime.program import Layout, contiguous

__all__ = ["Signature", "TensorSpec", "input_names", "output_names"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype, shape and strides (in elements; always contiguous) of an input or output."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}: {describe(self.dtype, self.shape)}"


@dataclass(frozen=True, slots=True)
class Signature:
    """The promise of an executable; `structure` is how the function returns its results."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    mutates: tuple[str, ...]
    structure: pytree.TreeSpec


def describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """`int32[4, 2]`: a dtype and a shape in few characters."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def input_names(
    function: Callable[..., Any],
    examples: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
) -> tuple[str, ...]:
    """The names of the inputs: the keys of the examples, or the parameters of the function."""
    if isinstance(examples, Mapping):
        return tuple(examples)
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in positional]
    rest = range(len(names), len(examples))
    return (*names[: len(examples)], *(f"input_{number}" for number in rest))


def output_names(structure: pytree.TreeSpec) -> tuple[str, ...]:
    """`output`, `output_0`, ..., or the keys of a dictionary, joined by dots where nested."""
    dummy = pytree.tree_unflatten([0] * structure.num_leaves, structure)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(dummy)[0]]
    words = [".".join(re.findall(r"\w+", path)) for path in paths]
    return tuple(f"output_{word}" if word[:1].isdigit() else word or "output" for word in words)


def spec_of(name: str, layout: Layout | torch.Tensor) -> TensorSpec:
    """The promise that a tensor has this dtype and size and is contiguous."""
    size = tuple(layout.size() if isinstance(layout, torch.Tensor) else layout.size)
    return TensorSpec(name, layout.dtype, size, contiguous(size))
