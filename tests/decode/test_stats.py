from __future__ import annotations

import pytest

from neuron_streams.decode import DecodeStats


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
    assert DecodeStats().async_share == DecodeStats().decode_async_share == 0.0


def test_waiting_is_no_work_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 5.0])
    monkeypatch.setattr("neuron_streams.decode.stats.time.perf_counter", lambda: next(now))
    stats = DecodeStats()
    with stats.stepping(), stats.waiting():
        pass
    assert (stats.host_time, stats.wait_time) == (2.0, 3.0)
