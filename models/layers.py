"""A Llama's parameters and its arithmetic, in plain tensor operations with static shapes.

A product or an attention is written out as multiply and sum where a compiler can keep it in one
loop: a decode step is bound by reading weights and cache once, and a library call reads them more
often or wants them copied first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import LlamaConfig

__all__ = ["LayerWeights", "Weights", "attend", "materialise", "project", "write"]

_FEW_ROWS = 8
_SUMS = 16  # that the vector registers of a core hold
_LARGE = 2**17  # elements; a smaller weight stays in a cache, however often it is read


def project(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows @ weight.T`: [n, inputs], [outputs, inputs] -> [n, outputs].

    A few rows are a few dot products with each row of the weight. Written out, they share one
    read of the weight, at up to three times the speed of a CPU's BLAS. Bands of the weight go
    through the loop together, so that its sums do not wait for one another.
    """
    count, outputs = rows.shape[0], weight.shape[0]
    if count > _FEW_ROWS or not written_out(rows):
        return functional.linear(rows, weight)
    rows = materialise(rows)
    if weight.numel() < _LARGE:
        return _dots(weight, rows[:, None])
    bands = weight.chunk(math.gcd(outputs, min(4, _SUMS // count)))
    dots = torch.stack([_dots(band, row) for band in bands for row in rows.unbind()])
    return dots.view(len(bands), count, -1).transpose(0, 1).reshape(count, outputs)


def written_out(tensor: Tensor) -> bool:
    """Whether to spell products for the loops of a CPU; a GPU's libraries do better."""
    return tensor.device.type == "cpu"


def materialise(tensor: Tensor) -> Tensor:
    """The tensor, computed once: a compiler inlines what is cheap into every loop that reads it.

    Inductor needs strides to point at memory, so it writes the tensor out before this view.
    """
    return tensor.as_strided(tensor.shape, tensor.stride())


def _dots(band: Tensor, row: Tensor) -> Tensor:
    return (band.float() * row.float()).sum(-1).to(row.dtype)


class LayerWeights(nn.Module):
    """The parameters of one layer, and what both kinds of step do alike."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        hidden, wide = config.hidden_size, config.intermediate_size
        width = self.heads * self.head_dim
        self.input_norm = _parameter(dtype, hidden)
        self.qkv = _parameter(dtype, width + 2 * self.kv_heads * self.head_dim, hidden)
        self.output = _parameter(dtype, hidden, width)
        self.post_norm = _parameter(dtype, hidden)
        self.gate_up = _parameter(dtype, 2 * wide, hidden)
        self.down = _parameter(dtype, hidden, wide)

    def queries_keys_values(
        self, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: [n, hidden] -> [n, heads, head_dim] each."""
        mixed = project(norm(hidden, self.input_norm, self.eps), self.qkv)
        mixed = mixed.view(hidden.shape[0], -1, self.head_dim)
        turned = self.heads + self.kv_heads
        rotated = rotate(mixed[:, :turned], cos[:, None], sin[:, None])
        return rotated[:, : self.heads], rotated[:, self.heads :], mixed[:, turned:]

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add the attention, then the feed-forward: [n, hidden], [n, heads * head_dim]."""
        hidden = hidden + project(attended, self.output)
        gate, up = project(norm(hidden, self.post_norm, self.eps), self.gate_up).chunk(2, dim=-1)
        return hidden + project(functional.silu(gate) * up, self.down)


class Weights(nn.Module):
    """All parameters of a Llama, uninitialised."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.embedding = _parameter(dtype, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LayerWeights(config, dtype) for _ in range(config.num_hidden_layers)
        )
        self.norm = _parameter(dtype, config.hidden_size)
        self.head = self.embedding
        if not config.tie_word_embeddings:
            self.head = _parameter(dtype, config.vocab_size, config.hidden_size)

    @property
    def blocks(self) -> list[LayerWeights]:
        """The layers, for type checkers too."""
        return [layer for layer in self.layers if isinstance(layer, LayerWeights)]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of the last layer's output, [n, hidden]."""
        hidden = norm(hidden, self.norm, self.config.rms_norm_eps)
        return project(hidden, self.head).float()


def _parameter(dtype: torch.dtype, *size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=dtype, device="cpu"), requires_grad=False)


def norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in float32."""
    wide = hidden.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(
        hidden.dtype
    )


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, the halves of a head paired as Hugging Face pairs them."""
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-right, left), dim=-1) * sin


def write(kv: Tensor, new: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Put `new` [2, rows, (tokens,) kv_heads, head_dim] into the cache at slots and positions."""
    which = torch.arange(2, device=kv.device).view(2, *[1] * slots.dim())
    heads = torch.arange(kv.shape[2], device=kv.device)
    kv.index_put_((which, slots, heads, positions), new)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor
) -> Tensor:
    """Attention of one query a row over its slot, up to its position: [rows, heads * head_dim].

    Written out for the same reason as `project`: the indexing by slot and the sharing of a key by
    its group of queries stay inside the loops, and no part of the cache is copied.
    """
    dtype, (rows, heads, head_dim) = queries.dtype, queries.shape
    seen = torch.arange(keys.shape[2], device=keys.device) <= positions[:, None, None]
    keys, values = keys[slots], values[slots]
    if not written_out(queries):
        attended = functional.scaled_dot_product_attention(
            queries[:, :, None], keys, values, attn_mask=seen[:, None], enable_gqa=True
        )
        return attended.reshape(rows, heads * head_dim)
    queries = materialise(queries.float() * head_dim**-0.5)
    queries = queries.view(rows, keys.shape[1], -1, head_dim)
    mixed = [_mix(query, keys.float(), values.float(), seen) for query in queries.unbind(2)]
    return torch.stack(mixed, dim=2).reshape(rows, heads * head_dim).to(dtype)


def _mix(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """The values by the likeness of their keys to one query, for each row and key-value head."""
    scores = torch.where(seen, (query[:, :, None] * keys).sum(-1), -torch.inf)
    shares = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (shares[..., None] * values).sum(-2) / shares.sum(-1, keepdim=True)
