"""The system gives no more threads: an error at the submission, nothing lost, and then it goes on.

In each script `allow(n)` has the system give n threads more: by a pthread_create that counts, and
by RLIMIT_NPROC, as a user of its own where we are root, whom nothing limits.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from neuron_streams._runtime import toolchain
from tests.torch_backend import children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")

PRELUDE = """
import ctypes, os, resource, threading
import pytest
import torch
import neuron_streams
from neuron_streams.decode import DecodeEngine
from neuron_streams.testing import EmulatedRuntime, Gate
from tests.decode.harness import make_loop
from tests.decode.engines import limited, oracle

MANY, REFUSED = 1 << 30, "^can't start new thread: neuron:0 has none yet"
"""
START = """
core = neuron_streams._context.core()
runtime = EmulatedRuntime(2)
lane = runtime.open_lane(0)
"""
WAYS = {
    "a counting pthread_create": """
allow = ctypes.CDLL(os.environ["LD_PRELOAD"]).allow_threads
""",
    "RLIMIT_NPROC": """
hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
user = None
if os.getuid() == 0:
    user = 1_000_000 + os.getpid()  # of no other process
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
def allow(count):
    threads = len(os.listdir("/proc/self/task"))
    soft = 1 if count == 0 and user is None else min(threads + count, MANY)
    resource.setrlimit(resource.RLIMIT_NPROC, (soft if hard < 0 else min(soft, hard), hard))
""",
}

SCRIPTS = {
    "the first command of a device": """
allow(0)
with pytest.raises(RuntimeError, match=REFUSED):
    runtime.submit(lane, core.Sleep(0.0))
assert runtime.submitted(lane) == 0
runtime.wait(runtime.submit(lane, core.Marker()), 10)
allow(MANY)
runtime.wait(runtime.submit(lane, core.Sleep(0.0)), 10)
""",
    "one thread does the work of all units": """
allow(1)
lanes = [runtime.open_lane(0) for _ in range(8)]
last = [runtime.submit(lanes[i % 8], core.Sleep(0.0, i % 3)) for i in range(800)]
for ticket in last:
    runtime.wait(ticket, 10)
""",
    "others help when they can be had": """
allow(1)
runtime.wait(runtime.submit(lane, core.Sleep(0.0)), 10)
long = runtime.submit(lane, core.Sleep(60.0))
allow(MANY)
runtime.wait(runtime.submit(runtime.open_lane(0), core.Sleep(0.0, 1)), 10)
assert runtime.completed(lane) == 1
runtime.close(0.0)
""",
    "each device needs one of its own": """
allow(1)
runtime.wait(runtime.submit(lane, core.Sleep(0.0)), 10)
with pytest.raises(RuntimeError, match="neuron:1 has none yet"):
    runtime.submit(runtime.open_lane(1), core.Sleep(0.0))
""",
    "what becomes ready later finds the thread that the submission made sure of": """
gate = runtime.submit(runtime.open_lane(0, host=True), core.Pledge())
allow(1)
ticket = runtime.submit(lane, core.Sleep(0.0), [gate])
allow(0)
runtime.complete(gate)
runtime.wait(ticket, 10)
""",
    "a stream keeps its place and what it waits for": """
s = neuron_streams.Stream()
gate = Gate()
s.wait_stream(neuron_streams.current_stream())
allow(0)
with neuron_streams.stream(s):
    with pytest.raises(RuntimeError, match=REFUSED):
        neuron_streams._sleep(0)
    allow(MANY)
    neuron_streams._sleep(0)
assert not s.query()
gate.open()
s.synchronize()
""",
    "not once, but for long": """
x = torch.ones(3).to("neuron")
allow(0)
for _ in range(300):
    with pytest.raises(RuntimeError, match=REFUSED):
        x + 1
    assert neuron_streams.current_stream().query()
    neuron_streams.synchronize()
allow(MANY)
assert (x + 1).tolist() == [2.0] * 3
""",
    "once, and then each time again": """
for _ in range(20):
    runtime = EmulatedRuntime(1)
    lane = runtime.open_lane(0)
    allow(0)
    with pytest.raises(RuntimeError, match=REFUSED):
        runtime.submit(lane, core.Sleep(0.0))
    allow(MANY)
    runtime.wait(runtime.submit(lane, core.Sleep(0.0)), 10)
    runtime.close(1.0)
""",
    "a decode engine": """
loop, _, _ = make_loop(output_thread=True)
allow(0)
for _ in range(20):
    with pytest.raises(RuntimeError, match="can't start new thread"):
        DecodeEngine(loop)
allow(MANY)
with DecodeEngine(loop) as engine:
    stream = engine.add_request("a", [1], limited(3))
    assert [*stream.result(10).new_token_ids] == oracle([1], limited(3))
""",
    "an operator": """
x = torch.ones(3).to("neuron")
allow(0)
with pytest.raises(RuntimeError, match=REFUSED):
    x + 1
allow(MANY)
assert (x + 1).tolist() == [2.0] * 3
""",
}


# Of a user who is not root others' processes count, too, so that no number can be given.
COUNTS = os.getuid() == 0


def applies(way, script):
    return way != "RLIMIT_NPROC" or COUNTS or "allow(1)" not in script


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    path = tmp_path_factory.mktemp("shim") / "no_threads.so"
    source = Path(__file__).with_name("no_threads.c")
    toolchain.run([*toolchain.c_compiler(), "-shared", "-fPIC", str(source), "-o", str(path)])
    found = {}
    for way, allow in WAYS.items():
        scripts = {
            (way, name): START + allow + code
            for name, code in SCRIPTS.items()
            if applies(way, code)
        }
        preload = {"LD_PRELOAD": str(path)} if "LD_PRELOAD" in allow else {}
        found |= children.run(
            scripts, PRELUDE, 20.0, PYTHONPATH=os.pathsep.join(sys.path), **preload
        )
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_no_more_threads(ended, name, way):
    if not applies(way, SCRIPTS[name]):
        pytest.skip("a number of threads is given to a user without other processes")
    assert str(ended[way, name]) == "0: "
