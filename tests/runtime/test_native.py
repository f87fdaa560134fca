"""The native port: what is its alone. What all runtimes share is in tests/contract."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import neuron_streams
from neuron_streams._context import core
from neuron_streams._runtime.port import Ticket, Unit
from neuron_streams.testing import EmulatedRuntime, Gate, use_runtime
from tests.runtime.commands import Commands, call


@pytest.fixture
def runtime():
    with use_runtime(EmulatedRuntime(2)) as made:
        yield made


@pytest.fixture
def made(runtime):
    return Commands()


def view(buffer, dtype, *size, stride=(1,)):
    return core().View(buffer, dtype, size, stride)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: view(x.buffer, x.dtype, 2, stride=(2,)),
        lambda x: view(x.buffer, torch.int32, 2),
        lambda x: view(x.buffer, x.dtype, 1),
    ],
    ids=["strides", "another dtype", "broadcast"],
)
def test_copies_that_are_no_plain_bytes(runtime, made, make):
    source = make(made.floats(1.0, 2.0, 3.0, 4.0))
    out = torch.zeros(2)
    command = core().Copy(source, out)
    assert not command.quick
    runtime.wait(runtime.submit(runtime.open_lane(0), command))
    assert torch.equal(out, source.on_host().expand(2).to(torch.float32))


def test_small_copies_are_quick(made):
    small, large = made.floats(1.0, 2.0), view(made.buffer(1 << 18), torch.float32, 1 << 16)
    assert core().Copy(small, torch.zeros(2)).quick
    assert not core().Copy(large, large).quick


def test_a_copy_that_torch_refuses_fails(runtime, made):
    lane = runtime.open_lane(0)
    ticket = runtime.submit(lane, core().Copy(made.floats(1.0, 2.0), torch.zeros(3)))
    runtime.wait(ticket)
    (failure,) = runtime.failures(ticket)
    assert "size" in str(failure.error)
    assert (failure.ticket, failure.what) == (ticket, "copy")


def test_large_copies_run_beside_the_compute_unit(runtime, made):
    lanes = runtime.open_lane(0), runtime.open_lane(0)
    source = torch.arange(1 << 20, dtype=torch.int32)
    target = view(made.buffer(source.nbytes), torch.int32, 1 << 20)
    back = torch.zeros_like(source)
    busy = runtime.submit(lanes[0], core().Sleep(30.0))
    runtime.submit(lanes[1], core().Copy(source, target))
    runtime.wait(runtime.submit(lanes[1], core().Copy(target, back)), timeout=20)
    assert runtime.completed(busy.lane) < busy.value
    assert torch.equal(source, back)
    runtime.close(0.0)  # cuts the sleep short


def test_commands_in_python_run_beside_each_other_where_units_are_free(runtime):
    together = threading.Barrier(3, timeout=30)
    lanes = [runtime.open_lane(0), runtime.open_lane(0), runtime.open_lane(1)]
    units = [Unit.TENSOR_OP, Unit.TENSOR_OP, Unit.COMPUTE]
    work = [runtime.submit(x, call(together.wait, u)) for x, u in zip(lanes, units, strict=True)]
    for ticket in work:
        runtime.wait(ticket, timeout=30)
        assert runtime.failures(ticket) == ()


def test_a_unit_is_not_over_its_capacity_for_commands_in_python(runtime):
    inside, most, lock = [], [], threading.Lock()

    def enter():
        with lock:
            inside.append(None)
            most.append(len(inside))
        with lock:
            inside.pop()

    lanes = [runtime.open_lane(0) for _ in range(4)]
    work = [runtime.submit(lane, call(enter)) for lane in lanes for _ in range(10)]
    for ticket in work:
        runtime.wait(ticket)
    assert max(most) == 1


def test_what_has_completed_is_let_go_without_another_command(runtime, made):
    lane, before = runtime.open_lane(0), made.allocated()[0]
    source = made.floats(1.0)
    ticket = runtime.submit(lane, core().Copy(source, torch.zeros(1)))
    del source
    runtime.wait(ticket)
    gc.collect()
    assert made.allocated()[0] == before


def test_more_commands_than_a_device_may_have_outstanding(runtime):
    lane = runtime.open_lane(0)
    tickets = [runtime.submit(lane, core().Sleep(0.0)) for _ in range(3000)]
    runtime.wait(tickets[-1])
    assert runtime.completed(lane) == 3000


def test_a_device_that_waits_for_the_host_never_holds_it_up(runtime):
    gate = runtime.submit(runtime.open_lane(0, host=True), core().Pledge())
    lane = runtime.open_lane(0)
    runtime.submit(lane, core().Marker(), after=[gate])
    last = [runtime.submit(lane, core().Sleep(0.0)) for _ in range(1500)][-1]
    runtime.complete(gate)
    runtime.wait(last)


def test_lanes_by_the_thousand_leave_nothing(runtime):
    for _ in range(20):
        lanes = [runtime.open_lane(i % 2) for i in range(200)]
        for lane in lanes:
            runtime.submit(lane, core().Marker())
            runtime.close_lane(lane)
    kept = runtime.open_lane(0)
    for _ in range(4000):  # each looks after some of those that were closed
        runtime.close_lane(runtime.open_lane(0))
    assert len(runtime.lanes(0)) + len(runtime.lanes(1)) < 20
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
    ticket = runtime.submit(lane, core().Marker())
    runtime.close_lane(lane)
    runtime.open_lane(0)
    runtime.wait(Ticket(lane, 1 << 40))
    assert runtime.completed(lane) >= ticket.value
    with pytest.raises(RuntimeError, match="^submit: there is no lane"):
        runtime.submit(lane, core().Marker())


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
    with use_runtime(EmulatedRuntime(1)) as runtime:
        x = torch.zeros(8).to("neuron")
        with Gate():
            for _ in range(50):
                x = compiled["add one"](x)
        assert x.tolist() == [50.0] * 8
        names = [name for *_, name in runtime.busy_intervals()]
        assert names.count("add_one") == 50


def test_a_program_that_fails_says_why_and_poisons_what_follows(compiled, capfd):
    with use_runtime(EmulatedRuntime(1)):
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
    with use_runtime(EmulatedRuntime(2)):
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
exe = neuron_streams.compile(long, [torch.zeros(4000, 4000)], target=TARGET)
x = torch.zeros(4000, 4000).to("neuron")
for _ in range(3):
    x = exe(x)
print(time.monotonic(), flush=True)
"""


@pytest.mark.parametrize("target", ["cpu", "exported"])
def test_the_process_ends_with_an_execution_in_flight(target):
    for _ in range(int(os.environ.get("NEURON_STREAMS_EXITS", "1"))):
        done = subprocess.run(
            [sys.executable, "-c", EXIT.replace("TARGET", repr(target))],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=100,
            check=False,
        )
        over = time.monotonic()
        assert (done.returncode, done.stderr) == (0, "")
        assert over - float(done.stdout) < 10, "a second for the device, then a busy machine's time"


def test_waiters_leave_when_the_runtime_is_closed(runtime):
    gate = runtime.submit(runtime.open_lane(0, host=True), core().Pledge())
    lane, woken = runtime.open_lane(0), []
    ticket = runtime.submit(lane, core().Marker(), after=[gate])

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
