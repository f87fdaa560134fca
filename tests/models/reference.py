"""A compiler that compiles nothing: the module, on CPU tensors, with an executable's checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn


def compile_eager(
    fn: nn.Module,
    example_inputs: Mapping[str, Tensor],
    /,
    *,
    mutates: Sequence[str] = (),
    name: str | None = None,
) -> Callable[..., Tensor]:
    """As `neuron_streams.compile`; also checks that what is not in `mutates` stays as it is."""
    names = tuple(example_inputs)

    def run(*inputs: Tensor) -> Tensor:
        for key, given, example in zip(names, inputs, example_inputs.values(), strict=True):
            assert given.shape == example.shape, f"{name}: {key} is of shape {given.shape}"
            assert given.dtype == example.dtype, f"{name}: {key} is of type {given.dtype}"
        kept = {key: given.clone() for key, given in zip(names, inputs, strict=True)}
        with torch.inference_mode():
            result: Tensor = fn(*inputs)
        for key, given in zip(names, inputs, strict=True):
            assert key in mutates or torch.equal(given, kept[key]), f"{name} changed {key}"
        assert not any(result.data_ptr() == given.data_ptr() for given in inputs)
        return result

    return run
