import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import toy
from models.llama import Llama
from neuron_streams.decode import Model, SamplingTensors
from tests.models.driver import Request, decode, ints, prefill, prefill_in_pieces, run
from tests.models.peer import greedy_tokens, in_transformers, tokens_of
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
    assert (made.max_length, made.num_slots, made.prefill_batch) == (64, 6, 1)
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
    assert at_position.nonzero().flatten().tolist() == list(range(8))


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


def fresh(request: Request, slot: int) -> Request:
    return Request(
        request.prompt,
        slot,
        request.temperature,
        request.top_k,
        request.top_p,
        request.seed,
        request.wishes,
    )


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
        ("greedy_prefill", 8),
        ("sampled_prefill", 8),
        ("greedy_decode", 1),
    ]
    decode(made, [sampled])
    assert ("sampled_decode", 1) in made._executables
    prefill(made, Request(PROMPTS[0], 1))
    made._executables.clear()
    decode(made, [Request([3], 1, tokens=[1]), greedy])
    assert list(made._executables) == [("greedy_decode", 2)]


WISHES = {
    "logit_bias": {"logit_bias": {3: 4.0, 7: -torch.inf, 50: 2.5}},
    "stop mask": {"stop_mask": set(range(0, 97, 3)), "min_length": 12},
    "repetition": {"repetition_penalty": 1.7},
    "rewarded": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 1.1},
    "presence": {"presence_penalty": 1.5},
    "min_p": {"min_p": 0.2},
}
WISHES["all"] = {name: value for wishes in WISHES.values() for name, value in wishes.items()}
SAMPLERS = {"greedy": {}, "sampled": {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": 12}}


def wishing(name, slot=1, how="sampled", prompt=PROMPTS[0], **more):
    return Request(prompt, slot, wishes=WISHES[name] | more, **SAMPLERS[how])


@pytest.mark.parametrize("how", SAMPLERS)
@pytest.mark.parametrize("name", WISHES)
def test_adjusted_tokens_are_those_of_transformers(name, how):
    peer = in_transformers(toy.weights())
    request = wishing(name, slot=4, how=how)
    tokens = tokens_of(peer, request, 16)
    assert run(model(), request, 16) == tokens
    if (name, how) != ("min_p", "greedy"):
        assert tokens != run(model(), Request(request.prompt, 1, **SAMPLERS[how]), 16)


def test_rows_that_adjust_and_rows_that_do_not_share_a_batch():
    made = model()
    asked = [wishing("all"), wishing("frequency", how="greedy"), fresh(SAMPLED[2], 1)]
    asked += [Request(PROMPTS[4], 1)]
    alone = [run(model(), fresh(request, 1), 12) for request in asked]
    together = [fresh(request, slot) for request, slot in zip(asked, (5, 2, 4, 1), strict=True)]
    for request in together:
        prefill(made, request)
    for step in range(11):
        decode(made, together[step % 4 :] + together[: step % 4])
    assert [request.tokens for request in together] == alone
    assert {kind for kind, _ in made._executables} >= {"adjusted_decode", "greedy_prefill"}
    counts = made._state["token_counts"][:, 5]
    assert torch.bincount(torch.tensor(PROMPTS[0]), minlength=97).equal(counts[0].long())
    assert torch.bincount(torch.tensor(alone[0][:-1]), minlength=97).equal(counts[1].long())


def test_the_next_tenant_of_a_slot_has_a_clean_one():
    made = model()
    tenants = [wishing("all"), Request(PROMPTS[0], 1), wishing("presence"), wishing("presence")]
    for tenant in tenants:
        alone = run(model(), fresh(tenant, 1), 9)
        neighbour = wishing("all", slot=3)
        prefill(made, tenant)
        prefill(made, neighbour)
        for _ in range(8):
            decode(made, [tenant, neighbour])
        assert tenant.tokens == alone


def test_a_plain_tenant_after_one_that_adjusts_brings_back_the_plain_executables():
    made = model()
    run(made, wishing("all"), 3)
    run(made, Request(PROMPTS[0], 1), 3)
    made._executables.clear()
    run(made, Request(PROMPTS[0], 1), 3)
    assert list(made._executables) == [("greedy_prefill", 8), ("greedy_decode", 1)]


@pytest.mark.parametrize("piece", [1, 4, 7])
@pytest.mark.parametrize("name", ["all", "repetition", "frequency"])
def test_pieces_and_preemption_count_the_same_history(name, piece):
    prompt = [(5 * n + 3) % 97 for n in range(13)]
    whole, parts = (wishing(name, slot, prompt=prompt, num_logprobs=0) for slot in (1, 2))
    made = model(prompt_buckets=(8, 16, 32))
    run(made, whole, 14)
    prefill_in_pieces(made, parts, piece, bucket=8)
    for _ in range(5):
        decode(made, [parts])
    run(made, wishing("all", slot=2), 3)  # preempted: another has the slot meanwhile
    parts.slot = 3
    prefill_in_pieces(made, parts, piece, bucket=8)
    decode(made, [parts])
    parts.slot = 2
    prefill(made, parts)
    for _ in range(5):
        decode(made, [parts])
    assert parts.tokens == whole.tokens
    counts = made._state["token_counts"]
    assert torch.equal(counts[:, 1], counts[:, 2])
    for one, other in zip(whole.logprobs, parts.logprobs, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=1e-4)


def test_a_gathered_step_adjusts_like_a_plain_one():
    made = model()
    plain, gathered = wishing("all", 2), wishing("all", 3)
    for request in (plain, gathered):
        prefill(made, request)
    for _ in range(10):
        decode(made, [plain])
        decode(made, [gathered, None], gather=True)
    assert plain.tokens == gathered.tokens
    counts = made._state["token_counts"]
    assert torch.equal(counts[:, 2], counts[:, 3])


@torch.inference_mode()
def test_log_probabilities_are_of_the_models_own_logits():
    peer, made = in_transformers(toy.weights()), model()
    asking, silent = wishing("all", num_logprobs=3), Request(PROMPTS[1], 2)
    for request in (asking, silent):
        prefill(made, request)
    for _ in range(7):
        decode(made, [silent, asking])
    ids = [*asking.prompt, *asking.tokens]
    logits = peer(torch.tensor([ids])).logits[0, len(asking.prompt) - 1 : -1]
    wanted = torch.log_softmax(logits, -1)
    got = [torch.stack(parts) for parts in zip(*asking.logprobs, strict=True)]
    assert torch.equal(got[0][:, 0], ints(asking.tokens))
    assert torch.equal(got[0][:, 1:], wanted.topk(20).indices.int())
    torch.testing.assert_close(got[1], wanted.gather(1, got[0].long()), atol=1e-4, rtol=1e-4)
    chosen = wanted.gather(1, got[0][:, :1].long())
    assert torch.equal(got[2], ((wanted > chosen).sum(-1) + 1).int())
    assert len(silent.logprobs) == 7  # of the steps beside one that asks
    decode(made, [silent])
    assert len(silent.logprobs) == 7


def test_log_probabilities_come_only_where_a_row_wants_them():
    made = model()
    quiet = wishing("all", 1)
    prefill(made, quiet)
    decode(made, [quiet, None])
    assert quiet.logprobs == []
    assert ("adjusted_decode", 2) in made._executables


def test_a_vocabulary_may_be_smaller_than_the_alternatives():
    config = dataclasses.replace(toy.CONFIG, vocab_size=7)
    made = Llama(toy.weights(config=config), max_length=16, device="cpu", compile=compile_eager)
    request = Request([1, 2, 3], 1, 0.8, wishes={"num_logprobs": 20, "repetition_penalty": 1.2})
    run(made, request, 6)
    for token, logprobs in zip(request.tokens, request.logprobs, strict=True):
        assert logprobs.logprob_token_ids[0] == token
        assert logprobs.logprob_token_ids[8:].tolist() == [-1] * 13
        assert logprobs.logprobs[1:8].exp().sum() == pytest.approx(1)


def test_warm_up_compiles_what_is_asked_for(capsys):
    made = model()
    made.warm_up(batch_buckets=[2], prompt_buckets=[8], progress=True)
    assert set(made._executables) == {("greedy_prefill", 8), ("greedy_decode", 2)}
    assert "compiling" in capsys.readouterr().err
    made.warm_up(sampled=True)
    assert len(made._executables) == 10
    made.warm_up(adjusted=True, gather=True, batch_buckets=[1], prompt_buckets=[8])
    assert {kind for kind, _ in made._executables} > {"admit", "gathered_adjusted_decode"}
    assert "token_counts" not in made._state


def test_buckets_fit_the_sizes():
    made = model(max_length=32, num_slots=4, batch_buckets=(8, 1, 3), prompt_buckets=(128, 8, 64))
    assert (made.batch_buckets, made.prompt_buckets) == ((1, 3), (8, 32))


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
    with pytest.raises(ValueError, match="greedy_prefill of 5: no such bucket"):
        made.prefill(ints([1] * 5)[None], ints([5]), ints([1]), sampling)


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
    wishing_ones = [wishing("all", 1, num_logprobs=2), wishing("repetition", 2, "greedy")]
    wanted = [run(model(), fresh(request, 1), 9) for request in wishing_ones]
    for request in wishing_ones:
        prefill(made, request)
    for _ in range(8):
        decode(made, [*wishing_ones, None, None])
    assert [request.tokens for request in wishing_ones] == wanted
    assert len(wishing_ones[0].logprobs) == 9
    future = made.remap(
        made.decode(ints([0] * 4), ints([0] * 4), ints([0] * 4)), ints([3, 1, 0, 2])
    )
    assert future.shape == (4,)
