"""What torch's operators do on device tensors, and what makes a tensor on "neuron" at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neuron_streams import memory
from neuron_streams._runtime.cpu import HOST
from neuron_streams.context import index_of
from neuron_streams.errors import UnsupportedError
from neuron_streams.stream import as_stream
from neuron_streams.tensor import HANDLERS, NeuronTensor, unsupported

__all__ = ["register"]

aten = torch.ops.aten


def _broadcasts(size: torch.Size, wanted: torch.Size) -> bool:
    """Whether a tensor of one size can be copied into one of another."""
    fits = all(a in (1, b) for a, b in zip(reversed(size), reversed(wanted), strict=False))
    return len(size) <= len(wanted) and fits


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """What `torch.tensor(values, device="neuron")` ends in."""
    return _copy_(target, source, non_blocking)


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if source.shape != target.shape and not _broadcasts(source.shape, target.shape):
        raise RuntimeError(
            f"copy_: a tensor of shape {list(source.shape)} cannot be broadcast to "
            f"{list(target.shape)}; reshape it first"
        )
    if isinstance(target, NeuronTensor):
        if isinstance(source, NeuronTensor):
            memory.copy_between(target._view, source._view)
        else:
            memory.copy_into(target._view, source, non_blocking)
    elif isinstance(source, NeuronTensor):
        memory.to_host(source._view, target, non_blocking)
    return target


def _to_copy(
    source: NeuronTensor,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    if device is None or device.type != "cpu":
        raise unsupported("aten._to_copy on the device")
    out = _like(source, dtype or source.dtype, memory_format)
    if non_blocking:
        memory.mark_pinned(out)
    memory.to_host(source._view, out, non_blocking)
    return out


def _like(
    source: NeuronTensor, dtype: torch.dtype, memory_format: torch.memory_format | None
) -> torch.Tensor:
    """An empty host tensor laid out as torch would lay out a copy."""
    size, stride = source._view.size, source._view.stride
    if memory_format in (None, torch.preserve_format) and stride == memory.contiguous(size):
        return torch.empty(size, dtype=dtype, device=HOST)
    shape = torch.empty_strided(size, stride, device="meta")
    kept = torch.empty_like(shape, memory_format=memory_format or torch.preserve_format)
    return torch.empty_strided(kept.shape, kept.stride(), dtype=dtype, device=HOST)


def _local_scalar_dense(source: NeuronTensor) -> bool | int | float | complex:
    # Below autograd `source.cpu()` would come back as aten.to.
    value: bool | int | float | complex = _to_copy(source, device=torch.device("cpu")).item()
    return value


def _record_stream(tensor: NeuronTensor, stream: torch.Stream) -> None:
    """Nothing to keep: a command holds the buffers that it names until it has completed."""
    as_stream(stream)


def _alias(source: NeuronTensor) -> NeuronTensor:
    return NeuronTensor._wrap(source._view)


def _is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    return not isinstance(tensor, NeuronTensor) and memory.is_pinned(tensor)


def _pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    return memory.pin(tensor)


HANDLERS.update(
    {
        aten.copy_.default: _copy_,
        aten._to_copy.default: _to_copy,
        aten._local_scalar_dense.default: _local_scalar_dense,
        aten.record_stream.default: _record_stream,
        aten.detach.default: _alias,
        aten.alias.default: _alias,
        aten.lift_fresh.default: _alias,
        aten.detach_.default: lambda tensor: tensor,
        aten.is_pinned.default: _is_pinned,
    }
)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> NeuronTensor:
    view = memory.empty(
        tuple(size), tuple(stride), dtype or torch.get_default_dtype(), index_of(device)
    )
    return NeuronTensor._wrap(view)


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> NeuronTensor:
    shape = tuple(size)
    strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    return _empty_strided(shape, strides, dtype, layout, device, pin_memory)


_library: torch.library.Library | None = None


def register() -> None:
    """Give torch what it needs to make a tensor on "neuron"; once, at the first use of anything."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in (
        ("empty.memory_format", _empty),
        ("empty_strided", _empty_strided),
        ("_copy_from", _copy_from),
    ):
        _library.impl(name, kernel, "PrivateUse1")  # type: ignore[no-untyped-call]
    if not torch.cuda.is_available():  # CUDA pins memory of its own
        for name, pinning in (("is_pinned", _is_pinned), ("_pin_memory", _pin_memory)):
            _library.impl(name, pinning, "CPU")  # type: ignore[no-untyped-call]
    torch.serialization.register_package(LOADS_FIRST, lambda storage: None, _refuse_to_load)


LOADS_FIRST = 19  # ahead of what torch does for Python backends, which crashes


def _refuse_to_load(storage: object, location: str) -> None:
    if location.partition(":")[0] == "neuron":
        raise UnsupportedError(
            f"torch.load(map_location={location!r}): storages live on the host here; load with "
            'map_location="cpu", then copy: tensor.to("neuron"), or module.to("neuron")'
        )
