"""Slots and rows: that none is idle, that no step has too many, and what the others cost it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from neuron_streams.decode import DecodeLoop, SamplingParams, Scheduler, SchedulerOutput
from tests.decode.fake_streams import FakeStreams
from tests.decode.harness import check_capacity, check_choices, make_loop, steps_of, work_of
from tests.decode.hash_model import FakeChunkModel, FakeHashModel


def limited(max_tokens: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def make(max_batch_size: int | None = None, *, chunks: bool = False, **sizes: Any) -> Scheduler:
    model = (FakeChunkModel if chunks else FakeHashModel)(FakeStreams(), **sizes)
    scheduler = Scheduler(model, max_batch_size=max_batch_size)
    check_choices(scheduler)
    return scheduler


def names(step: SchedulerOutput) -> list[str]:
    return [key.request_id for key in step.num_scheduled_tokens]


def steps(scheduler: Scheduler, count: int) -> list[list[str]]:
    return [names(scheduler.schedule()) for _ in range(count)]


# A request whose last token is in flight


def test_a_request_whose_last_token_is_in_flight_leaves_its_row_to_the_next() -> None:
    scheduler = make(max_batch_size=1)
    for name in "abc":
        scheduler.add_request(name, [1], limited(2))
    assert steps(scheduler, 7) == [["a"], ["a"], ["b"], ["b"], ["c"], ["c"], []]


def test_its_slot_is_not_free_before_its_last_step_has_been_read() -> None:
    scheduler = make(num_slots=2)
    scheduler.add_request("a", [1], limited(1))
    scheduler.add_request("b", [1], limited(1))
    assert steps(scheduler, 2) == [["a"], []]


def drive(depth: int, limits: list[int], policy: str, **sizes: Any) -> DecodeLoop:
    options: dict[str, Any] = {"async_scheduling": False}
    loop, model, _ = make_loop(
        sizes=sizes, **({"depth": depth, "policy": policy} if depth else options)
    )
    for number, limit in enumerate(limits):
        loop.add_request(str(number), [number % 31], limited(limit, number))
    for _ in steps_of(loop, model):
        pass
    return loop


SHORT = [1 + n * 5 % 6 for n in range(24)]
LONGER = [8 + n * 5 % 6 for n in range(24)]


@pytest.mark.parametrize("policy", ["materialize", "gather"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("prefill_batch", [1, 2])
@pytest.mark.parametrize("limits", [SHORT, LONGER], ids=["1 to 6 tokens", "8 to 13 tokens"])
def test_the_batches_are_as_full_as_those_of_the_synchronous_loop(
    depth: int, policy: str, prefill_batch: int, limits: list[int]
) -> None:
    """With four rows, and the slots that are needed for it."""
    num_slots = 1 + 4 + (depth - 1) * prefill_batch
    loop = drive(depth, limits, policy, num_slots=num_slots, prefill_batch=prefill_batch)
    want = drive(0, limits, policy, num_slots=5, prefill_batch=prefill_batch)
    assert loop.stats.steps == want.stats.steps
    if policy == "gather":
        assert loop.stats.async_share == 1


def test_one_token_each_runs_ahead_too() -> None:
    """A batch of two, both prefilled in one step, which ends them."""
    sizes = {"prefill_batch": 2, "batch_buckets": (1, 2)}
    loop, model, streams = make_loop(sizes=sizes, policy="gather", depth=2)
    for number in range(4):
        loop.add_request(str(number), [number], limited(1, number))
    with streams.hold(loop.runner.compute_stream):
        loop.step()
        with pytest.raises(RuntimeError, match="deadlock"):
            loop.step()
    assert len(model.calls) == 2


@pytest.mark.parametrize("call", ["pause_request", "preempt_request"])
def test_a_request_whose_last_token_is_in_flight_ends_whatever_is_done_to_it(call: str) -> None:
    loop, model, _ = make_loop(policy="gather", depth=4)
    loop.add_request("a", [1, 2], limited(2))
    loop.step()
    loop.step()
    assert loop.scheduler.running[0].is_ending
    done = getattr(loop.scheduler, call)("a")
    assert done == (call == "pause_request"), "there is nothing to preempt"
    check_capacity(loop.scheduler)
    assert loop.scheduler.has_work != done
    loop.resume_request("a")
    last = [output for outputs in steps_of(loop, model) for output in outputs][-1]
    assert (last.finish_reason, last.num_output_tokens) == ("length", 2)
    assert loop.stats.preemptions == 0


# The cap


def test_the_cap_counts_the_requests_that_are_at_least_as_urgent() -> None:
    scheduler = make(max_batch_size=1, prefill_batch=3)
    scheduler.add_request("least", [1], limited(9), priority=1)
    assert steps(scheduler, 2) == [["least"], ["least"]]
    for name in "abc":
        scheduler.add_request(name, [1], limited(2), priority=0)
    assert names(scheduler.schedule()) == ["a"]
    assert len(scheduler.running) == 2
    assert steps(scheduler, 4) == [["a"], ["b"], ["b"], ["c"]]


def test_a_more_urgent_request_takes_the_row_of_the_last_in_order() -> None:
    scheduler = make(max_batch_size=2)
    for name, priority in [("a", 0), ("old", 1)]:
        scheduler.add_request(name, [1], limited(9), priority=priority)
    assert steps(scheduler, 3) == [["a"], ["old"], ["a", "old"]]
    scheduler.add_request("b", [1], limited(2), priority=0)
    scheduler.add_request("as urgent as old", [1], limited(9), priority=1)
    assert steps(scheduler, 3) == [["b"], ["a", "b"], ["a", "old"]]
    assert scheduler.stats.preemptions == 0


def test_an_older_request_that_is_resumed_takes_the_row_of_a_newer_one() -> None:
    scheduler = make(max_batch_size=1)
    scheduler.add_request("old", [1], limited(9))
    assert steps(scheduler, 2) == [["old"], ["old"]]
    scheduler.pause_request("old")
    scheduler.add_request("new", [1], limited(9))
    assert steps(scheduler, 2) == [["new"], ["new"]]
    scheduler.resume_request("old")
    assert steps(scheduler, 1) == [["old"]]
    scheduler.pause_request("old")
    assert steps(scheduler, 1) == [["new"]]


@pytest.mark.parametrize("prefill_batch", [1, 2])
@pytest.mark.parametrize("cap", [1, 2])
def test_pieces_of_prompts_are_bounded_too_and_the_most_urgent_goes_first(
    cap: int, prefill_batch: int
) -> None:
    scheduler = make(cap, chunks=True, prefill_batch=prefill_batch)
    scheduler.add_request("more", [1] * 20, limited(3), priority=0)
    assert names(scheduler.schedule()) == ["more"]
    scheduler.pause_request("more")
    scheduler.add_request("less", [1] * 20, limited(3), priority=1)
    assert names(scheduler.schedule()) == ["less"]
    scheduler.resume_request("more")
    both = min(cap, prefill_batch) == 2
    assert names(scheduler.schedule()) == (["more", "less"] if both else ["more"])


@pytest.mark.parametrize("priority", [0, 1], ids=["as urgent", "less urgent"])
def test_a_paused_request_gives_up_its_slot_before_one_at_work(priority: int) -> None:
    loop, _, _ = make_loop(sizes={"num_slots": 3}, async_scheduling=False)
    loop.add_request("paused", [1], limited(9), priority=-1)
    loop.step()
    loop.pause_request("paused")
    loop.add_request("at work", [1], limited(9), priority=priority)
    loop.step()
    loop.add_request("new", [1], limited(9), priority=0)
    loop.step()
    assert [request.request_id for request in loop.scheduler.running] == ["at work", "new"]
    assert loop.stats.preemptions == 1


def test_a_request_that_was_paused_while_it_waited_waits_again() -> None:
    scheduler = make(max_batch_size=1)
    for name in "abc":
        scheduler.add_request(name, [1], limited(1))
    for _ in range(2):
        scheduler.pause_request("b")
    assert steps(scheduler, 3) == [["a"], ["c"], []]
    assert scheduler.has_work
    for _ in range(2):
        scheduler.resume_request("b")
    check_capacity(scheduler)
    assert steps(scheduler, 2) == [["b"], []]


# What the others cost a step


def crowd(state: str, size: int) -> DecodeLoop:
    """A loop that runs four requests, while `size` others are in a state in which none runs."""
    sizes = {"max_length": 4000, "num_slots": size + 9}
    loop, _, _ = make_loop(sizes=sizes, policy="gather")
    names = [f"other {n}" for n in range(size)]
    for name in names if state in ("paused in slots", "resumed") else ():
        loop.add_request(name, [1], limited(3000))
        loop.step()
        loop.pause_request(name)
    for number in range(4):
        loop.add_request(f"runs {number}", [1], limited(3000), priority=-1)
    for _ in range(8):
        loop.step()
    for name in names if state in ("waiting", "waiting paused") else ():
        loop.add_request(name, [1], limited(3000))
        if state == "waiting paused":
            loop.pause_request(name)
    for name in names if state == "resumed" else ():
        loop.resume_request(name)
    loop.drain()
    return loop


STATES = ["waiting", "waiting paused", "paused in slots", "resumed"]


@pytest.mark.parametrize("state", STATES)
def test_a_step_costs_the_same_however_many_others_do_not_run(state: str) -> None:
    def least(size: int) -> int:
        loop = crowd(state, size)
        work = min(work_of(loop.step) for _ in range(6))
        (step,) = loop.batch_queue
        assert len(step.scheduler_output.num_scheduled_tokens) == 4
        return work

    assert least(200) <= 1.02 * least(10)


CALLS: dict[str, Callable[[DecodeLoop, str], object]] = {
    "admission": lambda loop, name: loop.add_request(f"{name}, new", [1], limited(3000)),
    "abort": lambda loop, name: loop.abort_request(f"{name}4"),
    "pause": lambda loop, name: loop.pause_request(f"{name}5"),
    "resume": lambda loop, name: loop.resume_request(f"{name}6"),
    "whether there is work": lambda loop, name: loop.has_unfinished_requests(),
}


@pytest.mark.parametrize("state", STATES)
def test_a_call_costs_the_same_however_many_others_do_not_run(state: str) -> None:
    def costs(size: int, middle: str) -> dict[str, int]:
        loop = crowd(state, size)
        return {name: work_of(partial(call, loop, middle)) for name, call in CALLS.items()}

    few, many = costs(10, "other "), costs(200, "other 10")
    assert {name for name in CALLS if many[name] > 1.02 * few[name]} == set()
