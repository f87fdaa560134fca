"""Memory statistics, spelled as in torch.cuda: real counts of live buffers, no caching allocator.

A buffer lives as long as a tensor shows it or a pending command names it. Because nothing is
cached, reserved is allocated. A file of its own because memory.py is about copies.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from neuron_streams import memory
from neuron_streams._runtime.ledger import Count, Ledger
from neuron_streams.context import DeviceLike, context, index_of

__all__ = [
    "empty_cache",
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
]

_NUMBERS = ("allocation", "segment", "active")
_BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
_METRICS = ("current", "peak", "allocated", "freed")


def _ledger(device: DeviceLike) -> Ledger:
    return context().runtime.ledger(index_of(device))


def _metrics(count: Count) -> dict[str, int]:
    return {name: getattr(count, name) for name in _METRICS}


def memory_stats_as_nested_dict(device: DeviceLike = None) -> dict[str, Any]:
    """`memory_stats` with a dictionary per dot in its keys. Host: returns at once."""
    number, size = _ledger(device).read()
    found: dict[str, Any] = {name: {"all": _metrics(number)} for name in _NUMBERS}
    found.update({name: {"all": _metrics(size)} for name in _BYTES})
    found.update(num_alloc_retries=0, num_ooms=0)
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
    return _ledger(device).read()[1].current


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most bytes that were live at once since the last reset. Host: returns at once."""
    return _ledger(device).read()[1].peak


def memory_reserved(device: DeviceLike = None) -> int:
    """The same as `memory_allocated`, since nothing is cached."""
    return memory_allocated(device)


def max_memory_reserved(device: DeviceLike = None) -> int:
    """The same as `max_memory_allocated`, since nothing is cached."""
    return max_memory_allocated(device)


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Start the peaks of a device at what is live now. Host: returns at once."""
    _ledger(device).reset(peak=True)


reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Start the `allocated` and `freed` metrics of a device at 0. Host: returns at once."""
    _ledger(device).reset(accumulated=True)


def empty_cache() -> None:
    """Nothing: a buffer is freed with its last user. Host: returns at once."""


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """(free, total) bytes: of the host's memory, where the CPU plays the device."""
    index_of(device)
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


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
    number, size = memory.pinned.read()
    return {"allocation": _metrics(number), "allocated_bytes": _metrics(size)}


def host_memory_stats() -> dict[str, Any]:
    """Counts and bytes of live pinned memory. Host: returns at once."""
    return _flat(host_memory_stats_as_nested_dict())


def reset_peak_host_memory_stats() -> None:
    """Start the peaks of pinned memory at what is live now. Host: returns at once."""
    memory.pinned.reset(peak=True)


def reset_accumulated_host_memory_stats() -> None:
    """Start the `allocated` and `freed` metrics of pinned memory at 0. Host: returns at once."""
    memory.pinned.reset(accumulated=True)
