"""What torch asks of an accelerator before its first use, and has no answer to without a backend.

`torch._C._get_accelerator` raises as soon as the device has a name, until C++ has registered the
rest: with it would fail programs that stay on the host, at `init_process_group` and `barrier`. So
it is answered here from the import to the first use, which gives torch its own function back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register"]

_GROUPS = "torch.distributed.distributed_c10d"


def register(lazy_call: Callable[[Callable[[], object]], object]) -> None:
    """Have the question answered until the first use. Host: returns at once, starts nothing.

    Args:
        lazy_call: calls a function at the first use of the device.
    """
    asked = torch._C._get_accelerator

    @functools.wraps(asked)
    def _get_accelerator(*args: Any) -> torch.device:
        # A process group serves the host until then, and from then on the device, too.
        on_host = sys._getframe(1).f_globals.get("__name__") == _GROUPS
        return torch.device("cpu" if on_host else "neuron")

    torch._C._get_accelerator = _get_accelerator  # type: ignore[assignment]
    lazy_call(lambda: setattr(torch._C, "_get_accelerator", asked))
