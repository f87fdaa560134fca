"""A stream's lane: remembered waits, failures and which calls raise them, what is traced."""

from __future__ import annotations

import sys

import pytest
import torch

import neuron_streams
from neuron_streams._context import core
from neuron_streams.testing import Gate, ManualRuntime, use_runtime


class Fails:
    name = "fails"

    def __init__(self, error):
        self.error = error

    def run(self, inputs):
        raise self.error


def fail(stream, error):
    """Submit an executable that fails; returns its output."""
    step = core().Loaded("step", [], [(torch.float32, (2,), (1,))], [], 0, Fails(error))
    with neuron_streams.stream(stream):
        (output,) = step.call([])
    return output


@pytest.fixture
def runtime():
    with use_runtime(ManualRuntime(2)) as made:
        yield made


@pytest.fixture
def stream(runtime):
    return neuron_streams.Stream()


def test_a_wait_costs_no_command_until_the_stream_is_asked(runtime, stream):
    other = neuron_streams.Stream()
    with Gate(other):
        stream.wait_stream(other)
        stream.wait_stream(other)
        assert runtime.submitted(stream._state.lane) == 0
        assert not stream.query()
        assert runtime.submitted(stream._state.lane) == 1
    assert stream.query()
    stream.wait_stream(other)
    assert stream.query()
    assert runtime.submitted(stream._state.lane) == 1, "what has completed is not waited for"


def test_a_write_follows_an_unfinished_write_of_another_stream(runtime, stream):
    other = neuron_streams.Stream()
    with Gate(other):
        with neuron_streams.stream(other):
            x = torch.zeros(4, device="neuron")
        with neuron_streams.stream(stream):
            x[:2].copy_(torch.full((2,), 5.0).pin_memory(), non_blocking=True)
            x[2:].fill_(7.0)
        assert not stream.query()
    assert x.tolist() == [5.0, 5.0, 7.0, 7.0]


MOST_WAITS = 64  # csrc/stream.cpp


def test_waits_without_commands_do_not_pile_up(runtime, stream):
    others = [neuron_streams.Stream() for _ in range(3 * MOST_WAITS)]
    gates = [Gate(other) for other in others]
    for other in others:
        stream.wait_stream(other)
    assert runtime.submitted(stream._state.lane) == 3 * MOST_WAITS // (MOST_WAITS + 1)
    for gate in gates[:-1]:
        gate.open()
    assert not stream.query()
    gates[-1].open()
    stream.synchronize()


def test_each_failure_is_raised_once_by_stream_event_and_device(runtime, stream):
    before, after = neuron_streams.Event(), neuron_streams.Event()
    before.record(stream)
    fail(stream, KeyError("first"))
    after.record(stream)
    before.synchronize()
    for synchronize in (after.synchronize, stream.synchronize, neuron_streams.synchronize):
        with pytest.raises(KeyError, match="first"):
            synchronize()
        synchronize()
    later = stream.record_event()
    later.synchronize()
    after.synchronize()


def test_a_second_failure_is_named_by_the_first(runtime, stream, caplog):
    fail(stream, KeyError("first"))
    fail(stream, ValueError("second"))
    with pytest.raises(KeyError, match="first") as caught:
        stream.synchronize()
    assert "second" in caplog.text
    if sys.version_info >= (3, 11):
        assert any("ValueError('second')" in note for note in caught.value.__notes__)
    stream.synchronize()


def test_a_failure_outlives_its_stream(runtime):
    stream = neuron_streams.Stream()
    fail(stream, KeyError("orphan"))
    lane = stream._state.lane
    del stream
    runtime.run()
    with pytest.raises(KeyError, match="orphan"):
        neuron_streams.synchronize()
    neuron_streams.Stream()  # lets go of streams without an object
    assert lane in runtime.lanes(0), "a lane with failures is kept until they are asked for again"
    neuron_streams.synchronize()
    assert lane not in runtime.lanes(0)


def test_reading_raises_the_first_cause_every_time_with_its_traceback(runtime, stream):
    tensor = fail(stream, KeyError("cause"))
    for _ in range(2):
        with pytest.raises(KeyError, match="cause") as caught:
            tensor.tolist()
        frames = [entry.name for entry in caught.traceback]
        assert "run" in frames, "the traceback of the command itself"
    with neuron_streams.stream(stream):
        tensor.copy_(torch.ones(2))
    assert tensor.tolist() == [1.0, 1.0], "a full overwrite cures"


def test_the_place_of_submission_is_said_when_the_environment_asks(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_TRACE_SUBMISSIONS", "1")
    with use_runtime(ManualRuntime(1)):
        stream = neuron_streams.Stream()
        fail(stream, KeyError("where"))
        with pytest.raises(KeyError) as caught:
            stream.synchronize()
    said = "\n".join(getattr(caught.value, "__notes__", ())) + str(caught.value)
    assert "'step submitted at " in said
    assert "test_stream.py:" in said
    assert "in fail" in said


def test_what_failed_is_said_without_it(runtime, stream):
    fail(stream, KeyError("what"))
    with pytest.raises(KeyError) as caught:
        stream.synchronize()
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [f"in 'step', command 1 of lane {stream._state.lane}"]


def test_a_blocking_launch_raises_at_the_launch(monkeypatch):
    monkeypatch.setenv("NEURON_LAUNCH_BLOCKING", "1")
    with use_runtime(ManualRuntime(1)):
        stream = neuron_streams.Stream()
        with pytest.raises(KeyError, match="here"):
            fail(stream, KeyError("here"))
        stream.synchronize()


def test_a_lane_of_another_library_is_asked_each_time(runtime):
    lane = runtime.open_lane(0)
    stream = neuron_streams.ExternalStream(2 * lane)
    assert stream.query()
    held = runtime.open_lane(0, host=True)
    gate = runtime.submit(held, core().Pledge())
    runtime.submit(lane, core().Marker(), after=[gate])
    event = stream.record_event()
    assert not stream.query()
    assert not event.query()
    runtime.complete(gate)
    event.synchronize()
    del stream, event
    assert lane in runtime.lanes(0), "its owner closes it"


def test_backward_runs_on_the_streams_and_devices_of_the_forward_pass(runtime):
    streams = [neuron_streams.default_stream(i) for i in range(2)]
    streams += [neuron_streams.Stream(device=i % 2) for i in range(4)]
    leaves = [torch.ones(2, device=s.device, requires_grad=True) for s in streams[2:]]
    for one, stream, device in zip(leaves, streams[2:], (0, 1, 0, 1), strict=True):
        with stream:
            assert stream.device.index == device
            loss = (one * 2).sum()
        runtime.run()
        before = [runtime.submitted(s._state.lane) for s in streams]
        loss.backward()  # from the default stream of the default device
        after = [runtime.submitted(s._state.lane) for s in streams]
        busy = {i for i in range(len(streams)) if after[i] > before[i] and i >= 2}
        assert busy == {streams.index(stream)}
        assert neuron_streams.current_device() == 0
        assert neuron_streams.current_stream() == streams[0]
        assert one.grad.device == stream.device
        assert one.grad.tolist() == [2.0, 2.0]


def test_what_follows_a_backward_on_the_ambient_stream_waits_for_it(runtime):
    side = neuron_streams.Stream()
    x = torch.ones(2, device="neuron", requires_grad=True)
    side.wait_stream(neuron_streams.current_stream())
    with side:
        loss = (x * 2).sum()
    with Gate(side):
        loss.backward()
        done = neuron_streams.current_stream().record_event()
        assert not done.query()
    done.synchronize()
    assert x.grad.tolist() == [2.0, 2.0]
