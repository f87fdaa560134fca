"""Move a sample of the operator database to a device, storages and all.

`.to(device)` makes a gapped, overlapping or shared tensor dense, and strides are part of what is
compared: so each storage moves once, and each tensor is a view of it with its old strides.
"""

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree


class Placing:
    """One sample's move: tensors that shared a storage share one again."""

    def __init__(self, device):
        self.device = torch.device(device)
        self._storages = {}
        self._tensors = {}

    def sample(self, sample):
        return SampleInput(
            self(sample.input),
            args=self(tuple(sample.args)),
            kwargs=self(dict(sample.kwargs)),
            output_process_fn_grad=sample.output_process_fn_grad,
            broadcasts_input=sample.broadcasts_input,
        )

    def __call__(self, value):
        return pytree.tree_map(self._leaf, value)

    def _leaf(self, leaf):
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._tensors:
                self._tensors[id(leaf)] = (leaf, self._tensor(leaf))
            return self._tensors[id(leaf)][1]
        if isinstance(leaf, torch.device) and leaf.type == "cpu":
            return self.device
        if isinstance(leaf, str) and leaf == "cpu":
            return str(self.device)
        return leaf

    @torch.no_grad()
    def _tensor(self, tensor):
        source = tensor.detach()
        if source.device.type != "cpu":
            return tensor
        if source.layout is not torch.strided or source.is_nested:
            moved = source.clone().to(self.device)
        elif source.is_conj():
            moved = self._strided(source.conj()).conj()
        elif source.is_neg():
            moved = torch._neg_view(self._strided(torch._neg_view(source)))
        else:
            moved = self._strided(source)
        return moved.detach().requires_grad_(tensor.requires_grad)

    def _strided(self, source):
        key = source.untyped_storage()._cdata, source.dtype
        if key not in self._storages:
            whole = torch.empty(0, dtype=source.dtype).set_(source.untyped_storage())
            self._storages[key] = (source, whole.clone().to(self.device))
        whole = self._storages[key][1]
        return whole.as_strided(source.shape, source.stride(), source.storage_offset())


def tensors(value):
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
