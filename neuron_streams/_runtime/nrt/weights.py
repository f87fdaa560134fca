"""The tensors that executables share: written to a core once, whichever of them comes first."""

from __future__ import annotations

import torch

from neuron_streams._runtime.nrt.lib import Library
from neuron_streams._runtime.nrt.memory import Block, Memory

__all__ = ["Weights"]


class Weights:
    """The weights of one core. They stay until its memory is closed, as the models do.

    Not thread-safe.
    """

    def __init__(self, library: Library, memory: Memory) -> None:
        self._library = library
        self._memory = memory
        # With the host's tensor, without which another one might get its address.
        self._there: dict[object, tuple[torch.Tensor, Block]] = {}

    def tensor(self, weight: torch.Tensor) -> int:
        """The nrt tensor of a host tensor, which must not change any more.

        Host: waits until it is written, if it is new.
        """
        form = weight.dtype, tuple(weight.shape), weight.stride()
        key = (weight.data_ptr(), *form)
        if key not in self._there:
            block = self._memory.allocate(weight.nbytes)
            whole = weight.detach().contiguous()
            self._library.call(
                "nrt_tensor_write", block.tensor, whole.data_ptr(), 0, weight.nbytes, about="weight"
            )
            self._there[key] = weight, block
        block = self._there[key][1]
        return self._memory.slice(block, 0, weight.nbytes)
