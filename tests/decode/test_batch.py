from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_streams.decode import CachedRequestState, InputBatch, SamplingParams
from neuron_streams.decode.batch import PLACEHOLDER
from neuron_streams.decode.request import RequestKey
from neuron_streams.decode.schedule import NewRequestData


def make(max_num_reqs: int, max_length: int) -> InputBatch:
    return InputBatch(max_num_reqs, max_length, vocab_size=10, eos_token_ids=frozenset({7}))


def state(name: str, prompt: list[int], slot: int = 1, **params: Any) -> CachedRequestState:
    return CachedRequestState(
        RequestKey(name, 0),
        prompt,
        SamplingParams(**params),
        seed=slot,
        slot=slot,
        num_prompt_tokens=len(prompt),
    )


def test_add_request_copies_prompt_and_outputs() -> None:
    batch = make(2, 6)
    one = state("a", [1, 2])
    one.output_token_ids = [3]
    assert batch.add_request(one) == 0
    assert batch.token_ids_cpu[0] == [1, 2, 3, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER]


def test_a_reused_row_keeps_nothing_of_the_request_before() -> None:
    batch = make(1, 4)
    batch.add_request(state("a", [1, 2, 3]))
    batch.remove_request(RequestKey("a", 0))
    batch.add_request(state("b", [9]))
    assert batch.token_ids_cpu[0] == [9, -1, -1, -1]


def test_remove_request_tells_the_row() -> None:
    batch = make(2, 4)
    batch.add_request(state("a", [1]))
    assert batch.remove_request(RequestKey("a", 0)) == 0
    assert batch.remove_request(RequestKey("a", 0)) is None


def test_condense_fills_holes_from_the_end_and_moves_no_slot() -> None:
    batch = make(4, 4)
    for number, name in enumerate("abcd"):
        batch.add_request(state(name, [number], slot=number + 1))
    batch.remove_request(RequestKey("a", 0))
    batch.remove_request(RequestKey("c", 0))
    batch.condense()
    assert [key.request_id for key in batch.req_ids] == ["d", "b"]
    assert [one.slot for one in batch.states] == [4, 2]
    assert [row[0] for row in batch.token_ids_cpu[:2]] == [3, 1]


def test_append_token_reaches_the_row_only_of_a_request_in_the_batch() -> None:
    batch = make(1, 4)
    one, other = state("a", [1]), state("b", [5])
    batch.add_request(one)
    batch.append_token(one, 7)
    batch.append_token(other, 8)
    assert batch.token_ids_cpu[0] == [1, 7, -1, -1]
    assert (one.output_token_ids, other.output_token_ids) == ([7], [8])


def test_the_decode_input_pads_with_the_scratch_slot() -> None:
    batch = make(4, 4)
    for slot in (3, 5):
        one = state(str(slot), [slot, 9], slot)
        one.output_token_ids = [slot * 2]
        one.num_computed_tokens = 2
        batch.add_request(one)
    input_ids, positions, slots, *rest = batch.decode_input(4)
    assert rest == [None, None, None]
    assert input_ids.tolist() == [6, 10, 0, 0]
    assert positions.tolist() == [2, 2, 0, 0]
    assert slots.tolist() == [3, 5, 0, 0]


def test_the_decode_input_sends_a_failed_request_to_the_scratch_slot() -> None:
    batch = make(2, 4)
    lost, other = state("a", [1], 2), state("b", [5], 3)
    for one in (lost, other):
        one.num_computed_tokens = 1
        batch.add_request(one)
    batch.append_token(other, 8)
    lost.ended = True
    input_ids, positions, slots, *_ = batch.decode_input(2)
    assert (input_ids.tolist(), positions.tolist(), slots.tolist()) == ([0, 8], [0, 1], [0, 3])


def test_the_prefill_input_pads_on_the_right() -> None:
    batch = make(4, 8)
    batch.add_request(state("a", [1, 2, 3], 2))
    batch.add_request(state("b", [4], 1))
    input_ids, lengths, slots, sampling, starts, _ = batch.prefill_input([3, 1], 4)
    assert sampling is not None
    assert starts is None
    assert input_ids.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert lengths.tolist() == [3, 1]
    assert slots.tolist() == [2, 1]


def test_the_prefill_input_goes_on_where_a_request_stands() -> None:
    batch = make(2, 8)
    batch.add_request(state("a", [1, 2, 3, 4, 5], 2))
    batch.states[0].num_computed_tokens = 2
    input_ids, lengths, _, _, starts, _ = batch.prefill_input([3], 4)
    assert input_ids.tolist() == [[3, 4, 5, 0]]
    assert lengths.tolist() == [3]
    assert starts is not None
    assert starts.tolist() == [2]


def test_sampling_tensors_are_in_row_order() -> None:
    batch = make(2, 4)
    batch.add_request(state("a", [1], 1, temperature=0.5, top_k=3))
    batch.add_request(state("b", [1], 2, top_p=0.25))
    temperature, top_k, top_p, seed = batch.sampling_tensors()[:4]
    assert temperature.tolist() == [0.5, 0.0]
    assert top_k.tolist() == [3, 0]
    assert top_p.tolist() == [1.0, 0.25]
    assert seed.tolist() == [1, 2]


def test_nothing_is_adjusted_where_no_row_asks() -> None:
    batch = make(2, 4)
    batch.add_request(state("a", [1], temperature=0.5, stop_token_ids=(3,)))
    assert batch.sampling_tensors().adjustments is None


def test_adjustments_are_in_row_order_and_neutral_where_a_row_asks_for_none() -> None:
    batch = make(2, 8)
    batch.add_request(state("plain", [1, 2, 3], 1, stop_token_ids=(3,)))
    asked = {
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "logit_bias": {2: -1, 9: float("-inf")},
        "logprobs": 3,
        "min_tokens": 2,
        "stop_token_ids": (3, 5),
    }
    batch.add_request(state("asks", [1, 2], 2, **asked))
    adjustments = batch.sampling_tensors().adjustments
    assert adjustments is not None
    assert [column.tolist() for column in adjustments[:7]] == [
        [0.0, 0.25],
        [1.0, 1.5],
        [0.0, -0.5],
        [0.0, 0.75],
        [3, 2],
        [3, 4],
        [-1, 3],
    ]
    assert {column.dtype for column in adjustments[:4]} == {torch.float32}
    assert {column.dtype for column in adjustments[4:7]} == {torch.int32}
    bias, stops = adjustments.logit_bias, adjustments.stop_mask
    assert (bias.dtype, stops.dtype) == (torch.float32, torch.bool)
    assert not bias[0].any()
    assert not stops[0].any()
    assert bias[1].tolist() == [0, 0, -1, 0, 0, 0, 0, 0, 0, float("-inf")]
    assert stops[1].nonzero().flatten().tolist() == [3, 5, 7]


def test_an_end_of_sequence_that_is_ignored_is_not_masked() -> None:
    batch = make(1, 8)
    batch.add_request(state("a", [1], min_tokens=1, stop_token_ids=(3,), ignore_eos=True))
    adjustments = batch.sampling_tensors().adjustments
    assert adjustments is not None
    assert adjustments.stop_mask[0].nonzero().flatten().tolist() == [3]


def test_what_was_generated_before_a_preemption_is_no_prompt() -> None:
    key, params = RequestKey("a", 3), SamplingParams(min_tokens=3)
    batch = make(1, 8)
    batch.add_request(CachedRequestState.of(NewRequestData(key, [1, 2, 8, 9], params, 5, 4, 2)))
    adjustments = batch.sampling_tensors().adjustments
    assert adjustments is not None
    assert adjustments.num_prompt_tokens.tolist() == [2]
    assert adjustments.min_length.tolist() == [5]


def test_rows_that_sample_nothing_want_no_logprobs() -> None:
    batch = make(4, 8)
    for name, most in (("a", 2), ("b", None), ("c", 0), ("d", 5)):
        batch.add_request(state(name, [1], logprobs=most))
    assert batch.num_logprobs(frozenset()) == [2, None, 0, 5]
    batch.states[3].ended = True
    assert batch.num_logprobs(frozenset({RequestKey("a", 0)})) == [None, None, 0, None]
    assert batch.num_logprobs(frozenset(batch.req_ids)) == []


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "swap", "append"]), st.integers(0, 9))))
def test_rows_and_requests_always_agree(moves: list[tuple[str, int]]) -> None:
    batch, live = make(6, 40), dict[RequestKey, CachedRequestState]()
    for number, (move, pick) in enumerate(moves):
        keys = list(live)
        if move == "add" and len(live) < 6:
            one = state(str(number), [pick, number], slot=number)
            live[one.key] = one
            batch.add_request(one)
        elif move == "remove" and keys:
            del live[keys[pick % len(keys)]]
            batch.remove_request(keys[pick % len(keys)])
            batch.condense()
        elif move == "swap" and len(keys) > 1:
            batch.swap_states(pick % len(keys), (pick + 1) % len(keys))
        elif move == "append" and keys:
            batch.append_token(live[keys[pick % len(keys)]], number)
    assert set(batch.req_ids) == set(live)
    for key, row in batch.req_id_to_index.items():
        tokens = live[key].prompt_token_ids + live[key].output_token_ids
        assert batch.token_ids_cpu[row][: len(tokens)] == tokens
        assert set(batch.token_ids_cpu[row][len(tokens) :]) == {PLACEHOLDER}
