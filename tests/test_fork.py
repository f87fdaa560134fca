"""The child of a fork: every call of streams, events and tensors raises the words of torch.cuda."""

from __future__ import annotations

import pytest

from tests.torch_backend import children

PRELUDE = """
import os, threading
import torch
import neuron_streams
from neuron_streams.testing import EmulatedRuntime, Gate
"""
STREAMS = """
s, e, other = neuron_streams.Stream(), neuron_streams.Event(), neuron_streams.Stream()
x, pinned = torch.ones(2).to("neuron"), torch.ones(2).pin_memory()
gate = Gate(s)
e.record(s)
other.wait_event(e)
with neuron_streams.stream(other):
    y = x + 1
runtime = neuron_streams._context.context().runtime
last = other._state.ticket()
"""
CALLS = """
calls = dict(
    current=neuron_streams.current_stream, stream=neuron_streams.Stream, query=s.query,
    event=e.synchronize, seen=e.query, read=y.tolist, item=lambda: y[0].item(), add=lambda: y + 1,
    device=neuron_streams.synchronize, record=lambda: e.record(s), wait=lambda: s.wait_event(e),
    enter=s.__enter__, wait_stream=lambda: s.wait_stream(s), copy=lambda: x.copy_(x),
    to_host=lambda: pinned.copy_(x, non_blocking=True), to_device=lambda: x.copy_(pinned),
    gate=gate.open, other=other.synchronize, flush=other.query, mark=other.record_event,
    port_wait=lambda: runtime.wait(last), port_seen=lambda: runtime.completed(last.lane),
    port_lane=lambda: runtime.open_lane(0), port_drain=runtime.drain,
    port_room=lambda: runtime.wait_for_room(last.lane), port_lanes=lambda: runtime.lanes(0),
    memory=neuron_streams.memory_allocated, generator=lambda: torch.rand(2, device="neuron"),
)
if runtime.name == "manual":  # it has no threads to miss
    calls = {name: call for name, call in calls.items() if not name.startswith("port_")}
assert not neuron_streams.is_initialized()
assert neuron_streams._is_in_bad_fork()
for name, call in calls.items():
    try:
        call()
    except RuntimeError as error:
        assert "Cannot re-initialize neuron_streams in forked subprocess" in str(error), name
    else:
        raise AssertionError(name)
runtime.close()
del s, e, x, y, pinned, other, gate
"""


def forked(setup, child, parent):
    indented = child.replace("\n", "\n    ")
    return f"""{setup}
child = os.fork()
if child == 0:
    {indented}
else:
    assert os.waitpid(child, 0)[1] == 0
    {parent}
"""


SCRIPTS = {
    "after the first use": (
        forked(STREAMS, CALLS, "gate.open(); print(y.tolist(), flush=True)"),
        "[2.0, 2.0]\n",
    ),
    "while a thread waits and others submit": (
        forked(
            STREAMS
            + """
stopping = threading.Event()
def submit():
    with neuron_streams.stream(neuron_streams.Stream()):
        while not stopping.is_set():
            (x + 1).to("cpu", non_blocking=True)
threads = [threading.Thread(target=submit) for _ in range(4)]
threads.append(threading.Thread(target=e.synchronize))
for thread in threads:
    thread.start()
""",
            CALLS,
            "stopping.set(); gate.open(); print(y.tolist(), flush=True)",
        ),
        "[2.0, 2.0]\n",
    ),
    "the manual runtime": (
        forked(
            "os.environ['NEURON_STREAMS_RUNTIME'] = 'manual'" + STREAMS,
            CALLS,
            "gate.open(); print(y.tolist(), flush=True)",
        ),
        "[2.0, 2.0]\n",
    ),
    "before the first use": (
        """
child = os.fork()
neuron_streams.current_stream().synchronize()
assert torch.ones(2).to("neuron").tolist() == [1.0, 1.0]
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("both", flush=True)
""",
        "both\n",
    ),
    "while another thread makes the first use": (
        """
from neuron_streams._runtime import extension, process
locked, stopping = threading.Event(), threading.Event()
def hold():
    with process._lock, extension._loading, neuron_streams._context._lock:
        locked.set()
        stopping.wait()
threading.Thread(target=hold).start()
locked.wait()
child = os.fork()
if child == 0:
    assert torch.ones(2).to("neuron").tolist() == [1.0, 1.0]
else:
    assert os.waitpid(child, 0)[1] == 0
    stopping.set()
    print("both", flush=True)
""",
        "both\n",
    ),
}


@pytest.fixture(scope="module")
def ended():
    return children.run({name: code for name, (code, _) in SCRIPTS.items()}, PRELUDE, 20.0)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_fork(ended, name):
    assert str(ended[name]) == "0: " + SCRIPTS[name][1]
