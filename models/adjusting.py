"""What few requests ask of the sampler: bias, penalties, a least length, log-probabilities.

A slot's wishes and the counts of what it has seen lie in tables on the device, so that a step needs
nothing of them from the host, and a token that never reached the host counts like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.steps import Span
from neuron_streams.decode.model import MAX_LOGPROBS, Adjustments, LogprobsTensors

__all__ = ["TABLES", "Admit", "adjust", "count", "empty_tables", "logprobs", "neutral"]


class Table(NamedTuple):
    """A table of the slots: the field of `Adjustments` that it keeps, and what is neutral."""

    field: str
    dtype: torch.dtype
    neutral: float
    wide: bool = False

    def rows(self, number: int, vocab_size: int) -> Tensor:
        """So many neutral ones."""
        size = (number, vocab_size) if self.wide else (number,)
        return torch.full(size, self.neutral, dtype=self.dtype, device="cpu")


TABLES = {
    "min_ps": Table("min_p", torch.float32, 0.0),
    "repetition_penalties": Table("repetition_penalty", torch.float32, 1.0),
    "presence_penalties": Table("presence_penalty", torch.float32, 0.0),
    "frequency_penalties": Table("frequency_penalty", torch.float32, 0.0),
    "prompt_lengths": Table("num_prompt_tokens", torch.int32, 0),
    "min_lengths": Table("min_length", torch.int32, 0),
    "logit_biases": Table("logit_bias", torch.float32, 0.0, wide=True),
    "stop_masks": Table("stop_mask", torch.bool, False, wide=True),
}
"""By name, in the order of `Adjustments`."""


def empty_tables(num_slots: int, vocab_size: int) -> dict[str, Tensor]:
    """All tables, neutral, and `token_counts`, int32 [2, slots, vocab]: of prompt and output."""
    tables = {name: table.rows(num_slots, vocab_size) for name, table in TABLES.items()}
    return tables | {
        "token_counts": torch.zeros(2, num_slots, vocab_size, dtype=torch.int32, device="cpu")
    }


def neutral(rows: int, vocab_size: int) -> Adjustments:
    """The adjustments of rows that ask for none."""
    fields = {table.field: table.rows(rows, vocab_size) for table in TABLES.values()}
    return Adjustments(
        num_logprobs=torch.full((rows,), -1, dtype=torch.int32, device="cpu"), **fields
    )


class Admit(nn.Module):
    """Gives slots to new requests: their wishes into the tables, and their counts to zero."""

    def forward(self, **inputs: Tensor) -> Tensor:
        """`slots`, a row for each slot under each field's name, and the tables."""
        slots = inputs["slots"].long()
        for name, table in TABLES.items():
            inputs[name].index_put_((slots,), inputs[table.field])
        inputs["token_counts"].index_fill_(1, slots, 0)
        return inputs["slots"] + 0  # an executable returns something


def count(token_counts: Tensor, prompt_lengths: Tensor, span: Span) -> None:
    """Count the tokens of a step, each as prompt or output; padding counts for the scratch slot.

    Args:
        token_counts: int32 [2, slots, vocab], updated in place.
        prompt_lengths: int [parts], of the owners.
    """
    is_output = (span.positions >= prompt_lengths[:, None]).long()
    where = torch.where(span.valid, span.owners[:, None], 0)
    once = torch.ones_like(where, dtype=torch.int32)
    token_counts.index_put_((is_output, where, span.input_ids.long()), once, accumulate=True)


def adjust(
    logits: Tensor, token_counts: Tensor, positions: Tensor, own: Mapping[str, Tensor]
) -> Tensor:
    """Logits as the rows want them, in the order that `Adjustments` tells; [rows, vocab].

    Args:
        logits: float32 [rows, vocab].
        token_counts: int32 [2, rows, vocab].
        positions: int [rows], of the tokens to sample.
        own: The rows' adjustments, under the names of the fields.
    """
    prompt, output = token_counts[0], token_counts[1]
    logits = logits + own["logit_bias"]
    early = (positions < own["min_length"])[:, None]
    logits = torch.where(early & own["stop_mask"], -torch.inf, logits)
    penalty = own["repetition_penalty"][:, None]
    repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = torch.where(prompt + output > 0, repeated, logits)
    logits = logits - own["frequency_penalty"][:, None] * output
    return logits - own["presence_penalty"][:, None] * (output > 0)


def logprobs(logits: Tensor, tokens: Tensor) -> LogprobsTensors:
    """Log-probabilities of sampled tokens and of the likeliest ones.

    A vocabulary of fewer than `MAX_LOGPROBS` tokens leaves columns over: id -1, -inf.

    Args:
        logits: float32 [rows, vocab], the model's own.
        tokens: int32 [rows].
    """
    total = torch.logsumexp(logits, -1, keepdim=True)
    chosen = logits.gather(-1, tokens.long()[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    best, ids = logits.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    over = (0, MAX_LOGPROBS - best.shape[-1])
    ids = torch.cat((tokens[:, None], nn.functional.pad(ids.to(torch.int32), over, value=-1)), -1)
    values = nn.functional.pad(best - total, over, value=-torch.inf)
    return LogprobsTensors(ids, torch.cat((chosen - total, values), -1), ranks.to(torch.int32))
