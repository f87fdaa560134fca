from __future__ import annotations

from typing import Any

import pytest

from neuron_streams.decode import (
    Logprob,
    ModelRunnerOutput,
    SamplingParams,
    Scheduler,
    SchedulerOutput,
)
from tests.decode.fake_streams import FakeStreams
from tests.decode.hash_model import EOS, FakeHashModel


def make(max_batch_size: int | None = None, **sizes: Any) -> Scheduler:
    model = FakeHashModel(FakeStreams(), **sizes)
    return Scheduler(model, max_batch_size=max_batch_size)


def give(scheduler: Scheduler, step: SchedulerOutput, *tokens: int) -> list[Any]:
    """Retire a step in which each request sampled one of `tokens`; 1 where there are none."""
    keys = list(step.num_scheduled_tokens)
    sampled = [[token] for token in tokens] or [[1]] * len(keys)
    index = {key: row for row, key in enumerate(keys)}
    return scheduler.update_from_output(step, ModelRunnerOutput(keys, index, sampled))


def names(step: SchedulerOutput) -> list[str]:
    return [key.request_id for key in step.num_scheduled_tokens]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "^Request 'x' has an empty prompt"),
        ([1] * 9, "^Request 'x' has a prompt of 9 tokens; this model takes 8 at most"),
        ([1, 31], "^Request 'x' has token ids from 1 to 31; this model knows 0 to 30"),
        ([-1, 2], "^Request 'x' has token ids from -1 to 2"),
    ],
)
def test_a_bad_prompt_is_refused_and_others_go_on(prompt: list[int], message: str) -> None:
    scheduler = make()
    scheduler.add_request("a", [1])
    with pytest.raises(ValueError, match=message):
        scheduler.add_request("x", prompt)
    assert names(scheduler.schedule()) == ["a"]


def test_a_prompt_must_leave_room_for_one_token() -> None:
    scheduler = make(max_length=6)
    with pytest.raises(ValueError, match="this model takes 5 at most"):
        scheduler.add_request("x", [1] * 6)
    scheduler.add_request("y", [1] * 5)


def test_an_id_in_use_is_refused() -> None:
    scheduler = make()
    scheduler.add_request("a", [1])
    with pytest.raises(ValueError, match="^Request id 'a' is in use"):
        scheduler.add_request("a", [2])


@pytest.mark.parametrize("priority", ["1", None, float("nan")])
def test_a_priority_that_cannot_be_compared_is_refused_and_leaves_no_trace(priority: Any) -> None:
    scheduler = make()
    scheduler.add_request("a", [1])
    with pytest.raises(ValueError, match="^Request 'b' has priority .*; it must be a number"):
        scheduler.add_request("b", [1], priority=priority)
    assert scheduler.unfinished_request_ids == ("a",)


def test_max_tokens_is_capped_by_the_models_length() -> None:
    request = make(max_length=6).add_request("a", [1, 2], SamplingParams(max_tokens=100))
    assert request.max_tokens == 4


def test_a_seed_is_drawn_at_admission() -> None:
    scheduler = make()
    seeds = {scheduler.add_request(name, [1]).seed for name in "abcd"}
    assert len(seeds) == 4
    assert scheduler.add_request("e", [1], SamplingParams(seed=5)).seed == 5


def test_prefill_goes_first_come_first_served_while_slots_are_free() -> None:
    scheduler = make(num_slots=3)
    for name in "abc":
        scheduler.add_request(name, [1])
    steps = [scheduler.schedule() for _ in range(3)]
    assert [names(step) for step in steps] == [["a"], ["b"], ["a", "b"]]
    assert [new.slot for step in steps for new in step.scheduled_new_reqs] == [1, 2]


def test_a_prefill_step_takes_as_many_rows_as_the_model() -> None:
    scheduler = make(prefill_batch=2)
    for name in "abc":
        scheduler.add_request(name, [1])
    steps = [scheduler.schedule() for _ in range(3)]
    assert [names(step) for step in steps] == [["a", "b"], ["c"], ["a", "b", "c"]]


@pytest.mark.parametrize(("limit", "size"), [(None, 4), (2, 2), (9, 4)])
def test_the_batch_size_is_limited(limit: int | None, size: int) -> None:
    scheduler = make(max_batch_size=limit)
    for name in "abcdef":
        scheduler.add_request(name, [1])
    while len(names(scheduler.schedule())) == 1 and len(scheduler.running) < size:
        pass
    assert len(names(scheduler.schedule())) == size
    with pytest.raises(ValueError, match="^max_batch_size is 0"):
        make(max_batch_size=0)


def test_positions_run_ahead_of_the_device() -> None:
    scheduler = make()
    request = scheduler.add_request("a", [1, 2, 3])
    steps = [scheduler.schedule() for _ in range(3)]
    assert [list(step.num_scheduled_tokens.values()) for step in steps] == [[3], [1], [1]]
    assert [list(step.num_computed_tokens.values()) for step in steps] == [[0], [3], [4]]
    assert request.num_in_flight == 3


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_no_step_past_max_tokens_is_scheduled(max_tokens: int) -> None:
    scheduler = make()
    request = scheduler.add_request("a", [1], SamplingParams(max_tokens=max_tokens))
    steps = [scheduler.schedule() for _ in range(max_tokens)]
    assert not scheduler.schedule().num_scheduled_tokens
    assert request.num_in_flight == max_tokens
    ends = [give(scheduler, step)[0].finish_reason for step in steps]
    assert ends == [None] * (max_tokens - 1) + ["length"]
    assert request.num_in_flight == 0


def test_a_slot_is_free_only_when_no_launched_step_uses_it() -> None:
    scheduler = make(num_slots=2)
    scheduler.add_request("a", [1])
    prefill, decode = scheduler.schedule(), scheduler.schedule()
    scheduler.abort_request("a")
    scheduler.add_request("a", [2])
    assert not scheduler.schedule().num_scheduled_tokens
    assert give(scheduler, prefill) == []
    assert not scheduler.schedule().num_scheduled_tokens
    assert give(scheduler, decode) == []
    again = scheduler.schedule()
    assert again.scheduled_new_reqs[0].prompt_token_ids == [2]
    assert again.scheduled_new_reqs[0].slot == 1
    assert scheduler.stats.extra_tokens_dropped == 2


def test_finished_requests_are_reported_once() -> None:
    scheduler = make()
    scheduler.add_request("a", [1])
    step = scheduler.schedule()
    late = scheduler.schedule()
    assert give(scheduler, step, EOS)[0].finish_reason == "stop"
    ended = scheduler.schedule()
    assert [key.request_id for key in ended.finished_req_ids] == ["a"]
    assert not scheduler.schedule().finished_req_ids
    give(scheduler, late)
    assert scheduler.stats.extra_tokens_dropped == 1


def test_aborting_a_waiting_request_leaves_no_trace() -> None:
    scheduler = make()
    scheduler.add_request("a", [1])
    output = scheduler.abort_request("a")
    assert output is not None
    assert output.finish_reason == "abort"
    step = scheduler.schedule()
    assert not step.num_scheduled_tokens
    assert not step.finished_req_ids


def test_aborting_an_unknown_request_is_harmless() -> None:
    assert make().abort_request("nobody") is None


def test_a_partial_prefill_row_yields_no_output() -> None:
    scheduler = make()
    scheduler.add_request("a", [1, 2])
    step = scheduler.schedule()
    (key,) = step.num_scheduled_tokens
    assert scheduler.update_from_output(step, ModelRunnerOutput([key], {key: 0}, [[]])) == []


def test_a_generation_never_comes_back() -> None:
    scheduler = make()
    keys = set()
    for _ in range(5):
        keys.add(scheduler.add_request("a", [1]).key)
        scheduler.abort_request("a")
    assert len(keys) == 5


def test_what_is_dropped_of_a_step_drops_its_logprobs() -> None:
    scheduler = make()
    scheduler.add_request("a", [1], SamplingParams(logprobs=0))
    step = scheduler.schedule()
    (key,) = step.num_scheduled_tokens
    logprobs = [{token: Logprob(-1.0, 1)} for token in (1, EOS, 3)]
    given = ModelRunnerOutput([key], {key: 0}, [[1, EOS, 3]], logprobs=[logprobs])
    (output,) = scheduler.update_from_output(step, given)
    assert output.new_token_ids == (1, EOS)
    assert output.logprobs == tuple(logprobs[:2])


def test_a_model_may_refuse_parameters_at_admission() -> None:
    class Picky(FakeHashModel):
        def check_sampling(self, params: SamplingParams) -> None:
            if params.top_k > 64:
                raise ValueError(f"top_k={params.top_k}: this model looks at 64 tokens")

    scheduler = Scheduler(Picky(FakeStreams()))
    with pytest.raises(ValueError, match="^top_k=65"):
        scheduler.add_request("a", [1], SamplingParams(top_k=65))
    scheduler.add_request("a", [1], SamplingParams(top_k=64))
