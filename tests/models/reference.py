"""A compiler that compiles nothing: the module, on CPU tensors, with an executable's checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def compile_eager(
    fn: nn.Module,
    example_inputs: Mapping[str, Tensor],
    /,
    *,
    mutates: Sequence[str] = (),
    name: str | None = None,
) -> Callable[..., Any]:
    """As `neuron_streams.compile`; also checks that what is not in `mutates` stays as it is."""
    names = tuple(example_inputs)

    def run(*inputs: Tensor) -> Any:
        for key, given, example in zip(names, inputs, example_inputs.values(), strict=True):
            assert given.shape == example.shape, f"{name}: {key} is of shape {given.shape}"
            assert given.dtype == example.dtype, f"{name}: {key} is of type {given.dtype}"
        kept = {key: given.clone() for key, given in zip(names, inputs, strict=True)}
        with torch.inference_mode():
            result = fn(**dict(zip(names, inputs, strict=True)))
        for key, given in zip(names, inputs, strict=True):
            assert key in mutates or torch.equal(given, kept[key]), f"{name} changed {key}"
        for made in pytree.tree_leaves(result):
            assert not any(made.data_ptr() == given.data_ptr() for given in inputs)
        return result

    return run
