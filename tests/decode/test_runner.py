from __future__ import annotations

import logging

import pytest

from neuron_streams.decode import SamplingParams, SchedulerOutput
from tests.decode.harness import make_worker

LONG = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)


def test_a_rank_that_nobody_reads_retires_what_has_arrived_without_waiting() -> None:
    worker = make_worker(is_output_rank=False, max_concurrent_batches=4)
    worker.scheduler.add_request("a", [1, 2], LONG)
    for _ in range(3):
        worker.launch()
    assert len(worker.runner._pending_outputs) == 3
    worker.streams.run()
    worker.launch()
    assert len(worker.runner._pending_outputs) == 1


def test_the_output_rank_leaves_reading_to_the_output_thread() -> None:
    worker = make_worker(max_concurrent_batches=4)
    worker.scheduler.add_request("a", [1, 2], LONG)
    outputs = [worker.launch()[1] for _ in range(3)]
    worker.streams.run()
    worker.launch()
    assert not any(output.done for output in outputs)
    assert len(worker.runner._pending_outputs) == 4


def test_write_backs_keep_the_launch_order() -> None:
    worker = make_worker(max_concurrent_batches=4)
    worker.scheduler.add_request("a", [1, 2], LONG)
    outputs = [worker.launch()[1] for _ in range(3)]
    outputs[2].get_output()
    worker.launch()
    (state,) = worker.runner.requests.values()
    assert state.output_token_ids == [], "a later token may not overtake an earlier one"
    outputs[0].get_output()
    worker.launch()
    assert len(state.output_token_ids) == 1


def test_a_late_token_of_a_dead_generation_is_not_written() -> None:
    worker = make_worker()
    worker.scheduler.add_request("a", [1, 2], LONG)
    first = worker.launch()
    second = worker.launch()
    worker.scheduler.abort_request("a")
    worker.scheduler.add_request("a", [3], LONG)
    third = worker.launch()
    for launched in (first, second, third):
        worker.finish(launched)
    worker.launch()
    (state,) = worker.runner.requests.values()
    assert state.output_token_ids == third[1].get_output().sampled_token_ids[0]


def test_an_empty_schedule_launches_nothing() -> None:
    worker = make_worker()
    worker.runner.execute_model(SchedulerOutput())
    assert worker.runner.execute_model_state is None
    assert worker.runner.stats.steps == 0
    assert not worker.model.calls


def test_a_decode_right_after_a_flush_counts_as_composition() -> None:
    worker = make_worker()
    worker.scheduler.add_request("a", [1, 2], LONG)
    worker.finish(worker.launch())
    worker.runner.execute_model(SchedulerOutput())
    worker.launch()
    assert dict(worker.runner.stats.fallback_reasons) == {"prefill": 1, "composition": 1}


def test_a_break_says_why_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    worker = make_worker()
    worker.scheduler.add_request("a", [1, 2], LONG)
    worker.launch()
    worker.scheduler.add_request("b", [1, 2], LONG)
    with caplog.at_level(logging.DEBUG, "neuron_streams.decode.runner"):
        worker.launch()
    assert "batch composition changed" in caplog.text


def test_sizes_that_share_no_bucket_are_padded_to_the_next() -> None:
    worker = make_worker(sizes={"batch_buckets": (1, 4)})
    for name in "ab":
        worker.scheduler.add_request(name, [1, 2, 3, 4, 5], LONG)
    for _ in range(3):
        worker.launch()
    assert worker.model.calls[0].input_ids.shape == (1, 8)
    assert worker.model.calls[2].input_ids.shape == (4,)


def test_a_failure_on_a_rank_that_nobody_reads_is_raised_there() -> None:
    worker = make_worker(is_output_rank=False)
    worker.model.fail_at = {0}
    worker.scheduler.add_request("a", [1, 2], LONG)
    worker.launch()
    worker.streams.run()
    with pytest.raises(ArithmeticError, match="the device failed in call 0"):
        worker.launch()


def test_a_failure_on_the_output_rank_is_left_to_whoever_reads_the_output() -> None:
    worker = make_worker()
    worker.model.fail_at = {0}
    worker.scheduler.add_request("a", [1, 2], LONG)
    _, output = worker.launch()
    with pytest.raises(ArithmeticError):
        output.get_output()
    worker.launch()
    (state,) = worker.runner.requests.values()
    assert state.ended
