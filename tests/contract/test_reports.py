"""Reports against torch.cuda's streams, each as a small case that must be right here.

The number is that of the issue or pull request of pytorch/pytorch, unless said otherwise; what was
reported is in docs/reports.md, "Streams and events".
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import neuron_streams
from neuron_streams._context import context
from neuron_streams.errors import AbsentError, UnsupportedError
from tests.contract.test_streams import work


def is_ours(streams):
    return streams is neuron_streams


def is_manual(streams):
    return is_ours(streams) and context().runtime.name == "manual"


def two_devices(streams):
    if streams.device_count() < 2:
        pytest.skip("one device")


def test_188033_comparisons_with_foreign_objects(streams):
    s = streams.Stream()
    assert s != 42
    assert s in [1, "a", s]
    if is_ours(streams):
        assert (s != None) is True  # noqa: E711
        for compare in ("__lt__", "__le__", "__gt__", "__ge__"):
            assert getattr(s, compare)(streams.Stream()) is NotImplemented


def test_176560_a_stream_is_entered_again(streams):
    s, t, before = streams.Stream(), streams.Stream(), streams.current_stream()
    with s, s:
        assert streams.current_stream() == s
    with s:
        with t:
            with s:
                assert streams.current_stream() == s
            assert streams.current_stream() == t
        assert streams.current_stream() == s
    assert streams.current_stream() == before


def test_leaving_a_stream_that_was_not_entered_is_an_error(streams):
    if not is_ours(streams):
        pytest.skip("torch crashes")
    with pytest.raises(RuntimeError, match=r"^Stream\.__exit__: this thread has not entered"):
        streams.Stream().__exit__(None, None, None)


def test_16019_a_stream_of_another_device_switches_the_device(streams):
    two_devices(streams)
    s = streams.Stream(device=1)
    with streams.device(0), streams.stream(s):
        assert streams.current_device() == 1
        assert streams.current_stream() == s
        assert s.record_event().device.index == 1


def test_17439_leaving_restores_both_devices(streams):
    two_devices(streams)
    a, b, c = streams.Stream(0), streams.Stream(1), streams.Stream(1)
    before = streams.current_stream(0), streams.current_stream(1)
    with streams.stream(b), streams.stream(a):
        with streams.stream(c):
            pass
        assert streams.current_stream(1) == b
        assert streams.current_stream(0) == a
        assert streams.current_device() == 0
    assert (streams.current_stream(0), streams.current_stream(1)) == before


def test_15682_a_stream_answers_for_itself_from_another_device(streams, hold):
    two_devices(streams)
    s = streams.default_stream(1)
    release = hold(s)
    with streams.device(0):
        assert not s.query()
        assert streams.default_stream(0).query()
        release()
        s.synchronize()
        assert s.query()


def test_16156_lookups_per_device(streams):
    two_devices(streams)
    for name in (1, "neuron:1" if is_ours(streams) else "cuda:1"):
        assert streams.default_stream(name).device_index == 1
        assert streams.current_stream(name).device_index == 1
    assert streams.current_device() == 0


def test_44898_making_a_stream_touches_no_current_device(streams):
    two_devices(streams)
    before = streams.current_stream()
    streams.Stream(device=1)
    streams.Event()
    assert streams.current_device() == 0
    assert streams.current_stream() == before


def test_151221_timing_is_off_by_default(streams):
    with pytest.raises(ValueError, match="^Both events must be created with argument"):
        streams.Event().elapsed_time(streams.Event())


def test_173792_an_event_is_recorded_on_a_generic_stream(streams, hold):
    s, e = streams.Stream(), streams.Event()
    generic = torch.Stream(
        stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type
    )
    release = hold(s)
    e.record(generic)
    assert not e.query()
    release()
    e.synchronize()


def test_65822_an_external_stream_becomes_current(streams):
    s = streams.Stream()
    number = s.native_handle if is_ours(streams) else s.cuda_stream
    with streams.stream(streams.ExternalStream(number)):
        now = streams.current_stream()
        assert (now.native_handle if is_ours(streams) else now.cuda_stream) == number


def test_143849_priorities_out_of_range(streams):
    least, greatest = streams.Stream.priority_range()
    assert streams.Stream(priority=10).priority == least
    assert streams.Stream(priority=-100).priority == greatest


def test_188252_consecutive_streams_differ(streams):
    made = [streams.Stream() for _ in range(8)]
    assert len(set(made)) == 8


def test_16182_a_thread_that_the_event_needs_runs_during_synchronize(streams, hold):
    if is_manual(streams):
        pytest.skip("a manual wait finds the deadlock instead")
    s, e, ready = streams.Stream(), streams.Event(), threading.Event()
    release = hold(s)
    e.record(s)

    def needed():
        ready.wait(10)
        release()

    thread = threading.Thread(target=needed)
    thread.start()
    ready.set()
    e.synchronize()
    thread.join(10)
    assert e.query()


def test_119393_dropping_a_pending_event_returns(streams, hold):
    s, e = streams.Stream(), streams.Event(enable_timing=True)
    release = hold(s)
    e.record(s)
    alive = weakref.ref(e)
    del e
    gc.collect()
    assert alive() is None
    assert not s.query()
    release()
    s.synchronize()


def test_97833_user_code_in_a_destructor_may_submit(streams, device):
    class Submitter:
        def __del__(self):
            streams.Event().record()
            work(streams, device)

    for _ in range(20):
        Submitter()
        work(streams, device)
    streams.synchronize()


def test_24963_waiting_for_one_device_stalls_no_other(streams, device, hold):
    two_devices(streams)
    if is_manual(streams):
        pytest.skip("a manual wait finds the deadlock instead")
    release = hold(streams.default_stream(0))
    waiter = threading.Thread(target=streams.synchronize, args=(0,))
    waiter.start()
    with streams.device(1):
        work(streams, f"{device}:1")
        streams.synchronize(1)
    assert waiter.is_alive()
    release()
    waiter.join(10)


def test_60541_blocking_never_makes_a_wait_block_the_host(streams, hold):
    s, t, e = streams.Stream(), streams.Stream(), streams.Event(blocking=True)
    release = hold(s)
    e.record(s)
    e.wait(t)
    t.wait_event(e)
    assert not t.query()
    release()
    t.synchronize()


def test_sglang_14214_a_wait_before_the_record_waits_for_nobody(streams, hold):
    s, t, e = streams.Stream(), streams.Stream(), streams.Event()
    s.wait_event(e)
    release = hold(t)
    e.record(t)
    assert s.query()
    release()


def test_24078_memory_is_protected_for_what_is_queued(streams, device, hold):
    s, u = streams.Stream(), streams.Stream()
    with streams.stream(s):
        x = work(streams, device, 5.0)
    s.synchronize()
    release = hold(u)
    with streams.stream(u):
        out = x.to("cpu", non_blocking=True)
    x.record_stream(u)
    del x
    with streams.stream(s):
        for _ in range(4):
            work(streams, device, 9.0)
    s.synchronize()
    release()
    u.synchronize()
    assert out.tolist() == [5.0] * 4


def test_19625_20411_non_blocking_copies_return_early(streams, device, hold):
    s, source = streams.Stream(), torch.ones(4).pin_memory()
    release = hold(s)
    with streams.stream(s):
        there = source.to(device, non_blocking=True)
        back = there.to("cpu", non_blocking=True)
        done = s.record_event()
    assert not done.query()
    release()
    done.synchronize()
    assert back.tolist() == [1.0] * 4


def test_39694_the_result_of_an_early_copy_is_pinned(streams, device):
    x = torch.ones(4).to(device)
    assert x.to("cpu", non_blocking=True).is_pinned()
    streams.synchronize()


def test_86264_a_pinned_source_is_read_when_the_stream_gets_there(streams, device, hold):
    s, pinned = streams.Stream(), torch.zeros(4).pin_memory()
    with streams.stream(s):
        b = torch.empty(4, device=device)
    release = hold(s)
    with streams.stream(s):
        b.copy_(pinned, non_blocking=True)
        pinned[-1] = -1
        release()
        result = b.cpu().tolist()
    assert result[:3] == [0.0] * 3
    assert result[3] in (0.0, -1.0)
    if is_ours(streams):
        assert result[3] == -1.0


def test_130785_a_pinned_temporary_lives_until_it_was_read(streams, device, hold):
    s = streams.Stream()
    release = hold(s)
    with streams.stream(s):
        there = torch.full((4,), 3.0).pin_memory().to(device, non_blocking=True)
    gc.collect()
    torch.full((4,), 8.0).pin_memory()
    release()
    s.synchronize()
    assert there.cpu().tolist() == [3.0] * 4


def test_183501_one_pending_event_holds_no_other_memory(streams, device, hold):
    if not is_ours(streams):
        pytest.skip("needs counts of pinned memory")
    s = streams.Stream()
    before = streams.host_memory_stats()["allocation.current"]
    release = hold(s)
    with streams.stream(s):
        torch.ones(4).pin_memory().to(device, non_blocking=True)
    for _ in range(3):
        torch.ones(4).pin_memory().to(device, non_blocking=True)
    streams.current_stream().synchronize()
    gc.collect()
    assert streams.host_memory_stats()["allocation.current"] == before + 1
    release()
    s.synchronize()


def test_114588_events_do_not_cross_processes(streams):
    if not is_ours(streams):
        pytest.skip("torch.cuda's do")
    assert not hasattr(streams.Event, "ipc_handle")
    with pytest.raises(AbsentError, match=r"Synchronize the event, then send the data"):
        streams.Event.from_ipc_handle("neuron:0", b"")


def test_155372_external_events_are_plain_outside_graphs(streams, hold):
    s, e = streams.Stream(), streams.Event(external=True)
    release = hold(s)
    e.record(s)
    assert not e.query()
    release()
    e.synchronize()


def test_180623_an_id_is_no_handle(streams):
    s = streams.Stream()
    number = s.native_handle if is_ours(streams) else s.cuda_stream
    assert s.stream_id != number
    assert (
        streams.Stream(
            stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type
        )
        == s
    )


def test_159744_the_error_names_what_is_missing(streams):
    if not is_ours(streams):
        pytest.skip("a CUDA build has it")
    with pytest.raises(UnsupportedError, match=r"graph: absent\. .*neuron_streams\.compile"):
        streams.graph(None)


def test_169052_records_stay_on_a_device_and_waits_cross(streams):
    two_devices(streams)
    e = streams.Event()
    e.record(streams.default_stream(0))
    streams.default_stream(1).wait_event(e)
    with pytest.raises(RuntimeError, match="^Event device 0 does not match recording stream's"):
        e.record(streams.default_stream(1))


def test_178027_a_stream_records_any_event_of_ours(streams):
    s = streams.Stream()
    for event in (streams.Event(), streams.Event(enable_timing=True)):
        assert s.record_event(event) is event
        assert s.wait_event(event) is None


def test_15352_a_side_stream_as_current_is_used_by_every_command(streams, device, hold):
    s = streams.Stream()
    release = hold(s)
    with streams.stream(s):
        target = torch.empty(4, device=device)
        target.copy_(torch.ones(4).to(device, non_blocking=True), non_blocking=True)
        done = torch.zeros(1, device=device) if not is_ours(streams) else target
    assert not s.query()
    assert streams.default_stream().query()
    release()
    s.synchronize()
    assert done is not None


def test_neuron_1150_compute_of_two_streams_shares_the_core(streams):
    if not is_ours(streams) or is_manual(streams):
        pytest.skip("about the units of a NeuronCore")
    runtime = context().runtime
    for s in (streams.Stream(), streams.Stream()):
        with streams.stream(s):
            streams._sleep(2_000_000)
    streams.synchronize()
    first, second = runtime.busy_intervals()[-2:]
    assert first[3] <= second[2] + 1e-4


def test_generators_and_tasks_hold_the_stream_of_their_thread(streams):
    s, before = streams.Stream(), streams.current_stream()

    def produce():
        with streams.stream(s):
            yield streams.current_stream()
            yield streams.current_stream()

    generator = produce()
    assert next(generator) == s
    assert streams.current_stream() == s, "what is current belongs to the thread"
    assert next(generator) == s
    generator.close()
    assert streams.current_stream() == before


def test_tasks_of_one_thread_share_its_current_stream(streams):
    s, before, seen = streams.Stream(), streams.current_stream(), []

    async def hold_across_an_await():
        with streams.stream(s):
            await asyncio.sleep(0)
            seen.append(streams.current_stream() == s)

    async def look():
        seen.append(streams.current_stream() == s)

    async def both():
        await asyncio.gather(hold_across_an_await(), look())

    asyncio.run(both())
    assert seen == [True, True], "what is current belongs to the thread, not to the task"
    assert streams.current_stream() == before


def test_tasks_that_interleave_put_back_what_they_found(streams):
    """Each task has its stream until its first await; submit inside a `with` that has none."""
    s, t, before, seen = streams.Stream(), streams.Stream(), streams.current_stream(), []

    async def work(stream, turns):
        with streams.stream(stream):
            seen.append(streams.current_stream() == stream)
            for _ in range(turns):
                await asyncio.sleep(0)

    async def both():
        await asyncio.gather(work(s, 2), work(t, 1))

    asyncio.run(both())
    assert seen == [True, True]
    assert streams.current_stream() == before


def test_a_thread_pool_starts_on_the_default_stream(streams):
    s = streams.Stream()
    with ThreadPoolExecutor(2) as pool, streams.stream(s):
        found = list(pool.map(lambda _: streams.current_stream(), range(4)))
    assert set(found) == {streams.default_stream()}


def test_a_generator_that_moved_gives_the_other_thread_its_stream_back(streams):
    if not is_ours(streams):
        pytest.skip("torch puts it into the wrong thread")
    s, before, seen = streams.Stream(), streams.current_stream(), []

    def produce():
        with streams.stream(s):
            yield

    generator = produce()
    next(generator)
    thread = threading.Thread(
        target=lambda: (generator.close(), seen.append(streams.current_stream()))
    )
    thread.start()
    thread.join()
    assert seen == [streams.default_stream()]
    assert streams.current_stream() == before


def test_contexts_left_out_of_order_put_back_what_they_found(streams):
    s, t, before = streams.Stream(), streams.Stream(), streams.current_stream()
    first, second = streams.stream(s), streams.stream(t)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert streams.current_stream() == before
    second.__exit__(None, None, None)
    assert streams.current_stream() == s
    streams.set_stream(before)


def test_streams_and_events_are_not_copied(streams):
    if not is_ours(streams):
        pytest.skip("torch's own words")
    import copy
    import pickle

    for thing in (streams.Stream(), streams.Event()):
        for action in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="^cannot pickle"):
                action(thing)
