"""The port: lanes, tickets, `after`, units, poisoning, waits, close. On every runtime."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch

from neuron_streams._context import core
from neuron_streams._runtime.port import Ticket, Unit
from neuron_streams.errors import CancelledError
from neuron_streams.testing import DeadlockError, ManualRuntime
from tests.runtime.commands import Commands, view_of


@pytest.fixture
def made(runtime):
    return Commands()


def test_a_lane_runs_first_in_first_out(runtime, made):
    log, lane = [], runtime.open_lane(0)
    tickets = [runtime.submit(lane, made.execute(log, i)) for i in range(20)]
    assert [t.value for t in tickets] == list(range(1, 21))
    runtime.wait(tickets[-1])
    assert log == list(range(20))
    assert runtime.completed(lane) == runtime.submitted(lane) == 20


def test_nothing_completes_ahead_of_a_command_that_has_not(runtime, made):
    log, lane = [], runtime.open_lane(0)
    held = made.pledge()
    runtime.submit(lane, made.execute(log, "a"), after=[held])
    last = runtime.submit(lane, core().Marker())
    assert runtime.completed(lane) == 0
    runtime.complete(held)
    runtime.wait(last)
    assert runtime.completed(lane) == 2


def test_after_orders_lanes_and_nothing_else_does(runtime, made):
    log, a, b, c = [], *(runtime.open_lane(0) for _ in range(3))
    held = made.pledge()
    first = runtime.submit(a, made.execute(log, "a"), after=[held])
    second = runtime.submit(b, made.execute(log, "b"), after=[first])
    free = runtime.submit(c, made.execute(log, "c"))
    runtime.wait(free)
    assert log == ["c"], "a lane whose head is not ready never blocks another"
    runtime.complete(held)
    runtime.wait(second)
    assert log == ["c", "a", "b"]


def test_a_wait_crosses_devices(runtime, made):
    log, a, b = [], runtime.open_lane(0), runtime.open_lane(1)
    held = made.pledge()
    first = runtime.submit(a, made.execute(log, "a"), after=[held])
    second = runtime.submit(b, made.execute(log, "b"), after=[first])
    runtime.complete(held)
    runtime.wait(second)
    assert log == ["a", "b"]


def test_higher_priority_is_served_first(runtime, made):
    log = []
    held = made.pledge()
    lanes = [runtime.open_lane(0, priority) for priority in (0, -1, -3)]
    tickets = [runtime.submit(x, made.execute(log, i), after=[held]) for i, x in enumerate(lanes)]
    runtime.complete(held)
    for ticket in tickets:
        runtime.wait(ticket)
    assert log.index(2) < log.index(1) < log.index(0)


def test_a_closed_lane_finishes_what_it_was_given(runtime, made):
    log, lane = [], runtime.open_lane(0)
    held = made.pledge()
    ticket = runtime.submit(lane, made.execute(log, "a"), after=[held])
    runtime.close_lane(lane)
    runtime.complete(held)
    runtime.wait(ticket)
    other = runtime.open_lane(0)
    runtime.wait(runtime.submit(other, core().Marker()))
    assert log == ["a"]
    assert lane not in runtime.lanes(0)
    assert runtime.completed(lane) >= ticket.value


def test_a_timed_marker_is_stamped_when_it_completes(runtime, made):
    lane = runtime.open_lane(0)
    held = made.pledge()
    markers = core().Marker(timed=True), core().Marker(timed=True)
    start = runtime.submit(lane, markers[0])
    end = runtime.submit(lane, markers[1], after=[held])
    runtime.wait(start)
    assert runtime.completed_at(start) is not None
    assert runtime.completed_at(end) is None
    runtime.complete(held)
    runtime.wait(end)
    assert runtime.completed_at(end) > runtime.completed_at(start)


def test_buffers_live_until_their_command_has_completed(runtime, made):
    lane, held = runtime.open_lane(0), made.pledge()
    before = made.allocated()[0]
    view = made.floats(1.0, 2.0)
    out = torch.zeros(2)
    ticket = runtime.submit(lane, core().Copy(view, out), after=[held])
    del view
    gc.collect()
    assert made.allocated()[0] == before + 8
    runtime.complete(held)
    runtime.wait(ticket)
    assert out.tolist() == [1.0, 2.0]


def test_a_failure_poisons_what_depends_on_it_and_nothing_else(runtime, made):
    log, lane = [], runtime.open_lane(0)
    broken, after, fine = made.buffer(), made.buffer(), made.buffer()
    error = ZeroDivisionError("step 1")
    runtime.submit(lane, made.execute(log, "fails", outputs=[broken], error=error))
    runtime.submit(lane, made.execute(log, "poisoned", [view_of(broken)], [after]))
    runtime.submit(lane, made.execute(log, "fine", [made.floats(1.0, 2.0)], [fine]))
    last = runtime.submit(lane, core().Marker())
    runtime.wait(last)
    assert log == ["fails", "fine"], "a command that reads poison does not run"
    assert broken.failure.error is after.failure.error is error
    assert fine.failure is None
    assert [f.error for f in runtime.failures(last)] == [error], "each cause once"
    assert runtime.failures(last, since=2) == ()


def test_a_destructor_in_the_middle_of_a_command_cannot_hang_the_device(runtime, made):
    if runtime.name == "manual":
        pytest.skip("its waits run commands themselves")
    log, lane, held = [], runtime.open_lane(0), made.pledge()
    behind = runtime.submit(runtime.open_lane(0), made.execute(log, "behind"), [held])
    waits = made.execute(log, "waits", action=lambda: runtime.wait(behind, 30))
    last = runtime.submit(lane, waits)
    runtime.wait(last)
    (failure,) = runtime.failures(last)
    assert str(failure.error).startswith("wait: this destructor was run in the middle")
    runtime.complete(held)
    runtime.wait(behind)
    assert log == ["waits", "behind"]


def test_a_full_overwrite_cures(runtime, made):
    log, lane = [], runtime.open_lane(0)
    buffer = made.buffer()
    runtime.submit(lane, made.execute(log, "fails", outputs=[buffer], error=ValueError("once")))
    half = view_of(buffer, 1)
    runtime.wait(runtime.submit(lane, core().Copy(torch.zeros(1), half)))
    assert buffer.failure is not None, "half an overwrite cures nothing"
    runtime.wait(runtime.submit(lane, core().Copy(torch.zeros(2), view_of(buffer))))
    assert buffer.failure is None


def test_a_tensor_updated_in_place_is_not_poisoned(runtime, made):
    lane, cache = runtime.open_lane(0), made.floats(1.0, 2.0)
    command = made.execute([], "fails", [cache], mutated=[0], error=ValueError("x"))
    runtime.wait(runtime.submit(lane, command))
    assert cache.buffer.failure is None
    assert command.outputs[0].failure is not None


def test_only_the_host_completes_host_lanes(runtime, made):
    lane = runtime.open_lane(0)
    held = made.pledge()
    ticket = runtime.submit(lane, core().Marker(), after=[held])
    with pytest.raises(ValueError, match="belongs to the device"):
        runtime.complete(ticket)
    runtime.complete(held, ValueError("broken promise"))
    runtime.wait(ticket)
    assert [str(f.error) for f in runtime.failures(held)] == ["broken promise"]


def test_a_wait_gives_up(runtime, made):
    lane, held = runtime.open_lane(0), made.pledge()
    ticket = runtime.submit(lane, core().Marker(), after=[held])
    expected = DeadlockError if isinstance(runtime, ManualRuntime) else TimeoutError
    with pytest.raises(expected, match="has completed 0 of the 1 commands"):
        runtime.wait(ticket, timeout=0.01)
    runtime.complete(held)
    runtime.wait(ticket, timeout=5)


def test_close_cancels_what_has_not_started_and_wakes_everyone(runtime, made):
    log, lane, held = [], runtime.open_lane(0), made.pledge()
    buffer = made.buffer()
    ticket = runtime.submit(lane, made.execute(log, "never", outputs=[buffer]), after=[held])
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
        runtime.submit(lane, core().Marker())


def test_a_chain_of_markers_wakes_the_device_at_its_end(runtime, made):
    log, lanes = [], [runtime.open_lane(device) for device in (0, 1, 0, 1)]
    last = held = made.pledge()
    for lane in lanes:
        last = runtime.submit(lane, core().Marker(), after=[last])
    end = runtime.submit(lanes[-1], made.execute(log, "end"))
    first = runtime.submit(runtime.open_lane(0), made.execute(log, "first"), after=[held])
    runtime.complete(held)
    runtime.wait(end, timeout=10)
    runtime.wait(first, timeout=10)
    start = runtime.submit(lanes[0], made.execute(log, "start"))
    marker = runtime.submit(lanes[0], core().Marker())
    far = runtime.submit(lanes[1], core().Marker(), after=[marker])
    runtime.wait(runtime.submit(lanes[1], made.execute(log, "far"), after=[far]), timeout=10)
    assert runtime.completed(lanes[0]) >= start.value
    assert sorted(log) == ["end", "far", "first", "start"]


def test_close_gives_up_what_runs_on_and_on(runtime, made):
    if isinstance(runtime, ManualRuntime):
        pytest.skip("nothing runs by itself")
    lane, started, enough = runtime.open_lane(0), threading.Event(), threading.Event()
    buffer = made.buffer()

    def run_on():
        started.set()
        assert enough.wait(60)

    ticket = runtime.submit(lane, made.execute([], "long", outputs=[buffer], action=run_on))
    behind = runtime.submit(lane, made.execute([], "behind"))
    assert started.wait(10)
    runtime.close(0.05)
    runtime.wait(behind, timeout=5)
    enough.set()
    assert isinstance(buffer.failure.error, CancelledError)
    assert "was still running" in str(buffer.failure.error)
    assert runtime.completed(lane) >= ticket.value


def test_a_closed_lane_with_failures_is_kept_until_they_are_asked_for(runtime, made):
    lane = runtime.open_lane(0)
    ticket = runtime.submit(lane, made.execute([], "fails", error=KeyError("kept")))
    runtime.close_lane(lane)
    runtime.wait(ticket)
    runtime.open_lane(1)
    assert lane in runtime.lanes(0)
    assert [str(f.error) for f in runtime.failures(ticket)] == ["'kept'"]
    assert lane not in runtime.lanes(0)


def test_a_lane_that_is_gone_has_nothing_left_to_do(runtime):
    lane = runtime.open_lane(0)
    runtime.wait(runtime.submit(lane, core().Marker()))
    runtime.close_lane(lane)
    runtime.open_lane(0)
    assert lane not in runtime.lanes(0)
    assert runtime.submitted(lane) == 0
    assert runtime.completed(lane) > 0
    runtime.wait(Ticket(lane, 1))


def test_memory_is_counted_while_it_lives(runtime, made):
    before, freed = made.allocated(1)
    peak = core().counts(1)["bytes"]["peak"]
    buffer = made.buffer(1000, 1)
    assert made.allocated(1) == (before + 1000, freed)
    assert made.allocated(0)[0] == 0
    del buffer
    gc.collect()
    assert made.allocated(1) == (before, freed + 1000)
    assert core().counts(1)["bytes"]["peak"] == max(peak, before + 1000)


def test_busy_intervals_say_what_ran(runtime, made):
    lane = runtime.open_lane(1)
    runtime.wait(runtime.submit(lane, made.execute([], "a")))
    device, unit, start, end, name = runtime.busy_intervals()[-1]
    assert (device, unit, name) == (1, Unit.COMPUTE, "execute")
    assert start <= end


def test_tickets_of_another_thread_can_be_waited_for_both_ways(runtime, made):
    log, a, b = [], runtime.open_lane(0), runtime.open_lane(1)
    gates = made.pledge(), made.pledge()
    first = runtime.submit(a, made.execute(log, "a1"), after=[gates[0]])
    other = runtime.submit(b, made.execute(log, "b1"), after=[gates[1]])
    last = runtime.submit(a, made.execute(log, "a2"), after=[other])
    more = runtime.submit(b, made.execute(log, "b2"), after=[first])
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
