"""A prompt in pieces gives the tokens of the prompt as a whole."""

from __future__ import annotations

import pytest

from models import toy
from tests.models.driver import Request, decode, prefill, prefill_in_pieces
from tests.models.reference import compile_eager


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("piece", [1, 3, 8, 15])
def test_pieces_give_the_tokens_of_the_whole(piece: int, temperature: float) -> None:
    model = toy.toy(device="cpu", compile=compile_eager, prompt_buckets=(16, 64))
    prompt = [(5 * n + 3) % 97 for n in range(30)]
    whole = Request(prompt, 1, temperature, seed=4)
    pieces = Request(prompt, 2, temperature, seed=4)
    prefill(model, whole)
    prefill_in_pieces(model, pieces, piece, bucket=16)
    for _ in range(6):
        decode(model, [whole, pieces])
    assert pieces.tokens == whole.tokens
    assert len(set(whole.tokens)) > 2


def test_padding_beyond_the_end_of_a_slot_touches_nothing_but_scratch() -> None:
    model = toy.toy(device="cpu", compile=compile_eager, prompt_buckets=(16,), max_length=20)
    prompt = [(5 * n + 3) % 97 for n in range(19)]
    other = Request([7, 8, 9], 3)
    prefill(model, other)
    before = model._state["kv_cache"][:, :, 3].clone()
    request = Request(prompt, 2)
    prefill_in_pieces(model, request, 16, bucket=16)
    assert (model._state["kv_cache"][:, :, 3] == before).all()
    fitting = toy.toy(device="cpu", compile=compile_eager, prompt_buckets=(20,), max_length=20)
    whole = Request(prompt, 1)
    prefill(fitting, whole)
    assert request.tokens == whole.tokens
