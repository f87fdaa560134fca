"""The nrt runtime from outside: chosen, tensors on it, many threads, failures, its end."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import neuron_streams
from neuron_streams._context import core
from neuron_streams._runtime import process
from neuron_streams._runtime.nrt.status import LibraryError, NrtError, Status
from neuron_streams._runtime.port import CancelledError
from neuron_streams.testing import Gate
from tests.runtime.nrt.conftest import Kernels, floats, read, view_of
from tests.runtime.nrt.doubled import Double, DoubleRuntime, payload


def test_the_environment_chooses_it(abi, monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_LIBNRT", Double(abi).path)
    runtime = process.create("nrt")
    assert (runtime.name, runtime.device_count(), runtime.library.abi.value) == ("nrt", 2, abi)
    assert runtime._in_flight == 4
    runtime.close()
    monkeypatch.setenv("NEURON_STREAMS_NRT_IN_FLIGHT", "2")
    runtime = process.create("nrt")
    assert runtime._in_flight == 2
    runtime.close()
    monkeypatch.setenv("NEURON_STREAMS_NRT_IN_FLIGHT", "many")
    with pytest.raises(ValueError, match="^NEURON_STREAMS_NRT_IN_FLIGHT='many' is no number"):
        process.create("nrt")


def test_a_machine_without_it_is_told_what_to_install(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_LIBNRT", "/nowhere/libnrt.so")
    with pytest.raises(LibraryError, match="install aws-neuronx-runtime-lib"):
        process.create("nrt")


def test_a_machine_without_a_core_is_told_what_to_install(abi):
    with pytest.raises(LibraryError, match="sees no Neuron core; install aws-neuronx-dkms"):
        DoubleRuntime(0, abi)


@pytest.fixture
def streams(make):
    """The stream namespace on memory that the host does not reach, as on hardware."""
    make(reachable=False)
    return neuron_streams


def test_tensors_come_and_go_by_commands(streams):
    x = torch.arange(6.0).reshape(2, 3)
    there = x.to("neuron")
    assert there.cpu().equal(x)
    assert there[1].cpu().equal(x[1])
    assert there.t().cpu().equal(x.t())
    assert there[1, 2].item() == 5.0
    there[0].copy_(torch.full((3,), 7.0))
    assert there.cpu().tolist() == [[7.0, 7.0, 7.0], [3.0, 4.0, 5.0]]
    out = there.to("cpu", non_blocking=True)
    neuron_streams.synchronize()
    assert out[0].tolist() == [7.0, 7.0, 7.0]
    assert there.to("neuron:1").cpu().equal(there.cpu())


def test_a_host_tensor_may_be_changed_behind_the_call(streams):
    x, stream = torch.ones(2), neuron_streams.Stream()
    with Gate(stream), neuron_streams.stream(stream):
        there = x.to("neuron")
        x.zero_()
    assert there.cpu().tolist() == [1.0, 1.0]


def loaded(streams, kernel, inputs, outputs, mutated=()):
    runtime = process.runtime()
    aliases = dict.fromkeys(mutated, "y")
    handle = runtime.load(payload(kernel, inputs, outputs, aliases=aliases), 0)
    forms = [[(torch.float32, (n,), (1,)) for n in x.values()] for x in (inputs, outputs)]
    return core().Loaded(kernel, forms[0], [] if mutated else forms[1], mutated, 0, handle).call


def test_executables_take_tensors_of_both_sides(streams):
    add = loaded(streams, "sum", {"a": 2, "b": 2}, {"y": 2})
    (made,) = add([torch.tensor([1.0, 2.0]).to("neuron"), torch.tensor([10.0, 20.0])])
    assert made.cpu().tolist() == [11.0, 22.0]


def test_an_executable_updates_in_place(streams):
    update = loaded(streams, "increment", {"x": 2}, {"y": 2}, mutated=[0])
    cache = torch.tensor([1.0, 2.0]).to("neuron")
    for _ in range(3):
        update([cache])
    assert cache.cpu().tolist() == [4.0, 5.0]


def test_streams_and_events_order_executables(streams):
    plus_one = loaded(streams, "increment", {"x": 2}, {"y": 2})
    a, b = neuron_streams.Stream(), neuron_streams.Stream()
    with neuron_streams.stream(a):
        (x,) = plus_one([torch.tensor([1.0, 2.0])])
        done = a.record_event()
    with neuron_streams.stream(b):
        b.wait_event(done)
        (y,) = plus_one([x])
        b.synchronize()
        assert done.query()
    assert y.cpu().tolist() == [3.0, 4.0]


def test_a_failure_is_raised_where_the_result_is_read(streams, abi):
    double = process.runtime().double
    plus_one = loaded(streams, "increment", {"x": 2}, {"y": 2})
    double.fail(0, double.compute, 0, 0, Status.EXEC_OOB)
    (x,) = plus_one([torch.ones(2)])
    (y,) = plus_one([x])
    with pytest.raises(NrtError, match=r"^increment: NRT_EXEC_OOB \(1006\)"):
        y.cpu()


def test_many_threads_submit_and_wait(runtime):
    kernels, results = Kernels(runtime), []

    def work(number):
        lane, view = runtime.open_lane(0), floats(runtime, float(number), 0.0)
        for _ in range(30):
            _, view = kernels.plus_one(lane, view)
        results.append((number, read(runtime, lane, view)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [(n, [n + 30.0, 30.0]) for n in range(8)]


class Script:
    """Random executions and copies on a few lanes and tensors, and the same done in order."""

    def __init__(self, runtime, seed):
        self.runtime, self.random = runtime, random.Random(seed)
        self.lanes = [runtime.open_lane(n % 2 * 0, priority=-n) for n in range(4)]
        self.kernels = Kernels(runtime)
        self.there = [floats(runtime, float(n), 1.0) for n in range(5)]
        self.expected = [torch.tensor([float(n), 1.0]) for n in range(5)]
        self.touched = [{"write": None, "reads": []} for _ in range(5)]

    def after(self, reads, writes):
        """The tickets that a command must come after: what the tracker of tensors says."""
        found = []
        for n in {*reads, *writes}:
            found.append(self.touched[n]["write"])
        for n in writes:
            found += self.touched[n]["reads"]
        return [ticket for ticket in found if ticket]

    def note(self, ticket, reads, writes):
        for n in reads:
            self.touched[n]["reads"].append(ticket)
        for n in writes:
            self.touched[n] = {"write": ticket, "reads": []}

    def step(self):
        pick, lane = self.random.randrange, self.random.choice(self.lanes)
        a, b, c = (pick(5) for _ in range(3))
        kind = self.random.choice(["add", "update", "write", "copy", "cast"])
        if kind == "add":
            reads, writes = [a, b], [c]
            ticket, made = self.kernels.add(
                lane, self.there[a], self.there[b], self.after(reads, [])
            )
            self.there[c], self.touched[c] = made, {"write": ticket, "reads": []}
            self.expected[c] = self.expected[a] + self.expected[b]
            self.note(ticket, {*reads} - {c}, [])
            return
        reads, writes = ([], [a]) if kind in ("update", "write", "cast") else ([b], [a])
        after = self.after(reads, writes)
        if kind == "update":
            ticket = self.kernels.update_in_place(lane, self.there[a], after)
            self.expected[a] = self.expected[a] + 1
        elif kind == "copy":
            command = core().Copy(self.there[b], self.there[a])
            ticket = self.runtime.submit(lane, command, after)
            self.expected[a] = self.expected[b].clone()
        else:
            values = torch.rand(2, dtype=torch.float64 if kind == "cast" else torch.float32)
            ticket = self.runtime.submit(lane, core().Copy(values, self.there[a]), after)
            self.expected[a] = values.float()
        self.note(ticket, reads, writes)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_gives_what_doing_it_in_order_gives(make, seed):
    runtime = make(in_flight=1 + seed % 5)
    runtime.double.set_depth(1 + seed % 3)
    runtime.double.set_latency(0, 300_000)
    runtime.double.refuse(0, runtime.double.compute, 0, seed % 4, Status.QUEUE_FULL)
    script = Script(runtime, seed)
    for _ in range(60):
        script.step()
    for n, view in enumerate(script.there):
        found = read(runtime, script.lanes[0], view, script.after([n], []))
        assert torch.tensor(found).equal(script.expected[n])


def test_closing_twice_and_using_it_after(runtime):
    runtime.close()
    runtime.close()
    with pytest.raises(RuntimeError, match="^the nrt runtime of neuron_streams is closed"):
        runtime.submit(runtime.open_lane(0), core().Marker())


def test_close_runs_what_can_run(runtime):
    kernels, lane = Kernels(runtime), runtime.open_lane(0)
    view = floats(runtime, 0.0, 1.0)
    for _ in range(20):
        last, view = kernels.plus_one(lane, view)
    runtime.close()
    assert runtime.completed(lane) == last.value
    assert runtime.failures(last) == ()


def test_close_in_flight_frees_nothing_and_wakes_all(runtime):
    kernels, lane, double = Kernels(runtime), runtime.open_lane(0), runtime.double
    with double.held(double.compute):
        tickets = [kernels.plus_one(lane, floats(runtime, 1.0, 2.0))[0] for _ in range(6)]
        runtime.close(0.01)
        runtime.wait(tickets[-1], 5)
    found = [failure.error for failure in runtime.failures(tickets[-1])]
    assert all(isinstance(error, CancelledError) for error in found)
    running = ["was still running" in str(error) for error in found]
    assert running == [True] * 4 + [False] * 2


def test_buffers_outlive_the_runtime(runtime):
    view = view_of(runtime, 2)
    runtime.close()
    del view  # the double finds nothing freed twice


PROGRAM = """
import faulthandler
faulthandler.dump_traceback_later(80, exit=True)
import torch
import neuron_streams
from neuron_streams._runtime import process
from tests.runtime.nrt.doubled import DoubleRuntime, payload
runtime = DoubleRuntime(1, {abi!r}, reachable=False)
neuron_streams.init(runtime=runtime)
{body}
"""
BODIES = {
    "idle": "torch.ones(2).to('neuron').cpu()",
    "in flight": """
double = runtime.double
runtime.forgiven = True
double.hold(0, double.compute, 0)
from tests.runtime.nrt.test_runtime import loaded
loaded(None, "increment", {"x": 2}, {"y": 2})([torch.ones(2)])
""",
    "a thread that waits in vain": """
import threading
from neuron_streams.testing import Gate
stream = neuron_streams.Stream()
gate = Gate(stream)
def wait():
    try:
        stream.synchronize()
    except RuntimeError as error:
        assert "The main thread has ended, nothing runs on the devices" in str(error)
threading.Thread(target=wait).start()
""",
    "a thread whose wait another one ends": """
import threading
import time
from neuron_streams.testing import Gate
stream = neuron_streams.Stream()
gate = Gate(stream)
def release():
    threading.main_thread().join()
    time.sleep(0.3)
    gate.open()
threading.Thread(target=stream.synchronize).start()
threading.Thread(target=release).start()
""",
}


@pytest.mark.parametrize("what", BODIES)
def test_the_process_ends(what):
    program = PROGRAM.format(abi="2.30", body=textwrap.dedent(BODIES[what]))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "VIOLATION" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fork_cannot_use_it(runtime):
    pid = os.fork()
    if pid == 0:
        try:
            runtime.close()
            neuron_streams.Stream()
        except RuntimeError as error:
            os._exit(0 if str(error).startswith("Cannot re-initialize neuron_streams") else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
