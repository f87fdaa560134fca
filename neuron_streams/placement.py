"""`x.to("neuron")` goes to the current device, as `x.to("cuda")` does.

Below Python torch knows one device of ours, so a "neuron" without an index arrives there as
neuron:0. While the current device of a thread is another one, a torch function mode of that thread
spells the index out. Whoever stays on device 0 pays nothing; elsewhere each function of torch
costs about a microsecond more. A file of its own because streams and devices both lead here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._device import DeviceContext

__all__ = ["follow"]


class _SpellOut(TorchFunctionMode):
    """Says "neuron:1" where a function of torch is told "neuron" and device 1 is current."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # No calls of ours on the usual way: Dynamo traces this and would stop at them.
        given = kwargs or {}
        moves = func is torch.Tensor.to and len(args) > 1
        device = args[1] if moves else given.get("device")
        if device is None and func in _READERS and not torch.compiler.is_compiling():
            device = _default_below()
        if isinstance(device, str | torch.device) and device in (_NAME, torch.device(_NAME)):
            if moves:
                args = (args[0], _current(), *args[2:])
            else:
                given = {**given, "device": _current()}
        return func(*args, **given)


_NAME = "neuron"
# Where these put a tensor they ask below Python; others leave that to the kernel.
_READERS = (torch.tensor, torch.as_tensor, torch.asarray)


def _default_below() -> torch.device | None:
    """Torch's default device if its mode is at the bottom, where it has its say after ours."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes[0].device if modes and isinstance(modes[0], DeviceContext) else None


def _current() -> torch.device:
    from neuron_streams.context import context

    return torch.device("neuron", context().threads.here.device)


_mode = _SpellOut()


def follow(device: int) -> None:
    """Have the calling thread's mode on if `device` is current from now on, unless it is 0.

    It goes to the bottom of the thread's modes, since those above are left in their own order; only
    torch's own default device wants to be below. Host: returns at once.
    """
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    kept = [mode for mode in modes if mode is not _mode]
    wanted = kept
    if device != 0:
        # Torch leaves a context that it entered in Python by looking for it at the bottom, but
        # `with torch.device(...)`, entered in C, by popping whatever is on top.
        above = 1 if kept and hasattr(kept[0], "old_device") else 0
        wanted = [*kept[:above], _mode, *kept[above:]]
    if wanted != modes:
        for _ in modes:
            _pop_mode()  # type: ignore[no-untyped-call]
        for mode in wanted:
            _push_mode(mode)  # type: ignore[no-untyped-call]
