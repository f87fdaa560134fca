"""Ranges: their depth, and where they show."""

import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from neuron_streams import nvtx


@pytest.fixture
def heard():
    names = []
    listener = lambda name, begin, end: names.append((name, end >= begin))  # noqa: E731
    nvtx.listeners.append(listener)
    yield names
    nvtx.listeners.remove(listener)


def test_push_and_pop_count_the_depth(heard):
    assert [nvtx.range_push("a"), nvtx.range_push("b")] == [0, 1]
    assert [nvtx.range_pop(), nvtx.range_pop(), nvtx.range_pop()] == [1, 0, -1]
    assert heard == [("b", True), ("a", True)]


def test_each_thread_has_its_own_stack():
    nvtx.range_push("mine")
    found = []
    thread = threading.Thread(target=lambda: found.append(nvtx.range_pop()))
    thread.start()
    thread.join()
    assert found == [-1]
    assert nvtx.range_pop() == 0


def test_a_started_range_may_end_in_another_order_and_thread(heard):
    a, b = nvtx.range_start("a"), nvtx.range_start("b")
    thread = threading.Thread(target=nvtx.range_end, args=(a,))
    thread.start()
    thread.join()
    nvtx.range_end(b)
    nvtx.range_end(b)
    assert [name for name, _ in heard] == ["a", "b"]


def test_a_range_is_a_context_and_a_decorator(heard):
    with nvtx.range("step {}", 3):
        pass

    @nvtx.range("f")
    def f(x):
        return x + 1

    assert f(1) == 2
    with pytest.raises(ValueError, match="boom"), nvtx.range("raising"):
        raise ValueError("boom")
    nvtx.mark("here")
    assert [name for name, _ in heard] == ["step 3", "f", "raising", "here"]


def test_the_profiler_has_them_as_annotations(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        with nvtx.range("outer"):
            nvtx.range_push("inner")
            torch.ones(2).add_(1)
            nvtx.range_pop()
        nvtx.mark("here")
        crossing = nvtx.range_start("crossing")
        torch.ones(2).add_(1)
        nvtx.range_end(crossing)
    events = {event.name: event for event in prof.events()}
    assert {"outer", "inner", "here", "crossing"} <= events.keys()
    assert all(events[name].is_user_annotation for name in ("outer", "inner", "here"))
    assert events["inner"].cpu_parent is events["outer"]


def test_a_range_that_spans_the_profiler_is_no_fault():
    nvtx.range_push("before")
    with profile(activities=[ProfilerActivity.CPU]):
        nvtx.range_pop()
        nvtx.range_push("behind")
    assert nvtx.range_pop() == 0
