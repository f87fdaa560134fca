from __future__ import annotations

import pytest
import torch

from neuron_streams.decode import Logprob, LogprobsTensors, SamplerOutput
from neuron_streams.decode.logprobs import logprobs_of_rows, split, to_host, what_is_wanted

TOKENS = torch.tensor([5, 6, 0])
TENSORS = LogprobsTensors(
    torch.tensor([[5, 8, 5, 2], [6, 1, 2, 3], [0, 0, 0, 0]]),
    torch.tensor([[-1.5, -0.5, -1.5, -2.0], [-9.0, -0.25, -3.0, -4.0], [0.0] * 4]),
    torch.tensor([2, 17, 1]),
)
OUTPUT = SamplerOutput(TOKENS, TENSORS)


def test_a_row_gets_as_many_as_it_wants() -> None:
    first, second = logprobs_of_rows(TENSORS, [3, 1], [1, 1])
    assert first == [{5: Logprob(-1.5, 2), 8: Logprob(-0.5, 1), 2: Logprob(-2.0, 3)}]
    assert second == [{6: Logprob(-9.0, 17), 1: Logprob(-0.25, 1)}]
    assert list(first[0]) == [5, 8, 2], "the sampled token comes first"


def test_nought_is_the_sampled_token_alone_and_none_is_nothing() -> None:
    assert logprobs_of_rows(TENSORS, [0, None], [1, 1]) == [[{5: Logprob(-1.5, 2)}], None]


def test_values_are_plain_numbers() -> None:
    ((logprob, rank),) = logprobs_of_rows(TENSORS, [0], [1])[0][0].values()  # type: ignore[index]
    assert type(logprob) is float
    assert type(rank) is int


def test_a_step_is_split_in_one_place() -> None:
    assert split(TOKENS) == (TOKENS, None)
    assert split(OUTPUT) == (TOKENS, TENSORS)


def test_all_of_a_step_comes_to_the_host() -> None:
    tokens, tensors = split(to_host(OUTPUT, non_blocking=True))
    assert tensors is not None
    assert torch.equal(tokens, TOKENS)
    assert all(map(torch.equal, tensors, TENSORS))
    assert to_host(TOKENS) is TOKENS


def test_only_what_is_wanted_is_copied() -> None:
    assert what_is_wanted(OUTPUT, []) is TOKENS
    assert what_is_wanted(OUTPUT, [None, 0, None]) is OUTPUT
    assert what_is_wanted(TOKENS, []) is TOKENS


def test_a_model_that_gives_none_is_told_so() -> None:
    with pytest.raises(RuntimeError, match="^A request wants log-probabilities and the model gave"):
        what_is_wanted(TOKENS, [3])
