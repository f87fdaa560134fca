"""A graph of aten operators as an executable: for what a compiled library cannot do.

That is what AOTInductor has no C for, and what draws random numbers. The GIL is taken for every
operator, so the host and the device do not overlap well here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["DRAWS", "ExportedHandle"]

DRAWS = "draws"  # in the metadata of a graph module that takes a generator behind its inputs


class ExportedHandle:
    """An exported graph loaded on one device. Runs on the calling thread in inference mode."""

    def __init__(self, name: str, graph: Callable[..., Any]) -> None:
        self.name = name
        self.draws: bool = getattr(graph, "meta", {}).get(DRAWS, False)
        self._run = graph

    def run(
        self, inputs: Sequence[torch.Tensor], numbers: torch.Generator | None = None
    ) -> list[torch.Tensor]:
        """Run to the end and return fresh, contiguous outputs.

        Args:
            inputs: on the host.
            numbers: for the operators that draw, where there are any.
        """
        drawn = (numbers,) if self.draws else ()
        with torch.inference_mode():
            outputs = pytree.tree_leaves(self._run(*inputs, *drawn))
            taken = {tensor.untyped_storage()._cdata for tensor in inputs}
            return [_own(output, taken) for output in outputs]


def _own(output: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The output itself if nobody else has its memory and it is laid out as promised."""
    storage = output.untyped_storage()
    whole = output.is_contiguous() and storage.nbytes() == output.numel() * output.element_size()
    if whole and storage._cdata not in taken:
        taken.add(storage._cdata)
        return output
    return output.clone(memory_format=torch.contiguous_format)
