"""DLPack of device tensors, between libraries of one process.

torch compares the device with "privateuse1", a name that no device has once the backend has its own
name; the exchange below knows the device (kDLExtDev).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import DLDeviceType

__all__ = ["register"]


def register(
    reaches_memory: Callable[[], bool], note_shared: Callable[[torch.Tensor], object]
) -> None:
    """Have a device tensor say where it is, or that no address of it can be given away.

    Args:
        note_shared: has a read of the tensor on the host wait for all that its device has, since
            other tensors over its memory have writers of their own.
        reaches_memory: whether the host does, directly, and so another library of this process.

    Host: returns at once.
    """
    asked = torch.Tensor.__dlpack_device__

    @functools.wraps(asked)
    def __dlpack_device__(self: torch.Tensor) -> Any:  # noqa: N807
        if self.device.type == "neuron":
            if not reaches_memory():
                raise BufferError(
                    "DLPack hands out addresses, and the memory of a Neuron core has none on the "
                    "host; copy the tensor there first, by .cpu()"
                )
            note_shared(self)
            return (DLDeviceType.kDLExtDev, self.device.index)
        return asked(self)

    torch.Tensor.__dlpack_device__ = __dlpack_device__  # type: ignore[method-assign]
