"""From tokens to logits: one new token a row, in modules that can be traced.

All of them are built around the same `Weights`, so that the executables of a model share one copy.
The layers are children of one ModuleList and alike in all but their parameters: the compiler
compiles one of them. `packed.py` has what takes in prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from models.layers import LayerWeights, Weights, attend, write

__all__ = ["Decode", "Layers", "Remap", "Span"]


class Span(NamedTuple):
    """The tokens that a step brings: int [parts, tokens] each, but for `ends`.

    Attributes:
        input_ids: The tokens.
        positions: Where they are in their sequences.
        valid: bool, False for padding.
        ends: int [rows], the position that follows the last one of each row.
        owners: int64 [parts], whose tokens they are: slots.
    """

    input_ids: Tensor
    positions: Tensor
    valid: Tensor
    ends: Tensor
    owners: Tensor


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


class Layers(nn.Module):
    """What is the same for all tokens: the layers, one after another, and the rotations.

    `inputs` names what `forward` takes, in order, before the cache, and what `span` takes. Only the
    first `length` positions of the cache are touched: attention reads all that it is given.
    """

    inputs: ClassVar[tuple[str, ...]]
    cos: Tensor
    sin: Tensor

    def __init__(
        self, weights: Weights, length: int, layer: Callable[[LayerWeights], nn.Module]
    ) -> None:
        super().__init__()
        self.weights, self.length = weights, length
        self.layers = nn.ModuleList(layer(block) for block in weights.blocks)
        for name, table in zip(("cos", "sin"), weights.config.rotations(length), strict=True):
            self.register_buffer(name, table.to(weights.embedding.dtype))

    def run_layers(self, input_ids: Tensor, kv_cache: Tensor, *inputs: Tensor | int) -> Tensor:
        hidden = self.weights.embedding[input_ids.long()]
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, *inputs, kv_cache[index].narrow(-2, 0, self.length))
        return hidden


class Decode(Layers):
    """One new token a row."""

    inputs = ("input_ids", "positions", "slots")

    def __init__(self, weights: Weights, length: int) -> None:
        super().__init__(weights, length, DecodeLayer)

    def forward(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, kv_cache: Tensor
    ) -> Tensor:
        """float32 [rows, vocab]; writes the tokens' keys and values into the cache."""
        return self.weights.logits(self.hidden(input_ids, positions.long(), slots.long(), kv_cache))

    def hidden(self, input_ids: Tensor, at: Tensor, where: Tensor, kv_cache: Tensor) -> Tensor:
        """[rows, hidden] behind the layers."""
        return self.run_layers(input_ids, kv_cache, self.cos[at], self.sin[at], at, where)

    def span(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Span:
        """The tokens; a padding row's are as good as any, since its slot is scratch."""
        valid = torch.ones_like(input_ids, dtype=torch.bool)
        ends, owners = positions + 1, slots.long()
        return Span(input_ids[:, None], positions[:, None], valid[:, None], ends, owners)


class Remap(nn.Module):
    """Row i of the result is row `index[i]` of the future."""

    def forward(self, future: Tensor, index: Tensor) -> Tensor:
        return future[index.long()]
