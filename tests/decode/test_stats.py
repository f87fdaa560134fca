from __future__ import annotations

import pytest

from neuron_streams.decode import DecodeStats, SamplingParams
from neuron_streams.decode.stats import COUNTERS, GAUGES
from tests.decode.harness import make_loop


def test_each_launched_step_counts_once() -> None:
    stats = DecodeStats()
    for decode, reason in [(False, "prefill"), (True, "shape"), (True, None), (True, None)]:
        stats.count_launch(decode=decode)
        stats.count_path(reason)
    assert stats.steps == 4
    assert (stats.async_steps, stats.sync_fallback_steps) == (2, 2)
    assert dict(stats.fallback_reasons) == {"prefill": 1, "shape": 1}
    assert stats.async_share == 0.5
    assert stats.decode_async_share == pytest.approx(2 / 3)


def test_shares_of_nothing_are_zero() -> None:
    stats = DecodeStats()
    assert stats.async_share == stats.decode_async_share == 0.0
    assert all(getattr(stats, name) == 0 for name in COUNTERS | GAUGES)


def test_each_figure_has_a_line_of_help() -> None:
    assert all(line.endswith(".") and "\n" not in line for line in (COUNTERS | GAUGES).values())


def test_tokens_requests_and_chunks_of_the_steps() -> None:
    sizes = {"prompt_buckets": (4,)}
    loop, *_ = make_loop(chunks=True, sizes=sizes, async_scheduling=False)
    list(loop.generate([[1] * 6], SamplingParams(max_tokens=3, seed=1, ignore_eos=True)))
    stats = loop.stats
    assert stats.steps == 4
    assert (stats.scheduled_tokens, stats.scheduled_prompt_tokens) == (8, 6)
    assert (stats.tokens_per_step, stats.requests_per_step) == (2, 1)
    assert stats.prefill_share == 6 / 8
    assert (stats.prompt_chunks, stats.mixed_steps, stats.decode_windows) == (2, 0, 0)
    assert stats.launches_per_token == 1


def test_waiting_is_no_work_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 5.0])
    monkeypatch.setattr("neuron_streams.decode.stats.time.perf_counter", lambda: next(now))
    stats = DecodeStats()
    with stats.stepping(), stats.waiting():
        pass
    assert (stats.host_time, stats.wait_time) == (2.0, 3.0)
