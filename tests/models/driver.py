"""Drives a model as the decode loop does, one step after another, without a loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from models.adjusting import neutral
from models.llama import Llama
from neuron_streams.decode import Adjustments, LogprobsTensors, SamplerOutput, SamplingTensors
from neuron_streams.decode.model import Sampled


@dataclass
class Request:
    """A prompt in a slot, and the tokens that came."""

    prompt: Sequence[int]
    slot: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    wishes: dict[str, Any] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogprobsTensors] = field(default_factory=list)

    def sampling(self, vocab_size: int = 97) -> SamplingTensors:
        """Its parameters as `prefill` takes them."""
        return SamplingTensors(
            torch.tensor([self.temperature]),
            ints([self.top_k]),
            torch.tensor([self.top_p]),
            torch.tensor([self.seed]),
            self._adjustments(vocab_size),
        )

    def _adjustments(self, vocab_size: int) -> Adjustments | None:
        """`wishes` are fields of `Adjustments`; bias and stop mask as {token: value}, {token}."""
        if self.wishes is None:
            return None
        made = neutral(1, vocab_size)
        made.num_prompt_tokens[0] = len(self.prompt)
        for name, value in self.wishes.items():
            row = getattr(made, name)[0]
            if name == "logit_bias":
                for token, bias in value.items():
                    row[token] = bias
            elif name == "stop_mask":
                row[list(value)] = True
            else:
                row.fill_(value)
        return made

    def take(self, result: Sampled, row: int) -> None:
        """Its part of what a step gave."""
        if isinstance(result, SamplerOutput):
            own = (part.to("cpu")[row] for part in result.logprobs_tensors)
            self.logprobs.append(LogprobsTensors(*own))
            result = result.sampled_token_ids
        self.tokens.append(int(result.tolist()[row]))


def fresh(request: Request, slot: int) -> Request:
    """The same request in another slot, as if nothing had come of it."""
    return dataclasses.replace(request, slot=slot, tokens=[], logprobs=[])


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill(model: Llama, request: Request) -> None:
    """Admit a request in the smallest bucket that holds its prompt and what has come of it."""
    known = [*request.prompt, *request.tokens]
    bucket = next(size for size in model.prompt_buckets if size >= len(known))
    ids = ints([*known, *[0] * (bucket - len(known))])[None]
    sampling = request.sampling(model.vocab_size)
    request.take(model.prefill(ids, ints([len(known)]), ints([request.slot]), sampling), 0)


def prefill_in_pieces(model: Llama, request: Request, piece: int) -> None:
    """The same, so many tokens at a time."""
    known, sampling = [*request.prompt, *request.tokens], request.sampling(model.vocab_size)
    for start in range(0, len(known), piece):
        tokens = known[start : start + piece]
        rest = ints([len(tokens)]), ints([request.slot]), sampling
        result = model.packed(ints(tokens), ints([start]), *rest)
    request.take(result, 0)


def decode(model: Llama, rows: Sequence[Request | None], *, gather: bool = False) -> None:
    """One step; None is a padding row."""
    ids = [(-1 if gather else row.tokens[-1]) if row else 0 for row in rows]
    at = [len(row.prompt) + len(row.tokens) - 1 if row else 0 for row in rows]
    slots = [row.slot if row else 0 for row in rows]
    step = model.decode_gather if gather else model.decode
    result = step(ints(ids), ints(at), ints(slots))
    for number, row in enumerate(rows):
        if row:
            row.take(result, number)


def run(model: Llama, request: Request, count: int) -> list[int]:
    """`count` tokens of one request on its own."""
    prefill(model, request)
    for _ in range(count - 1):
        decode(model, [request])
    return request.tokens


def packed(model: Llama, rows: Sequence[tuple[Request, Sequence[int]]], *, gather: bool) -> None:
    """One step of many: so many of their known tokens each, none for one that decodes."""
    ids: list[int] = []
    starts, lengths, slots = [], [], []
    for request, piece in rows:
        known = len(request.prompt) + len(request.tokens)
        tokens = [request.prompt[at] for at in piece]
        if not piece:
            tokens = [-1 if gather else request.tokens[-1]]
        ids += tokens
        starts.append(piece[0] if piece else known - 1)
        lengths.append(len(tokens))
        slots.append(request.slot)
    each = [request.sampling(model.vocab_size) for request, _ in rows]
    fields = (torch.cat(column) for column in zip(*(one[:4] for one in each), strict=True))
    sampling = SamplingTensors(*fields, together([one.adjustments for one in each], model))
    result = model.packed(ints(ids), ints(starts), ints(lengths), ints(slots), sampling)
    for row, (request, piece) in enumerate(rows):
        if not piece or piece[-1] == len(request.prompt) - 1:
            request.take(result, row)


def together(rows: Sequence[Adjustments | None], model: Llama) -> Adjustments | None:
    if all(one is None for one in rows):
        return None
    full = [neutral(1, model.vocab_size) if one is None else one for one in rows]
    return Adjustments(*(torch.cat(column) for column in zip(*full, strict=True)))
