"""Adjusted logits against the classes that `transformers.generate` uses, and log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.adjusting import TABLES, Admit, adjust, count, empty_tables, logprobs, neutral
from models.steps import Span
from neuron_streams.decode.model import MAX_LOGPROBS, Adjustments
from tests.models.driver import Request, ints
from tests.models.peer import processed

VOCAB = 23
tokens = st.integers(0, VOCAB - 1)


def adjusted(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """The same by our tables, in slot 2 of 3, the tokens counted in two steps."""
    tables, slots = empty_tables(3, logits.shape[0]), torch.tensor([2])
    wanted = request.sampling(logits.shape[0]).adjustments or neutral(1, logits.shape[0])
    admit(tables, ints([2]), wanted)
    known = [*request.prompt, *request.tokens]
    for part in (slice(0, len(known) // 2), slice(len(known) // 2, None)):
        positions = torch.arange(len(known))[None, part]
        ids, valid = ints(known)[None, part], torch.ones_like(positions, dtype=torch.bool)
        span = Span(ids, positions, valid, ints([len(known)]), slots)
        count(tables["token_counts"], tables["prompt_lengths"][slots], span)
    own = {table.field: tables[name][slots] for name, table in TABLES.items()}
    counts = tables["token_counts"][:, slots]
    return adjust(logits[None], counts, ints([len(known)]), own)[0]


def admit(tables: dict[str, torch.Tensor], slots: torch.Tensor, wanted: Adjustments) -> None:
    fields = wanted._asdict()
    del fields["num_logprobs"]
    Admit()(slots=slots, **fields, **tables)


wishes = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.floats(0.25, 5, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
        "logit_bias": st.dictionaries(
            tokens, st.one_of(st.floats(-50, 50, width=32), st.just(-torch.inf)), min_size=1
        ),
        "stop_mask": st.sets(tokens, min_size=1),
        "min_length": st.integers(0, 30),
    },
)


@given(
    st.lists(tokens, min_size=1, max_size=12),
    st.lists(tokens, max_size=12),
    wishes,
    st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_logits_are_those_of_transformers(
    prompt: list[int], output: list[int], wanted: dict[str, Any], seed: int
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    request = Request(prompt, 1, wishes=wanted, tokens=output)
    torch.testing.assert_close(adjusted(logits, request), processed(logits.clone(), request))


def test_a_neutral_row_keeps_its_logits_to_the_last_bit() -> None:
    logits = torch.randn(VOCAB)
    assert torch.equal(adjusted(logits, Request([3, 4, 5], 1, tokens=[3, 3, 7])), logits)


def test_padding_counts_for_the_scratch_slot_alone() -> None:
    counts = torch.zeros(2, 4, 9, dtype=torch.int32)
    ids = ints([5, 5, 7, 0, 0, 0, 8, 2]).view(2, 4)
    valid = torch.tensor([[True, True, True, False], [True, True, True, True]])
    positions = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    span = Span(ids, positions, valid, ints([3, 8]), torch.tensor([3, 1]))
    count(counts, ints([2, 6]), span)
    wanted = torch.zeros_like(counts)
    wanted[0, 3, 5], wanted[1, 3, 7] = 2, 1
    wanted[0, 1, 0], wanted[1, 1, [8, 2]] = 2, 1
    assert torch.equal(counts[:, 1:], wanted[:, 1:])
    assert counts[:, 0].sum() == 1


def test_a_slot_is_given_its_wishes_and_no_counts() -> None:
    tables = empty_tables(3, VOCAB)
    tables["token_counts"].fill_(7)
    first = Request([1], 1, wishes={"min_p": 0.2, "logit_bias": {4: -torch.inf}, "stop_mask": {2}})
    wanted = first.sampling(VOCAB).adjustments
    assert wanted is not None
    admit(tables, ints([2]), wanted)
    assert tables["min_ps"].tolist() == [0, 0, pytest.approx(0.2)]
    assert tables["logit_biases"][2, 4] == -torch.inf
    assert tables["stop_masks"].nonzero().tolist() == [[2, 2]]
    assert tables["token_counts"].sum((0, 2)).tolist() == [14 * VOCAB, 14 * VOCAB, 0]
    admit(tables, ints([2]), neutral(1, VOCAB))
    empty = empty_tables(3, VOCAB)
    assert all(torch.equal(tables[name], empty[name]) for name in TABLES)


@pytest.mark.parametrize("vocab", [MAX_LOGPROBS + 30, MAX_LOGPROBS, 5, 1])
def test_logprobs_are_those_of_torch(vocab: int) -> None:
    logits = torch.randn(4, vocab) * 3
    chosen = torch.randint(vocab, (4,), dtype=torch.int32)
    ids, values, ranks = logprobs(logits, chosen)
    wanted = torch.log_softmax(logits, -1)
    assert (ids.shape, values.shape, ranks.shape) == ((4, 21), (4, 21), (4,))
    assert (ids.dtype, values.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    assert torch.equal(ids[:, 0], chosen)
    best = min(vocab, MAX_LOGPROBS)
    assert torch.equal(ids[:, 1 : best + 1], wanted.topk(best).indices.int())
    real = ids[:, : best + 1]
    torch.testing.assert_close(values[:, : best + 1], wanted.gather(1, real.long()))
    assert (ids[:, best + 1 :] == -1).all()
    assert (values[:, best + 1 :] == -torch.inf).all()
    order = wanted.argsort(-1, descending=True)
    assert ranks.tolist() == [int((order[n] == chosen[n]).nonzero()) + 1 for n in range(4)]
