"""Memory of devices and pinned memory, spelled as in torch.cuda: real counts of live buffers.

A buffer lives as long as a tensor shows it or a pending command names it. Where the CPU plays the
device nothing is cached, so reserved is allocated; memory of a Neuron core is cached when it comes
back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from neuron_streams._context import DeviceLike, context, core, index_of
from neuron_streams._runtime import process

__all__ = [
    "empty_cache",
    "get_per_process_memory_fraction",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
]

_NUMBERS = ("allocation", "segment", "active")
_BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
_METRICS = ("current", "peak", "allocated", "freed")


_PINNED = -1  # the number that the extension has for the memory of the host


def _counts(device: int) -> dict[str, Any]:
    context()
    counts: dict[str, Any] = core().counts(device)
    return counts


def memory_stats_as_nested_dict(device: DeviceLike = None) -> dict[str, Any]:
    """`memory_stats` with a dictionary per dot in its keys. Host: returns at once."""
    counts = _counts(index_of(device))
    found: dict[str, Any] = {name: {"all": dict(counts["number"])} for name in _NUMBERS}
    found.update({name: {"all": dict(counts["bytes"])} for name in _BYTES})
    found["segment"] = {"all": dict(counts["segments"])}
    found["reserved_bytes"] = {"all": dict(counts["reserved"])}
    found.update(num_alloc_retries=counts["retries"], num_ooms=counts["refusals"])
    return found


def memory_stats(device: DeviceLike = None) -> dict[str, Any]:
    """Counts and bytes of the live buffers of a device, keys sorted: `allocated_bytes.all.peak`.

    Host: returns at once. Source: torch.cuda.memory_stats.
    """
    return _flat(memory_stats_as_nested_dict(device))


def _flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    return OrderedDict(sorted(_leaves("", nested)))


def _leaves(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, item in value.items():
        yield from _leaves(f"{prefix}.{name}" if prefix else name, item)


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes of the live buffers of a device. Host: returns at once."""
    current: int = _counts(index_of(device))["bytes"]["current"]
    return current


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most bytes that were live at once since the last reset. Host: returns at once."""
    peak: int = _counts(index_of(device))["bytes"]["peak"]
    return peak


def memory_reserved(device: DeviceLike = None) -> int:
    """Bytes that are taken from a device: those of its buffers, and what is cached.

    Nothing is cached where the CPU plays the device. Host: returns at once.
    """
    current: int = _counts(index_of(device))["reserved"]["current"]
    return current


def max_memory_reserved(device: DeviceLike = None) -> int:
    """The most bytes that were taken at once since the last reset. Host: returns at once."""
    peak: int = _counts(index_of(device))["reserved"]["peak"]
    return peak


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Start the peaks of a device at what is live now. Host: returns at once."""
    _reset(index_of(device), peak=True)


def _reset(device: int, *, peak: bool = False, accumulated: bool = False) -> None:
    context()
    core().reset_counts(device, peak, accumulated)


reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Start the `allocated` and `freed` metrics of a device at 0. Host: returns at once."""
    _reset(index_of(device), accumulated=True)


def empty_cache() -> None:
    """Give the memory that is cached, and so in no use, back to the devices.

    Nothing is cached where the CPU plays the device. Host: returns at once.
    """
    if process.is_started():
        core().empty_cache()


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """(free, total) bytes of a device. Host: returns at once. Source: torch.cuda.mem_get_info.

    In all there is what the host has where the CPU plays the device, or what
    NEURON_STREAMS_MEMORY or `set_per_process_memory_fraction` says.
    """
    index = index_of(device)
    context()
    free, total = core().memory_info(index)
    return free, total


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Let a device allocate at most a fraction of the memory that there is.

    Raises:
        ValueError: the fraction is not between 0 and 1.

    Host: returns at once. Source: torch.cuda.set_per_process_memory_fraction.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    found = context()
    found.port.set_capacity(index_of(device), int(found.memory * fraction))


def get_per_process_memory_fraction(device: DeviceLike = None) -> float:
    """What `set_per_process_memory_fraction` has set; 1.0 before. Host: returns at once."""
    found = context()
    capacity: int = found.port.capacity(index_of(device))
    return capacity / found.memory


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """`memory_stats` as a table for people. Host: returns at once."""
    nested = memory_stats_as_nested_dict(device)
    head = f"neuron:{index_of(device)}"
    lines = [f"{head:<16}" + "".join(f"{name:>16}" for name in _METRICS)]
    for name in (_BYTES[0], _NUMBERS[0]) if abbreviated else (*_BYTES, *_NUMBERS):
        values = nested[name]["all"].values()
        lines.append(f"{name:<16}" + "".join(f"{value:>16}" for value in values))
    return "\n".join(lines)


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    """`host_memory_stats` with a dictionary per dot in its keys. Host: returns at once."""
    counts = _counts(_PINNED)
    return {"allocation": dict(counts["number"]), "allocated_bytes": dict(counts["bytes"])}


def host_memory_stats() -> dict[str, Any]:
    """Counts and bytes of live pinned memory. Host: returns at once."""
    return _flat(host_memory_stats_as_nested_dict())


def reset_peak_host_memory_stats() -> None:
    """Start the peaks of pinned memory at what is live now. Host: returns at once."""
    _reset(_PINNED, peak=True)


def reset_accumulated_host_memory_stats() -> None:
    """Start the `allocated` and `freed` metrics of pinned memory at 0. Host: returns at once."""
    _reset(_PINNED, accumulated=True)
