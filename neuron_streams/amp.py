"""Automatic mixed precision, spelled as in torch.cuda.amp: torch.amp for the device "neuron".

torch.cuda.amp is deprecated in favour of `torch.amp.autocast("cuda")`; these are for ported code,
and do not warn. The lists of what is cast are those of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GradScaler", "amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd"]


class autocast(torch.amp.autocast):  # noqa: N801  (torch.cuda spells it so)
    """Run what is inside in `dtype`, except for operators that need float32.

    Host: returns at once. Source: torch.cuda.amp.autocast.
    """

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.float16,
        cache_enabled: bool = True,
    ) -> None:
        super().__init__("neuron", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """Scale a loss so that gradients in float16 do not vanish.

    Host: `step` waits for the gradients, to see whether they are finite. Source:
    torch.cuda.amp.GradScaler.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(
            "neuron",
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )


def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None
) -> Any:
    """Decorate the forward of an autograd.Function. Source: torch.cuda.amp.custom_fwd."""
    return torch.amp.custom_fwd(fwd, device_type="neuron", cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """Decorate the backward of an autograd.Function. Source: torch.cuda.amp.custom_bwd."""
    return torch.amp.custom_bwd(bwd, device_type="neuron")


def amp_definitely_not_available() -> bool:
    """False. Source: torch.cuda.amp.common."""
    return False
