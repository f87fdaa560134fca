"""The port: lanes, tickets, `after`, units, poisoning, waits, close. On every runtime."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest
import torch

from neuron_streams._runtime.cpu import tensor_of
from neuron_streams._runtime.port import (
    Buffer,
    Copy,
    Execute,
    Marker,
    Pledge,
    Ticket,
    Unit,
    View,
)
from neuron_streams.errors import CancelledError
from neuron_streams.testing import DeadlockError, ManualRuntime


class Recorder:
    """A handle that notes when it ran, and fails on demand."""

    name = "recorder"

    def __init__(self, log, label, error=None, action=None):
        self.log, self.label, self.error, self.action = log, label, error, action

    def run(self, inputs):
        self.log.append(self.label)
        if self.action is not None:
            self.action()
        if self.error is not None:
            raise self.error
        return [x + 1 for x in inputs] or [torch.zeros(2)]


def execute(log, label, inputs=(), outputs=(), unit=Unit.COMPUTE, **kwargs):
    outputs = outputs or (Buffer(0, 8),)
    return Execute(Recorder(log, label, **kwargs), tuple(inputs), tuple(outputs), unit=unit)


def floats(runtime, *values, device=0):
    buffer = runtime.allocate(device, 4 * len(values))
    view = View(buffer, torch.float32, (len(values),), (1,))
    tensor_of(view).copy_(torch.tensor(values))
    return view


def view_of(buffer, n=2):
    return View(buffer, torch.float32, (n,), (1,))


def pledge(runtime, device=0):
    lane = runtime.open_lane(device, host=True)
    return runtime.submit(lane, Pledge())


def test_a_lane_runs_first_in_first_out(runtime):
    log, lane = [], runtime.open_lane(0)
    tickets = [runtime.submit(lane, execute(log, i)) for i in range(20)]
    assert [t.value for t in tickets] == list(range(1, 21))
    runtime.wait(tickets[-1])
    assert log == list(range(20))
    assert runtime.completed(lane) == runtime.submitted(lane) == 20


def test_nothing_completes_ahead_of_a_command_that_has_not(runtime):
    log, lane = [], runtime.open_lane(0)
    held = pledge(runtime)
    runtime.submit(lane, execute(log, "a"), after=[held])
    last = runtime.submit(lane, Marker())
    assert runtime.completed(lane) == 0
    runtime.complete(held)
    runtime.wait(last)
    assert runtime.completed(lane) == 2


def test_after_orders_lanes_and_nothing_else_does(runtime):
    log, a, b, c = [], *(runtime.open_lane(0) for _ in range(3))
    held = pledge(runtime)
    first = runtime.submit(a, execute(log, "a"), after=[held])
    second = runtime.submit(b, execute(log, "b"), after=[first])
    free = runtime.submit(c, execute(log, "c"))
    runtime.wait(free)
    assert log == ["c"], "a lane whose head is not ready never blocks another"
    runtime.complete(held)
    runtime.wait(second)
    assert log == ["c", "a", "b"]


def test_a_wait_crosses_devices(runtime):
    log, a, b = [], runtime.open_lane(0), runtime.open_lane(1)
    held = pledge(runtime)
    first = runtime.submit(a, execute(log, "a"), after=[held])
    second = runtime.submit(b, execute(log, "b"), after=[first])
    runtime.complete(held)
    runtime.wait(second)
    assert log == ["a", "b"]


def test_higher_priority_is_served_first(runtime):
    log = []
    held = pledge(runtime)
    lanes = [runtime.open_lane(0, priority) for priority in (0, -1, -3)]
    tickets = [runtime.submit(x, execute(log, i), after=[held]) for i, x in enumerate(lanes)]
    runtime.complete(held)
    for ticket in tickets:
        runtime.wait(ticket)
    assert log.index(2) < log.index(1) < log.index(0)


def test_a_closed_lane_finishes_what_it_was_given(runtime):
    log, lane = [], runtime.open_lane(0)
    held = pledge(runtime)
    ticket = runtime.submit(lane, execute(log, "a"), after=[held])
    runtime.close_lane(lane)
    runtime.complete(held)
    runtime.wait(ticket)
    other = runtime.open_lane(0)
    runtime.wait(runtime.submit(other, Marker()))
    assert log == ["a"]
    assert lane not in runtime.lanes(0)
    assert runtime.completed(lane) >= ticket.value


def test_a_timed_marker_is_stamped_when_it_completes(runtime):
    lane = runtime.open_lane(0)
    held = pledge(runtime)
    markers = Marker(timed=True), Marker(timed=True)
    start = runtime.submit(lane, markers[0])
    end = runtime.submit(lane, markers[1], after=[held])
    runtime.wait(start)
    assert runtime.completed_at(start) is not None
    assert runtime.completed_at(end) is None
    runtime.complete(held)
    runtime.wait(end)
    assert runtime.completed_at(end) > runtime.completed_at(start)


def test_buffers_live_until_their_command_has_completed(runtime):
    lane, held = runtime.open_lane(0), pledge(runtime)
    view = floats(runtime, 1.0, 2.0)
    kept = weakref.ref(view.buffer)
    out = torch.zeros(2)
    ticket = runtime.submit(lane, Copy(view, out), after=[held])
    del view
    gc.collect()
    assert kept() is not None
    runtime.complete(held)
    runtime.wait(ticket)
    assert out.tolist() == [1.0, 2.0]


def test_a_failure_poisons_what_depends_on_it_and_nothing_else(runtime):
    log, lane = [], runtime.open_lane(0)
    broken, after, fine = Buffer(0, 8), Buffer(0, 8), Buffer(0, 8)
    error = ZeroDivisionError("step 1")
    runtime.submit(lane, execute(log, "fails", outputs=[broken], error=error))
    runtime.submit(lane, execute(log, "poisoned", [view_of(broken)], [after]))
    runtime.submit(lane, execute(log, "fine", [floats(runtime, 1.0, 2.0)], [fine]))
    last = runtime.submit(lane, Marker())
    runtime.wait(last)
    assert log == ["fails", "fine"], "a command that reads poison does not run"
    assert broken.failure.error is after.failure.error is error
    assert fine.failure is None
    assert [f.error for f in runtime.failures(last)] == [error], "each cause once"
    assert runtime.failures(last, since=2) == ()


def test_a_destructor_in_the_middle_of_a_command_cannot_hang_the_device(runtime):
    if runtime.name == "manual":
        pytest.skip("its waits run commands themselves")
    log, lane, held = [], runtime.open_lane(0), pledge(runtime)
    behind = runtime.submit(runtime.open_lane(0), execute(log, "behind"), [held])
    waits = execute(log, "waits", action=lambda: runtime.wait(behind, 30))
    last = runtime.submit(lane, waits)
    runtime.wait(last)
    (failure,) = runtime.failures(last)
    assert str(failure.error).startswith("wait: this destructor was run in the middle")
    runtime.complete(held)
    runtime.wait(behind)
    assert log == ["waits", "behind"]


def test_a_full_overwrite_cures(runtime):
    log, lane = [], runtime.open_lane(0)
    buffer = Buffer(0, 8)
    runtime.submit(lane, execute(log, "fails", outputs=[buffer], error=ValueError("once")))
    half = View(buffer, torch.float32, (1,), (1,))
    runtime.wait(runtime.submit(lane, Copy(torch.zeros(1), half)))
    assert buffer.failure is not None, "half an overwrite cures nothing"
    runtime.wait(runtime.submit(lane, Copy(torch.zeros(2), view_of(buffer))))
    assert buffer.failure is None


def test_a_tensor_updated_in_place_is_not_poisoned(runtime):
    lane, cache = runtime.open_lane(0), floats(runtime, 1.0, 2.0)
    command = Execute(
        Recorder([], "fails", ValueError("x")), (cache,), (Buffer(0, 8),), mutated=(0,)
    )
    runtime.wait(runtime.submit(lane, command))
    assert cache.buffer.failure is None
    assert command.outputs[0].failure is not None


def test_only_the_host_completes_host_lanes(runtime):
    lane = runtime.open_lane(0)
    held = pledge(runtime)
    ticket = runtime.submit(lane, Marker(), after=[held])
    with pytest.raises(ValueError, match="belongs to the device"):
        runtime.complete(ticket)
    runtime.complete(held, ValueError("broken promise"))
    runtime.wait(ticket)
    assert [str(f.error) for f in runtime.failures(held)] == ["broken promise"]


def test_a_wait_gives_up(runtime):
    lane, held = runtime.open_lane(0), pledge(runtime)
    ticket = runtime.submit(lane, Marker(), after=[held])
    expected = DeadlockError if isinstance(runtime, ManualRuntime) else TimeoutError
    with pytest.raises(expected, match="has completed 0 of the 1 commands"):
        runtime.wait(ticket, timeout=0.01)
    runtime.complete(held)
    runtime.wait(ticket, timeout=5)


def test_close_cancels_what_has_not_started_and_wakes_everyone(runtime):
    log, lane, held = [], runtime.open_lane(0), pledge(runtime)
    buffer = Buffer(0, 8)
    ticket = runtime.submit(lane, execute(log, "never", outputs=[buffer]), after=[held])
    woken = []

    def wait():
        with contextlib.suppress(DeadlockError):
            runtime.wait(ticket)
        woken.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    runtime.close(0.05)
    thread.join(10)
    assert woken
    assert log == []
    assert isinstance(buffer.failure.error, CancelledError)
    with pytest.raises(RuntimeError, match="is closed"):
        runtime.submit(lane, Marker())


def test_a_chain_of_markers_wakes_the_device_at_its_end(runtime):
    log, lanes = [], [runtime.open_lane(device) for device in (0, 1, 0, 1)]
    last = held = pledge(runtime)
    for lane in lanes:
        last = runtime.submit(lane, Marker(), after=[last])
    end = runtime.submit(lanes[-1], execute(log, "end"))
    first = runtime.submit(runtime.open_lane(0), execute(log, "first"), after=[held])
    runtime.complete(held)
    runtime.wait(end, timeout=10)
    runtime.wait(first, timeout=10)
    start = runtime.submit(lanes[0], execute(log, "start"))
    marker = runtime.submit(lanes[0], Marker())
    far = runtime.submit(lanes[1], Marker(), after=[marker])
    runtime.wait(runtime.submit(lanes[1], execute(log, "far"), after=[far]), timeout=10)
    assert runtime.completed(lanes[0]) >= start.value
    assert sorted(log) == ["end", "far", "first", "start"]


def test_close_gives_up_what_runs_on_and_on(runtime):
    if isinstance(runtime, ManualRuntime):
        pytest.skip("nothing runs by itself")
    lane, started, enough = runtime.open_lane(0), threading.Event(), threading.Event()
    buffer = Buffer(0, 8)

    def run_on():
        started.set()
        assert enough.wait(60)

    ticket = runtime.submit(lane, execute([], "long", outputs=[buffer], action=run_on))
    behind = runtime.submit(lane, execute([], "behind"))
    assert started.wait(10)
    runtime.close(0.05)
    runtime.wait(behind, timeout=5)
    enough.set()
    assert isinstance(buffer.failure.error, CancelledError)
    assert "was still running" in str(buffer.failure.error)
    assert runtime.completed(lane) >= ticket.value


def test_a_closed_lane_with_failures_is_kept_until_they_are_asked_for(runtime):
    lane = runtime.open_lane(0)
    ticket = runtime.submit(lane, execute([], "fails", error=KeyError("kept")))
    runtime.close_lane(lane)
    runtime.wait(ticket)
    runtime.open_lane(1)
    assert lane in runtime.lanes(0)
    assert [str(f.error) for f in runtime.failures(ticket)] == ["'kept'"]
    assert lane not in runtime.lanes(0)


def test_a_lane_that_is_gone_has_nothing_left_to_do(runtime):
    lane = runtime.open_lane(0)
    runtime.wait(runtime.submit(lane, Marker()))
    runtime.close_lane(lane)
    runtime.open_lane(0)
    assert lane not in runtime.lanes(0)
    assert runtime.submitted(lane) == 0
    assert runtime.completed(lane) > 0
    runtime.wait(Ticket(lane, 1))


def test_memory_is_counted_while_it_lives(runtime):
    number, size = runtime.ledger(1).read()
    buffer = runtime.allocate(1, 1000)
    now = runtime.ledger(1).read()
    assert (now[0].current, now[1].current) == (number.current + 1, size.current + 1000)
    assert runtime.ledger(0).read()[1].current == 0
    del buffer
    gc.collect()
    number, size = runtime.ledger(1).read()
    assert (size.current, size.freed, size.peak) == (now[1].current - 1000, 1000, now[1].peak)


def test_busy_intervals_say_what_ran(runtime):
    lane = runtime.open_lane(1)
    runtime.wait(runtime.submit(lane, execute([], "a")))
    device, unit, start, end, name = runtime.busy_intervals()[-1]
    assert (device, unit, name) == (1, Unit.COMPUTE, "execute")
    assert start <= end


def test_tickets_of_another_thread_can_be_waited_for_both_ways(runtime):
    log, a, b = [], runtime.open_lane(0), runtime.open_lane(1)
    gates = pledge(runtime), pledge(runtime)
    first = runtime.submit(a, execute(log, "a1"), after=[gates[0]])
    other = runtime.submit(b, execute(log, "b1"), after=[gates[1]])
    last = runtime.submit(a, execute(log, "a2"), after=[other])
    more = runtime.submit(b, execute(log, "b2"), after=[first])
    for gate in gates:
        runtime.complete(gate)
    runtime.wait(last)
    runtime.wait(more)
    assert log.index("b1") < log.index("a2")
    assert log.index("a1") < log.index("b2")


def test_waiting_for_nothing_returns(runtime):
    lane = runtime.open_lane(0)
    runtime.wait(Ticket(lane, 0))
    assert runtime.failures(Ticket(lane, 0)) == ()
