"""Sampling on the device: greedy, temperature, top-k, top-p, with a counter-based generator.

Every function is plain tensor arithmetic with static shapes, so it traces into the executable that
computed the logits. There is no generator state: the uniform of a draw is Philox4x32-10 keyed by
the request's seed, with the position of the token as its counter. So a token depends on the seed,
the position and the logits, never on the batch that it was drawn in.

Top-k and top-p look at a short list of the `SHORT_LIST` largest logits, as the samplers of
Neuron's own libraries do: a sort of the whole vocabulary costs seven times as much, and an exact
search for the cut-off takes longer to compile than the model. Where both are off, the whole
vocabulary is drawn from.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["SHORT_LIST", "greedy", "philox", "sample", "uniform"]

SHORT_LIST = 1024
"""How many of the largest logits top-k and top-p look at; a larger top-k cannot be had."""

Word: TypeAlias = Tensor | int

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
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
    word = philox((position.long() & _MASK, 0, 0, 0), (seed & _MASK, (seed >> 32) & _MASK))[0]
    return (torch.as_tensor(word) >> 9).to(torch.float32) * 2.0**-23


def philox(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 of Salmon et al., 2011: 32-bit words, held in int64."""
    a, b, c, d = counter
    left, right = key
    for _ in range(_ROUNDS):
        high_a, low_a = _multiply(_MULTIPLIERS[0], a)
        high_c, low_c = _multiply(_MULTIPLIERS[1], c)
        a, b, c, d = high_c ^ b ^ left, low_c, high_a ^ d ^ right, low_a
        left, right = (left + _WEYL[0]) & _MASK, (right + _WEYL[1]) & _MASK
    return a, b, c, d


def _multiply(constant: int, word: Word) -> tuple[Word, Word]:
    """High and low word of a 32 by 32 bit product; in halves, which an int64 can hold."""
    upper = constant * (word >> 16)
    lower = constant * (word & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    low = (((upper & 0xFFFF) << 16) + lower) & _MASK
    return high, low
