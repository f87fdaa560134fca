"""Pause and resume, slots that run out, priorities, and prompts that go on where they stopped."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_streams.decode import DecodeLoop, RequestOutput, SamplingParams
from tests.decode.harness import check_idle, check_invariants, make_loop, modes
from tests.decode.hash_model import FakeHashModel, reference


def limited(max_tokens: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def tokens_of(outputs: list[RequestOutput], request_id: str) -> list[int]:
    return [t for out in outputs if out.request_id == request_id for t in out.new_token_ids]


def run(loop: DecodeLoop, model: FakeHashModel) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while loop.has_unfinished_requests():
        outputs += loop.step()
        check_invariants(loop, model)
    return outputs


def steps(loop: DecodeLoop, count: int) -> list[RequestOutput]:
    return [output for _ in range(count) for output in loop.step()]


# Pause and resume


@modes
def test_a_paused_request_runs_no_further_and_goes_on_with_the_same_tokens(
    options: dict[str, Any],
) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2], limited(9))
    outputs = steps(loop, 3)
    assert loop.pause_request("a")
    launched = len(model.calls)
    outputs += run(loop, model)
    assert len(model.calls) == launched
    assert loop.scheduler.unfinished_request_ids == ("a",)
    assert not loop.has_unfinished_requests()
    assert loop.step() == []
    assert loop.resume_request("a")
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == reference([1, 2], limited(9), 24)[0]
    assert loop.stats.preemptions == 0
    check_idle(loop)


def test_a_request_that_waits_can_be_paused() -> None:
    loop, model, _ = make_loop()
    loop.add_request("a", [1], limited(2))
    loop.pause_request("a")
    loop.add_request("b", [2], limited(2))
    assert tokens_of(run(loop, model), "b")
    loop.resume_request("a")
    assert tokens_of(run(loop, model), "a") == reference([1], limited(2), 24)[0]


def test_pause_and_resume_of_an_unknown_id_are_told() -> None:
    loop, _, _ = make_loop()
    assert not loop.pause_request("nobody")
    assert not loop.resume_request("nobody")
    assert not loop.scheduler.preempt_request("nobody")


def test_a_paused_request_can_be_aborted_and_its_slot_comes_free() -> None:
    loop, _, _ = make_loop()
    loop.add_request("a", [1], limited(9))
    steps(loop, 2)
    loop.pause_request("a")
    loop.drain()
    assert loop.abort_request("a")
    assert [out.finish_reason for out in loop.step()] == ["abort"]
    assert len(loop.scheduler.capacity.free_slots) == 5


def test_generate_ends_where_all_that_is_left_is_paused_and_aborts_nothing() -> None:
    loop, model, _ = make_loop()
    outputs = loop.generate([[1]], limited(5))
    got = [next(outputs)]
    loop.pause_request("0")
    got += outputs
    assert loop.scheduler.unfinished_request_ids == ("0",)
    loop.resume_request("0")
    got += run(loop, model)
    assert tokens_of(got, "0") == reference([1], limited(5), 24)[0]


# Slots run out


@modes
def test_a_paused_request_gives_its_slot_to_one_that_waits(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(sizes={"num_slots": 2}, **options)
    loop.add_request("a", [1, 2], limited(9))
    outputs = steps(loop, 4)
    loop.pause_request("a")
    loop.add_request("b", [3], limited(4))
    outputs += run(loop, model)
    assert tokens_of(outputs, "b") == reference([3], limited(4), 24)[0]
    assert loop.stats.preemptions == 1
    loop.resume_request("a")
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == reference([1, 2], limited(9), 24)[0]
    known = len(model.of("prefill")[-1].host_ids or [])
    assert known == 1, "it prefilled once more"
    check_idle(loop)


@modes
def test_the_newest_of_the_least_urgent_is_preempted(options: dict[str, Any]) -> None:
    loop, model, _ = make_loop(sizes={"num_slots": 4}, **options)
    for number, (request_id, priority) in enumerate([("old", 1), ("new", 1), ("urgent", 0)]):
        loop.add_request(request_id, [number], limited(12, number), priority=priority)
    outputs = steps(loop, 5)
    loop.add_request("most urgent", [9], limited(3, 9), priority=-1)
    loop.add_request("as urgent", [8], limited(3, 8), priority=1)
    preempted = []
    while loop.has_unfinished_requests():
        outputs += loop.step()
        check_invariants(loop, model)
        preempted = [r.request_id for r in loop.scheduler.waiting] or preempted
        assert set(preempted) <= {"new", "most urgent", "as urgent"}
    assert loop.stats.preemptions == 1
    order = [out.request_id for out in outputs if out.finished]
    assert order[0] == "most urgent"
    assert order.index("old") < order.index("as urgent")
    for number, request_id in enumerate(["old", "new", "urgent"]):
        want = reference([number], limited(12, number), 24)[0]
        assert tokens_of(outputs, request_id) == want


def test_an_urgent_request_does_not_preempt_while_a_slot_is_about_to_come_free() -> None:
    loop, model, _ = make_loop(sizes={"num_slots": 3})
    loop.add_request("a", [1], limited(2))
    loop.add_request("b", [2], limited(12), priority=1)
    steps(loop, 3)
    assert loop.scheduler.running[0].is_ending
    loop.add_request("urgent", [3], limited(2), priority=-1)
    run(loop, model)
    assert loop.stats.preemptions == 0


def test_an_urgent_request_takes_a_row_without_a_preemption_where_a_slot_is_free() -> None:
    loop, model, _ = make_loop(max_batch_size=1)
    loop.add_request("a", [1], limited(9), priority=1)
    outputs = steps(loop, 3)
    loop.add_request("urgent", [2], limited(3), priority=0)
    outputs += run(loop, model)
    assert [out.request_id for out in outputs if out.finished] == ["urgent", "a"]
    assert loop.stats.preemptions == 0
    assert tokens_of(outputs, "a") == reference([1], limited(9), 24)[0]
    assert all(call.positions.shape[0] == 1 for call in model.of("decode"))


@modes
def test_what_is_in_flight_at_a_preemption_is_delivered_and_not_computed_again(
    options: dict[str, Any],
) -> None:
    loop, model, _ = make_loop(**options)
    loop.add_request("a", [1, 2], limited(12))
    outputs = steps(loop, 4)
    in_flight = loop.scheduler.running[0].num_output_placeholders
    known = len(tokens_of(outputs, "a"))
    assert loop.scheduler.preempt_request("a")
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == reference([1, 2], limited(12), 24)[0]
    again = model.of("prefill")[1]
    assert again.positions.tolist() == [2 + known + in_flight]
    assert loop.stats.extra_tokens_dropped == 0
    assert loop.stats.steps == 12


def test_a_request_that_ends_by_what_was_in_flight_is_not_started_again() -> None:
    loop, model, _ = make_loop()
    loop.add_request("a", [1], limited(3))
    outputs = steps(loop, 3)
    assert loop.scheduler.running[0].is_ending
    loop.scheduler.preempt_request("a")
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == reference([1], limited(3), 24)[0]
    assert len(model.of("prefill")) == 1
    check_idle(loop)


# Prompts in pieces


@modes
@pytest.mark.parametrize("length", [8, 9, 16, 17, 20, 23])
def test_a_prompt_longer_than_the_largest_bucket_goes_in_pieces(
    options: dict[str, Any], length: int
) -> None:
    loop, model, _ = make_loop(chunks=True, **options)
    prompt = [(7 * n) % 31 for n in range(length)]
    loop.add_request("long", prompt, limited(4, 1))
    loop.add_request("short", [5], limited(4, 2))
    outputs = run(loop, model)
    assert tokens_of(outputs, "long") == reference(prompt, limited(4, 1), 24)[0]
    assert tokens_of(outputs, "short") == reference([5], limited(4, 2), 24)[0]
    assert len(model.of("prefill")) == -(-length // 8) + 1
    assert loop.stats.prefill_steps == len(model.of("prefill"))


def test_a_model_that_cannot_go_on_refuses_such_a_prompt() -> None:
    loop, _, _ = make_loop()
    with pytest.raises(ValueError, match=r"^Request 'a' has a prompt of 9 tokens; .* 8 at most"):
        loop.add_request("a", [1] * 9)


@modes
@pytest.mark.parametrize("chunks", [False, True])
def test_a_preempted_request_that_outgrew_the_largest_bucket_goes_on(
    options: dict[str, Any], chunks: bool
) -> None:
    """Tokens that no prefill can take are decoded one by one, with what the host knows."""
    loop, model, _ = make_loop(chunks=chunks, **options)
    loop.add_request("a", [1, 2, 3, 4, 5, 6], limited(14, 1))
    loop.add_request("b", [7], limited(20, 2))
    outputs = steps(loop, 12)
    loop.scheduler.preempt_request("a")
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == reference([1, 2, 3, 4, 5, 6], limited(14, 1), 24)[0]
    assert tokens_of(outputs, "b") == reference([7], limited(20, 2), 24)[0]
    prefills = {True: 5, False: 3}[chunks]
    assert len(model.of("prefill")) == prefills
    check_idle(loop)


def test_a_prompt_paused_between_two_pieces_goes_on_there() -> None:
    loop, model, _ = make_loop(chunks=True)
    prompt = [(3 * n) % 31 for n in range(20)]
    loop.add_request("a", prompt, limited(4))
    outputs = loop.step()
    loop.pause_request("a")
    outputs += run(loop, model)
    assert outputs == []
    loop.resume_request("a")
    outputs += run(loop, model)
    assert tokens_of(outputs, "a") == reference(prompt, limited(4), 24)[0]
    assert len(model.of("prefill")) == 3
