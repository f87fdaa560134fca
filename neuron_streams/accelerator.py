"""torch.accelerator's streams, devices and memory, where "neuron" is the accelerator.

Below Python a backend written in Python has one device and no streams, so that torch's own
functions would say nothing and do nothing: work would land on another stream without an error.
Nor has it an allocator there, and those that ask for one fail an assertion of torch.
At the first use of anything ours take their places in torch.accelerator; with another accelerator
they are left alone. `torch.Stream("neuron")` is made in C and cannot be had this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def empty_cache() -> None:
    """`neuron_streams.empty_cache`: nothing is cached. Host: returns at once."""


def empty_host_cache() -> None:
    """Nothing: pinned memory is not cached either. Host: returns at once."""


def get_memory_info(device_index: DeviceLike = None, /) -> tuple[int, int]:
    """`neuron_streams.mem_get_info`. Host: returns at once."""
    return neuron_streams.mem_get_info(device_index)


def max_memory_allocated(device_index: DeviceLike = None, /) -> int:
    """`neuron_streams.max_memory_allocated`. Host: returns at once."""
    return neuron_streams.max_memory_allocated(device_index)


def max_memory_reserved(device_index: DeviceLike = None, /) -> int:
    """`neuron_streams.max_memory_reserved`. Host: returns at once."""
    return neuron_streams.max_memory_reserved(device_index)


def memory_allocated(device_index: DeviceLike = None, /) -> int:
    """`neuron_streams.memory_allocated`. Host: returns at once."""
    return neuron_streams.memory_allocated(device_index)


def memory_reserved(device_index: DeviceLike = None, /) -> int:
    """`neuron_streams.memory_reserved`. Host: returns at once."""
    return neuron_streams.memory_reserved(device_index)


def memory_stats(device_index: DeviceLike = None, /) -> dict[str, Any]:
    """`neuron_streams.memory_stats`. Host: returns at once."""
    return neuron_streams.memory_stats(device_index)


def reset_accumulated_memory_stats(device_index: DeviceLike = None, /) -> None:
    """`neuron_streams.reset_accumulated_memory_stats`. Host: returns at once."""
    neuron_streams.reset_accumulated_memory_stats(device_index)


def reset_peak_memory_stats(device_index: DeviceLike = None, /) -> None:
    """`neuron_streams.reset_peak_memory_stats`. Host: returns at once."""
    neuron_streams.reset_peak_memory_stats(device_index)


def take_over() -> None:
    """Put these in the places of torch's, if "neuron" is the accelerator. Again changes nothing."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "neuron":
        return
    memory = getattr(torch.accelerator, "memory", None)
    for ours in _OURS:
        setattr(torch.accelerator, ours.__name__, ours)
        if hasattr(memory, ours.__name__):
            setattr(memory, ours.__name__, ours)


_OURS: tuple[Callable[..., object], ...] = (
    current_device_index,
    current_device_idx,
    set_device_index,
    set_device_idx,
    device_index,
    current_stream,
    set_stream,
    synchronize,
    empty_cache,
    empty_host_cache,
    get_memory_info,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
