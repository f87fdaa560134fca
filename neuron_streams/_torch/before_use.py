"""What torch asks of a device that has a name and no backend yet, and answers with an error.

A name alone makes `torch._C._get_accelerator` raise, and with it `torch.distributed.barrier` on the
host's tensors and `torch.get_device_module()`. So it is answered here until the first use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["register"]


def register(lazy_call: Callable[[Callable[[], object]], object]) -> None:
    """Have torch's question about the accelerator answered until the first use. Starts nothing.

    Args:
        lazy_call: calls a function at the first use of the device.
    """
    asked = getattr(torch._C, "_get_accelerator", None)
    if asked is None:
        return

    def _get_accelerator(check: bool | None = None) -> torch.device:
        return torch.device("neuron")

    torch._C._get_accelerator = _get_accelerator
    lazy_call(lambda: setattr(torch._C, "_get_accelerator", asked))
