"""From first use to the end of the process: threads, fork, and exit with work pending."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
import torch

import neuron_streams
from neuron_streams._context import context
from neuron_streams.testing import EmulatedRuntime, Gate, use_runtime

PRELUDE = """
import os, signal, sys, threading
import torch
import neuron_streams
from neuron_streams.testing import Gate
"""


# Runs each script in a fork of a process that has imported everything and used nothing: the time
# of a scenario is its own. The child leaves by the end of the program, as any script does.
DRIVER = """
import gc, json, tempfile, time
gc.collect()
gc.freeze()  # a child that ends need not look at all of torch again
scenarios = json.load(sys.stdin)
results = []
for code in scenarios:
    files = [tempfile.mkstemp()[0] for _ in range(3)]
    child = os.fork()
    if child == 0:
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        def over():
            os.write(files[2], str(time.time()).encode())
        exec(compile(code, "scenario", "exec"), {**globals(), "over": over})
        break
    status = os.waitpid(child, 0)[1]
    now = time.time()
    out, err, last = (os.pread(file, 1 << 16, 0).decode() for file in files)
    results.append([status, out, err, now - float(last or "nan")])
else:
    json.dump(results, sys.stdout)
"""


def python(script, seconds=200.0, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=seconds,
        check=False,
    )


HELD = """
s = neuron_streams.Stream()
gate = Gate(s)
with neuron_streams.stream(s):
    x = torch.ones(8).to("neuron")
    out = torch.empty(8, device="neuron").copy_(x)
    done = s.record_event()
"""
NOW = "over()\n"

ENDS = {
    "nothing used": NOW,
    "long work running": "neuron_streams._sleep(30_000_000_000)\n" + NOW,
    "a daemon thread that waits behind a closed gate": HELD
    + "threading.Thread(target=done.synchronize, daemon=True).start()\n"
    + NOW,
    "a daemon thread that submits": HELD
    + """
def submit():
    while True:
        with neuron_streams.stream(s):
            s.record_event(neuron_streams.Event(enable_timing=True))
threading.Thread(target=submit, daemon=True).start()
"""
    + NOW,
    "a signal handler": HELD
    + """
def leave(*_):
    over()
    sys.exit(0)
signal.signal(signal.SIGALRM, leave)
signal.setitimer(signal.ITIMER_REAL, 0.05)
done.synchronize()
""",
}


ENDS["the manual runtime"] = "os.environ['NEURON_STREAMS_RUNTIME'] = 'manual'\n" + HELD + NOW

FORK = """
s, e = neuron_streams.Stream(), neuron_streams.Event()
e.record(s)
x = torch.ones(2).to("neuron")
child = os.fork()
if child == 0:
    calls = dict(
        current=neuron_streams.current_stream, stream=neuron_streams.Stream, query=s.query,
        wait=e.synchronize, read=x.tolist, device=neuron_streams.synchronize,
        record=lambda: e.record(s), wait_event=lambda: s.wait_event(e),
        wait_stream=lambda: s.wait_stream(s), copy=lambda: x.copy_(x),
    )
    assert not neuron_streams.is_initialized()
    assert neuron_streams._is_in_bad_fork()
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            assert "Cannot re-initialize neuron_streams in forked subprocess" in str(error)
        else:
            raise AssertionError(name)
    del s, e, x
else:
    assert os.waitpid(child, 0)[1] == 0
    s.synchronize()
    print(x.tolist(), flush=True)
"""

FORK_BEFORE = """
child = os.fork()
assert torch.ones(2).to("cpu").tolist() == [1.0, 1.0]
neuron_streams.current_stream().synchronize()
assert torch.ones(2).to("neuron").tolist() == [1.0, 1.0]
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("both", flush=True)
"""

FIRST_USE = """
barrier, found = threading.Barrier(16), []
def first():
    barrier.wait()
    found.append(neuron_streams.current_stream())
threads = [threading.Thread(target=first) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found), len({id(s) for s in found}), len({s._state.lane for s in found}))
"""

SPEAKS = {
    "a fork after the first use raises in the child": (FORK, "[1.0, 1.0]\n"),
    "a fork before the first use is fine": (FORK_BEFORE, "both\n"),
    "first use from many threads starts one runtime": (FIRST_USE, "16 1 1\n"),
}


@pytest.fixture(scope="module")
def outcomes():
    scripts = {**ENDS, **{name: code for name, (code, _) in SPEAKS.items()}}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + DRIVER],
        input=json.dumps(list(scripts.values())),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(scripts, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", ENDS)
def test_the_process_ends(outcomes, name):
    status, _, err, seconds = outcomes[name]
    assert (status, err) == (0, "")
    usual = outcomes["nothing used"][3]  # torch takes its time, too
    assert seconds < usual + 2.0, "the process ends within two seconds"


@pytest.mark.parametrize("name", SPEAKS)
def test_the_process_says(outcomes, name):
    status, out, err, _ = outcomes[name]
    assert (status, out, err) == (0, SPEAKS[name][1], "")


def test_torch_logs_shows_the_log():
    done = python(PRELUDE + HELD + "gate.open()", TORCH_LOGS="+neuron_streams")
    assert done.returncode == 0
    assert "runtime emulated" in done.stderr
    assert "submit Copy" in done.stderr


def test_a_launch_blocks_where_the_environment_asks_for_it(monkeypatch):
    monkeypatch.setenv("NEURON_LAUNCH_BLOCKING", "1")
    with use_runtime(EmulatedRuntime(1)) as runtime:
        s = neuron_streams.Stream()
        with neuron_streams.stream(s):
            neuron_streams._sleep(1_000_000)
        assert runtime.completed(s._state.lane) == runtime.submitted(s._state.lane) == 1


def test_dropping_a_stream_with_work_pending_returns_and_the_work_is_done(monkeypatch):
    with use_runtime(EmulatedRuntime(1)) as runtime:
        s = neuron_streams.Stream()
        gate = Gate(s)
        with neuron_streams.stream(s):
            x = neuron_streams.current_stream().record_event(
                neuron_streams.Event(enable_timing=True)
            )
        del s
        assert len(runtime.lanes(0)) == 1
        assert not x.query()
        gate.open()
        x.synchronize()


def test_threads_submit_record_wait_and_query_at_once():
    with use_runtime(EmulatedRuntime(2)):
        streams = [neuron_streams.Stream(device=i % 2) for i in range(4)]
        events = [neuron_streams.Event() for _ in range(4)]
        wrong = []

        def work(number):
            s, neighbour = streams[number], events[(number + 1) % 4]
            try:
                for _ in range(300):
                    with neuron_streams.stream(s):
                        neuron_streams._sleep(0)
                        events[number].record()
                        s.wait_event(neighbour)
                        neighbour.query()
                    if number == 0:
                        neighbour.synchronize()
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(2):
            neuron_streams.synchronize(index)
        assert wrong == []
        assert all(s.query() for s in streams)


WAITS = {
    "a stream": lambda s, e, x: s.synchronize(),
    "an event": lambda s, e, x: e.synchronize(),
    "a device": lambda s, e, x: neuron_streams.synchronize(),
    "a tensor": lambda s, e, x: x.tolist(),
    "a copy": lambda s, e, x: torch.empty(2).copy_(x),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_holds_neither_the_gil_nor_a_lock(name):
    with use_runtime(EmulatedRuntime(1)):
        s, done, entered = neuron_streams.Stream(), [], threading.Event()
        gate = Gate(s)
        with neuron_streams.stream(s):
            x = torch.empty(2, device="neuron").copy_(torch.ones(2).to("neuron"))
            e = s.record_event()

        def wait():
            entered.set()
            WAITS[name](s, e, x)
            done.append(name)

        thread = threading.Thread(target=wait)
        thread.start()
        assert entered.wait(10)
        for _ in range(200):
            with neuron_streams.stream(s):
                neuron_streams._sleep(0)
                s.record_event(neuron_streams.Event(enable_timing=True))
            s.wait_stream(neuron_streams.default_stream())
            assert not s.query()
            assert not e.query()
        assert neuron_streams.Stream().query()
        assert done == []
        gate.open()
        thread.join(30)
        assert done == [name]


def test_a_device_is_waited_for_while_streams_come_and_go():
    before, wrong = sys.getswitchinterval(), []

    def work():
        try:
            for _ in range(100):
                streams = [neuron_streams.Stream() for _ in range(10)]
                for s in streams:
                    with neuron_streams.stream(s):
                        neuron_streams._sleep(0)
                neuron_streams.synchronize()
        except Exception as error:
            wrong.append(error)

    with use_runtime(EmulatedRuntime(1)):
        threads = [threading.Thread(target=work) for _ in range(4)]
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
        neuron_streams.synchronize()
    assert wrong == []


def test_two_threads_wait_for_each_other():
    with use_runtime(EmulatedRuntime(1)):
        a, b = neuron_streams.Stream(), neuron_streams.Stream()
        gates = Gate(a), Gate(b)
        ea, eb = a.record_event(), b.record_event()
        seen = []

        def wait(mine, other):
            mine.open()
            other.synchronize()
            seen.append(other.query())

        threads = [
            threading.Thread(target=wait, args=pair) for pair in zip(gates, (eb, ea), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert seen == [True, True]


def threads():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted by /proc")
def test_no_thread_is_left_behind():
    before = threads()
    runtime = EmulatedRuntime(2)
    with use_runtime(runtime):
        neuron_streams._sleep(0)
        neuron_streams.synchronize()
        assert context().runtime is runtime
        assert threads() > before
    assert threads() <= before
