"""Prompts in pieces, and in company, give the tokens of each prompt on its own."""

from __future__ import annotations

import pytest

from models import toy
from models.llama import Llama
from models.packed import pack
from tests.models.driver import (
    Request,
    decode,
    fresh,
    packed,
    prefill,
    prefill_in_pieces,
    run,
)
from tests.models.reference import compile_eager


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("piece", [1, 3, 8, 15])
def test_pieces_give_the_tokens_of_the_whole(piece: int, temperature: float) -> None:
    model = toy.toy(device="cpu", compile=compile_eager, prompt_buckets=(16, 64))
    prompt = [(5 * n + 3) % 97 for n in range(30)]
    whole = Request(prompt, 1, temperature, seed=4)
    pieces = Request(prompt, 2, temperature, seed=4)
    prefill(model, whole)
    prefill_in_pieces(model, pieces, piece)
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
    prefill_in_pieces(model, request, 16)
    assert (model._state["kv_cache"][:, :, 3] == before).all()
    fitting = toy.toy(device="cpu", compile=compile_eager, prompt_buckets=(32,), max_length=32)
    whole = Request(prompt, 1)
    prefill(fitting, whole)
    assert request.tokens == whole.tokens


WISHES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "num_logprobs": 2}


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("wishes", [None, WISHES])
def test_company_changes_no_token(wishes: dict[str, float] | None, gather: bool) -> None:
    """Two prompts, a piece of a third and a row that decodes, in one step."""

    def made() -> list[Request]:
        prompts = [
            [(n * k + 3) % 97 for n in range(length)] for k, length in enumerate((5, 9, 1, 13))
        ]
        return [
            Request(prompt, slot, 0.8 * (slot % 2), seed=slot, wishes=wishes)
            for slot, prompt in enumerate(prompts, 1)
        ]

    def fitted() -> Llama:
        return toy.toy(device="cpu", compile=compile_eager, prompt_buckets=(8, 32))

    alone = [run(fitted(), fresh(request, 1), 6) for request in made()]
    model, (a, b, c, d) = fitted(), made()
    prefill(model, a)
    packed(model, [(a, ()), (b, range(9)), (d, range(8))], gather=gather)
    packed(model, [(d, range(8, 13)), (b, ()), (a, ()), (c, range(1))], gather=gather)
    for _ in range(3):
        decode(model, [d, c, b, a], gather=gather)
    for request, tokens in zip((a, b, c, d), alone, strict=True):
        assert request.tokens == tokens[: len(request.tokens)]
    assert [len(request.tokens) for request in (a, b, c, d)] == [6, 5, 4, 4]


def test_rows_lie_behind_one_another_in_whole_blocks() -> None:
    packing = pack(
        [7, 1, 2, 3, 4, 5, -1], [0, 4, 9], [1, 5, 1], [3, 1, 2], rows=4, buckets=(4, 8), block=4
    )
    assert packing.input_ids.tolist() == [7, -1, 0, 0, 1, 2, 3, 4, 5, 0, 0, 0]
    assert packing.positions.tolist() == [0, 9, 0, 0, 4, 5, 6, 7, 8, 0, 0, 0]
    assert packing.owners.tolist() == [3, 2, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    assert packing.block_slots.tolist() == [1, 1]
    assert packing.last.tolist() == [0, 8, 1, 0]
    assert packing.ends.tolist() == [1, 9, 10, 0]
    assert packing.slots.tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize(("lengths", "slots"), [([5, 5], [1, 2]), ([1] * 5, [1] * 5)])
def test_what_does_not_fit_is_refused(lengths: list[int], slots: list[int]) -> None:
    rows = [0] * sum(lengths), [0] * len(lengths), lengths, slots
    with pytest.raises(ValueError, match="are too many for one step: it takes 4 rows and 8 tokens"):
        pack(*rows, rows=4, buckets=(4, 8), block=4)
