from __future__ import annotations

from typing import Any

import pytest

from neuron_streams.decode import ModelRunnerOutput, SamplingParams, Scheduler, SchedulerOutput
from neuron_streams.decode.policy import MOST_OVERTAKEN
from tests.decode.fake_streams import FakeStreams
from tests.decode.fuzz import check_host_ids
from tests.decode.harness import Results, drive, make_loop, run_to_end
from tests.decode.hash_model import (
    FakeChunkModel,
    FakeHashModel,
    FakePackedModel,
    reference,
)

Sizes = dict[str, Any]
LONG: Sizes = {"max_length": 64, "num_slots": 9, "batch_buckets": (8,), "prompt_buckets": (32,)}


def make(
    kind: type[FakeHashModel], bound: int | None, rows: int | None = None, **sizes: Any
) -> Scheduler:
    model = kind(FakeStreams(), **(LONG | sizes))
    return Scheduler(model, max_batch_size=rows, max_num_batched_tokens=bound)


def lasting() -> SamplingParams:
    return SamplingParams(max_tokens=30, ignore_eos=True)


def step_of(scheduler: Scheduler) -> dict[str, int]:
    """The next step, retired at once: tokens by request."""
    step: SchedulerOutput = scheduler.schedule()
    keys = list(step.num_scheduled_tokens)
    sampled = [[] if key in step.partial_req_ids else [1] for key in keys]
    index = {key: row for row, key in enumerate(keys)}
    scheduler.update_from_output(step, ModelRunnerOutput(keys, index, sampled))
    return {key.request_id: count for key, count in step.num_scheduled_tokens.items()}


def steps_of(scheduler: Scheduler, count: int) -> list[dict[str, int]]:
    return [step_of(scheduler) for _ in range(count)]


def test_a_prompt_beside_a_running_request_comes_in_chunks_with_decode_steps_between() -> None:
    scheduler = make(FakeChunkModel, 4, rows=4)
    scheduler.add_request("a", [1], lasting())
    assert step_of(scheduler) == {"a": 1}
    scheduler.add_request("b", [1] * 10)
    assert steps_of(scheduler, 6) == [
        {"b": 4},
        {"a": 1},
        {"b": 4},
        {"a": 1},
        {"b": 2},
        {"a": 1, "b": 1},
    ]


def test_a_model_that_packs_carries_the_running_requests_along() -> None:
    scheduler = make(FakePackedModel, 4, rows=4)
    scheduler.add_request("a", [1], lasting())
    step_of(scheduler)
    scheduler.add_request("b", [1] * 7)
    assert steps_of(scheduler, 4) == [
        {"a": 1, "b": 3},
        {"a": 1, "b": 3},
        {"a": 1, "b": 1},
        {"a": 1, "b": 1},
    ]
    assert scheduler.stats.mixed_steps == 3
    assert scheduler.stats.prompt_chunks == 3
    assert scheduler.stats.scheduled_prompt_tokens == 8
    assert scheduler.stats.launches_per_token == 1


@pytest.mark.parametrize(
    ("length", "chunks"),
    [(8, [8]), (9, [8, 1]), (14, [8, 6]), (16, [16]), (31, [31]), (40, [32, 8]), (33, [32, 1])],
)
@pytest.mark.parametrize("bound", [None, 64])
def test_a_prompt_is_cut_where_most_of_a_bucket_would_be_padding(
    length: int, chunks: list[int], bound: int | None
) -> None:
    scheduler = make(FakePackedModel, bound, prompt_buckets=(8, 32))
    scheduler.add_request("a", [1] * length, lasting())
    assert [step["a"] for step in steps_of(scheduler, len(chunks))] == chunks


def test_prompts_that_leave_most_of_a_bucket_empty_share_the_one_below() -> None:
    scheduler = make(FakePackedModel, 64, prompt_buckets=(8, 32), prefill_batch=3)
    for name in "abc":
        scheduler.add_request(name, [1] * 4, lasting())
    assert steps_of(scheduler, 2) == [{"a": 4, "b": 4}, {"a": 1, "b": 1, "c": 4}]


@pytest.mark.parametrize("kind", [FakeChunkModel, FakePackedModel])
def test_where_nobody_decodes_a_prompt_is_not_cut(kind: type[FakeHashModel]) -> None:
    scheduler = make(kind, 4, rows=4)
    scheduler.add_request("a", [1] * 20)
    assert step_of(scheduler) == {"a": 20}


def test_a_model_that_cannot_go_on_takes_prompts_whole_one_between_two_decode_steps() -> None:
    scheduler = make(FakeHashModel, 4, rows=4, prefill_batch=2)
    scheduler.add_request("a", [1], lasting())
    step_of(scheduler)
    scheduler.add_request("b", [1] * 7, lasting())
    scheduler.add_request("c", [1] * 3, lasting())
    assert steps_of(scheduler, 4) == [
        {"c": 3},
        {"a": 1, "c": 1},
        {"b": 7},
        {"a": 1, "c": 1, "b": 1},
    ]


def test_without_a_bound_prompts_go_in_order_of_arrival_and_in_company_where_they_fit() -> None:
    scheduler = make(FakePackedModel, None, prefill_batch=3)
    for name, length in {"a": 20, "b": 3, "c": 12, "d": 2}.items():
        scheduler.add_request(name, [1] * length, lasting())
    assert steps_of(scheduler, 3) == [
        {"a": 20, "b": 3, "c": 8},
        {"a": 1, "b": 1, "c": 4},
        {"a": 1, "b": 1, "c": 1, "d": 2},
    ]


def test_the_shortest_goes_first_and_shares_the_step_with_the_next() -> None:
    scheduler = make(FakePackedModel, 8, prefill_batch=4)
    scheduler.add_request("a", [1], lasting())
    step_of(scheduler)
    for name, length in {"b": 20, "c": 5, "d": 3}.items():
        scheduler.add_request(name, [1] * length, lasting())
    assert step_of(scheduler) == {"a": 1, "d": 3, "c": 4}
    assert step_of(scheduler) == {"a": 1, "d": 1, "c": 1, "b": 5}


def test_an_urgent_prompt_goes_before_a_shorter_one() -> None:
    scheduler = make(FakePackedModel, 8, prefill_batch=1)
    scheduler.add_request("a", [1], lasting(), priority=-1)
    step_of(scheduler)
    scheduler.add_request("b", [1] * 2, lasting())
    assert step_of(scheduler) == {"a": 1, "b": 2}
    scheduler.add_request("c", [1] * 3, lasting())
    scheduler.add_request("d", [1] * 30, lasting(), priority=-1)
    assert step_of(scheduler) == {"a": 1, "b": 1, "d": 6}


def test_a_long_prompt_is_overtaken_a_bounded_number_of_times() -> None:
    scheduler = make(FakePackedModel, 8, prefill_batch=1)
    scheduler.add_request("a", [1], lasting())
    step_of(scheduler)
    scheduler.add_request("long", [1] * 30, lasting())
    overtaken = 0
    for number in range(3 * MOST_OVERTAKEN):
        scheduler.add_request(f"short {number}", [1] * 2, SamplingParams(max_tokens=1))
        if "long" in step_of(scheduler):
            break
        overtaken += 1
    assert overtaken == MOST_OVERTAKEN
    assert not any(r.num_overtaken for r in scheduler.capacity.rows if r.request_id != "long")
    assert [step["long"] for step in steps_of(scheduler, 4)] == [7, 7, 7, 2]


def test_some_that_start_and_some_that_go_on_share_no_prefill_step() -> None:
    scheduler = make(FakeChunkModel, 4, rows=4, prefill_batch=4)
    scheduler.add_request("a", [1], lasting())
    step_of(scheduler)
    scheduler.add_request("b", [1] * 6, lasting())
    assert steps_of(scheduler, 2) == [{"b": 4}, {"a": 1}]
    scheduler.add_request("c", [1] * 2, lasting())
    assert steps_of(scheduler, 3) == [{"b": 2}, {"a": 1, "b": 1}, {"c": 2}]


@pytest.mark.parametrize("kind", [FakeHashModel, FakePackedModel])
def test_a_bound_that_leaves_prompts_no_room_is_refused(kind: type[FakeHashModel]) -> None:
    with pytest.raises(ValueError, match="^max_num_batched_tokens is 7; it must be at least"):
        make(kind, 7)
    make(kind, 8)
    make(kind, 3, rows=3)


@pytest.mark.parametrize("policy", ["materialize", "gather"])
def test_a_mixed_step_is_async_or_counted(policy: str) -> None:
    options = {"packs": True, "max_num_batched_tokens": 4, "policy": policy}
    loop, model, _ = make_loop(sizes={"prompt_buckets": (8,)}, **options)
    p = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    results = Results()
    for name in ("a", "b"):
        results.admit(name)
    loop.add_request("a", [1, 2], p)
    for _ in range(4):
        results.take(loop.step())
    loop.add_request("b", [3] * 8, p)
    run_to_end(loop, model, results)
    assert loop.stats.mixed_steps == 3
    if policy == "gather":
        assert not loop.stats.fallback_reasons
    else:
        assert loop.stats.fallback_reasons["mixed"] == 3
        check_host_ids(model)
    assert results.tokens["b", 0] == reference([3] * 8, p, 24)[0]


def test_a_row_that_has_failed_gives_a_mixed_step_no_token() -> None:
    loop, model, _ = make_loop(packs=True, sizes={"prompt_buckets": (8,)})
    p = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    loop.add_request("a", [1, 2], p)
    outputs = [out for _ in range(3) for out in loop.step()]
    model.fail_at = {len(model.calls)}
    outputs += loop.step()
    loop.add_request("b", [3] * 8, p)
    outputs += drive(loop, model)
    ends = {out.request_id: out.finish_reason for out in outputs if out.finished}
    assert ends == {"a": "error", "b": "length"}
    assert loop.stats.mixed_steps == 1
    check_host_ids(model)
