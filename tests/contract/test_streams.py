"""What torch.cuda does with streams and events, asserted of ours and, on a GPU, of torch.cuda."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from neuron_streams._context import context


def work(streams, device, value=1.0):
    """Something on the current stream whose result can be told: a copy of a device tensor."""
    source = torch.full((4,), value).to(device)
    target = torch.empty(4, device=device)
    target.copy_(source)
    return target


def test_a_stream_is_a_torch_stream(streams):
    s = streams.Stream()
    assert isinstance(s, torch.Stream)
    assert isinstance(streams.Event(), torch.Event)
    assert s.device_index == streams.current_device()
    assert weakref.ref(s)() is s


def test_equality_hash_and_order(streams):
    s, t = streams.Stream(), streams.Stream()
    assert s == s
    assert s != t
    again = streams.Stream(
        stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type
    )
    assert again == s
    assert hash(again) == hash(s)
    assert s in [1, "a", s]
    assert streams.default_stream() == streams.default_stream()


def test_comparisons_as_fixed_upstream(streams):
    if streams is torch.cuda:
        pytest.skip("torch has the bug up to 2.13")
    s = streams.Stream()
    assert (s != None) is True  # noqa: E711
    assert (s == None) is False  # noqa: E711
    with pytest.raises(TypeError):
        _ = s < streams.Stream()


def test_the_default_stream_has_id_0(streams):
    assert streams.default_stream().stream_id == 0
    seen = []
    thread = threading.Thread(target=lambda: seen.append(streams.current_stream()))
    thread.start()
    thread.join()
    assert seen == [streams.default_stream()], "what is current until another is set"


@pytest.mark.parametrize(("asked", "got"), [(10, 0), (1, 0), (0, 0), (-1, -1), (-3, -3), (-9, -3)])
def test_priorities_are_clamped(streams, asked, got):
    assert streams.Stream(priority=asked).priority == got
    assert streams.Stream.priority_range() == (0, -3)


def test_an_unrecorded_event_makes_nobody_wait(streams):
    s, e = streams.Stream(), streams.Event()
    assert e.query() is True
    assert e.synchronize() is None
    assert e.wait() is None
    assert s.wait_event(e) is None
    assert e.device is None
    assert "uninitialized" in repr(e)


def test_an_event_completes_with_the_work_before_it(streams, device, hold):
    s, e = streams.Stream(), streams.Event()
    release = hold(s)
    with streams.stream(s):
        work(streams, device)
        e.record()
    assert not e.query()
    assert not s.query()
    release()
    e.synchronize()
    assert e.query()


def test_an_event_recorded_after_a_wait_waits_too(streams, hold):
    s, t, e, f = streams.Stream(), streams.Stream(), streams.Event(), streams.Event()
    release = hold(s)
    e.record(s)
    t.wait_event(e)
    f.record(t)
    assert not f.query()
    assert not t.query()
    release()
    f.synchronize()
    assert e.query()


def test_a_wait_binds_to_the_record_at_the_call(streams, hold):
    s, t, u, e = *(streams.Stream() for _ in range(3)), streams.Event()
    first, second = hold(s), None
    e.record(s)
    t.wait_event(e)
    second = hold(u)
    if streams is torch.cuda:
        pytest.skip("a GPU cannot hold one stream longer than another for sure")
    e.record(u)
    first()
    t.synchronize()
    assert not e.query(), "query looks at the newest record"
    second()
    e.synchronize()


def test_a_record_after_the_wait_holds_nobody(streams, hold):
    s, t, e = streams.Stream(), streams.Stream(), streams.Event()
    t.wait_event(e)
    release = hold(s)
    e.record(s)
    assert t.query()
    release()


def test_wait_stream_covers_what_was_submitted_before(streams, device, hold):
    s, t = streams.Stream(), streams.Stream()
    release = hold(s)
    t.wait_stream(s)
    assert not t.query()
    release()
    t.synchronize()
    assert s.query()
    s.wait_stream(s)
    s.synchronize()


def test_streams_do_not_wait_for_the_default_stream_nor_it_for_them(streams, hold):
    s, e = streams.Stream(), streams.Event()
    release = hold(s)
    e.record(streams.default_stream())
    e.synchronize()
    assert not s.query()
    release()


def test_elapsed_time_checks_in_order(streams, hold):
    plain, timed, other = (streams.Event(enable_timing=x) for x in (False, True, True))
    with pytest.raises(ValueError, match="^Both events must be created with argument"):
        plain.elapsed_time(timed)
    with pytest.raises(ValueError, match="^Both events must be recorded before"):
        timed.elapsed_time(other)
    s = streams.Stream()
    timed.record(s)
    release = hold(s)
    other.record(s)
    with pytest.raises(RuntimeError, match="^Both events must be completed before"):
        timed.elapsed_time(other)
    release()
    other.synchronize()
    assert timed.elapsed_time(other) > 0
    assert other.elapsed_time(timed) == -timed.elapsed_time(other)


def test_contexts_nest_and_restore(streams):
    s, t = streams.Stream(), streams.Stream()
    before = streams.current_stream()
    with streams.stream(s) as entered:
        assert entered is None
        assert streams.current_stream() == s
        with streams.stream(t), streams.stream(None):
            assert streams.current_stream() == t
        assert streams.current_stream() == s
        streams.set_stream(t)
        assert streams.current_stream() == t
    assert streams.current_stream() == before
    with s as entered:
        assert entered is s
        with s:
            assert streams.current_stream() == s
        assert streams.current_stream() == s
    assert streams.current_stream() == before


def test_a_context_restores_after_an_exception_and_can_be_entered_again(streams):
    context = streams.stream(streams.Stream())
    before = streams.current_stream()
    for _ in range(2):
        with pytest.raises(KeyError), context:
            raise KeyError
        assert streams.current_stream() == before


def test_a_context_object_is_no_decorator(streams):
    with pytest.raises(TypeError, match="not callable"):
        streams.stream(streams.Stream())(lambda: None)


def test_threads_have_their_own_current_stream(streams):
    s, seen = streams.Stream(), []
    with streams.stream(s):
        thread = threading.Thread(target=lambda: seen.append(streams.current_stream()))
        thread.start()
        thread.join()
        assert streams.current_stream() == s
    assert seen == [streams.default_stream()]


def test_threads_share_a_stream_object(streams):
    s, barrier, wrong = streams.Stream(), threading.Barrier(2, timeout=10), []

    def enter():
        barrier.wait()
        for _ in range(200):
            with s:
                if streams.current_stream() != s:
                    wrong.append("inside")
            if streams.current_stream() != streams.default_stream():
                wrong.append("outside")

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_share_a_context_object(streams):
    if streams is torch.cuda:
        pytest.skip("torch keeps what it restores on the object")
    s, barrier, wrong = streams.Stream(), threading.Barrier(3, timeout=10), []
    context = streams.stream(s)

    def enter():
        own = streams.Stream()
        streams.set_stream(own)
        barrier.wait()
        for _ in range(200):
            with context, context:
                if streams.current_stream() != s:
                    wrong.append("inside")
            if streams.current_stream() != own:
                wrong.append("outside")

    threads = [threading.Thread(target=enter) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_device_contexts_nest_and_restore(streams):
    if streams.device_count() < 2:
        pytest.skip("one device")
    one = streams.device(1)
    with one:
        assert streams.current_device() == 1
        with streams.device(0), streams.stream(streams.Stream(device=1)):
            assert streams.current_device() == 1
        assert streams.current_device() == 1
    with pytest.raises(KeyError), one:
        raise KeyError
    assert streams.current_device() == 0
    s = streams.Stream(device=1)
    with streams.device(0):
        streams.set_stream(s)
        assert streams.current_device() == 1
    assert streams.current_device() == 0
    assert streams.current_stream(1) == s, "what is set inside a device's context stays set"


def test_a_stream_of_another_device_switches_the_device(streams):
    if streams.device_count() < 2:
        pytest.skip("one device")
    s = streams.Stream(device=1)
    with streams.device(0):
        here, before = streams.current_stream(0), streams.current_stream(1)
        with streams.stream(s):
            assert streams.current_device() == 1
            assert streams.current_stream() == s
            assert streams.current_stream(0) == here
        assert streams.current_device() == 0
        assert streams.current_stream(1) == before
    assert streams.default_stream(0) != streams.default_stream(1)


def test_waits_cross_devices_and_records_do_not(streams, hold):
    if streams.device_count() < 2:
        pytest.skip("one device")
    s, t, e = streams.Stream(device=0), streams.Stream(device=1), streams.Event()
    release = hold(s)
    e.record(s)
    t.wait_event(e)
    assert not t.query()
    with pytest.raises(RuntimeError, match="^Event device 0 does not match recording stream's"):
        e.record(t)
    release()
    t.synchronize()


def test_wrong_devices_are_refused(streams):
    with pytest.raises(ValueError, match=r"^Expected a \w+ device, but got: cpu"):
        streams.current_stream("cpu")
    with pytest.raises(ValueError, match="cpu"):
        streams.synchronize("cpu")
    before = streams.current_device()
    streams.set_device(-1)
    with streams.device(-1), streams.device(None):
        assert streams.current_device() == before


def test_copies_go_where_the_current_stream_is(streams, device, hold):
    s = streams.Stream()
    source = torch.arange(4.0).to(device)
    streams.synchronize()
    release = hold(s)
    with streams.stream(s):
        target = torch.zeros(4).to(device)
        target.copy_(source)
        out = target.to("cpu", non_blocking=True)
        done = s.record_event()
    assert not done.query()
    release()
    done.synchronize()
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_blocking_read_waits_for_its_own_stream_only(streams, device, hold):
    s, x = streams.Stream(), torch.arange(3).to(device)
    release = hold(s)
    assert x.cpu().tolist() == [0, 1, 2]
    assert not s.query()
    release()


BUSY = 20_000_000  # what `_sleep` keeps a stream busy with, so that a copy which waits shows


def test_a_copy_into_pageable_memory_is_there_when_it_returns(streams, device):
    x, there = torch.ones(4).to(device), torch.zeros(4)
    y = torch.zeros(4).to(device)
    streams._sleep(BUSY)
    y.copy_(x)
    there.copy_(y, non_blocking=True)
    assert there.tolist() == [1.0] * 4


def test_a_blocking_copy_into_pinned_memory_keeps_its_place(streams, device):
    x, y = torch.full((4,), 7.0).to(device), torch.zeros(4).to(device)
    staging = torch.ones(4).pin_memory()
    streams.synchronize()
    streams._sleep(BUSY)
    y.copy_(staging, non_blocking=True)
    staging.copy_(x)
    assert staging.tolist() == [7.0] * 4
    assert y.tolist() == [1.0] * 4


def test_a_copy_to_another_device_keeps_its_place_on_both(streams, device):
    if streams.device_count() < 2:
        pytest.skip("one device")
    x, zeros = torch.ones(4).to(f"{device}:0"), torch.zeros(4).pin_memory()
    streams.synchronize()
    with streams.device(1):
        streams._sleep(BUSY)
    y = x.to(f"{device}:1", non_blocking=True)
    x.copy_(zeros, non_blocking=True)
    assert y.tolist() == [1.0] * 4
    assert x.tolist() == [0.0] * 4


def test_host_memory_may_change_after_a_copy_from_it(streams, device, hold):
    s, x = streams.Stream(), torch.zeros(3).to(device)
    streams.synchronize()
    if streams is torch.cuda:
        pytest.skip("a pageable copy waits for the stream, which is held")
    source = torch.ones(3)
    release = hold(s)
    with streams.stream(s):
        y = torch.empty(3, device=device)
        y.copy_(x)
        y.copy_(source, non_blocking=True)
        source.zero_()
        release()
        assert y.cpu().tolist() == [1.0, 1.0, 1.0]


def test_memory_outlives_its_tensor_while_a_stream_reads_it(streams, device, hold):
    s, u = streams.Stream(), streams.Stream()
    with streams.stream(s):
        x = work(streams, device, 3.0)
    u.wait_stream(s)
    release = hold(u)
    with streams.stream(u):
        out = x.to("cpu", non_blocking=True)
        x.record_stream(u)
        done = u.record_event()
    del x
    gc.collect()
    with streams.stream(s):
        for _ in range(10):
            work(streams, device, 7.0)
    release()
    done.synchronize()
    assert out.tolist() == [3.0] * 4


def test_synchronize_lets_the_thread_run_that_it_waits_for(streams, hold):
    if streams is not torch.cuda and context().runtime.name == "manual":
        pytest.skip("a manual wait finds the deadlock instead")
    s = streams.Stream()
    release, waiting = hold(s), threading.Event()

    def open_when_waiting():
        assert waiting.wait(10)
        release()

    thread = threading.Thread(target=open_when_waiting)
    thread.start()
    waiting.set()
    s.synchronize()
    thread.join(10)
    assert s.query()


def test_deleting_a_pending_event_or_stream_returns(streams, hold):
    s, e = streams.Stream(), streams.Event()
    release = hold(s)
    e.record(s)
    del e, s
    gc.collect()
    release()
    streams.synchronize()


def test_synchronize_covers_the_whole_device(streams, device, hold):
    s, t = streams.Stream(), streams.Stream()
    release = hold(s)
    t.wait_stream(s)
    release()
    streams.synchronize()
    assert s.query()
    assert t.query()


def test_record_event_makes_and_returns_an_event(streams):
    s, e = streams.Stream(), streams.Event()
    assert s.record_event(e) is e
    assert isinstance(s.record_event(), streams.Event)
    assert e.device.index == s.device_index
