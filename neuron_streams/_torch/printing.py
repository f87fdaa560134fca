"""What a device tensor shows of itself where the host does not reach its memory.

torch computes on the device to lay numbers out, and nothing computes there; the numbers are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import _tensor_str as printing

__all__ = ["register"]


def register(reaches_memory: Callable[[], bool]) -> None:
    """Have such a tensor be copied to the host to be shown. Host: returns at once."""
    numbers = printing._tensor_str
    if hasattr(numbers, "__wrapped__"):
        return

    @functools.wraps(numbers)
    def _tensor_str(self: torch.Tensor, indent: int) -> Any:
        if self.device.type == "neuron" and not reaches_memory():
            self = self.cpu()
        return numbers(self, indent)  # type: ignore[no-untyped-call]

    printing._tensor_str = _tensor_str
