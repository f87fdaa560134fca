"""From logits to tokens: what is done with them in a step, and which tables of the slots it reads.

A step in which no slot samples takes the likeliest tokens and never pays for a sampler; one in
which no slot asks for more than a sampler never pays for the rest. The same token comes out of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from models import adjusting
from models.sampling import Sampler, greedy
from models.steps import Span
from neuron_streams.decode import SamplerOutput

__all__ = ["CHOOSERS", "SAMPLING_TABLES", "Adjusted", "Greedy", "Sampled"]

SAMPLING_TABLES = {
    "temperatures": ("temperature", torch.float32),
    "top_ks": ("top_k", torch.int32),
    "top_ps": ("top_p", torch.float32),
    "seeds": ("seed", torch.int64),
}
"""Of all slots, with the field of `SamplingTensors` that each keeps, in the order of the fields."""


class Greedy(nn.Module):
    """The likeliest token of each row."""

    tables: ClassVar[tuple[str, ...]] = ()

    def forward(
        self, logits: Tensor, span: Span, slots: Tensor, tables: Mapping[str, Tensor]
    ) -> Tensor:
        return greedy(logits)


class Sampled(nn.Module):
    """A token sampled with the parameters of the row's slot."""

    tables: ClassVar[tuple[str, ...]] = tuple(SAMPLING_TABLES)

    def __init__(self) -> None:
        super().__init__()
        self.sampler = Sampler()

    def forward(
        self, logits: Tensor, span: Span, slots: Tensor, tables: Mapping[str, Tensor]
    ) -> Tensor:
        parameters = (tables[name][slots] for name in SAMPLING_TABLES)
        tokens: Tensor = self.sampler(logits, *parameters, span.ends)
        return tokens


class Adjusted(nn.Module):
    """A token sampled from logits that the slot's wishes and history change; log-probabilities."""

    tables: ClassVar[tuple[str, ...]] = (*SAMPLING_TABLES, *adjusting.TABLES, "token_counts")

    def __init__(self) -> None:
        super().__init__()
        self.sampler = Sampler()

    def forward(
        self, logits: Tensor, span: Span, slots: Tensor, tables: Mapping[str, Tensor]
    ) -> SamplerOutput:
        """The step's own tokens count before they change its logits."""
        own = {table.field: tables[name][slots] for name, table in adjusting.TABLES.items()}
        counts = tables["token_counts"]
        adjusting.count(counts, tables["prompt_lengths"][span.owners], span)
        adjusted = adjusting.adjust(logits, counts[:, slots], span.ends, own)
        parameters = (tables[name][slots] for name in SAMPLING_TABLES)
        tokens = self.sampler(adjusted, *parameters, span.ends, own["min_p"])
        return SamplerOutput(tokens, adjusting.logprobs(logits, tokens))


CHOOSERS: dict[str, type[Greedy] | type[Sampled] | type[Adjusted]] = {
    "greedy": Greedy,
    "sampled": Sampled,
    "adjusted": Adjusted,
}
