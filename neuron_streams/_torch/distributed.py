"""Process groups for device tensors: `init_process_group("gloo")` serves them, too.

torch gives each group of gloo's one backend for all of its devices, which takes tensors of the host
only. The device "neuron" gets another: a gloo of its own, over the same ranks, behind commands of
the device's streams (c10d/group.cpp). It is connected with the group, since that takes all ranks,
and compiled at the first use of the device: a program that has none compiles nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from neuron_streams._runtime import extension

__all__ = ["register"]


LazyCall: TypeAlias = "Callable[[Callable[[], object], object], object]"
Core: TypeAlias = "Callable[[], Any]"


def register(lazy_call: LazyCall, core: Core) -> None:
    """Have process groups know the device. Host: returns at once, compiles and starts nothing.

    Args:
        lazy_call: calls a function at the first use of the device, at once if that has been; of
            those with one key the last.
        core: gives the extension.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        return
    c10d: Any = dist.distributed_c10d
    c10d.Backend.default_device_backend_map.setdefault("neuron", "gloo")
    c10d.Backend.backend_capability["gloo"].append("neuron")
    begin = c10d._new_process_group_helper

    @functools.wraps(begin)
    def begin_with_device(*args: Any, **kwargs: Any) -> Any:
        group, store = begin(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup) and _is_gloo(group):
            _connect(group, store, lazy_call, core)
        return group, store

    c10d._new_process_group_helper = begin_with_device


def _is_gloo(group: Any) -> bool:
    """Whether a group has torch's own gloo for the device."""
    place = torch.device("neuron")
    return place in group._device_types and group._get_backend(place).name() == "gloo"


def _connect(group: Any, store: Any, lazy_call: LazyCall, core: Core) -> None:
    c10d: Any = dist.distributed_c10d
    place, kind = torch.device("neuron"), c10d.ProcessGroup.BackendType
    plain = group._get_backend(place)
    if torch.device("cpu") not in group._device_types:  # the default of a program that names none
        group._register_backend(torch.device("cpu"), kind.GLOO, plain)
    _waiting[group] = c10d.ProcessGroupGloo(
        c10d.PrefixStore("neuron/", store), group.rank(), group.size(), plain.options._timeout
    )
    lazy_call(functools.partial(_serve, core), _serve)


_waiting: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # group: its transport


def _serve(core: Core) -> None:
    """Give the groups that have been made the device's backend."""
    kind = dist.ProcessGroup.BackendType
    while _waiting:
        library = extension.load(extension.PROCESS_GROUP)
        group, transport = _waiting.popitem()
        made = library.group(transport, core().collective_door())
        name = group.group_name
        group._register_backend(torch.device("neuron"), kind.CUSTOM, made)
        group._set_group_name(name)  # of each backend: a group has the name of any of them
