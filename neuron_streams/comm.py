"""Copies and sums across the devices of one process, spelled as in torch.cuda.comm.

Plain copies on the current streams of the devices: nothing waits on the host, and nothing is put
into one buffer first, so `buffer_size` changes nothing.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from neuron_streams._context import DeviceLike, index_of
from neuron_streams._stream import stream as stream_context

__all__ = [
    "broadcast",
    "broadcast_coalesced",
    "gather",
    "reduce_add",
    "reduce_add_coalesced",
    "scatter",
]

_BUFFER = 10485760


def _exactly_one(first: str, a: object, second: str, b: object) -> None:
    if (a is None) == (b is None):
        raise RuntimeError(
            f"Exactly one of '{first}' and '{second}' must be specified, "
            f"but got {first}={a} and {second}={b}"
        )


def _devices(devices: Iterable[DeviceLike]) -> list[torch.device]:
    found = [torch.device("neuron", index_of(device, optional=False)) for device in devices]
    if not found:
        raise RuntimeError("Expected at least one device to copy to")
    return found


def broadcast(
    tensor: torch.Tensor,
    devices: Iterable[DeviceLike] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Copy a tensor to several devices; where it is already, it is itself the copy.

    Raises:
        RuntimeError: not exactly one of `devices` and `out` is given, or a size does not fit.

    Host: returns at once. Source: torch.cuda.comm.broadcast.
    """
    _exactly_one("devices", devices, "out", out)
    if devices is not None:
        return tuple(tensor.to(device, non_blocking=True) for device in _devices(devices))
    assert out is not None
    for number, target in enumerate(out):
        if target.shape != tensor.shape:
            raise RuntimeError(
                f"Expected all output tensors to have the shape {tuple(tensor.shape)} of the "
                f"source, but output {number} has {tuple(target.shape)}"
            )
    return tuple(target.copy_(tensor, non_blocking=True) for target in out)


def broadcast_coalesced(
    tensors: Iterable[torch.Tensor], devices: Iterable[DeviceLike], buffer_size: int = _BUFFER
) -> tuple[list[torch.Tensor], ...]:
    """Copy several tensors to several devices; one list for each device.

    Host: returns at once. Source: torch.cuda.comm.broadcast_coalesced.
    """
    sources = list(tensors)
    return tuple([x.to(device, non_blocking=True) for x in sources] for device in _devices(devices))


def reduce_add(inputs: Sequence[torch.Tensor], destination: DeviceLike = None) -> torch.Tensor:
    """Add tensors of several devices up on one of them (default: the current device).

    Raises:
        ValueError: the sizes differ.
        RuntimeError: no input is on the destination.

    Host: returns at once. Source: torch.cuda.comm.reduce_add.
    """
    target = torch.device("neuron", index_of(destination))
    for number, tensor in enumerate(inputs):
        if tensor.device.type != "neuron":
            raise AssertionError(
                f"reduce_add expects all inputs to be on neuron devices, but input {number} is on "
                f"{tensor.device}"
            )
        if tensor.size() != inputs[0].size():
            got, expected = ("x".join(map(str, x.size())) for x in (tensor, inputs[0]))
            raise ValueError(f"input {number} has invalid size: got {got}, but expected {expected}")
    roots = [number for number, tensor in enumerate(inputs) if tensor.device == target]
    if not roots:
        raise RuntimeError(
            "reduce_add expects destination to be on the same device with one of the tensors"
        )
    if len(inputs) == 1:
        return inputs[0]
    total, *others = [inputs[roots[-1]]] + [x for i, x in enumerate(inputs) if i != roots[-1]]
    for other in others:
        total = total + other.to(target, non_blocking=True)
    return total


def reduce_add_coalesced(
    inputs: Iterable[Sequence[torch.Tensor]],
    destination: DeviceLike = None,
    buffer_size: int = _BUFFER,
) -> tuple[torch.Tensor, ...]:
    """`reduce_add` of the first tensors of all sequences, of the second ones, and so on.

    Host: returns at once. Source: torch.cuda.comm.reduce_add_coalesced.
    """
    return tuple(reduce_add(group, destination) for group in zip(*inputs, strict=True))


def scatter(
    tensor: torch.Tensor,
    devices: Iterable[DeviceLike] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[torch.Stream | None] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Cut a tensor along a dimension and copy each part to a device.

    Args:
        chunk_sizes: of the parts; None cuts as `torch.chunk`. With `out` they are its sizes.
        streams: one for each part, or None for the current stream of its device.

    Raises:
        RuntimeError: not exactly one of `devices` and `out` is given, or sizes do not fit.

    Host: returns at once. Source: torch.cuda.comm.scatter.
    """
    _exactly_one("devices", devices, "out", out)
    if out is not None and chunk_sizes is not None:
        raise RuntimeError(
            "'chunk_sizes' must not be specified when 'out' is specified, "
            f"but got chunk_sizes={chunk_sizes}"
        )
    targets: Sequence[Any]
    targets = _devices(devices) if devices is not None else out or ()
    if out is not None:
        chunk_sizes = [target.size(dim) for target in out]
    elif chunk_sizes is not None and len(chunk_sizes) != len(targets):
        raise RuntimeError(
            "Expected devices and chunk_sizes to be of same length, but got "
            f"{len(targets)} devices and {len(chunk_sizes)} chunk sizes"
        )
    if chunk_sizes is None:
        parts = tensor.chunk(len(targets), dim)
    else:
        parts = tensor.split_with_sizes(list(chunk_sizes), dim)
    made = []
    for part, target, stream in zip(
        parts, targets, streams or itertools.repeat(None), strict=False
    ):
        with stream_context(stream):
            if isinstance(target, torch.Tensor):
                made.append(target.copy_(part, non_blocking=True))
            else:
                made.append(part.to(target, non_blocking=True))  # type: ignore[call-overload]
    return tuple(made)


def gather(
    tensors: Iterable[torch.Tensor],
    dim: int = 0,
    destination: DeviceLike = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Join tensors of several devices along a dimension.

    Args:
        destination: a device, "cpu" for the host; None is the current device.
        out: write the result there instead.

    Raises:
        RuntimeError: both `destination` and `out` are given, or sizes do not fit.

    Host: returns at once; waits for a result on the host. Source: torch.cuda.comm.gather.
    """
    if out is not None:
        if destination is not None:
            raise RuntimeError(
                "'destination' must not be specified when 'out' is specified, "
                f"but got destination={destination}"
            )
        torch.cat([tensor.to(out.device) for tensor in tensors], dim, out=out)
        return out
    if destination == -1:
        warnings.warn(
            "Using -1 to represent CPU tensor is deprecated. Please use a device object or string "
            'instead, e.g., "cpu".',
            FutureWarning,
            stacklevel=2,
        )
        target = torch.device("cpu")
    elif isinstance(destination, (str, torch.device)) and torch.device(destination).type == "cpu":
        target = torch.device("cpu")
    else:
        target = torch.device("neuron", index_of(destination))
    on_host = target.type == "cpu"
    return torch.cat([tensor.to(target, non_blocking=not on_host) for tensor in tensors], dim)
