"""From tokens to logits, behind tokens which the slots hold already."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import LayerWeights, Weights, write
from models.steps import Layers, Span

__all__ = ["Chunk"]


class ChunkLayer(nn.Module):
    """One layer on a piece of each prompt, which attends to its whole slot so far."""

    def __init__(self, weights: LayerWeights) -> None:
        super().__init__()
        self.weights = weights

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        positions: Tensor,
        valid: Tensor,
        kv: Tensor,
    ) -> Tensor:
        """hidden [rows * tokens, hidden]; positions and valid [rows, tokens]; kv as in decode."""
        w = self.weights
        rows = slots.shape[0]
        queries, keys, values = (
            part.view(rows, -1, *part.shape[1:]) for part in w.queries_keys_values(hidden, cos, sin)
        )
        # Padding may reach beyond the slot's end: it goes to the scratch slot.
        where = torch.where(valid, slots[:, None], 0)
        at = torch.where(valid, positions, 0)
        write(kv, torch.stack((keys, values)), where[..., None], at[..., None])
        seen = torch.arange(kv.shape[3], device=kv.device) <= positions[:, None, :, None]
        attended = functional.scaled_dot_product_attention(
            queries.transpose(1, 2), kv[0][slots], kv[1][slots], attn_mask=seen, enable_gqa=True
        )
        return w.finish(hidden, attended.transpose(1, 2).reshape(hidden.shape[0], -1))


class Chunk(Layers):
    """A piece of each prompt."""

    inputs = ("input_ids", "starts", "lengths", "slots")

    def __init__(self, weights: Weights, max_length: int) -> None:
        super().__init__(weights, max_length, ChunkLayer)

    def forward(
        self, input_ids: Tensor, starts: Tensor, lengths: Tensor, slots: Tensor, kv_cache: Tensor
    ) -> Tensor:
        """float32 [rows, vocab] after the last real token; fills the slots of the cache."""
        rows, tokens = input_ids.shape
        _, positions, valid, _ = self.span(input_ids, starts, lengths, slots)
        positions = positions.clamp(max=self.cos.shape[0] - 1)
        cos, sin = self.cos[positions.flatten()], self.sin[positions.flatten()]
        inputs = cos, sin, slots.long(), positions, valid
        hidden = self.run_layers(input_ids.flatten(), kv_cache, *inputs)
        ends = torch.arange(rows, device=hidden.device) * tokens + lengths - 1
        return self.weights.logits(hidden[ends])

    def span(self, input_ids: Tensor, starts: Tensor, lengths: Tensor, slots: Tensor) -> Span:
        """The pieces; padding may reach beyond the end of a slot."""
        offsets = torch.arange(input_ids.shape[1], device=input_ids.device)
        positions = starts.long()[:, None] + offsets
        valid = offsets < lengths[:, None]
        return Span(input_ids, positions, valid, starts + lengths)
