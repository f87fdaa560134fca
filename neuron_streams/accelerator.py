"""torch.accelerator's streams and devices, where "neuron" is the accelerator.

Below Python a backend written in Python has one device and no streams, so that torch's own
functions would say nothing and do nothing: work would land on another stream without an error.
At the first use of anything ours take their places in torch.accelerator; with another accelerator
they are left alone. `torch.Stream("neuron")` is made in C and cannot be had this way.
"""

from __future__ import annotations

import torch
from typing_extensions import deprecated

import neuron_streams
from neuron_streams.context import DeviceLike
from neuron_streams.stream import as_stream

__all__ = ["take_over"]


def current_device_index() -> int:
    """The index of the calling thread's current device. Host: returns at once."""
    return neuron_streams.current_device()


@deprecated("Use `current_device_index` instead.", category=FutureWarning)
def current_device_idx() -> int:
    """`current_device_index` under its old name."""
    return neuron_streams.current_device()


def set_device_index(device: DeviceLike, /) -> None:
    """Make a device current; a negative index changes nothing. Host: returns at once."""
    neuron_streams.set_device(device)


@deprecated("Use `set_device_index` instead.", category=FutureWarning)
def set_device_idx(device: DeviceLike, /) -> None:
    """`set_device_index` under its old name."""
    neuron_streams.set_device(device)


class device_index(neuron_streams.device):  # noqa: N801  (torch.accelerator spells it so)
    """Make a device current inside a `with`; None changes nothing."""

    def __init__(self, device: int | None, /) -> None:
        super().__init__(device)


def current_stream(device: DeviceLike = None, /) -> torch.Stream:
    """The calling thread's current stream on a device. Host: returns at once."""
    return neuron_streams.current_stream(device)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream, and its device, current for the calling thread. Host: returns at once."""
    neuron_streams.set_stream(as_stream(stream))


def synchronize(device: DeviceLike = None, /) -> None:
    """`neuron_streams.synchronize`. Host: waits for all streams of a device."""
    neuron_streams.synchronize(device)


def take_over() -> None:
    """Put these in the places of torch's, if "neuron" is the accelerator. Again changes nothing."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "neuron":
        return
    for ours in (
        current_device_index,
        current_device_idx,
        set_device_index,
        set_device_idx,
        device_index,
        current_stream,
        set_stream,
        synchronize,
    ):
        setattr(torch.accelerator, ours.__name__, ours)
