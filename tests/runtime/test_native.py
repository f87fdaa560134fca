"""The workers in C: what is theirs alone. What all runtimes share is in tests/contract."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

import neuron_streams
from neuron_streams._runtime.cpu import tensor_of
from neuron_streams._runtime.port import (
    Buffer,
    Copy,
    Execute,
    Marker,
    Pledge,
    Sleep,
    Ticket,
    Unit,
    View,
)
from neuron_streams._runtime.worker.library import why_not
from neuron_streams.testing import EmulatedRuntime, Gate, use_runtime

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no native worker: {why_not()}")


@pytest.fixture
def runtime():
    made = EmulatedRuntime(2, worker="native")
    yield made
    made.close(5.0)


def view(runtime, *values, dtype=torch.float32, device=0):
    made = runtime.allocate(device, len(values) * dtype.itemsize)
    made.fill(torch.tensor(values, dtype=dtype))
    return View(made, dtype, (len(values),), (1,))


class Calls:
    """A handle that only Python can run."""

    name = "calls"

    def __init__(self, action):
        self.action = action

    def run(self, inputs):
        self.action()
        return []


def calls(action, unit=Unit.COMPUTE):
    return Execute(Calls(action), (), (), unit=unit)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: View(x.buffer, x.dtype, (2,), (2,)),  # strides
        lambda x: View(x.buffer, torch.int32, (2,), (1,)),  # another dtype
    ],
)
def test_copies_that_are_no_plain_bytes_are_made_by_python(runtime, make):
    source = make(view(runtime, 1.0, 2.0, 3.0, 4.0))
    out = torch.zeros(2)
    runtime.wait(runtime.submit(runtime.open_lane(0), Copy(source, out)))
    assert out.tolist() == tensor_of(source).tolist()


def test_a_copy_tells_autograd_that_the_target_changed(runtime):
    out = torch.zeros(2)
    before = out._version
    runtime.wait(runtime.submit(runtime.open_lane(0), Copy(view(runtime, 1.0, 2.0), out)))
    assert out._version > before


def test_a_copy_that_python_refuses_fails_as_elsewhere(runtime):
    lane = runtime.open_lane(0)
    ticket = runtime.submit(lane, Copy(view(runtime, 1.0, 2.0), torch.zeros(3)))
    runtime.wait(ticket)
    assert "size" in str(runtime.failures(ticket)[0].error)


def test_large_copies_run_beside_the_compute_unit(runtime):
    lanes = runtime.open_lane(0), runtime.open_lane(0)
    source = torch.arange(1 << 20, dtype=torch.int32)
    there = runtime.allocate(0, source.nbytes)
    target = View(there, torch.int32, (1 << 20,), (1,))
    back = torch.zeros_like(source)
    busy = runtime.submit(lanes[0], Sleep(30.0))
    runtime.submit(lanes[1], Copy(source, target))
    runtime.wait(runtime.submit(lanes[1], Copy(target, back)), timeout=20)
    assert runtime.completed(busy.lane) < busy.value
    assert torch.equal(source, back)
    runtime.close(0.0)  # cuts the sleep short


def test_commands_for_python_run_beside_each_other_where_units_are_free(runtime):
    together = threading.Barrier(3, timeout=30)
    lanes = [runtime.open_lane(0), runtime.open_lane(0), runtime.open_lane(1)]
    units = [Unit.TENSOR_OP, Unit.TENSOR_OP, Unit.COMPUTE]
    work = [runtime.submit(x, calls(together.wait, u)) for x, u in zip(lanes, units, strict=True)]
    for ticket in work:
        runtime.wait(ticket, timeout=30)
        assert runtime.failures(ticket) == ()


def test_a_unit_is_not_over_its_capacity_for_commands_of_python(runtime):
    inside, most, lock = [], [], threading.Lock()

    def enter():
        with lock:
            inside.append(None)
            most.append(len(inside))
        with lock:
            inside.pop()

    lanes = [runtime.open_lane(0) for _ in range(4)]
    work = [runtime.submit(lane, calls(enter)) for lane in lanes for _ in range(10)]
    for ticket in work:
        runtime.wait(ticket)
    assert max(most) == 1


def test_what_has_completed_is_let_go_without_another_command(runtime):
    lane, source = runtime.open_lane(0), view(runtime, 1.0)
    gone = weakref.ref(source.buffer)
    ticket = runtime.submit(lane, Copy(source, torch.zeros(1)))
    del source
    runtime.wait(ticket)
    gc.collect()
    assert gone() is None


def test_more_commands_than_a_device_may_have_outstanding(runtime):
    lane = runtime.open_lane(0)
    tickets = [runtime.submit(lane, Sleep(0.0)) for _ in range(3000)]
    runtime.wait(tickets[-1])
    assert runtime.completed(lane) == 3000


def test_a_device_that_waits_for_the_host_never_holds_it_up(runtime):
    gate = runtime.submit(runtime.open_lane(0, host=True), Pledge())
    lane = runtime.open_lane(0)
    runtime.submit(lane, Marker(), after=[gate])
    last = [runtime.submit(lane, Sleep(0.0)) for _ in range(1500)][-1]
    runtime.complete(gate)
    runtime.wait(last)


def test_lanes_by_the_thousand_leave_nothing(runtime):
    for _ in range(20):
        lanes = [runtime.open_lane(i % 2) for i in range(200)]
        for lane in lanes:
            runtime.submit(lane, Marker())
            runtime.close_lane(lane)
    kept = runtime.open_lane(0)
    for _ in range(4000):  # each looks after some of those that were closed
        runtime.close_lane(runtime.open_lane(0))
    workers = runtime._workers
    assert len(workers._lanes) < 20
    assert len(workers._commands) < 20
    assert kept in runtime.lanes(0)


def test_numbers_of_lanes_are_never_given_out_twice(runtime):
    seen = set()
    for _ in range(500):
        lane = runtime.open_lane(0)
        assert lane not in seen
        seen.add(lane)
        runtime.close_lane(lane)


def test_a_lane_that_is_forgotten_has_completed(runtime):
    lane = runtime.open_lane(0)
    ticket = runtime.submit(lane, Marker())
    runtime.close_lane(lane)
    runtime.open_lane(0)
    runtime.wait(Ticket(lane, 1 << 40))
    assert runtime.completed(lane) >= ticket.value
    with pytest.raises(KeyError):
        runtime.submit(lane, Marker())


def test_buffers_without_words_of_c_go_through_python(runtime):
    plain = Buffer(0, 8)
    source = View(plain, torch.float32, (2,), (1,))
    tensor_of(source).copy_(torch.tensor([3.0, 4.0]))
    out = torch.zeros(2)
    runtime.wait(runtime.submit(runtime.open_lane(0), Copy(source, out)))
    assert out.tolist() == [3.0, 4.0]


def lookup(table, index):
    return table[index]


def add_one(x):
    return x + 1


@pytest.fixture(scope="module")
def compiled():
    table, index = torch.arange(8.0), torch.tensor([1, 2])
    with use_runtime(EmulatedRuntime(1)):
        if neuron_streams.compile(add_one, [table]).target != "cpu":
            pytest.skip("no C++ compiler here")
        return {
            "lookup": neuron_streams.compile(lookup, [table, index]),
            "add one": neuron_streams.compile(add_one, [table]),
        }


def test_a_chain_of_executables_never_comes_back_to_python(compiled):
    with use_runtime(EmulatedRuntime(1, worker="native")) as runtime:
        x = torch.zeros(8).to("neuron")
        with Gate():
            for _ in range(50):
                x = compiled["add one"](x)
            assert x._view.buffer.storage is None
        assert x.tolist() == [50.0] * 8
        assert [item[4] for item in runtime.busy_intervals()].count("add_one") == 50


def test_a_program_that_fails_says_why_and_poisons_what_follows(compiled, capfd):
    with use_runtime(EmulatedRuntime(1, worker="native")):
        table = torch.arange(8.0).to("neuron")
        bad = compiled["lookup"](table, torch.tensor([1, 99]))
        good = compiled["lookup"](table, torch.tensor([1, 2]))
        with pytest.raises(RuntimeError, match="lookup: .*out of bounds"):
            bad.tolist()
        with pytest.raises(RuntimeError, match="lookup: .*out of bounds"):
            neuron_streams.synchronize()
        assert good.tolist() == [1.0, 2.0]
    capfd.readouterr()  # the library says it on stderr, too


def test_an_input_that_another_device_still_makes(compiled):
    with use_runtime(EmulatedRuntime(2, worker="native")):
        with Gate():
            y = compiled["add one"](torch.zeros(8).to("neuron"))
            z = y.to("neuron:1")
            with neuron_streams.device(1):
                out = compiled["add one"](z)
        assert out.tolist() == [2.0] * 8


EXIT = """
import time, torch, neuron_streams
torch.set_num_threads(1)
def long(x):
    for _ in range(4):
        x = x @ x
    return x
exe = neuron_streams.compile(long, [torch.zeros(4000, 4000)])
x = torch.zeros(4000, 4000).to("neuron")
for _ in range(3):
    x = exe(x)
runtime = neuron_streams.context.context().runtime
print(runtime.worker, time.monotonic(), flush=True)
"""


@pytest.mark.parametrize("worker", ["native", "python"])
def test_the_process_ends_with_an_execution_in_flight(worker):
    for _ in range(int(os.environ.get("NEURON_STREAMS_EXITS", "1"))):
        done = subprocess.run(
            [sys.executable, "-c", EXIT],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NEURON_STREAMS_WORKER": worker},
            timeout=100,
            check=False,
        )
        over = time.monotonic()
        used, last = done.stdout.split()
        assert (done.returncode, done.stderr, used) == (0, "", worker)
        assert over - float(last) < 10, "a second for the device, the rest for a busy machine"


def test_waiters_leave_when_the_runtime_is_closed(runtime):
    gate = runtime.submit(runtime.open_lane(0, host=True), Pledge())
    lane, woken = runtime.open_lane(0), []
    ticket = runtime.submit(lane, Marker(), after=[gate])

    def wait():
        with contextlib.suppress(TimeoutError):
            runtime.wait(ticket, timeout=30)
        woken.append(runtime.completed(lane))

    threads = [threading.Thread(target=wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    runtime.close(0.0)
    for thread in threads:
        thread.join(30)
    assert woken == [1] * 5
