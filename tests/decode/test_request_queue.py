from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_streams.decode import SamplingParams
from neuron_streams.decode.request import Request, RequestKey
from neuron_streams.decode.request_queue import RequestQueue
from tests.decode.harness import work_of


def request(arrival: int, priority: float = 0) -> Request:
    key = RequestKey(str(arrival), arrival)
    return Request(key, [1], SamplingParams(), 1, 0, priority=priority, arrival=arrival)  # type: ignore[arg-type]


def queue_of(requests: list[Request]) -> RequestQueue:
    queue = RequestQueue(lambda r: r.order)
    for each in requests:
        queue.add(each)
    return queue


operations = st.lists(st.tuples(st.sampled_from(["add", "discard", "first"]), st.integers(0, 9)))


@given(st.lists(st.integers(-2, 2), min_size=10, max_size=10), operations)
def test_it_is_a_sorted_list_that_any_request_can_leave(
    priorities: list[int], todo: list[tuple[str, int]]
) -> None:
    requests = [request(n, priority) for n, priority in enumerate(priorities)]
    queue, want = queue_of([]), set[Request]()
    for what, n in todo:
        if what == "add" and requests[n] not in want:
            queue.add(requests[n])
            want.add(requests[n])
        if what == "discard":
            queue.discard(requests[n])
            want.discard(requests[n])
        in_order = sorted(want, key=lambda r: r.order)
        if what == "first":
            assert queue.first is (in_order[0] if in_order else None)
        assert list(queue) == in_order
        assert len(queue) == len(want)
        assert (requests[n] in queue) == (requests[n] in want)


def test_a_request_that_comes_back_has_the_place_of_its_new_key() -> None:
    first, second = request(0), request(1)
    queue = queue_of([first, second])
    queue.discard(first)
    first.priority = 5
    queue.add(first)
    assert list(queue) == [second, first]
    assert queue.first is second


def test_what_has_left_is_not_kept() -> None:
    last = request(0)
    queue = queue_of([last])
    for arrival in range(1, 500):
        gone = request(arrival)
        queue.add(gone)
        queue.discard(gone)
        assert len(queue._heap) <= 3
    assert list(queue) == [last]


class Counted:
    """A key that counts comparisons."""

    count = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __lt__(self, other: Counted) -> bool:
        Counted.count += 1
        return self.value < other.value


@pytest.mark.parametrize("what", ["add", "discard", "take the first"])
def test_the_work_is_logarithmic(what: str) -> None:
    """10 000 requests in a scattered order, each added and taken out: a few comparisons each."""
    size = 10_000
    requests = [request(n) for n in range(size)]
    queue = RequestQueue(lambda r: Counted(r.arrival * 7919 % size))
    Counted.count = 0
    for each in requests:
        queue.add(each)
    if what == "discard":
        for each in requests:
            queue.discard(each)
    elif what == "take the first":
        while (least := queue.first) is not None:
            queue.discard(least)
    assert not len(queue) or what == "add"
    assert Counted.count < 3 * size * 14


def test_looking_at_the_first_sorts_nothing() -> None:
    def look(size: int) -> int:
        queue = queue_of([request(n) for n in range(size)])
        return work_of(lambda: queue.first)

    assert 0 < look(10) == look(1000)
