"""From tokens to logits, of any mix of prompts, pieces of prompts and single tokens.

The rows lie behind one another on one token axis, so that a step computes little but their tokens
and reads the weights once for all of them. Single tokens come first, each attending to its slot as
in a decode step. Behind them each other row takes whole blocks of `block` tokens; the queries of a
block share one read of their slot. What is left of a row's last block is padding, which goes to
the scratch slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import LayerWeights, Weights, attend, write
from models.steps import Layers, Span

__all__ = ["Packed", "Packing", "pack"]


class PackedLayer(nn.Module):
    """One layer on single tokens and on blocks."""

    def __init__(self, weights: LayerWeights) -> None:
        super().__init__()
        self.weights = weights

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        owners: Tensor,
        block_slots: Tensor,
        singles: int,
        kv: Tensor,
    ) -> Tensor:
        """hidden [tokens, hidden]; positions and owners [tokens]; kv as in `DecodeLayer`."""
        w = self.weights
        queries, keys, values = w.queries_keys_values(hidden, cos, sin)
        write(kv, torch.stack((keys, values)), owners[:, None], positions[:, None])
        alone = attend(queries[:singles], kv[0], kv[1], positions[:singles], owners[:singles])
        grouped = _attend_in_blocks(queries[singles:], kv, positions[singles:], block_slots)
        return w.finish(hidden, torch.cat((alone, grouped)))


def _attend_in_blocks(queries: Tensor, kv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
    """Attention of blocks of queries [tokens, heads, head_dim] over their slots [blocks].

    The queries of a group of heads lie behind one another, so that each key is read once for all.
    """
    blocks, kv_heads, head_dim = slots.shape[0], kv.shape[2], queries.shape[-1]
    length = queries.shape[0] // blocks
    group = queries.shape[1] // kv_heads
    asked = queries.view(blocks, length, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    asked = asked.reshape(blocks, kv_heads, group * length, head_dim)
    at = positions.view(blocks, 1, 1, length, 1)
    seen = torch.arange(kv.shape[3], device=kv.device) <= at
    seen = seen.expand(blocks, 1, group, length, kv.shape[3]).reshape(
        blocks, 1, group * length, kv.shape[3]
    )
    attended = functional.scaled_dot_product_attention(
        asked, kv[0][slots], kv[1][slots], attn_mask=seen
    )
    attended = attended.view(blocks, kv_heads, group, length, head_dim).permute(0, 3, 1, 2, 4)
    return attended.reshape(blocks * length, -1)


class Packed(Layers):
    """Any mix of rows; `pack` makes what it takes."""

    inputs = (
        *("input_ids", "positions", "owners", "block_slots"),
        *("last", "ends", "slots"),
    )

    def __init__(self, weights: Weights, length: int) -> None:
        super().__init__(weights, length, PackedLayer)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        owners: Tensor,
        block_slots: Tensor,
        last: Tensor,
        ends: Tensor,
        slots: Tensor,
        kv_cache: Tensor,
    ) -> Tensor:
        """float32 [rows, vocab] after the last token of each row; fills the slots of the cache."""
        at = positions.long()
        inputs = self.cos[at], self.sin[at], at, owners.long(), block_slots.long(), slots.shape[0]
        hidden = self.run_layers(input_ids, kv_cache, *inputs)
        return self.weights.logits(hidden[last.long()])

    def span(
        self,
        input_ids: Tensor,
        positions: Tensor,
        owners: Tensor,
        block_slots: Tensor,
        last: Tensor,
        ends: Tensor,
        slots: Tensor,
    ) -> Span:
        """The tokens one by one; padding has no owner but the scratch slot."""
        valid = owners > 0
        return Span(input_ids[:, None], positions[:, None], valid[:, None], ends, owners.long())


class Packing(NamedTuple):
    """The inputs of `Packed`, int32.

    Attributes:
        input_ids, positions: [rows + tokens]: so many single tokens, then the blocks.
        owners: [rows + tokens], the slot of each token; 0 for padding.
        block_slots: [tokens / block].
        last: [rows], where the last token of each row is among the tokens.
        ends: [rows], the position that follows it.
        slots: [rows].
    """

    input_ids: Tensor
    positions: Tensor
    owners: Tensor
    block_slots: Tensor
    last: Tensor
    ends: Tensor
    slots: Tensor


def pack(
    input_ids: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    slots: Sequence[int],
    *,
    rows: int,
    buckets: Sequence[int],
    block: int,
) -> Packing:
    """Lay out rows that follow one another in `input_ids`, in the smallest bucket that holds them.

    Raises:
        ValueError: They are more rows, or more tokens, than fit.
    """
    blocks = [0 if length == 1 else -(-length // block) for length in lengths]
    needed = sum(blocks) * block
    size = next((bucket for bucket in buckets if bucket >= needed), None)
    if size is None or len(lengths) > rows:
        raise ValueError(
            f"{len(lengths)} rows of {sum(lengths)} tokens, {needed} in blocks of {block}, are too"
            f" many for one step: it takes {rows} rows and {buckets[-1]} tokens."
        )
    ids, positions, owners = ([0] * (rows + size) for _ in range(3))
    block_slots, last = [0] * (size // block), [0] * rows
    taken, single, offset = 0, 0, rows
    for row, (start, length, slot) in enumerate(zip(starts, lengths, slots, strict=True)):
        at = single if length == 1 else offset
        ids[at : at + length] = input_ids[taken : taken + length]
        positions[at : at + length] = range(start, start + length)
        owners[at : at + length] = [slot] * length
        last[row] = at + length - 1
        first = (offset - rows) // block
        block_slots[first : first + blocks[row]] = [slot] * blocks[row]
        taken, single, offset = taken + length, single + (length == 1), offset + blocks[row] * block
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    missing = [0] * (rows - len(lengths))
    fields = (ids, positions, owners, block_slots, last, [*ends, *missing], [*slots, *missing])
    return Packing(*(torch.tensor(each, dtype=torch.int32, device="cpu") for each in fields))
