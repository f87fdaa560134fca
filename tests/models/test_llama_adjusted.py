"""A Llama whose requests want their logits adjusted, or log-probabilities."""

import dataclasses

import pytest
import torch

from models import toy
from models.llama import Llama
from tests.models.driver import Request, decode, fresh, ints, prefill, prefill_in_pieces, run
from tests.models.peer import in_transformers, tokens_of
from tests.models.reference import compile_eager

PROMPT = [5, 7, 11, 13, 17]


def model(**options) -> Llama:
    return toy.toy(device="cpu", compile=compile_eager, **options)


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


def wishing(name, slot=1, how="sampled", prompt=PROMPT, **more):
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
    asked = [
        wishing("all"),
        wishing("frequency", how="greedy"),
        Request([4, 40], 1, 1.3, top_p=0.8, seed=2**62),
    ]
    asked += [Request([61, 8], 1)]
    alone = [run(model(), fresh(request, 1), 12) for request in asked]
    together = [fresh(request, slot) for request, slot in zip(asked, (5, 2, 4, 1), strict=True)]
    for request in together:
        prefill(made, request)
    for step in range(11):
        decode(made, together[step % 4 :] + together[: step % 4])
    assert [request.tokens for request in together] == alone
    assert {kind for kind, *_ in made._executables} >= {"adjusted_decode", "greedy_prefill"}
    counts = made._state["token_counts"][:, 5]
    assert torch.bincount(torch.tensor(PROMPT), minlength=97).equal(counts[0].long())
    assert torch.bincount(torch.tensor(alone[0][:-1]), minlength=97).equal(counts[1].long())


def test_the_next_tenant_of_a_slot_has_a_clean_one():
    made = model()
    tenants = [wishing("all"), Request(PROMPT, 1), wishing("presence"), wishing("presence")]
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
    run(made, Request(PROMPT, 1), 3)
    made._executables.clear()
    run(made, Request(PROMPT, 1), 3)
    assert list(made._executables) == [
        ("greedy_prefill", 8, made.max_length),
        ("greedy_decode", 1, made.max_length),
    ]


@pytest.mark.parametrize("piece", [1, 4, 7])
@pytest.mark.parametrize("name", ["all", "repetition", "frequency"])
def test_pieces_and_preemption_count_the_same_history(name, piece):
    prompt = [(5 * n + 3) % 97 for n in range(13)]
    whole, parts = (wishing(name, slot, prompt=prompt, num_logprobs=0) for slot in (1, 2))
    made = model(prompt_buckets=(8, 16, 32))
    run(made, whole, 14)
    prefill_in_pieces(made, parts, piece)
    for _ in range(5):
        decode(made, [parts])
    run(made, wishing("all", slot=2), 3)  # preempted: another has the slot meanwhile
    parts.slot = 3
    prefill_in_pieces(made, parts, piece)
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
    asking, silent = wishing("all", num_logprobs=3), Request([3], 2)
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
    assert ("adjusted_decode", 2, made.max_length) in made._executables


def test_a_vocabulary_may_be_smaller_than_the_alternatives():
    config = dataclasses.replace(toy.CONFIG, vocab_size=7)
    made = Llama(toy.weights(config=config), max_length=16, device="cpu", compile=compile_eager)
    request = Request([1, 2, 3], 1, 0.8, wishes={"num_logprobs": 20, "repetition_penalty": 1.2})
    run(made, request, 6)
    for token, logprobs in zip(request.tokens, request.logprobs, strict=True):
        assert logprobs.logprob_token_ids[0] == token
        assert logprobs.logprob_token_ids[8:].tolist() == [-1] * 13
        assert logprobs.logprobs[1:8].exp().sum() == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_executables_give_the_same_tokens():
    wanted = [wishing("all", 1, num_logprobs=2), wishing("repetition", 2, "greedy")]
    eager = [run(model(), fresh(request, 1), 9) for request in wanted]
    made = toy.toy(batch_buckets=(4,), prompt_buckets=(16,))
    for request in wanted:
        prefill(made, request)
    for _ in range(8):
        decode(made, [*wanted, None, None])
    assert [request.tokens for request in wanted] == eager
    assert len(wanted[0].logprobs) == 9
