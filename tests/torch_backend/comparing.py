"""What makes two results the same: type, layout and every bit."""

import math

import torch
from torch.utils import _pytree as pytree

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def difference(expected, actual, device, contents=True):
    """The first way in which a result differs from that of the CPU, as a sentence, or None."""
    left, shape = pytree.tree_flatten(expected)
    right, other = pytree.tree_flatten(actual)
    if shape != other:
        return f"structure {other} where the CPU gives {shape}"
    pairs = zip(left, right, strict=True)
    return next((why for a, b in pairs if (why := _leaf(a, b, device, contents))), None)


def _leaf(a, b, device, contents):
    if not isinstance(a, torch.Tensor):
        if type(a) is not type(b):
            return f"{type(b).__name__} where the CPU gives {type(a).__name__}"
        both_nan = isinstance(a, float) and math.isnan(a) and math.isnan(b)
        if isinstance(a, torch.device) or a == "cpu":  # each names its own device
            return None
        return f"{b!r} where the CPU gives {a!r}" if contents and not both_nan and a != b else None
    if not isinstance(b, torch.Tensor):
        return f"{type(b).__name__} where the CPU gives a tensor"
    if b.device.type != torch.device(device).type:
        return f"on {b.device}"
    for name in ("dtype", "shape", "layout", "requires_grad"):
        if getattr(a, name) != getattr(b, name):
            return f"{name} {getattr(b, name)} where the CPU gives {getattr(a, name)}"
    if a.layout is not torch.strided or a.is_nested:
        return _dense(a, b) if contents else None
    for name in ("stride", "storage_offset", "is_conj", "is_neg"):
        if getattr(a, name)() != getattr(b, name)():
            return f"{name} {getattr(b, name)()} where the CPU gives {getattr(a, name)()}"
    return _bits(a, b) if contents else None


def _dense(a, b):
    a, b = (x.detach().cpu() for x in (a, b))
    if a.is_nested:
        pairs = zip(a.unbind(), b.unbind(), strict=True)
    elif a.layout is torch.sparse_coo:
        pairs = [(a._indices(), b._indices()), (a._values(), b._values())]
    else:
        pairs = [(a.values(), b.values()), (a.to_dense(), b.to_dense())]
    return next((why for x, y in pairs if (why := _bits(x, y))), None)


def _bits(a, b):
    a, b = (x.detach().cpu().resolve_conj().resolve_neg() for x in (a, b))
    if a.shape != b.shape:
        return f"shape {tuple(b.shape)} where the CPU gives {tuple(a.shape)}"
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    kind = INTEGERS[a.element_size()]
    same = a.contiguous().view(kind) == b.contiguous().view(kind)
    if a.is_floating_point():
        same = same | (a.isnan() & b.isnan())
    if same.all():
        return None
    count = int((~same).sum())
    first = tuple(int(i) for i in (~same).nonzero()[0])
    values = f"{b[first].item()!r} where the CPU gives {a[first].item()!r}"
    return f"{count} of {same.numel()} values; at {first}: {values}"


def aliases(result, inputs):
    """For each tensor of a result, the first of the inputs whose storage it shares."""
    storages = [_address(x) for x in inputs]
    return [
        next((i for i, s in enumerate(storages) if s is not None and s == _address(leaf)), None)
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, torch.Tensor)
    ]


def _address(tensor):
    if tensor.layout is not torch.strided or tensor._is_zerotensor():
        return None
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else None
