from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import toy
from models.llama import Llama
from neuron_streams.decode import Model, SamplingTensors, Window
from neuron_streams.decode.model import MAX_STOP_IDS
from tests.models.driver import Request, decode, fresh, ints, prefill, run
from tests.models.peer import greedy_tokens, in_transformers
from tests.models.reference import compile_eager

PROMPTS = [[5, 7, 11, 13, 17], [3], list(range(40, 53)), [90, 4, 90, 4, 90, 4, 90, 4], [61, 8]]


def model(**options) -> Llama:
    return toy.toy(device="cpu", compile=compile_eager, **options)


@pytest.fixture(scope="module")
def wanted():
    peer = in_transformers(toy.weights())
    return [greedy_tokens(peer, prompt, 16) for prompt in PROMPTS]


def as_protocol(made: Model) -> Model:
    return made


def test_it_is_a_model_of_the_decode_loop():
    made = as_protocol(model())
    assert made.device == torch.device("cpu")
    assert (made.max_length, made.num_slots, made.prefill_batch) == (64, 6, 4)
    assert (made.batch_buckets, made.prompt_buckets) == ((1, 2, 4), (8, 16))
    assert (made.vocab_size, made.eos_token_ids) == (97, frozenset({2}))
    assert made.on_device_sampling


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_greedy_tokens_are_those_of_transformers(number, wanted):
    assert run(model(), Request(PROMPTS[number], slot=5), 16) == wanted[number]


@pytest.mark.parametrize(
    ("slots", "rows"),
    [
        ([1, 2, 3, 4], [0, 1, 2, 3]),
        ([4, 2, 5, 1], [3, 1, 0, 2]),
        ([3, 1], [None, 1, None, 0]),
        ([2], [None, 0]),
        ([5, 4, 1], [2, None, 0, 1]),
    ],
)
def test_batches_slots_and_padding_rows_change_no_token(slots, rows, wanted):
    made = model()
    requests = [Request(prompt, slot) for prompt, slot in zip(PROMPTS, slots, strict=False)]
    for request in requests:
        prefill(made, request)
    for _ in range(15):
        decode(made, [None if row is None else requests[row] for row in rows])
    assert [request.tokens for request in requests] == wanted[: len(requests)]


def test_requests_that_come_and_go_do_not_touch_each_other(wanted):
    made = model()
    first, second = Request(PROMPTS[0], 1), Request(PROMPTS[1], 2)
    prefill(made, first)
    decode(made, [first])
    prefill(made, second)
    for _ in range(4):
        decode(made, [second, first])
    again = Request(PROMPTS[2], 1)
    kept = first.tokens
    prefill(made, again)
    for _ in range(9):
        decode(made, [None, again, None, second])
    assert kept == wanted[0][:6]
    assert (again.tokens, second.tokens) == (wanted[2][:10], wanted[1][:14])


def test_a_step_writes_its_own_slots_and_nothing_else():
    made = model()
    before = made._state["kv_cache"].clone()
    request = Request(PROMPTS[0], 3)
    prefill(made, request)
    decode(made, [request, None])
    changed = (made._state["kv_cache"] != before).flatten(4).any(-1)
    touched = changed.any(3).any(1).any(0).nonzero().flatten().tolist()
    assert touched == [0, 3]
    at_position = (made._state["kv_cache"] != before)[:, :, 3].flatten(0, 2).any(2).any(0)
    assert at_position.nonzero().flatten().tolist() == list(range(6))


def test_input_ids_may_be_the_future_of_the_step_before(wanted):
    made = model()
    request = Request(PROMPTS[0], 1)
    prefill(made, request)
    future = ints(request.tokens)
    tokens = [future]
    for position in range(5, 12):
        future = made.decode(future, ints([position]), ints([1]))
        tokens.append(future)
    assert torch.cat(tokens).tolist() == wanted[0][:8]
    assert len({token.data_ptr() for token in tokens}) == len(tokens)


def test_a_gathered_step_knows_the_token_last_sampled_for_a_slot(wanted):
    made = model()
    requests = [Request(PROMPTS[0], 4), fresh(SAMPLED[2], 2), Request(PROMPTS[1], 1)]
    alone = [run(model(), fresh(request, 1), 8) for request in requests]
    for request in requests:
        prefill(made, request)
    first, second, third = requests
    steps = [(first, second), (third, first), (second, third), (first, third), (third, second)]
    for rows in steps:
        ids = [-1 if row is not third else row.tokens[-1] for row in rows]
        at = [len(row.prompt) + len(row.tokens) - 1 for row in rows]
        future = made.decode_gather(ints(ids), ints(at), ints([row.slot for row in rows]))
        for row, token in zip(rows, future.tolist(), strict=True):
            row.tokens.append(token)
    for request, tokens in zip(requests, alone, strict=True):
        assert request.tokens == tokens[: len(request.tokens)]


@given(st.permutations(range(4)))
def test_remap_gathers_rows(index: Sequence[int]):
    future = ints([11, 22, 33, 44])
    result = model().remap(future, ints(index))
    assert (result.dtype, result.tolist()) == (torch.int32, future[list(index)].tolist())


SAMPLED = [
    Request(PROMPTS[0], 1, temperature=1.0, seed=7),
    Request(PROMPTS[1], 2, temperature=0.7, top_k=5, seed=-3),
    Request(PROMPTS[2], 3, temperature=1.3, top_p=0.8, seed=2**62),
    Request(PROMPTS[3], 4, temperature=0.9, top_k=20, top_p=0.9, seed=7),
]


def test_sampled_tokens_depend_on_neither_batch_row_slot_nor_bucket():
    alone = [run(model(), fresh(request, 1), 12) for request in SAMPLED]
    made = model(prompt_buckets=(16, 32))
    together = [fresh(request, slot) for request, slot in zip(SAMPLED, (5, 3, 4, 1), strict=True)]
    for request in together:
        prefill(made, request)
    for step in range(11):
        rows = together[step % 4 :] + together[: step % 4]
        decode(made, rows)
    assert [request.tokens for request in together] == alone
    greedy = [run(model(), Request(request.prompt, 1), 12) for request in SAMPLED]
    assert all(one != other for one, other in zip(alone, greedy, strict=True))


def test_another_seed_gives_other_tokens():
    runs = [run(model(), Request(PROMPTS[0], 1, temperature=1.0, seed=seed), 12) for seed in (1, 2)]
    assert runs[0] != runs[1]


def test_a_greedy_row_beside_a_sampled_one_is_greedy(wanted):
    made = model()
    greedy, sampled = Request(PROMPTS[0], 1), fresh(SAMPLED[1], 2)
    prefill(made, sampled)
    prefill(made, greedy)
    for _ in range(11):
        decode(made, [greedy, sampled])
    assert greedy.tokens == wanted[0][:12]
    assert sampled.tokens == run(model(), fresh(SAMPLED[1], 4), 12)


def test_only_batches_that_sample_use_the_sampler():
    made = model()
    sampled, greedy = fresh(SAMPLED[0], 1), Request(PROMPTS[0], 2)
    prefill(made, greedy)
    prefill(made, sampled)
    decode(made, [greedy])
    assert list(made._executables) == [
        ("greedy_prefill", 8, made.max_length),
        ("sampled_prefill", 8, made.max_length),
        ("greedy_decode", 1, made.max_length),
    ]
    decode(made, [sampled])
    assert ("sampled_decode", 1, made.max_length) in made._executables
    prefill(made, Request(PROMPTS[0], 1))
    made._executables.clear()
    decode(made, [Request([3], 1, tokens=[1]), greedy])
    assert list(made._executables) == [("greedy_decode", 2, made.max_length)]


def test_warm_up_compiles_what_is_asked_for(capsys):
    made = model()
    made.warm_up(batch_buckets=[2], prompt_buckets=[8], progress=True)
    assert set(made._executables) == {
        ("greedy_prefill", 8, made.max_length),
        ("greedy_decode", 2, made.max_length),
    }
    assert "compiling" in capsys.readouterr().err
    made.warm_up(sampled=True)
    assert len(made._executables) == 10
    made.warm_up(adjusted=True, gather=True, batch_buckets=[1], prompt_buckets=[8])
    assert {kind for kind, *_ in made._executables} > {"admit", "gathered_adjusted_decode"}
    assert "token_counts" not in made._state


def test_buckets_fit_the_sizes():
    made = model(max_length=32, num_slots=4, batch_buckets=(8, 1, 3), prompt_buckets=(128, 8, 64))
    assert (made.batch_buckets, made.prompt_buckets) == ((1, 3), (8, 32))


def test_a_step_attends_over_the_smallest_length_that_holds_its_rows_and_gives_the_same_tokens():
    made = model(length_buckets=(32, 16, 200))
    assert made.length_buckets == (16, 32, 64)
    short, long = (Request(PROMPTS[0], 1), Request(PROMPTS[2], 2))
    for request in (short, long):
        prefill(made, request)
    for _ in range(30):
        decode(made, [short, long])
    whole = [run(model(), fresh(request, request.slot), 31) for request in (short, long)]
    assert [short.tokens, long.tokens] == whole
    assert list(made._executables) == [
        ("greedy_prefill", 8, 16),
        ("greedy_prefill", 16, 16),
        ("greedy_decode", 2, 16),
        ("greedy_decode", 2, 32),
        ("greedy_decode", 2, 64),
    ]


def test_a_window_attends_over_a_length_that_holds_its_last_step():
    made = model(length_buckets=(16,))
    request = Request(PROMPTS[0], 1)
    prefill(made, request)
    stops = torch.full((1, MAX_STOP_IDS), -1, dtype=torch.int32)
    for position, limit, length in ((8, 8, 16), (9, 8, 64), (9, 7, 16)):
        made._executables.clear()
        made.decode_window(ints([1]), ints([position]), ints([1]), Window(ints([limit]), stops, 8))
        assert list(made._executables) == [("windowed8_greedy_decode", 1, length)]


def test_warm_up_compiles_each_length():
    made = model(length_buckets=(16,))
    made.warm_up(batch_buckets=[2], prompt_buckets=[8])
    assert {length for *_, length in made._executables} == {16, 64}
    assert len(made._executables) == 4


def test_the_longest_slot_can_be_filled():
    made = model(max_length=16)
    peer = in_transformers(toy.weights())
    request = Request(list(range(10, 25)), 2)
    assert run(made, request, 2) == greedy_tokens(peer, list(request.prompt), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 1}, "num_slots=1: slot 0 is scratch"),
        ({"max_length": 1}, "max_length=1: this model knows"),
        ({"max_length": 129}, "max_length=129: this model knows positions up to 128"),
        ({"batch_buckets": (9,)}, r"batch_buckets=\[9\]: none is between 1 and 5"),
        ({"prompt_buckets": ()}, r"prompt_buckets=\[\]: none is between"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        model(**options)


def test_calls_that_no_bucket_fits_are_refused():
    made = model()
    with pytest.raises(ValueError, match="greedy_decode of 3: no such bucket; pad to one of"):
        made.decode(ints([1, 1, 1]), ints([0, 0, 0]), ints([1, 2, 3]))
    sampling = SamplingTensors(torch.zeros(1), ints([0]), torch.ones(1), torch.zeros(1).long())
    with pytest.raises(ValueError, match="^1 rows of 17 tokens, 24 in blocks of 8, are too many"):
        made.prefill(ints([1] * 17)[None], ints([17]), ints([1]), sampling)


def test_bfloat16_stays_close_to_float32():
    halved = Llama(
        toy.weights(dtype=torch.bfloat16),
        max_length=32,
        prompt_buckets=(8,),
        device="cpu",
        compile=compile_eager,
    )
    assert halved._state["kv_cache"].dtype == torch.bfloat16
    tokens = run(halved, Request(PROMPTS[0], 1), 8)
    assert all(0 <= token < 97 for token in tokens)
    assert any(one != other for one, other in pairwise(tokens))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_executables_give_the_same_tokens():
    eager = [run(model(), fresh(request, 1), 12) for request in SAMPLED]
    made = toy.toy(batch_buckets=(4,), prompt_buckets=(16,))
    requests = [fresh(request, 5 - slot) for slot, request in enumerate(SAMPLED, 1)]
    for request in requests:
        prefill(made, request)
    for _ in range(11):
        decode(made, requests)
    assert [request.tokens for request in requests] == eager
    future = made.remap(
        made.decode(ints([0] * 4), ints([0] * 4), ints([0] * 4)), ints([3, 1, 0, 2])
    )
    assert future.shape == (4,)
