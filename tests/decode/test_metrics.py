from __future__ import annotations

import math
from typing import Any

import pytest

from neuron_streams.decode import DecodeStats, RecentLatencies, RequestMetrics, SamplingParams
from tests.decode.harness import make_loop


def test_the_times_of_a_request() -> None:
    metrics = RequestMetrics(1.0, 9.0, 3, (3.0, 4.0, 8.0))
    assert metrics.first_token_at == 3.0
    assert metrics.time_to_first_token == 2.0
    assert metrics.inter_token_latencies == (1.0, 4.0)
    assert metrics.seconds == 8.0
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens) == (3, 3)


def test_a_request_without_tokens_has_no_first_one() -> None:
    metrics = RequestMetrics(1.0, 2.0, 3, ())
    assert metrics.first_token_at is None
    assert metrics.time_to_first_token is None
    assert metrics.inter_token_latencies == ()
    stats = DecodeStats()
    stats.count_request(metrics)
    assert len(stats.time_to_first_token) == len(stats.inter_token_latency) == 0


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    latencies = RecentLatencies()
    latencies.extend([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (latencies.p50, latencies.p99) == (3.0, 5.0)
    assert (latencies.percentile(0), latencies.percentile(100)) == (1.0, 5.0)
    assert latencies.percentile(40) == 2.0
    assert repr(latencies) == "RecentLatencies(5, p50=3.000000, p99=5.000000)"
    with pytest.raises(ValueError, match=r"^percentile\(101\): it must be from 0 to 100"):
        latencies.percentile(101)
    assert math.isnan(RecentLatencies().p50)


def test_only_the_newest_are_kept() -> None:
    latencies = RecentLatencies(3)
    latencies.extend(map(float, range(10)))
    assert len(latencies) == 3
    assert latencies.percentile(0) == 7.0


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"policy": "gather"}])
def test_a_finished_output_has_its_times_and_the_stats_have_them_too(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    loop, _, _ = make_loop(**options)
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    outputs = list(loop.generate([[1, 2], [3]], params))
    assert all((out.metrics is not None) == out.finished for out in outputs)
    ended = {out.request_id: out.metrics for out in outputs if out.metrics is not None}
    for metrics in ended.values():
        assert metrics.num_output_tokens == 4
        assert metrics.arrived_at < metrics.token_times[0]
        assert list(metrics.token_times) == sorted(set(metrics.token_times))
        assert metrics.finished_at > metrics.token_times[-1]
    assert ended["0"].num_prompt_tokens == 2
    assert len(loop.stats.time_to_first_token) == 2
    assert len(loop.stats.inter_token_latency) == 6
    times = sorted(metrics.time_to_first_token or 0.0 for metrics in ended.values())
    assert loop.stats.time_to_first_token.p99 == times[-1]


def test_the_wait_ahead_of_the_loop_counts() -> None:
    loop, _, _ = make_loop()
    loop.add_request("a", [1], SamplingParams(max_tokens=1), arrived_at=0.0)
    (output,) = [out for _ in range(3) for out in loop.step()]
    assert output.metrics is not None
    assert output.metrics.arrived_at == 0.0
    assert output.metrics.time_to_first_token == output.metrics.first_token_at


def test_an_aborted_request_has_times_and_keeps_those_over_a_preemption() -> None:
    loop, _, _ = make_loop()
    loop.add_request("a", [1], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    got = [out for _ in range(3) for out in loop.step()]
    loop.scheduler.preempt_request("a")
    got += [out for _ in range(5) for out in loop.step()]
    count = sum(len(out.new_token_ids) for out in got)
    loop.abort_request("a")
    got = loop.step()
    assert got[-1].finish_reason == "abort"
    assert got[-1].metrics is not None
    assert got[-1].metrics.num_output_tokens == got[-1].num_output_tokens >= count > 2
