"""A full device: a submission waits for room, and nothing else does."""

from __future__ import annotations

import _thread
import functools
import threading

import pytest

import neuron_streams
from neuron_streams._context import context, core
from neuron_streams._runtime.lanes import OUTSTANDING
from neuron_streams.testing import ManualRuntime, use_runtime
from tests.contract.conftest import RUNTIMES
from tests.runtime.commands import call, view_of


def until(end):
    """Runs until the event is set: the device is busy and does not wait for the host."""

    def wait():
        assert end.wait(60)

    return call(wait)


@pytest.fixture(params=[*RUNTIMES])
def runtime(request):
    with use_runtime(RUNTIMES[request.param](devices=2)) as made:
        yield made


@pytest.fixture
def full(runtime):
    """The lane of a stream whose device has no room; setting what comes with it makes some."""
    stream, end = neuron_streams.Stream(), threading.Event()
    if isinstance(runtime, ManualRuntime):
        end.set()  # it runs when it is stepped
    stream._submit(until(end))
    for _ in range(OUTSTANDING - 1):
        stream._submit(core().Sleep(0.0))
    yield stream, end
    end.set()


@pytest.fixture
def waiting(full):
    """Set when a command is on its way to the full device."""
    seen = threading.Event()
    context().port.watch(lambda *_: seen.set())
    return seen


def sleep_on(stream):
    with neuron_streams.stream(stream):
        neuron_streams._sleep(0)


def test_a_full_device_says_so_and_only_it(runtime, full):
    stream, _ = full
    other = runtime.open_lane(0)
    assert runtime.submit(other, core().Sleep(0.0), (), False) is None
    assert runtime.submit(other, core().Marker(), (), False).value == 1, "a marker needs no room"
    assert runtime.submit(runtime.open_lane(1), core().Sleep(0.0), (), False).value == 1
    assert runtime.submitted(stream._state.lane) == OUTSTANDING


def test_a_wait_for_room_holds_nothing_up(runtime, full, waiting):
    if isinstance(runtime, ManualRuntime):
        pytest.skip("a manual wait for room steps instead")
    stream, end = full
    thread = threading.Thread(target=sleep_on, args=(stream,))
    thread.start()
    assert waiting.wait(30)
    other, event = neuron_streams.Stream(device=1), neuron_streams.Event(enable_timing=True)
    assert not stream.query()
    event.record(stream)
    stream.wait_stream(other)
    stream.wait_event(other.record_event())
    stream.record_event()
    other.wait_event(event)
    assert not event.query()
    assert not other.query()
    sleep_on(other)
    assert thread.is_alive()
    end.set()
    other.synchronize()
    thread.join(30)
    assert not thread.is_alive()
    assert event.query()


def test_many_threads_wait_for_room_and_all_get_in(runtime, full, waiting):
    stream, end = full
    threads = [
        threading.Thread(target=lambda: [sleep_on(stream) for _ in range(100)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert waiting.wait(30)
    end.set()
    for thread in threads:
        thread.join(60)
    stream.synchronize()
    assert runtime.submitted(stream._state.lane) == OUTSTANDING + 400
    assert stream.query()


def test_a_thread_alone_finds_its_commands_in_order(runtime, full):
    stream, end = full
    lane, order = stream._state.lane, []

    threading.Timer(0.01, end.set).start()
    for number in range(OUTSTANDING + 200):
        stream._submit(call(functools.partial(order.append, number)))
    stream.synchronize()
    assert order == list(range(OUTSTANDING + 200))
    assert runtime.completed(lane) == 2 * OUTSTANDING + 200


def test_submissions_that_fail_take_no_room(runtime, full):
    stream, end = full
    lane, before = stream._state.lane, neuron_streams.memory_allocated()
    for _ in range(5_000):
        x = view_of(context().port.allocate(0, 8))
        assert runtime.submit(lane, core().Copy(x, x), (), False) is None
        with pytest.raises(RuntimeError, match="^submit: there is no lane"):
            runtime.submit(1 << 50, core().Copy(x, x), (), False)
    del x
    assert runtime.submitted(lane) == OUTSTANDING
    assert neuron_streams.memory_allocated() == before
    end.set()
    stream.synchronize()
    end.clear()
    again = [runtime.submit(lane, until(end), (), False)]
    again += [runtime.submit(lane, core().Sleep(0.0), (), False) for _ in range(OUTSTANDING - 1)]
    assert runtime.submit(lane, core().Sleep(0.0), (), False) is None
    end.set()
    runtime.wait(again[-1])


def test_ctrl_c_ends_a_wait_for_room(runtime, full, waiting):
    if isinstance(runtime, ManualRuntime):
        pytest.skip("a manual wait for room steps instead")
    stream, end = full
    threading.Thread(target=lambda: waiting.wait(30) and _thread.interrupt_main()).start()
    with pytest.raises(KeyboardInterrupt):
        sleep_on(stream)
    assert runtime.submitted(stream._state.lane) == OUTSTANDING
    other = threading.Thread(target=stream.query, daemon=True)
    other.start()
    other.join(30)
    assert not other.is_alive(), "nothing holds the stream"
    assert neuron_streams.current_stream() == neuron_streams.default_stream()
    end.set()
    sleep_on(stream)
    stream.synchronize()


def test_the_end_of_the_runtime_ends_a_wait_for_room(runtime, full, waiting):
    if isinstance(runtime, ManualRuntime):
        pytest.skip("a manual wait for room steps instead")
    stream, end = full
    raised = []

    def submit():
        try:
            sleep_on(stream)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=submit)
    thread.start()
    assert waiting.wait(30)
    runtime.close(0.0)
    end.set()
    thread.join(30)
    assert len(raised) == 1
    assert "is closed" in raised[0]
