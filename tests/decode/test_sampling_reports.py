"""How the sampling state of such loops has failed in public: one test for each report that applies.

As test_reports.py, for penalties, masks and log-probabilities, in both policies at depths 1 to 4;
the numbers are the rows of docs/reports.md, "Decode loops".
Stop strings have their own tests, and a grammar is refused.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from neuron_streams.decode import DecodeLoop, SamplingParams, SamplingTensors
from neuron_streams.decode.logprobs import split
from tests.decode.fake_streams import FakeStreams
from tests.decode.harness import Results, make_loop, make_worker, run_to_end
from tests.decode.hash_adjustments import choose
from tests.decode.hash_model import (
    EOS,
    FakeHashModel,
    hash_of,
    reference,
    reference_logprobs,
)

ASYNC: dict[str, dict[str, Any]] = {
    f"{policy} {depth}": {"policy": policy, "depth": depth}
    for policy in ("materialize", "gather")
    for depth in (1, 2, 3, 4)
}
MODES = {"sync": {"async_scheduling": False}, **ASYNC}
modes = pytest.mark.parametrize("options", MODES.values(), ids=MODES)
policies = pytest.mark.parametrize("options", ASYNC.values(), ids=ASYNC)
PENALTIES = {"repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": -0.25}


def asking(max_tokens: int = 9, seed: int = 1, **wanted: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **{"ignore_eos": True, **wanted})


def everything(seed: int) -> SamplingParams:
    bias = {3: -math.inf, 4: 2.0, 5: -1.5}
    others = {"min_p": 0.25, "logit_bias": bias, "logprobs": seed, "min_tokens": 3}
    return asking(9, seed, stop_token_ids=(1, 2, 6, 8), ignore_eos=False, **PENALTIES, **others)


def admit(loop: DecodeLoop, results: Results, name: str, prompt: list[int], p: Any) -> None:
    results.admit(name)
    loop.add_request(name, prompt, p)


def check(results: Results, name: tuple[str, int], prompt: list[int], p: SamplingParams) -> None:
    tokens, reason = reference(prompt, p, 24)
    assert (results.tokens[name], results.reasons[name]) == (tokens, reason)
    assert results.logprobs.get(name) == reference_logprobs(prompt, tokens, p)


def run(loop: DecodeLoop, prompts: list[list[int]], params: list[SamplingParams]) -> Results:
    """Run requests to their end, with a reorder at every step."""
    results = Results()
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        admit(loop, results, str(number), prompt, each)
    while loop.has_unfinished_requests():
        batch = loop.runner.input_batch
        for row in range(batch.num_reqs - 1):
            batch.swap_states(row, row + 1)
        results.take(loop.step())
    return results


def play(prompts: list[list[int]], params: list[SamplingParams], **options: Any) -> DecodeLoop:
    """Run requests, and check each against the oracle."""
    loop, _, _ = make_loop(**options)
    results = run(loop, prompts, params)
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        check(results, (str(number), 0), prompt, each)
    return loop


def loop_of(model: type[FakeHashModel], sizes: dict[str, Any], **options: Any) -> DecodeLoop:
    streams = FakeStreams()
    return DecodeLoop(model(streams, **sizes), streams=streams, output_thread=False, **options)


# Penalties


@modes
def test_row_47_penalties_in_a_mixed_batch(options: dict[str, Any]) -> None:
    params = [everything(1), asking(12), asking(7, 3, **PENALTIES), asking(8, 4), everything(5)]
    play([[1, 2], [3], [4, 4, 5], [6], [7, 1]], params, **options)


@modes
def test_row_47_a_preemption_makes_no_prompt_of_the_output(options: dict[str, Any]) -> None:
    for chunks in (False, True):
        sizes = {"prompt_buckets": (4,)}
        loop, model, _ = make_loop(chunks=chunks, sizes=sizes, **options)
        results, p = Results(), asking(12, min_tokens=8, logprobs=2, **PENALTIES)
        admit(loop, results, "a", [1, 2, 2], p)
        while len(results.tokens["a", 0]) < 6:
            results.take(loop.step())
        assert loop.scheduler.preempt_request("a")
        run_to_end(loop, model, results)
        check(results, ("a", 0), [1, 2, 2], p)


@modes
def test_row_47_the_output_is_counted_behind_a_prompt_in_pieces(options: dict[str, Any]) -> None:
    prompt = [1, 2, 3, 4, 5, 1, 2]
    p = asking(8, logprobs=3, **PENALTIES)
    sizes = {"prompt_buckets": (2,)}
    loop = play([prompt, [9]], [p, asking(9, 2)], chunks=True, sizes=sizes, **options)
    assert loop.stats.generated_tokens == 8 + 9


@modes
def test_row_48_what_the_model_is_given_has_few_shapes(options: dict[str, Any]) -> None:
    shapes = set()

    class Shaped(FakeHashModel):
        def prefill(self, input_ids: Any, lengths: Any, slots: Any, sampling: Any) -> Any:
            assert sampling.adjustments is not None
            shapes.add((input_ids.shape, *(column.shape for column in sampling.adjustments)))
            return super().prefill(input_ids, lengths, slots, sampling)

        def decode(self, input_ids: Any, positions: Any, slots: Any) -> Any:
            shapes.add((input_ids.shape, positions.shape, slots.shape))
            return super().decode(input_ids, positions, slots)

        def decode_gather(self, input_ids: Any, positions: Any, slots: Any) -> Any:
            shapes.add((input_ids.shape, positions.shape, slots.shape))
            return super().decode_gather(input_ids, positions, slots)

    loop = loop_of(Shaped, {"batch_buckets": (4,), "prompt_buckets": (8,)}, **options)
    params = [asking(9 - number, number, **PENALTIES) for number in range(6)]
    run(loop, [[1] * (number + 1) for number in range(6)], params)
    assert len(shapes) == 2, "one of a prefill and one of a decode"


@modes
@pytest.mark.parametrize("penalty", PENALTIES)
def test_row_48b_a_penalty_is_not_a_token_late(penalty: str, options: dict[str, Any]) -> None:
    p = asking(16, **{penalty: PENALTIES[penalty]})
    assert reference([1, 2], p, 24)[0][2:] != reference([1, 2], asking(16), 24)[0][2:]
    play([[1, 2], [5]], [p, asking(16, 2)], **options)


@modes
def test_row_49_a_processor_sees_the_whole_history(options: dict[str, Any]) -> None:
    class NeverTwice(FakeHashModel):
        def _next(self, slot: int, length: int) -> int:
            counts = self.counts[slot]
            seen = frozenset({*counts.prompt, *counts.output})
            return choose(hash_of(self.history[slot][:length]), self.vocab_size, seen)

    prompts = [[number, number + 9] for number in range(4)]
    params = [asking(18 - number, **PENALTIES) for number in range(4)]
    results = run(loop_of(NeverTwice, {}, **options), prompts, params)
    for number, prompt in enumerate(prompts):
        tokens = prompt + results.tokens[str(number), 0]
        assert len(tokens) == len(set(tokens)) == 20 - number


# What a slot, an id or a batch keeps of others


@modes
def test_row_23_a_slot_keeps_nothing_of_the_tenant_before(options: dict[str, Any]) -> None:
    params = [everything(2), asking(6, 2), everything(3), asking(6, 4), asking(6, 5, logprobs=0)]
    play([[1, 2]] * 5, params, sizes={"num_slots": 2}, **options)


@modes
def test_row_25_a_plain_row_beside_one_that_asks_is_plain(options: dict[str, Any]) -> None:
    params = [everything(2), asking(6, 2), asking(6, 3), everything(4)]
    play([[1, 2], [1, 2], [3], [3]], params, sizes={"prefill_batch": 2}, **options)


# The minimum of tokens


@modes
@pytest.mark.parametrize("min_tokens", [0, 1, 4, 7])
def test_no_stop_before_min_tokens_and_one_right_after(
    min_tokens: int, options: dict[str, Any]
) -> None:
    """All but one token stop: the request ends with the first that may."""
    stops = tuple(token for token in range(31) if token != 11)
    p = asking(7, min_tokens=min_tokens, stop_token_ids=stops)
    tokens, reason = reference([1, 2], p, 24)
    assert tokens[:min_tokens] == [11] * min_tokens
    assert len(tokens) == min(min_tokens + 1, 7)
    assert reason == ("length" if min_tokens == 7 else "stop")
    play([[1, 2]], [p], **options)


@modes
def test_an_end_of_sequence_waits_for_min_tokens(options: dict[str, Any]) -> None:
    bias = {token: -math.inf for token in range(31) if token not in (EOS, 11)}
    p = asking(9, min_tokens=5, ignore_eos=False, logit_bias=bias)
    tokens, reason = reference([1, 2], p, 24)
    assert tokens[:5] == [11] * 5
    assert (tokens[-1], reason) == (EOS, "stop")
    play([[1, 2]], [p], **options)


# Log-probabilities


@modes
@pytest.mark.parametrize("most", [0, 1, 20])
def test_row_50_the_logprobs_are_those_of_the_oracle(most: int, options: dict[str, Any]) -> None:
    params = [asking(9, 1, logprobs=most), asking(6, 2), asking(7, 3, logprobs=most)]
    play([[1, 2], [3], [4, 5]], params, **options)


@policies
def test_row_50_logprobs_force_no_sync(options: dict[str, Any]) -> None:
    counted = []
    for most in (None, 3):
        loop, _, streams = make_loop(**options)
        params = [asking(9 - number, number, logprobs=most) for number in range(3)]
        run(loop, [[0], [1], [2]], params)
        assert streams.blocking_reads == 0
        assert streams.copies == loop.stats.steps * (1 if most is None else 4)
        counted.append((loop.stats.async_steps, loop.stats.fallback_reasons, loop.stats.steps))
    assert counted[0] == counted[1]


def test_row_50_logprobs_are_those_of_the_rows_at_launch() -> None:
    worker = make_worker()
    prompts, outputs = {"a": [1, 2], "b": [3]}, []
    for name, prompt in prompts.items():
        worker.scheduler.add_request(name, prompt, asking(logprobs=2))
        outputs += worker.finish(worker.launch())
    launched = worker.launch()
    worker.runner.input_batch.swap_states(0, 1)
    outputs += worker.finish(launched)
    for name, prompt in prompts.items():
        told = [out for out in outputs if out.request_id == name]
        tokens = [token for out in told for token in out.new_token_ids]
        logprobs = [each for out in told for each in out.logprobs]
        assert logprobs == reference_logprobs(prompt, tokens, asking(logprobs=2))
        assert len(logprobs) == 2


@policies
def test_row_51_who_asks_for_no_logprobs_pays_for_none(options: dict[str, Any]) -> None:
    loop, _, streams = make_loop(**options)
    run(loop, [[1], [1]], [asking(), asking(**PENALTIES)])
    assert streams.copies == loop.stats.steps


@modes
def test_row_54_what_is_dropped_brings_no_logprobs(options: dict[str, Any]) -> None:
    tokens, _ = reference([1, 2], asking(12), 24)
    p = asking(12, logprobs=2, stop_token_ids=tuple(tokens[4:5]))
    loop = play([[1, 2]], [p], **options)
    dropped = loop.stats.extra_tokens_dropped
    assert dropped == (loop.max_concurrent_batches - 1 if loop.runner.use_async_scheduling else 0)


@modes
def test_row_7_a_piece_of_a_prompt_brings_no_logprobs(options: dict[str, Any]) -> None:
    streams, pieces = FakeStreams(), 2
    p = asking(3, logprobs=1)
    sizes = {"prompt_buckets": (2,)}
    loop = play([[1, 2, 3, 4, 5]], [p], streams=streams, chunks=True, sizes=sizes, **options)
    assert loop.stats.steps == pieces + 3
    if loop.runner.use_async_scheduling:
        assert streams.copies == pieces + 3 * 4


@policies
def test_row_42_a_step_that_failed_brings_no_logprobs(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    model.fail_at = {5}
    p = asking(logprobs=1)
    results = run(loop, [[1, 2]], [p])
    tokens = results.tokens["0", 0]
    assert results.reasons["0", 0] == "error"
    assert tokens == reference([1, 2], p, 24)[0][: len(tokens)]
    assert results.logprobs["0", 0] == reference_logprobs([1, 2], tokens, p)


@policies
def test_an_abort_is_told_with_no_logprobs(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2], asking(logprobs=1))
    for _ in range(4):
        loop.step()
    loop.abort_request("a")
    told = [out for _ in range(9) if loop.has_unfinished_requests() for out in loop.step()]
    assert [(out.finish_reason, out.new_token_ids, out.logprobs) for out in told][-1:] == [
        ("abort", (), ())
    ]
    assert model.calls


# Ranks


def test_all_ranks_agree() -> None:
    streams = FakeStreams()
    first, second = make_worker(streams), make_worker(streams, is_output_rank=False)
    alone = make_worker(async_scheduling=False)
    params = {"a": everything(2), "b": asking(5), "c": asking(6, 3, logprobs=0)}
    for number, (name, p) in enumerate(params.items()):
        for worker in (first, alone):
            worker.scheduler.add_request(name, [number + 1], p)
    seen = []
    while first.scheduler.unfinished_request_ids:
        schedule, output = first.launch()
        _, other = second.launch(schedule)
        assert output.get_output() == other.get_output()
        first.scheduler.update_from_output(schedule, output.get_output())
        seen.append(output.get_output())
    assert [alone.step_sync() for _ in seen] == seen
    assert any(output.logprobs for output in seen)


def test_a_model_that_gives_no_logprobs_fails_the_request_that_asked() -> None:
    class Forgetful(FakeHashModel):
        def prefill(self, *args: Any, **kwargs: Any) -> Any:
            return split(super().prefill(*args, **kwargs))[0]

    loop = loop_of(Forgetful, {})
    p = asking()
    results = run(loop, [[1], [2]], [asking(logprobs=1), p])
    assert results.reasons["0", 0] == "error"
    assert str(results.errors["0", 0]).startswith("A request wants log-probabilities")
    check(results, ("1", 0), [2], p)


def test_the_sampling_tensors_of_plain_rows_are_plain() -> None:
    given: list[SamplingTensors] = []

    class Watched(FakeHashModel):
        def prefill(self, input_ids: Any, lengths: Any, slots: Any, sampling: Any) -> Any:
            given.append(sampling)
            return super().prefill(input_ids, lengths, slots, sampling)

    run(loop_of(Watched, {}), [[1], [1]], [asking(stop_token_ids=(3,)), asking(min_p=0.5)])
    assert [sampling.adjustments is None for sampling in given] == [True, False]
