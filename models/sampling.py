"""Sampling on the device: greedy, temperature, top-k, top-p, with a counter-based generator.

Every function is plain tensor arithmetic with static shapes, so it traces into the executable that
computed the logits. There is no generator state: the uniform of a draw is Philox2x32-10 of the
request's seed and the position of the token. So a token depends on the seed, the position and the
logits, never on the batch that it was drawn in.

Top-k and top-p look at a short list of the `SHORT_LIST` largest logits, as the samplers of
Neuron's own libraries do: a sort of the whole vocabulary costs seven times as much, and an exact
search for the cut-off takes longer to compile than the model. Where both are off, the whole
vocabulary is drawn from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.layers import materialise

__all__ = ["SHORT_LIST", "greedy", "philox", "sample", "uniform"]

SHORT_LIST = 1024
"""How many of the largest logits top-k and top-p look at; a larger top-k cannot be had."""

_MASK = 0xFFFFFFFF
_MULTIPLIER = 0xD256D193
_WEYL = 0x9E3779B9
_ROUNDS = 10


def greedy(logits: Tensor) -> Tensor:
    """The largest logit of each row, the lowest index on ties: [rows, vocab] -> int32 [rows]."""
    return torch.argmax(logits, dim=-1).to(torch.int32)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """Draw one token a row: [rows, vocab] -> int32 [rows]; greedy where `temperature` is 0.

    Temperature first, then top-k (0: off), then top-p (1.0: off) on what top-k left, as in
    Hugging Face transformers and vLLM. A nucleus of more than `SHORT_LIST` tokens is cut there.

    Args:
        logits: float32.
        temperature, top_k, top_p, seed: one of each a row: float32, int32, float32, int64.
        position: int32, the position in its sequence of the token to draw.
    """
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    mass = torch.exp(scaled - scaled.amax(-1, keepdim=True))
    draw = uniform(seed, position)
    listed = _from_short_list(scaled, mass.sum(-1), top_k, top_p, draw)
    unfiltered = (top_k == 0) & (top_p >= 1.0)
    sampled = torch.where(unfiltered, _draw(mass, draw), listed).to(torch.int32)
    return torch.where(temperature > 0, sampled, greedy(logits))


def _from_short_list(
    scaled: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, draw: Tensor
) -> Tensor:
    length = min(SHORT_LIST, scaled.shape[-1])
    values, tokens = torch.topk(scaled, length, dim=-1)
    rank = torch.arange(length, device=scaled.device)
    mass = torch.exp(values - values[:, :1])
    mass = torch.where((rank < top_k[:, None]) | (top_k[:, None] == 0), mass, 0.0)
    total = torch.where(top_k == 0, total, mass.sum(-1))
    likelier = mass.cumsum(-1) - mass
    inside = (likelier < (top_p * total)[:, None]) | (top_p[:, None] >= 1.0) | (rank == 0)
    return tokens.gather(-1, _draw(torch.where(inside, mass, 0.0), draw)[:, None])[:, 0]


def _draw(mass: Tensor, draw: Tensor) -> Tensor:
    """Invert the distribution function: the first index whose cumulative mass exceeds the draw."""
    cumulative = mass.cumsum(-1)
    return (cumulative <= (draw * cumulative[:, -1])[:, None]).long().sum(-1)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A float32 in [0, 1 - 2**-23] for each int64 `seed` and int `position`.

    Of 23 bits, so that its product with a float32 total stays below the total.
    """
    word, _ = philox(position.long() & _MASK, (seed >> 32) & _MASK, seed & _MASK)
    return (word >> 9).to(torch.float32) * 2.0**-23


def philox(left: Tensor, right: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Philox2x32-10 of Salmon et al., 2011: the words of the counter, 32 bits held in int64."""
    for number in range(_ROUNDS):
        high, low = _multiply(left)
        left = materialise(high ^ ((key + number * _WEYL) & _MASK) ^ right)
        right = materialise(low)
    return left, right


def _multiply(word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product, by half the odd multiplier: an int64 holds that."""
    half = word * (_MULTIPLIER >> 1)
    high = (half + (word >> 1)) >> 31
    low = (((half & (_MASK >> 1)) << 1) + word) & _MASK
    return high, low
