from __future__ import annotations

import pytest

from neuron_streams.decode.device_times import DeviceTimes
from tests.decode.harness import make_loop


class Event:
    """Completed at a moment, in ms; None while it has not."""

    def __init__(self, at: float | None) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        return end.at - self.at


def times(*steps: tuple[float, float | None] | None, size: int = 64) -> DeviceTimes:
    made = DeviceTimes(size)
    for step in steps:
        if step is None:
            made.rest()
        else:
            made.add(Event(step[0]), Event(step[1]), 0.0)
    return made


@pytest.mark.parametrize(
    ("steps", "share"),
    [
        ((), 0.0),
        (((0, 3),), 0.0),
        (((0, 3), (4, 6), (6, 8)), 1 / 8),
        (((0, 3), (4, None)), 0.0),
        (((0, 3), None, (40, 41)), 0.0),
        (((0, 3), None, None, (40, 42), (44, 45)), 2 / 8),
    ],
)
def test_idle_is_what_lies_between_steps_that_have_ended(steps: tuple, share: float) -> None:
    assert times(*steps).idle_share == pytest.approx(share)


def test_the_hosts_time_in_a_call_is_idle_where_the_device_waited_for_it() -> None:
    made = times((0, 3))
    made.add(Event(4), Event(10), 0.002)
    assert made.idle_share == pytest.approx(3 / 10)
    made.add(Event(10), Event(11), 0.002)
    assert made.idle_share == pytest.approx(4 / 11), "no more than the step lasted"


def test_only_the_newest_steps_count() -> None:
    assert times((0, 1), (9, 10), (10, 11), size=2).idle_share == 0


def test_a_loop_counts_its_device_and_not_the_time_without_requests() -> None:
    loop, _, streams = make_loop()
    list(loop.generate([[1, 2]]))
    streams.run()
    assert 0 <= loop.stats.device_idle_share < 1
    steps = loop.stats.steps
    assert len(loop.stats.device_times._steps) == steps
    list(loop.generate([[1, 2]]))
    assert list(loop.stats.device_times._steps).index(None) == steps
    assert list(loop.stats.device_times._steps).count(None) == 1
