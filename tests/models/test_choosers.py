import torch

from models.adjusting import empty_tables
from models.choosers import CHOOSERS, SAMPLING_TABLES
from models.steps import Span
from neuron_streams.decode import SamplingTensors
from tests.models.driver import ints

VOCAB, SLOTS = 40, 5


SLOTS_OF_ROWS = torch.tensor([3, 2, 1, 4])


def tables():
    kept = torch.tensor([0.0, 0.9, 0.0, 1.4, 0.6]), ints([0, 5, 0, 0, 9]), torch.ones(SLOTS)
    named = dict(zip(SAMPLING_TABLES, (*kept, torch.arange(SLOTS)), strict=True))
    return named | empty_tables(SLOTS, VOCAB)


def span(rows):
    ids, at = ints(range(rows))[:, None], ints(range(7, 7 + rows))
    return Span(
        ids, at[:, None], torch.ones(rows, 1, dtype=torch.bool), at + 1, SLOTS_OF_ROWS[:rows]
    )


def test_all_choose_the_same_where_nothing_more_is_asked():
    logits, slots = torch.randn(4, VOCAB), SLOTS_OF_ROWS
    sampled = CHOOSERS["sampled"]()(logits, span(4), slots, tables())
    adjusted = CHOOSERS["adjusted"]()(logits, span(4), slots, tables())
    assert torch.equal(adjusted.sampled_token_ids, sampled)
    greedy = CHOOSERS["greedy"]()(logits, span(4), slots, tables())
    assert greedy[1] == sampled[1]
    assert greedy.dtype == sampled.dtype == torch.int32


def test_sampling_tables_are_the_fields_of_sampling_tensors():
    fields = [field for field, _ in SAMPLING_TABLES.values()]
    assert fields == list(SamplingTensors._fields[:4])


def test_log_probabilities_are_of_the_logits_before_they_are_adjusted():
    given = tables()
    given["temperatures"].zero_()
    logits = torch.randn(1, VOCAB)
    likeliest = int(logits.argmax())
    given["logit_biases"][2, likeliest] = -torch.inf
    result = CHOOSERS["adjusted"]()(logits, span(1), torch.tensor([2]), given)
    assert int(result.sampled_token_ids) == int(logits.topk(2).indices[0, 1])
    assert int(result.logprobs_tensors.selected_token_ranks) == 2
    assert int(result.logprobs_tensors.logprob_token_ids[0, 1]) == likeliest
