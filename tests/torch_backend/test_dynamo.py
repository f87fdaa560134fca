"""torch.compile of functions that use streams: what is written happens, every time."""

from __future__ import annotations

import warnings

import pytest
import torch

import neuron_streams
from neuron_streams._torch import dynamo


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    neuron_streams.init()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def record_here(log):
    """An event recorded on whatever stream is current; Dynamo never looks inside."""
    log.append(neuron_streams.current_stream())


def test_stream_contexts_and_events_run_each_time():
    s, t, e, log = neuron_streams.Stream(), neuron_streams.Stream(), neuron_streams.Event(), []
    look = torch._dynamo.disable(record_here)

    @torch.compile(backend="eager")
    def step(x):
        with neuron_streams.stream(s):
            look(log)
            e.record()
            y = x + 1
        t.wait_event(e)
        t.wait_stream(s)
        return y * 2

    for _ in range(3):
        assert step(torch.ones(2)).tolist() == [4.0, 4.0]
        assert e._ticket.lane == s._state.lane, "recorded on the current stream, inside"
        assert neuron_streams.current_stream() == neuron_streams.default_stream()
        log.append(None)
    assert log == [s, None] * 3


def test_streams_made_inside_are_new_each_time():
    made = []
    keep = torch._dynamo.disable(made.append)

    @torch.compile(backend="eager")
    def step(x):
        s = neuron_streams.Stream()
        with neuron_streams.stream(s):
            y = x + 1
            done = neuron_streams.Event()
            done.record()
        done.synchronize()
        keep(s)
        return y

    for _ in range(3):
        step(torch.ones(2))
    assert len(set(made)) == 3


def test_the_form_that_dynamo_drops_runs_and_is_warned_about_once(monkeypatch):
    monkeypatch.setattr(dynamo, "_warned", False)
    s, e = neuron_streams.Stream(), neuron_streams.Event()

    @torch.compile(backend="eager")
    def step(x):
        with s:
            e.record()
            return x + 1

    with pytest.warns(UserWarning, match="^torch.compile met `with s:`") as caught:
        step(torch.ones(2))
    assert len(caught) == 1
    assert e._ticket.lane == s._state.lane
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch._dynamo.reset()
        step(torch.ones(2))
    assert neuron_streams.current_stream() == neuron_streams.default_stream()


def test_nothing_is_mended_twice():
    dynamo.prepare()
    assert dynamo._hooks == {}
    rules = torch._dynamo.trace_rules.SKIP_DIRS
    assert len([d for d in rules if d.rstrip("/").endswith("neuron_streams")]) == 1
