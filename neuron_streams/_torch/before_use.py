"""What torch asks of a device before its first use, and answers with an error without a C++ backend.

The answers start nothing, as those of torch.cuda.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register"]


def register(lazy_call: Callable[[Callable[[], object]], object]) -> None:
    """Have torch's questions about the accelerator answered until the first use.

    Args:
        lazy_call: calls a function at the first use of the device.
    """
    asked = getattr(torch._C, "_get_accelerator", None)
    if asked is None:
        return

    @functools.wraps(asked)
    def _get_accelerator(*args: Any) -> torch.device:
        return torch.device("neuron")

    torch._C._get_accelerator = _get_accelerator
    lazy_call(lambda: setattr(torch._C, "_get_accelerator", asked))
