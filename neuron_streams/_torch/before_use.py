"""What torch asks of a device that has a name and no backend yet, and answers with an error.

A name alone makes `torch._C._get_accelerator` raise, and with it `torch.distributed.barrier` on the
host's tensors and `torch.get_device_module()`. So it is answered here until the first use.

Pinning memory asks C++ alone, too, and a data loader of a host-only program does so where there is
an accelerator. It is the first use: the backend is begun, and then asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["register"]

LazyCall: TypeAlias = "Callable[[Callable[[], object]], object]"


def register(lazy_call: LazyCall, begin: Callable[[], object]) -> None:
    """Have torch's questions about the accelerator answered until the first use. Starts nothing.

    Args:
        lazy_call: calls a function at the first use of the device.
        begin: is the first use, where none has been.
    """
    _begin_at(torch.Tensor, "pin_memory", lazy_call, begin)  # storages and data loaders call it
    asked = getattr(torch._C, "_get_accelerator", None)
    if asked is None:
        return

    def _get_accelerator(check: bool | None = None) -> torch.device:
        return torch.device("neuron")

    torch._C._get_accelerator = _get_accelerator
    lazy_call(lambda: setattr(torch._C, "_get_accelerator", asked))


def _begin_at(owner: Any, name: str, lazy_call: LazyCall, begin: Callable[[], object]) -> None:
    """Put a function that begins the backend before `owner.name`, and take it away at the begin."""
    inherited, asked = name not in vars(owner), getattr(owner, name)

    @functools.wraps(asked)
    def first(*args: Any, **kwargs: Any) -> Any:
        begin()
        return asked(*args, **kwargs)

    def restore() -> None:
        if vars(owner).get(name) is first:  # else another has put something before it
            delattr(owner, name) if inherited else setattr(owner, name, asked)

    setattr(owner, name, first)
    lazy_call(restore)
