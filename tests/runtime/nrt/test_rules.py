"""Every ordering rule of the asynchronous API: a scenario for each, and what drops the rule.

`RULES` is the list. Each scenario holds with the runtime as it is, and fails, by a wrong result or
by a violation that the double reports, when the guard of its rule is taken out: both are tested, so
that neither the guard nor its test can be lost. Sources: the core concepts, the best practices and
the migration guide of the runtime's asynchronous API, release notes where an ABI differs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from types import SimpleNamespace

import numpy
import pytest
import torch

from neuron_streams._context import core
from neuron_streams._runtime.nrt import notice
from neuron_streams._runtime.nrt import runtime as runtime_module
from neuron_streams._runtime.nrt.memory import Memory
from neuron_streams._runtime.nrt.order import Order
from neuron_streams._runtime.nrt.progress import Progress
from neuron_streams._runtime.nrt.queue import Queue
from neuron_streams._runtime.nrt.requests import Requests, Route
from neuron_streams._runtime.nrt.runtime import NrtRuntime
from neuron_streams._runtime.nrt.sets import SetPair, Sets
from neuron_streams._runtime.nrt.status import DeviceLostError, Status
from neuron_streams._runtime.port import Kind
from tests.runtime.nrt.conftest import Kernels, floats, view_of

RULES = []
KEPT = []  # what a broken runtime may still write to behind its test


def rule(text, abis=("2.28", "2.29", "2.30"), **kwargs):
    """Adds a scenario to the list, with `without_` and its name, which takes the guard out."""

    def note(scenario):
        RULES.append((text, abis, kwargs, scenario, globals()[f"without_{scenario.__name__}"]))
        return scenario

    return note


def scheduled(runtime):
    return runtime.double.count("scheduled")


def finish(runtime, *tickets):
    for ticket in tickets:
        runtime.wait(ticket, 1)


def zeros(size, dtype=torch.float32):
    KEPT.append(torch.zeros(size, dtype=dtype))
    return KEPT[-1]


def value_of(runtime, lane, view, after=()):
    out = zeros(view.size)
    finish(runtime, runtime.submit(lane, core().Copy(view, out), after))
    return out.tolist()


# -- order -----------------------------------------------------------------------------------


def without_same_queue(patch):
    real = Requests.route
    patch(Requests, "route", lambda *a: Route(real(*a).queue, False))


@rule("requests of one queue are ordered by it: a chain needs no wait of the host")
def same_queue(runtime):
    kernels, lanes = Kernels(runtime), [runtime.open_lane(0) for _ in range(2)]
    ticket, view = None, floats(runtime, 0.0, 1.0)
    with runtime.double.held(runtime.double.compute):
        for step in range(4):
            after = [ticket] if ticket else []
            ticket, view = kernels.plus_one(lanes[step % 2], view, after)
        assert scheduled(runtime) == 4
    assert value_of(runtime, lanes[0], view, [ticket]) == [4.0, 5.0]


def without_markers_between(patch):
    real = Order._pass_next

    def stop_at_markers(self, lane):
        head = lane.unpassed[0] if lane.unpassed else None
        if head and head.kind is Kind.MARKER and lane.pending[0] is not head:
            return False
        return real(self, lane)

    patch(Order, "_pass_next", stop_at_markers)


@rule("markers between the executions of a chain, as events are, do not hold it up")
def markers_between(runtime):
    kernels, (a, b) = Kernels(runtime), [runtime.open_lane(0) for _ in range(2)]
    view = floats(runtime, 0.0, 1.0)
    with runtime.double.held(runtime.double.compute):
        _, view = kernels.plus_one(a, view)
        recorded = runtime.submit(a, core().Marker())
        runtime.submit(b, core().Marker(), [recorded])
        ticket, view = kernels.plus_one(b, view)
        assert scheduled(runtime) == 2
        assert runtime.completed(a) == runtime.completed(b) == 0
    assert value_of(runtime, b, view, [ticket]) == [2.0, 3.0]


def without_order_within_the_queue(patch):
    patch(Order, "_is_held", lambda self, step, goal, marker: (False, goal))


@rule("and so what comes after something must be scheduled after it, however urgent", in_flight=1)
def order_within_the_queue(runtime):
    kernels = Kernels(runtime)
    low, high = runtime.open_lane(0), runtime.open_lane(0, -5)
    x = floats(runtime, 0.0, 1.0)
    with runtime.double.held(runtime.double.compute):
        kernels.plus_one(low, x)
        first, one = kernels.plus_one(low, x)
        last, two = kernels.plus_one(high, one, [first])
    assert value_of(runtime, high, two, [last]) == [2.0, 3.0]


def without_compute_before_read(patch):
    real = Order._passed
    patch(Order, "_passed", lambda self, step, tail: real(self, step, None))


@rule("a read waits on the host until what computes has completed")
def compute_before_read(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    out = zeros(2)
    with runtime.double.held(runtime.double.compute):
        _, made = kernels.plus_one(lane, floats(runtime, 1.0, 2.0))
        last = runtime.submit(lane, core().Copy(made, out))
        assert scheduled(runtime) == 1
    finish(runtime, last)
    assert out.tolist() == [2.0, 3.0]


without_write_before_compute = without_compute_before_read


@rule("an execution waits on the host until what is written for it has been")
def write_before_compute(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    x = view_of(runtime, 2)
    with runtime.double.held(runtime.double.write, queue=lane % 2):
        runtime.submit(lane, core().Copy(torch.ones(2), x))
        _, made = kernels.plus_one(lane, x)
        assert scheduled(runtime) == 1
    assert value_of(runtime, lane, made) == [2.0, 2.0]


without_read_before_overwrite = without_compute_before_read


@rule("an input is overwritten only when the execution that reads it has completed")
def read_before_overwrite(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    x = floats(runtime, 1.0, 2.0)
    with runtime.double.held(runtime.double.compute):
        _, made = kernels.plus_one(lane, x)
        runtime.submit(lane, core().Copy(zeros(2), x))
        assert scheduled(runtime) == 1
    assert value_of(runtime, lane, made) == [2.0, 3.0]


def without_unordered_lanes(patch):
    patch(Progress, "_clashes", lambda self, step, queue: False)


@rule("even where a program does not order that: what is in flight reads what it was given")
def unordered_lanes(runtime):
    kernels, (a, b) = Kernels(runtime), [runtime.open_lane(0) for _ in range(2)]
    x = floats(runtime, 1.0, 2.0)
    with runtime.double.held(runtime.double.compute):
        _, made = kernels.plus_one(a, x)
        last = runtime.submit(b, core().Copy(zeros(2), x))
        other = runtime.submit(b, core().Copy(zeros(2), view_of(runtime, 2)))
        assert scheduled(runtime) == 1
    finish(runtime, last, other)
    assert value_of(runtime, a, made) == [2.0, 3.0]
    assert value_of(runtime, b, x) == [0.0, 0.0]


without_other_lane = without_order_within_the_queue


@rule("across lanes, too")
def other_lane(runtime):
    kernels, (a, b) = Kernels(runtime), [runtime.open_lane(0) for _ in range(2)]
    out = zeros(2)
    with runtime.double.held(runtime.double.compute):
        first, made = kernels.plus_one(a, floats(runtime, 1.0, 2.0))
        last = runtime.submit(b, core().Copy(made, out), [first])
        assert scheduled(runtime) == 1
    finish(runtime, last)
    assert out.tolist() == [2.0, 3.0]


without_behind_markers = without_order_within_the_queue


@rule("and behind markers that come after several queues")
def behind_markers(runtime):
    kernels, (a, b, c) = Kernels(runtime), [runtime.open_lane(0) for _ in range(3)]
    x, y = view_of(runtime, 2), floats(runtime, 1.0, 2.0)
    with runtime.double.held(runtime.double.write, queue=a % 2):
        written = runtime.submit(a, core().Copy(torch.ones(2), x))
        computed, made = kernels.plus_one(b, y)
        runtime.submit(c, core().Marker(), [computed, written])
        _, total = kernels.add(c, x, made)
        finish(runtime, computed)
        assert scheduled(runtime) == 2
    assert value_of(runtime, c, total) == [3.0, 4.0]


without_two_queues = without_order_within_the_queue


@rule("the two queues of the transfer unit are two queues")
def two_queues(runtime):
    a, b = runtime.open_lane(0), runtime.open_lane(0)
    x, out = view_of(runtime, 2), zeros(2)
    with runtime.double.held(runtime.double.write, queue=a % 2):
        written = runtime.submit(a, core().Copy(torch.ones(2), x))
        last = runtime.submit(b, core().Copy(x, out), [written])
        assert scheduled(runtime) == 1
    finish(runtime, last)
    assert out.tolist() == [1.0, 1.0]


def without_two_units(patch):
    real = Requests.route

    def one_queue(self, command, device, lane):
        found = real(self, command, device, lane)
        return Route(self._queue(device, self._library.units.write, lane % 2), found.direct)

    patch(Requests, "route", one_queue)


@rule("in the first ABI reads, writes and copies are units of their own", abis=("2.28",))
def two_units(runtime):
    lane, x, out = runtime.open_lane(0), view_of(runtime, 2), zeros(2)
    with runtime.double.held(runtime.double.write, queue=lane % 2):
        runtime.submit(lane, core().Copy(torch.ones(2), x))
        last = runtime.submit(lane, core().Copy(x, out))
        assert scheduled(runtime) == 1
    finish(runtime, last)
    assert out.tolist() == [1.0, 1.0]


without_two_cores = without_order_within_the_queue


@rule("the cores are ordered by the host alone")
def two_cores(runtime):
    kernels = [Kernels(runtime, device=device) for device in range(2)]
    a, b = (runtime.open_lane(device) for device in range(2))
    there = view_of(runtime, 2, device=1)
    with runtime.double.held(runtime.double.compute):
        first, made = kernels[0].plus_one(a, floats(runtime, 1.0, 2.0))
        moved = runtime.submit(b, core().Copy(made, there), [first])
        _, last = kernels[1].plus_one(b, there, [moved])
        assert scheduled(runtime) == 1
    assert value_of(runtime, b, last) == [3.0, 4.0]


def without_host_work(patch):
    real = Requests.route
    patch(Requests, "route", lambda *a: Route(real(*a).queue, True))


@rule("nothing is queued behind a copy that the host has a part in", abis=("2.29", "2.30"))
def host_work(runtime):
    lane = runtime.open_lane(0)
    x, y = floats(runtime, 1.0, 2.0), view_of(runtime, 2)
    there = zeros(2, dtype=torch.float64)
    with runtime.double.held(runtime.double.read, queue=lane % 2):
        runtime.submit(lane, core().Copy(x, there))
        runtime.submit(lane, core().Copy(there, y))
        assert scheduled(runtime) == 1
    assert value_of(runtime, lane, y) == [1.0, 2.0]


without_shared_queue = without_same_queue


@rule("since the second ABI a copy follows a write on one queue", abis=("2.29", "2.30"))
def shared_queue(runtime):
    lane, x, y = runtime.open_lane(0), view_of(runtime, 2), view_of(runtime, 2)
    out = zeros(2)
    with runtime.double.held(runtime.double.copy, queue=lane % 2):
        runtime.submit(lane, core().Copy(torch.ones(2), x))
        runtime.submit(lane, core().Copy(x, y))
        last = runtime.submit(lane, core().Copy(y, out))
        assert scheduled(runtime) == 3
    finish(runtime, last)
    assert out.tolist() == [1.0, 1.0]


# -- statuses, and room ----------------------------------------------------------------------


def without_queue_full(patch):
    real = Queue.schedule

    def drop(self, request, step):
        status = real(self, request, step)
        return Status.FAILURE if status == Status.QUEUE_FULL else status

    patch(Queue, "schedule", drop)


@rule("a full queue is tried again when something has completed", in_flight=8)
def queue_full(runtime):
    runtime.double.set_depth(2)
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    view = floats(runtime, 0.0, 1.0)
    with runtime.double.held(runtime.double.compute):
        for _ in range(10):
            _, view = kernels.plus_one(lane, view)
        assert scheduled(runtime) == 2
        assert runtime.statistics.queue_full >= 1
    assert value_of(runtime, lane, view) == [10.0, 11.0]


def without_full_of_others(patch):
    patch(Progress, "_later", lambda self, seconds, action: None)


@rule("one that is full of nothing of ours is tried again by and by")
def full_of_others(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    runtime.double.refuse(0, runtime.double.compute, 0, 3, Status.QUEUE_FULL)
    _, made = kernels.plus_one(lane, floats(runtime, 1.0, 2.0))
    assert value_of(runtime, lane, made) == [2.0, 3.0]
    assert runtime.statistics.queue_full == 3


def without_in_flight_bound(patch):
    real = NrtRuntime.__init__
    patch(NrtRuntime, "__init__", lambda self, library: real(self, library, in_flight=60))


@rule("no more than four are in flight on a queue, its depth being unknown")
def in_flight_bound(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    view = floats(runtime, 0.0, 1.0)
    with runtime.double.held(runtime.double.compute):
        for _ in range(10):
            last, view = kernels.plus_one(lane, view)
        assert scheduled(runtime) == 4
        runtime.double.release(0, runtime.double.compute, 0, 4)
        finish(runtime, last._replace(value=4))
        with runtime._lock:
            assert scheduled(runtime) == 8, "and as many again when all of those have completed"
    assert value_of(runtime, lane, view) == [10.0, 11.0]


def without_status_at_completion(patch):
    patch(Queue, "_status", lambda self, request: 0)


@rule("the status is there when completion is seen, and is what ends the command")
def status_at_completion(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    runtime.double.fail(0, runtime.double.compute, 0, 1, Status.EXEC_BAD_INPUT)
    tickets = []
    for _ in range(3):
        ticket, made = kernels.plus_one(lane, floats(runtime, 1.0, 2.0))
        tickets.append((ticket, made.buffer))
    finish(runtime, tickets[-1][0])
    (failure,) = runtime.failures(tickets[-1][0])
    assert failure.error.status == Status.EXEC_BAD_INPUT
    assert failure.ticket == tickets[1][0]
    assert [buffer.failure for _, buffer in tickets] == [None, failure, None]


def without_poison_behind(patch):
    real = Progress._bring_back

    def forgive(self, request, step, status, now):
        blame = type("Command", (), {"blame": lambda self: None})()
        step.command, kept = Blameless(step.command, blame), step.command
        try:
            real(self, request, step, status, now)
        finally:
            step.command = kept

    patch(Progress, "_bring_back", forgive)


class Blameless:
    """A command that has read nothing poisoned."""

    def __init__(self, command, other):
        self._command, self.blame = command, other.blame

    def __getattr__(self, name):
        return getattr(self._command, name)


@rule("what was queued behind a request that failed is of no use, though the hardware runs it")
def poison_behind(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    runtime.double.fail(0, runtime.double.compute, 0, 0, Status.EXEC_OOB)
    with runtime.double.held(runtime.double.compute):
        _, one = kernels.plus_one(lane, floats(runtime, 1.0, 2.0))
        last, two = kernels.plus_one(lane, one)
        assert scheduled(runtime) == 2
    finish(runtime, last)
    assert two.buffer.failure is not None
    assert two.buffer.failure.error is one.buffer.failure.error


def without_unrecoverable(patch):
    patch(Progress, "_lose", lambda self, device, what: None)


@rule("an unrecoverable unit ends all that waits for its device, and takes nothing more")
def unrecoverable(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    far, other = Kernels(runtime, device=1), runtime.open_lane(1)
    gate = runtime.submit(runtime.open_lane(0, host=True), core().Pledge())
    x = floats(runtime, 1.0, 2.0)
    with runtime.double.held(runtime.double.compute):
        runtime.double.fail(0, runtime.double.compute, 0, 0, Status.EXEC_UNIT_UNRECOVERABLE)
        queued = [kernels.plus_one(lane, x)[0] for _ in range(6)]
        gated = kernels.plus_one(runtime.open_lane(0), x, [gate])[0]
        event = runtime.submit(lane, core().Marker())
        beyond, _ = far.plus_one(other, floats(runtime, 1.0, 2.0, device=1), [gated])
    finish(runtime, *queued, gated, event, beyond)
    for ticket in (*queued, gated):
        (failure,) = runtime.failures(ticket, ticket.value - 1)
        assert isinstance(failure.error, DeviceLostError)
    with pytest.raises(DeviceLostError, match="^execute on neuron:0, which was lost earlier"):
        kernels.plus_one(lane, x)
    assert runtime.failures(beyond) == (), "another device is another device"


# -- lifetimes -------------------------------------------------------------------------------


def without_status_storage(patch):
    shared, real = ctypes.c_int(-1), Queue.schedule

    def share(self, request, step):
        request.outcome = shared
        return real(self, request, step)

    patch(Queue, "schedule", share)


@rule("each request in flight has status storage of its own", abis=("2.29", "2.30"))
def status_storage(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    with runtime.double.held(runtime.double.compute):
        for _ in range(3):
            last, _ = kernels.plus_one(lane, floats(runtime, 1.0, 2.0))
    finish(runtime, last)


def without_host_buffers(patch):
    real = Queue.schedule

    def forget(self, request, step):
        status = real(self, request, step)
        request.kept, step.plan = None, iter(())
        step.command = core().Copy(torch.zeros(1), torch.zeros(1))
        return status

    patch(Queue, "schedule", forget)


@rule("host memory and device memory live until the request has completed")
def host_buffers(runtime):
    lane = runtime.open_lane(0)
    array, target = numpy.ones(2, dtype=numpy.float32), view_of(runtime, 2)
    source, lease = torch.from_numpy(array), target.buffer.peer
    kept = weakref.ref(array), weakref.ref(lease)
    del array, lease
    with runtime.double.held(runtime.double.write, queue=lane % 2):
        last = runtime.submit(lane, core().Copy(source, target))
        del source, target
        gc.collect()
        assert all(ref() is not None for ref in kept)
    finish(runtime, last)


def without_tensor_sets(patch):
    real = Queue.schedule

    def release(self, request, step):
        status = real(self, request, step)
        request.release()
        return status

    patch(Queue, "schedule", release)


@rule("tensor sets are neither changed nor destroyed until the execution has completed")
def tensor_sets(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    with runtime.double.held(runtime.double.compute):
        for _ in range(3):
            last, _ = kernels.plus_one(lane, floats(runtime, 1.0, 2.0))
    finish(runtime, last)


def without_aliased_pair(patch):
    real = SetPair.fill

    def apart(self, inputs, outputs):
        other = ctypes.c_void_p()
        self._library.call("nrt_tensor_allocate", 0, 0, 8, None, ctypes.byref(other))
        real(self, inputs, [(name, other.value) for name, _ in outputs])

    patch(SetPair, "fill", apart)


@rule("what an execution updates in place is one tensor in both of its sets")
def aliased_pair(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    x = floats(runtime, 1.0, 2.0)
    finish(runtime, kernels.update_in_place(lane, x))
    assert value_of(runtime, lane, x) == [2.0, 3.0]


def without_tensors_of_sets(patch):
    patch(Sets, "clear", lambda self: None)


@rule("a tensor outlives the sets that name it")
def tensors_of_sets(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    last, _ = kernels.plus_one(lane, floats(runtime, 1.0, 2.0))
    finish(runtime, last)
    runtime._drop()
    gc.collect()
    assert runtime._memories[0].trim()


def without_models(patch):
    patch(NrtRuntime, "_queues", property(lambda self: ()))


@rule("a model is not unloaded, nor anything freed, under a request in flight")
def models(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    with runtime.double.held(runtime.double.compute):
        kernels.plus_one(lane, floats(runtime, 1.0, 2.0))
        runtime.close(0.01)


def without_memory_in_flight(patch):
    patch(Memory, "give_back", lambda self, block: self.closed or self._destroy(block))
    without_host_buffers(patch)


@rule("a tensor is not freed under a request in flight")
def memory_in_flight(runtime):
    lane, source, target = runtime.open_lane(0), torch.ones(2), view_of(runtime, 2)
    with runtime.double.held(runtime.double.write, queue=lane % 2):
        last = runtime.submit(lane, core().Copy(source, target))
        del target
        gc.collect()
        runtime._drop()
    finish(runtime, last)


# -- completion ------------------------------------------------------------------------------


def without_registered_first(patch):
    real = notice.Eventfds.open
    patch(notice.Eventfds, "open", lambda self, queue: None)

    def late(self, queue):
        if queue.fd < 0:
            real(self, queue)

    patch(notice.Eventfds, "arm", late)


@rule("a queue's eventfd is registered before its first request", abis=("2.30",))
def registered_first(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    finish(runtime, kernels.plus_one(lane, floats(runtime, 1.0, 2.0))[0])


def without_deregistered(patch):
    real = notice.Eventfds._register

    def register(self, queue, fd):
        if fd >= 0:
            real(self, queue, fd)

    patch(notice.Eventfds, "_register", register)


@rule("and deregistered before it is closed", abis=("2.30",))
def deregistered(runtime):
    registered_first(runtime)
    runtime.close()


def without_one_registration(patch):
    real = notice.Handles.arm

    def again(self, queue):
        self._asked.clear()
        queue.fd = -1
        real(self, queue)

    patch(notice.Handles, "arm", again)


@rule("a sequence is registered once", abis=("2.28",))
def one_registration(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    with runtime.double.held(runtime.double.compute):
        for _ in range(3):
            last, _ = kernels.plus_one(lane, floats(runtime, 1.0, 2.0))
    finish(runtime, last)


def without_looked_for(patch):
    patch(notice.Polling, "wait", lambda self, timeout: self._poll(timeout))
    patch(notice.Polling, "arm", lambda self, queue: None)
    patch(runtime_module, "LOOK_AGAIN", None)


@rule("completions are looked for where nothing signals them", abis=("2.29",))
def looked_for(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    with runtime.double.held(runtime.double.compute):
        last, _ = kernels.plus_one(lane, floats(runtime, 1.0, 2.0))
        threading.Timer(0.05, runtime.double.release, (0, runtime.double.compute, 0, -1)).start()
        runtime.wait(last, 1)


def without_closed_handles(patch):
    patch(notice, "os", SimpleNamespace(**{**vars(os), "close": lambda fd: None}))


@rule("completion handles are closed", abis=("2.28",))
def closed_handles(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    for _ in range(3):
        finish(runtime, kernels.plus_one(lane, floats(runtime, 1.0, 2.0))[0])
    runtime.close()


def without_many_waiters(patch):
    real = NrtRuntime.wait

    def register(self, ticket, timeout=None):
        for queue in self._queues:
            if queue.flight:
                self.library.nrta_event_register_seq_id_completion(queue.front, queue.fd)
        real(self, ticket, timeout)

    patch(NrtRuntime, "wait", register)


@rule("however many wait for it", abis=("2.30",))
def many_waiters(runtime):
    kernels, lane, woken = Kernels(runtime), runtime.open_lane(0), []
    with runtime.double.held(runtime.double.compute):
        last, _ = kernels.plus_one(lane, floats(runtime, 1.0, 2.0))

        def wait():
            runtime.wait(last, 30)
            woken.append(True)

        threads = [threading.Thread(target=wait) for _ in range(16)]
        for thread in threads:
            thread.start()
        before = runtime.double.count("registered")
    for thread in threads:
        thread.join()
    assert len(woken) == 16
    assert runtime.double.count("registered") == before == 1


CASES = [
    pytest.param(*case, abi, id=f"{case[3].__name__}-{abi}") for case in RULES for abi in case[1]
]


@pytest.fixture
def abi(request):
    return request.getfixturevalue("of_abi")


@pytest.mark.parametrize(("text", "abis", "kwargs", "scenario", "breaks_it", "of_abi"), CASES)
def test_it_holds(make, text, abis, kwargs, scenario, breaks_it, of_abi):
    runtime = make(**kwargs)
    scenario(runtime)
    runtime.close(5)
    assert runtime.double.violations() == [], text


@pytest.mark.parametrize(("text", "abis", "kwargs", "scenario", "breaks_it", "of_abi"), CASES)
def test_it_fails_without_its_guard(
    make, monkeypatch, text, abis, kwargs, scenario, breaks_it, of_abi
):
    without_unordered_lanes(monkeypatch.setattr)  # the net that would catch what the guard lets go
    breaks_it(monkeypatch.setattr)
    runtime = make(**kwargs)
    runtime.forgiven = True
    try:
        with pytest.raises((AssertionError, TimeoutError, ValueError)):  # noqa: PT012
            scenario(runtime)
            runtime.close(0.2)
            assert runtime.double.violations() == []
    finally:
        runtime.close(0.2)
