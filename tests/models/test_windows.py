"""A window gives the tokens of as many steps, and stops each row where it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models import toy
from models.llama import Llama
from neuron_streams.decode import LogprobsTensors, Window, WindowOutput
from neuron_streams.decode.model import MAX_STOP_IDS
from tests.models.driver import Request, fresh, ints, prefill, run
from tests.models.reference import compile_eager

PROMPTS = [[5, 7, 11, 13, 17], [3], list(range(40, 53))]
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "num_logprobs": 2}
WISHES: list[dict[str, Any] | None] = [None, PENALTIES]


def model() -> Llama:
    return toy.toy(device="cpu", compile=compile_eager)


def window(
    made: Llama, rows: list[Request], limits: list[int], stops: list[int], *, gather: bool
) -> WindowOutput:
    """Four steps, of one bucket."""
    missing = 4 - len(rows)
    ids = [-1 if gather else row.tokens[-1] for row in rows] + [0] * missing
    at = [len(row.prompt) + len(row.tokens) - 1 for row in rows] + [0] * missing
    stop_ids = [(stops + [-1] * MAX_STOP_IDS)[:MAX_STOP_IDS]] * 4
    given = Window(ints(limits + [0] * missing), torch.tensor(stop_ids, dtype=torch.int32), 4)
    slots = ints([row.slot for row in rows] + [0] * missing)
    return made.decode_window(ints(ids), ints(at), slots, given)


def take(rows: list[Request], result: WindowOutput) -> None:
    for row, column in zip(rows, result.sampled_token_ids.T.tolist(), strict=False):
        row.tokens += [token for token in column if token != -1]


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("wishes", WISHES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_window_gives_the_tokens_of_its_steps(
    temperature: float, wishes: dict[str, Any] | None, gather: bool
) -> None:
    requests = [Request(p, n, temperature, seed=n, wishes=wishes) for n, p in enumerate(PROMPTS, 1)]
    alone = [run(model(), fresh(request, 5), 12) for request in requests]
    made = model()
    for request in requests:
        prefill(made, request)
    for limits in ([4, 4, 3], [4, 2, 4]):
        result = window(made, requests, limits, [], gather=gather)
        assert (result.logprobs_tensors is None) == (wishes is None)
        take(requests, result)
        requests, last = requests[::-1], result.last_token_ids.tolist()
        assert last[:3] == [request.tokens[-1] for request in requests[::-1]]
    for request, tokens in zip(requests, alone, strict=True):
        assert request.tokens == tokens[: len(request.tokens)]
    assert sorted(len(request.tokens) for request in requests) == [7, 8, 9]


def test_log_probabilities_are_those_of_single_steps() -> None:
    request = Request(PROMPTS[0], 1, wishes=PENALTIES)
    alone = fresh(request, 1)
    run(model(), alone, 5)
    made = model()
    prefill(made, request)
    result = window(made, [request], [4], [], gather=True).logprobs_tensors
    assert result is not None
    for step in range(4):
        found = LogprobsTensors(*(part[step, 0] for part in result))
        for one, other in zip(found, alone.logprobs[step + 1], strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("gather", [False, True])
def test_a_row_that_stops_writes_nothing_more(gather: bool) -> None:
    tokens = run(model(), Request(PROMPTS[0], 1), 9)
    made = model()
    rows = [Request(PROMPTS[0], 2), Request(PROMPTS[1], 3)]
    for row in rows:
        prefill(made, row)
    take(rows, window(made, rows, [4, 4], [tokens[2]], gather=gather))
    assert rows[0].tokens == tokens[:3]
    before = made._state["kv_cache"][:, :, 2].clone()
    again = window(made, rows, [4, 4], [tokens[2]], gather=gather)
    assert again.sampled_token_ids[:, 0].tolist() == [-1] * 4, "it had stopped before"
    assert again.last_token_ids[0] == tokens[2]
    assert (made._state["kv_cache"][:, :, 2] == before).all()
    filled = before.flatten(0, 2).abs().sum((0, 2)).nonzero().flatten().tolist()
    assert filled == list(range(len(PROMPTS[0]) + 2))


def test_a_window_of_another_size_is_refused() -> None:
    given = Window(ints([1]), torch.full((1, MAX_STOP_IDS), -1, dtype=torch.int32), 3)
    with pytest.raises(ValueError, match="^a window of 3 steps: choose from"):
        model().decode_window(ints([1]), ints([0]), ints([1]), given)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_window_gives_the_same_tokens() -> None:
    requests = [Request(prompt, slot) for slot, prompt in enumerate(PROMPTS, 1)]
    alone = [run(model(), fresh(request, 5), 5) for request in requests]
    made = toy.toy(batch_buckets=(4,), prompt_buckets=(16,))
    for request in requests:
        prefill(made, request)
    take(requests, window(made, requests, [4, 4, 4], [], gather=True))
    assert [request.tokens for request in requests] == alone
