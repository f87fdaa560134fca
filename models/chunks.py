"""Prefill steps that go on behind tokens which the slots hold already."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import LayerWeights, Weights, write
from models.sampling import greedy, sample
from models.steps import Step, keep

__all__ = ["GreedyChunk", "SampledChunk"]


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


class GreedyChunk(Step):
    """A step on a piece of each prompt that takes the likeliest token after it."""

    def __init__(self, weights: Weights, max_length: int) -> None:
        super().__init__(weights, max_length, ChunkLayer)

    def logits(
        self, input_ids: Tensor, starts: Tensor, lengths: Tensor, slots: Tensor, kv_cache: Tensor
    ) -> Tensor:
        """float32 [rows, vocab] after the last real token; fills the slots of the cache."""
        rows, tokens = input_ids.shape
        offsets = torch.arange(tokens, device=input_ids.device)
        positions = (starts.long()[:, None] + offsets).clamp(max=self.cos.shape[0] - 1)
        valid = offsets < lengths[:, None]
        cos, sin = self.cos[positions.flatten()], self.sin[positions.flatten()]
        inputs = cos, sin, slots.long(), positions, valid
        hidden = self.run_layers(input_ids.flatten(), kv_cache, *inputs)
        ends = torch.arange(rows, device=hidden.device) * tokens + lengths - 1
        return self.weights.logits(hidden[ends])

    def choose(self, logits: Tensor, *parameters: Tensor) -> Tensor:
        """The token of each row."""
        return greedy(logits)

    def forward(
        self,
        input_ids: Tensor,
        starts: Tensor,
        lengths: Tensor,
        slots: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seed: Tensor,
        kv_cache: Tensor,
        temperatures: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        seeds: Tensor,
        last_sampled: Tensor,
    ) -> Tensor:
        logits = self.logits(input_ids, starts, lengths, slots, kv_cache)
        parameters = temperature, top_k, top_p, seed
        tokens = self.choose(logits, *parameters, starts + lengths)
        return keep(tokens, slots, parameters, (temperatures, top_ks, top_ps, seeds), last_sampled)


class SampledChunk(GreedyChunk):
    """A step on a piece of each prompt that samples."""

    def choose(self, logits: Tensor, *parameters: Tensor) -> Tensor:
        temperature, top_k, top_p, seed, position = parameters
        return sample(logits, temperature, top_k, top_p, seed, position)
