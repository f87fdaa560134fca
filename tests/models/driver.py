"""Drives a model as the decode loop does, one step after another, without a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from models.llama import Llama
from neuron_streams.decode import SamplingTensors


@dataclass
class Request:
    """A prompt in a slot, and the tokens that came."""

    prompt: Sequence[int]
    slot: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    tokens: list[int] = field(default_factory=list)


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill(model: Llama, request: Request) -> None:
    """Admit a request in the smallest bucket that holds its prompt."""
    length = len(request.prompt)
    bucket = next(size for size in model.prompt_buckets if size >= length)
    ids = ints([*request.prompt, *[0] * (bucket - length)])[None]
    sampling = SamplingTensors(
        torch.tensor([request.temperature]),
        ints([request.top_k]),
        torch.tensor([request.top_p]),
        torch.tensor([request.seed]),
    )
    future = model.prefill(ids, ints([length]), ints([request.slot]), sampling)
    request.tokens.append(int(future.tolist()[0]))


def decode(model: Llama, rows: Sequence[Request | None]) -> None:
    """One step; None is a padding row."""
    ids = [row.tokens[-1] if row else 0 for row in rows]
    at = [len(row.prompt) + len(row.tokens) - 1 if row else 0 for row in rows]
    slots = [row.slot if row else 0 for row in rows]
    future = model.decode(ints(ids), ints(at), ints(slots))
    for row, token in zip(rows, future.tolist(), strict=True):
        if row:
            row.tokens.append(int(token))


def run(model: Llama, request: Request, count: int) -> list[int]:
    """`count` tokens of one request on its own."""
    prefill(model, request)
    for _ in range(count - 1):
        decode(model, [request])
    return request.tokens
