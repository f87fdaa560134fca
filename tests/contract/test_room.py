"""A full device: who submits waits for room, and nobody else waits with them."""

from __future__ import annotations

import _thread
import threading

import pytest

import neuron_streams
from neuron_streams._runtime.complaints import NoRoom
from neuron_streams._runtime.lanes import OUTSTANDING
from neuron_streams._runtime.port import Execute, Marker, Sleep
from neuron_streams.testing import ManualRuntime, use_runtime
from tests.contract.conftest import RUNTIMES


class Waits:
    """A handle that runs until it may end: the device is busy and does not wait for the host."""

    name = "waits"

    def __init__(self):
        self.end = threading.Event()

    def run(self, inputs):
        assert self.end.wait(60)
        return []


@pytest.fixture(params=[*RUNTIMES])
def runtime(request):
    with use_runtime(RUNTIMES[request.param](devices=2)) as made:
        yield made


@pytest.fixture
def full(runtime):
    """The lane of a stream whose device has no room; setting what comes with it makes some."""
    handle, stream = Waits(), neuron_streams.Stream()
    if isinstance(runtime, ManualRuntime):
        handle.end.set()  # it runs when somebody steps
    stream._submit(Execute(handle, (), ()))
    for _ in range(OUTSTANDING - 1):
        stream._submit(Sleep(0.0))
    yield stream, handle.end
    handle.end.set()


@pytest.fixture
def waiting(runtime, monkeypatch):
    """Set when somebody waits for room."""
    workers = getattr(runtime, "_workers", runtime)
    seen, wait_for_room = threading.Event(), workers.wait_for_room

    def wait(lane):
        seen.set()
        wait_for_room(lane)

    monkeypatch.setattr(workers, "wait_for_room", wait)
    return seen


def sleep_on(stream):
    with neuron_streams.stream(stream):
        neuron_streams._sleep(0)


def test_a_full_device_says_so_and_only_it(runtime, full):
    stream, _ = full
    other = runtime.open_lane(0)
    with pytest.raises(NoRoom, match="^neuron:0 takes no more commands"):
        runtime.submit(other, Sleep(0.0), (), False)
    assert runtime.submit(other, Marker(), (), False).value == 1, "a marker needs no room"
    runtime.submit(runtime.open_lane(1), Sleep(0.0), (), False)
    assert runtime.submitted(stream._state.lane) == OUTSTANDING


def test_who_waits_for_room_holds_nobody_up(runtime, full, waiting):
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

    class Notes:
        name = "notes"

        def __init__(self, number):
            self.number = number

        def run(self, inputs):
            order.append(self.number)
            return []

    threading.Timer(0.01, end.set).start()
    for number in range(OUTSTANDING + 200):
        stream._submit(Execute(Notes(number), (), ()))
    stream.synchronize()
    assert order == list(range(OUTSTANDING + 200))
    assert runtime.completed(lane) == 2 * OUTSTANDING + 200


def test_submissions_that_fail_take_no_room(runtime, full):
    stream, end = full
    lane = stream._state.lane
    for _ in range(5_000):
        with pytest.raises(NoRoom):
            runtime.submit(lane, Sleep(0.0), (), False)
        with pytest.raises(KeyError):
            runtime.submit(1 << 50, Sleep(0.0), (), False)
    assert runtime.submitted(lane) == OUTSTANDING
    end.set()
    stream.synchronize()
    commands = getattr(getattr(runtime, "_workers", runtime), "_commands", {})
    assert len(commands) <= 1
    handle = Waits()
    again = [runtime.submit(lane, Execute(handle, (), ()), (), False)]
    again += [runtime.submit(lane, Sleep(0.0), (), False) for _ in range(OUTSTANDING - 1)]
    with pytest.raises(NoRoom):
        runtime.submit(lane, Sleep(0.0), (), False)
    handle.end.set()
    runtime.wait(again[-1])


def test_ctrl_c_ends_a_wait_for_room(runtime, full, waiting):
    if isinstance(runtime, ManualRuntime):
        pytest.skip("a manual wait for room steps instead")
    stream, end = full
    threading.Thread(target=lambda: waiting.wait(30) and _thread.interrupt_main()).start()
    with pytest.raises(KeyboardInterrupt):
        sleep_on(stream)
    assert runtime.submitted(stream._state.lane) == OUTSTANDING
    assert stream._state.lock.acquire(blocking=False), "nobody holds the stream"
    stream._state.lock.release()
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
