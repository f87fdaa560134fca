"""Log-probabilities on the host: what a request gets with each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from neuron_streams.decode.model import LogprobsTensors, Sampled, SamplerOutput, WindowOutput

__all__ = ["Logprob", "TokenLogprobs", "logprobs_of_rows", "split", "to_host", "what_is_wanted"]


class Logprob(NamedTuple):
    """Natural log-probability of a token, by the model's own logits; rank 1 is the likeliest."""

    logprob: float
    rank: int


TokenLogprobs: TypeAlias = dict[int, Logprob]
"""By token id: the sampled token first, then the likeliest ones that were asked for."""


def split(sampled: Sampled) -> tuple[torch.Tensor, LogprobsTensors | None]:
    """The tokens of a step, and their log-probabilities where a row wants them."""
    if isinstance(sampled, (SamplerOutput, WindowOutput)):
        return sampled.sampled_token_ids, sampled.logprobs_tensors
    return sampled, None


def what_is_wanted(sampled: Sampled, num_logprobs: Sequence[int | None]) -> Sampled:
    """What to copy of a step: the tokens alone where no row wants log-probabilities.

    Raises:
        RuntimeError: One does, and the model gave none.
    """
    tokens, logprobs = split(sampled)
    if not num_logprobs:
        return tokens
    if logprobs is None:
        raise RuntimeError(
            "A request wants log-probabilities and the model gave none: where its adjusts_logits is"
            " true, its calls must return a SamplerOutput for such a row."
        )
    return sampled


def to_host(sampled: Sampled, *, non_blocking: bool = False) -> Sampled:
    """Copy all that a step gives, on the current stream.

    Host: blocks until it is there; with `non_blocking` returns at once, as `torch.Tensor.to`.
    """
    tokens, logprobs = split(sampled)
    host_tokens = tokens.to("cpu", non_blocking=non_blocking)
    if logprobs is None:
        return host_tokens
    copies = [tensor.to("cpu", non_blocking=non_blocking) for tensor in logprobs]
    return SamplerOutput(host_tokens, LogprobsTensors(*copies))


def logprobs_of_rows(
    tensors: LogprobsTensors, num_logprobs: Sequence[int | None], num_tokens: Sequence[int]
) -> list[list[TokenLogprobs] | None]:
    """Of host tensors, as many likeliest ones as each row wants; None where it wants nothing.

    A sampled token that is among the likeliest is there once, with its place among them.
    `num_tokens` is how many tokens each row has, of a window or of one step.
    """
    windowed = tensors.selected_token_ranks.dim() == 2
    steps = tensors if windowed else (tensor.unsqueeze(0) for tensor in tensors)
    ids, logprobs, ranks = (tensor.tolist() for tensor in steps)
    return [
        None
        if most is None
        else [
            _of_row(ids[step][row][: most + 1], logprobs[step][row], ranks[step][row])
            for step in range(count)
        ]
        for row, (most, count) in enumerate(zip(num_logprobs, num_tokens, strict=True))
    ]


def _of_row(ids: list[int], logprobs: list[float], rank: int) -> TokenLogprobs:
    ranks = (rank, *range(1, len(ids)))
    return {
        token_id: Logprob(logprob, place)
        for token_id, logprob, place in zip(ids, logprobs, ranks, strict=False)
    }
