"""What a model keeps on its device between steps: the cache, and tables with a row a slot."""

from __future__ import annotations

import torch
from torch import Tensor

from models.choosers import SAMPLING_TABLES
from models.config import LlamaConfig

__all__ = ["empty_state"]


def empty_state(
    config: LlamaConfig, dtype: torch.dtype, num_slots: int, max_length: int
) -> dict[str, Tensor]:
    """The cache [layers, 2, slots, kv_heads, length, head_dim], and what every request needs.

    `adjusting.empty_tables` has what few requests need.
    """
    size = (
        *(config.num_hidden_layers, 2, num_slots),
        *(config.num_key_value_heads, max_length, config.head_dim),
    )
    # Zeros, since attention multiplies what it masks by 0, and 0 times garbage may be NaN.
    state = {"kv_cache": torch.zeros(size, dtype=dtype, device="cpu")}
    for name, (_, table) in SAMPLING_TABLES.items():
        state[name] = torch.zeros(num_slots, dtype=table, device="cpu")
    return state | {"last_sampled": torch.zeros(num_slots, dtype=torch.int32, device="cpu")}
