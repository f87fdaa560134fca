"""Sampling on the device: greedy, temperature, top-k, top-p, min-p, with a counter-based generator.

Everything is plain tensor arithmetic with static shapes, so it traces into the executable that
computed the logits. There is no generator state: the uniform of a draw is Philox2x32-10 of the
request's seed and the position of the token. So a token depends on the seed, the position and the
logits, never on the batch that it was drawn in.

Top-k and top-p are found by a search for the gap between the largest logit and the last one that
is kept. A sort would take ten times as long. The steps of the search are equal modules in a list,
which the compiler compiles once: unrolled, they would take longer to compile than the model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers import materialise

__all__ = ["Sampler", "greedy", "philox", "uniform"]

_GAP = 104.0  # exp(-104) is 0 in float32
_STEPS = 13  # of a quarter each: to 1.5e-8 of the widest gap, less than its own rounding

_MASK = 0xFFFFFFFF
_MULTIPLIER = 0xD256D193
_WEYL = 0x9E3779B9
_ROUNDS = 10


def greedy(logits: Tensor) -> Tensor:
    """The largest logit of each row, the lowest index on ties: [rows, vocab] -> int32 [rows]."""
    return torch.argmax(logits, dim=-1).to(torch.int32)


class Sampler(nn.Module):
    """Draws one token a row."""

    def __init__(self) -> None:
        super().__init__()
        self.search = Search()

    def forward(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seed: Tensor,
        position: Tensor,
        min_p: Tensor | None = None,
    ) -> Tensor:
        """[rows, vocab] -> int32 [rows]; greedy where `temperature` is 0.

        Args:
            logits: float32.
            temperature, top_k, top_p, seed: one of each a row: float32, int32, float32, int64.
            position: int32, the position in its sequence of the token to draw.
            min_p: float32, one a row; off when None.
        """
        mass = self.mass(logits, temperature, top_k, top_p, min_p)
        sampled = _draw(mass, uniform(seed, position))
        return torch.where(temperature > 0, sampled, greedy(logits))

    def mass(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor | None = None,
    ) -> Tensor:
        """What is drawn from, 1 for the likeliest token, 0 for what is left out: [rows, vocab].

        Temperature first, then top-k (0: off), then top-p (1.0: off) on what top-k left, then
        min-p, as in Hugging Face transformers. Tokens as likely as the last one kept are kept too.
        The likeliest is always kept; where all are excluded they are all as likely.
        """
        best = logits.amax(-1, keepdim=True)
        gap = torch.where(logits == best, 0.0, best - logits)  # infinite less infinite is NaN
        gap = gap / torch.where(temperature > 0, temperature, 1.0)[:, None]
        mass = torch.exp(-gap)
        last = self.search(gap, torch.ones_like(gap), top_k.to(torch.float32))
        mass = torch.where((gap <= last[:, None]) | (top_k == 0)[:, None], mass, 0.0)
        last = self.search(gap, mass, top_p * mass.sum(-1))
        kept = (gap <= last[:, None]) | (top_p >= 1.0)[:, None]
        if min_p is not None:
            kept = kept & (mass >= min_p[:, None])
        return torch.where(kept, mass, 0.0)


class Search(nn.Module):
    """Finds the gap within which lies enough weight."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(_Narrow() for _ in range(_STEPS))

    def forward(self, gap: Tensor, weight: Tensor, enough: Tensor) -> Tensor:
        """The least bound within which the weights of a row come to `enough`: float32 [rows].

        Args:
            gap: float32 [rows, vocab], at least 0; what lies beyond 104 is left out.
            weight: float32 [rows, vocab].
            enough: float32 [rows].
        """
        # Of the row's own width: a high temperature brings all gaps close to 0.
        high = torch.where(gap <= _GAP, gap, 0.0).amax(-1)
        low = high * -0.01
        for step in self.steps:
            low, high = step(gap, weight, enough, low, high)
        return high.clamp(min=0.0)  # where so little is enough that it is rounded to nothing


class _Narrow(nn.Module):
    """One step: the quarter, of what lies between two bounds, where the weight becomes enough."""

    def forward(
        self, gap: Tensor, weight: Tensor, enough: Tensor, low: Tensor, high: Tensor
    ) -> tuple[Tensor, Tensor]:
        quarter = (high - low) * 0.25
        for bound in (low + quarter * 3, low + quarter * 2, low + quarter):
            reached = torch.where(gap <= bound[:, None], weight, 0.0).sum(-1) >= enough
            low = torch.where(reached, low, torch.maximum(low, bound))
            high = torch.where(reached, bound, high)
        return low, high


def _draw(mass: Tensor, draw: Tensor) -> Tensor:
    """Invert the distribution function: the first index whose cumulative mass exceeds the draw."""
    cumulative = mass.cumsum(-1)
    index = (cumulative <= (draw * cumulative[:, -1])[:, None]).long().sum(-1)
    return index.clamp(max=mass.shape[-1] - 1).to(torch.int32)


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
