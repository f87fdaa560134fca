"""The steps of a Llama, one module for each kind of executable, which torch.export can trace.

All of them are built around the same `Weights`, so that the executables of a model share one copy.
The layers of a step are children of one ModuleList and alike in all but their parameters: the
compiler compiles one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import LayerWeights, Weights, attend, write
from models.sampling import greedy, sample

__all__ = [
    "GatheredGreedyDecode",
    "GatheredSampledDecode",
    "GreedyDecode",
    "GreedyPrefill",
    "Remap",
    "SampledDecode",
    "SampledPrefill",
    "Step",
    "keep",
]


class DecodeLayer(nn.Module):
    """One layer on one new token a row."""

    def __init__(self, weights: LayerWeights) -> None:
        super().__init__()
        self.weights = weights

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, kv: Tensor
    ) -> Tensor:
        """hidden [rows, hidden], kv [2, slots, kv_heads, length, head_dim], written in place."""
        w = self.weights
        queries, keys, values = w.queries_keys_values(hidden, cos, sin)
        write(kv, torch.stack((keys, values)), slots[:, None], positions[:, None])
        attended = attend(queries, kv[0], kv[1], positions, slots)
        return w.finish(hidden, attended)


class PrefillLayer(nn.Module):
    """One layer on whole prompts, which attend to themselves and fill their slots."""

    def __init__(self, weights: LayerWeights) -> None:
        super().__init__()
        self.weights = weights

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: Tensor
    ) -> Tensor:
        """hidden [rows * tokens, hidden]; kv as in `DecodeLayer`."""
        w = self.weights
        rows = slots.shape[0]
        positions = torch.arange(hidden.shape[0] // rows, device=hidden.device)
        queries, keys, values = (
            part.view(rows, -1, *part.shape[1:]) for part in w.queries_keys_values(hidden, cos, sin)
        )
        write(kv, torch.stack((keys, values)), slots[:, None, None], positions[None, :, None])
        attended = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return w.finish(hidden, attended.transpose(1, 2).reshape(hidden.shape[0], -1))


class Step(nn.Module):
    """What is the same in all steps: the layers, one after another, and the rotations."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, weights: Weights, max_length: int, layer: Callable[[LayerWeights], nn.Module]
    ) -> None:
        super().__init__()
        self.weights = weights
        self.layers = nn.ModuleList(layer(block) for block in weights.blocks)
        for name, table in zip(("cos", "sin"), weights.config.rotations(max_length), strict=True):
            self.register_buffer(name, table.to(weights.embedding.dtype))

    def run_layers(self, input_ids: Tensor, kv_cache: Tensor, *inputs: Tensor) -> Tensor:
        hidden = self.weights.embedding[input_ids.long()]
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, *inputs, kv_cache[index])
        return hidden


class GreedyDecode(Step):
    """A decode step that takes the likeliest token of each row."""

    def __init__(self, weights: Weights, max_length: int) -> None:
        super().__init__(weights, max_length, DecodeLayer)

    def logits(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, kv_cache: Tensor
    ) -> Tensor:
        """float32 [rows, vocab]; writes the tokens' keys and values into the cache."""
        at, where = positions.long(), slots.long()
        hidden = self.run_layers(input_ids, kv_cache, self.cos[at], self.sin[at], at, where)
        return self.weights.logits(hidden)

    def forward(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, kv_cache: Tensor
    ) -> Tensor:
        return greedy(self.logits(input_ids, positions, slots, kv_cache))


class SampledDecode(GreedyDecode):
    """A decode step that samples each row with the parameters of its slot."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv_cache: Tensor,
        temperatures: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        seeds: Tensor,
    ) -> Tensor:
        logits = self.logits(input_ids, positions, slots, kv_cache)
        at = slots.long()
        parameters = temperatures[at], top_ks[at], top_ps[at], seeds[at]
        return sample(logits, *parameters, positions + 1)


class GatheredGreedyDecode(GreedyDecode):
    """A greedy decode step whose negative ids stand for the token last sampled for the slot."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv_cache: Tensor,
        last_sampled: Tensor,
    ) -> Tensor:
        known = _gather(input_ids, slots, last_sampled)
        return _scatter(super().forward(known, positions, slots, kv_cache), slots, last_sampled)


class GatheredSampledDecode(SampledDecode):
    """A sampled decode step of the same kind."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv_cache: Tensor,
        temperatures: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        seeds: Tensor,
        last_sampled: Tensor,
    ) -> Tensor:
        known = _gather(input_ids, slots, last_sampled)
        tables = temperatures, top_ks, top_ps, seeds
        tokens = super().forward(known, positions, slots, kv_cache, *tables)
        return _scatter(tokens, slots, last_sampled)


def _gather(input_ids: Tensor, slots: Tensor, last_sampled: Tensor) -> Tensor:
    return torch.where(input_ids < 0, last_sampled[slots.long()], input_ids)


def _scatter(tokens: Tensor, slots: Tensor, last_sampled: Tensor) -> Tensor:
    last_sampled.index_put_((slots.long(),), tokens)
    return tokens


class GreedyPrefill(Step):
    """A prefill step that takes the likeliest token; it keeps the parameters of the slots too."""

    def __init__(self, weights: Weights, max_length: int) -> None:
        super().__init__(weights, max_length, PrefillLayer)

    def logits(self, input_ids: Tensor, lengths: Tensor, slots: Tensor, kv_cache: Tensor) -> Tensor:
        """float32 [rows, vocab] after the last real token; fills the slots of the cache."""
        rows, tokens = input_ids.shape
        cos, sin = (table[:tokens].repeat(rows, 1) for table in (self.cos, self.sin))
        hidden = self.run_layers(input_ids.flatten(), kv_cache, cos, sin, slots.long())
        ends = torch.arange(rows, device=hidden.device) * tokens + lengths - 1
        return self.weights.logits(hidden[ends])

    def choose(self, logits: Tensor, *parameters: Tensor) -> Tensor:
        """The token of each row."""
        return greedy(logits)

    def forward(
        self,
        input_ids: Tensor,
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
        parameters = temperature, top_k, top_p, seed
        logits = self.logits(input_ids, lengths, slots, kv_cache)
        tokens = self.choose(logits, *parameters, lengths)
        return keep(tokens, slots, parameters, (temperatures, top_ks, top_ps, seeds), last_sampled)


def keep(
    tokens: Tensor,
    slots: Tensor,
    parameters: Sequence[Tensor],
    tables: Sequence[Tensor],
    last_sampled: Tensor,
) -> Tensor:
    """Write what the later steps of the slots need into their tables; returns the tokens."""
    for table, parameter in zip(tables, parameters, strict=True):
        table.index_put_((slots.long(),), parameter)
    return _scatter(tokens, slots, last_sampled)


class SampledPrefill(GreedyPrefill):
    """A prefill step that samples."""

    def choose(self, logits: Tensor, *parameters: Tensor) -> Tensor:
        temperature, top_k, top_p, seed, position = parameters
        return sample(logits, temperature, top_k, top_p, seed, position)


class Remap(nn.Module):
    """Row i of the result is row `index[i]` of the future."""

    def forward(self, future: Tensor, index: Tensor) -> Tensor:
        return future[index.long()]
