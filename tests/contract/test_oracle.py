"""Each row of what was measured of torch.cuda on a GPU, asserted of ours and of torch.cuda."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import neuron_streams
from neuron_streams._context import context
from neuron_streams.errors import AbsentError, UnsupportedError


def is_ours(streams):
    return streams is neuron_streams


def handle(stream):
    return stream.native_handle if hasattr(stream, "native_handle") else stream.cuda_stream


def test_ids_and_handles(streams):
    default, side = streams.default_stream(), streams.Stream()
    assert (default.stream_id, handle(default)) == (0, 0)
    assert side.stream_id & 1 == 1
    assert handle(side) != 0
    assert side.stream_id != handle(side), "an id is no handle"


def test_streams_are_never_aliased(streams):
    made = [streams.Stream() for _ in range(64)]
    distinct = len({handle(s) for s in made})
    assert distinct == (64 if is_ours(streams) else 32)


def test_an_unrecorded_event(streams):
    e, s = streams.Event(), streams.Stream()
    assert (e.query(), e.synchronize(), e.wait(s), e.device) == (True, None, None, None)
    assert (
        repr(e) == f"<{'neuron_streams' if is_ours(streams) else 'torch.cuda'}.Event uninitialized>"
    )
    if is_ours(streams):
        assert e.event_id == 0
        e.record()
        assert e.event_id != 0


def test_interprocess_events_are_refused(streams):
    if is_ours(streams):
        with pytest.raises(UnsupportedError, match=r"^Event\(interprocess=True\)"):
            streams.Event(interprocess=True)
        with pytest.raises(AbsentError, match="ipc_handle: absent"):
            streams.Event().ipc_handle()
    else:
        with pytest.raises(RuntimeError):
            streams.Event(enable_timing=True, interprocess=True).record()


def test_external_streams(streams):
    s = streams.Stream()
    external = streams.ExternalStream(handle(s))
    assert external != s
    assert hash(external) == hash(s)
    assert handle(external) == handle(s)
    assert streams.get_stream_from_external(0).stream_id == 0
    if is_ours(streams):
        assert streams.ExternalStream(0) == streams.default_stream()


def test_cuda_streams_and_torch_streams_are_not_equal(streams):
    s = streams.Stream()
    generic = torch.Stream(
        stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type
    )
    assert (s == generic, generic == s, hash(s) == hash(generic)) == (False, False, False)
    assert s in [1, "a", s]


def test_generic_streams_are_accepted(streams, hold):
    s, t, e = streams.Stream(), streams.Stream(), streams.Event()
    generic = torch.Stream(
        stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type
    )
    release = hold(s)
    e.record(generic)
    t.wait_stream(generic)
    assert not e.query()
    assert not t.query()
    with streams.stream(generic):
        assert streams.current_stream().stream_id == s.stream_id
    release()
    t.synchronize()


def test_foreign_arguments_get_a_clear_error(streams):
    if not is_ours(streams):
        pytest.skip("ours is clearer")
    s, e = streams.Stream(), streams.Event()
    cpu = torch.Stream("cpu")
    for call in (s.wait_stream, e.record, e.wait, streams.stream, streams.set_stream):
        for foreign in (cpu, 42):
            with pytest.raises(TypeError, match="^a Neuron stream is expected, but got"):
                call(foreign)
    for call in (s.wait_event, s.record_event, e.elapsed_time):
        for foreign in (torch.Event("cpu"), 42):
            with pytest.raises(TypeError, match="^a Neuron event is expected, but got"):
                call(foreign)


def test_none_changes_nothing(streams):
    before = streams.current_stream()
    assert before.wait_stream(before) is None
    assert streams.set_stream(None) is None
    with streams.stream(None) as nothing:
        assert nothing is None
        assert streams.current_stream() == before


def test_a_copy_from_pinned_memory_returns_before_the_stream_gets_there(streams, device, hold):
    s, source = streams.Stream(), torch.zeros(4).pin_memory()
    assert source.is_pinned()
    assert source[1:].is_pinned()
    assert not torch.zeros(4).is_pinned()
    release = hold(s)
    with streams.stream(s):
        copied = source.to(device, non_blocking=True)
    assert not s.query()
    source[0] = 1.0
    release()
    s.synchronize()
    if is_ours(streams):
        assert copied.cpu().tolist() == [1.0, 0.0, 0.0, 0.0], "read when the stream got there"


def test_a_copy_to_the_host_that_does_not_wait_is_pinned(streams, device, hold):
    s, x = streams.Stream(), torch.ones(3).to(device)
    streams.synchronize()
    release = hold(s)
    with streams.stream(s):
        out = x.to("cpu", non_blocking=True)
    assert not s.query()
    assert out.is_pinned()
    assert not x.cpu().is_pinned()
    release()
    s.synchronize()
    assert out.tolist() == [1.0] * 3


def test_other_threads_run_during_a_synchronize(streams, hold):
    if is_ours(streams) and context().runtime.name == "manual":
        pytest.skip("a manual wait finds the deadlock instead")
    s, count, stop = streams.Stream(), 0, threading.Event()
    release = hold(s)

    def run():
        nonlocal count
        while count < 10_000:
            count += 1
        release()
        stop.set()

    thread = threading.Thread(target=run)
    thread.start()
    s.synchronize()
    assert stop.wait(10)
    thread.join()


def test_a_blocking_wait_sleeps(streams, hold):
    if not is_ours(streams) or context().runtime.name == "manual":
        pytest.skip("timed by the host clock")
    s, e = streams.Stream(), streams.Event(blocking=True)
    release = hold(s)
    e.record(s)
    timer = threading.Timer(1.0, release)
    timer.start()
    before = time.process_time()
    e.synchronize()
    spent = time.process_time() - before
    timer.join()
    assert spent < 0.05, "a wait of a second may not burn it"


def test_elapsed_time_is_taken_at_completion_and_may_be_negative(streams, hold):
    s = streams.Stream()
    start, end = streams.Event(enable_timing=True), streams.Event(enable_timing=True)
    start.record(s)
    release = hold(s)
    end.record(s)
    recorded = time.perf_counter()
    while time.perf_counter() - recorded < 2e-3:
        pass
    release()
    end.synchronize()
    assert start.elapsed_time(end) >= 1.9
    assert end.elapsed_time(start) < 0


def test_elapsed_time_refuses_two_devices(streams):
    if streams.device_count() < 2:
        pytest.skip("one device")
    events = [streams.Event(enable_timing=True) for _ in range(2)]
    for index, event in enumerate(events):
        event.record(streams.default_stream(index))
        event.synchronize()
    with pytest.raises(RuntimeError):
        events[0].elapsed_time(events[1])


def test_sleep_keeps_the_current_stream_busy(streams):
    s = streams.Stream()
    start, end = streams.Event(enable_timing=True), streams.Event(enable_timing=True)
    with streams.stream(s):
        start.record()
        streams._sleep(2_000_000)
        end.record()
    s.synchronize()
    assert start.elapsed_time(end) > 0.5


def test_nothing_is_ever_captured(streams):
    assert streams.is_current_stream_capturing() is False
    assert streams.Stream().is_capturing() is False
