"""The interpreter's end: threads that outlive the main thread, and waits in vain."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from neuron_streams import _exit
from tests.torch_backend import children


class Waiting:
    """A thread inside a last wait, until `go_on` is called; `act(function)` has it call one."""

    def __init__(self, stuck, daemon=False):
        self.stuck = stuck
        self._asked, self._answered, self._question = (
            threading.Semaphore(0),
            threading.Semaphore(0),
            None,
        )
        self.thread = threading.Thread(target=self._wait, daemon=daemon)
        self.thread.start()
        self._answered.acquire()

    def _wait(self):
        with _exit.LastWait(lambda: self.stuck) as last:
            self._answered.release()
            while True:
                self._asked.acquire()
                if self._question is None:
                    return
                self.answer = last.in_vain()
                self._answered.release()

    def in_vain(self):
        self._question = True
        self._asked.release()
        self._answered.acquire()
        return self.answer

    def go_on(self):
        self._question = None
        self._asked.release()
        self.thread.join()


@pytest.fixture
def waiting(monkeypatch):
    """Makes threads that wait; no other thread of the test run counts."""
    made, before = [], set(threading.enumerate())
    keepers = _exit._keepers
    monkeypatch.setattr(_exit, "_keepers", lambda: [t for t in keepers() if t not in before])

    def make(stuck=True, daemon=False):
        made.append(Waiting(stuck, daemon))
        return made[-1]

    yield make
    for each in made:
        if each.thread.is_alive():
            each.go_on()
    assert _exit._waits == {}


def test_the_only_thread_waits_in_vain(waiting):
    assert waiting().in_vain()


def test_what_the_device_will_bring_is_not_waited_for_in_vain(waiting):
    assert not waiting(stuck=False).in_vain()


def test_another_thread_that_is_busy_may_bring_it(waiting):
    busy = threading.Event()
    thread = threading.Thread(target=busy.wait)
    thread.start()
    try:
        assert not waiting().in_vain()
    finally:
        busy.set()
        thread.join()


def test_another_thread_whose_wait_will_end_may_bring_it(waiting):
    one, other = waiting(), waiting(stuck=False)
    assert not one.in_vain()
    other.stuck = True
    assert one.in_vain()
    one.go_on()
    assert other.in_vain()


def test_a_daemon_thread_brings_nothing_and_gives_up_nothing(waiting):
    daemon = waiting(stuck=False, daemon=True)
    assert waiting().in_vain()
    daemon.stuck = True
    assert not daemon.in_vain()


def test_patience_with_a_busy_thread_ends_and_starts_again_where_something_came(
    waiting, monkeypatch
):
    now = [100.0]
    monkeypatch.setattr(_exit, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waiting(stuck=False)
    one = waiting()
    assert not one.in_vain()
    now[0] += _exit.PATIENCE_SECONDS - 1
    assert not one.in_vain()
    one.stuck = False
    assert not one.in_vain()
    one.stuck = True
    now[0] += 2
    assert not one.in_vain()
    now[0] += _exit.PATIENCE_SECONDS
    assert one.in_vain()


def test_what_only_seems_stuck_is_waited_for_with_patience(monkeypatch):
    now, seems = [100.0], [True]
    monkeypatch.setattr(_exit, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with _exit.LastWait(lambda: False, lambda: seems[0]) as last:
        assert not last.in_vain()
        now[0] += _exit.PATIENCE_SECONDS
        assert last.in_vain()
        seems[0] = False
        assert not last.in_vain()


def test_the_main_thread_has_not_ended():
    assert not _exit.main_thread_has_ended()


# -- processes ----------------------------------------------------------------------------------

HELD = """
s = neuron_streams.Stream()
gate = Gate(s)
with neuron_streams.stream(s):
    x = torch.ones(8).to("neuron")
    out = torch.empty(8, device="neuron").copy_(x)
    done = s.record_event()
"""
REFUSED = """
def refused(wait):
    try:
        wait()
    except RuntimeError as error:
        if "The main thread has ended, nothing runs" in str(error):
            return
    os._exit(7)
"""

ENDS = {
    "threads that wait behind a closed gate": HELD
    + REFUSED
    + """
for wait in (done.synchronize, s.synchronize, out.tolist, neuron_streams.synchronize):
    threading.Thread(target=refused, args=[wait]).start()
""",
    "a thread that waits behind a closed gate, beside one that is busy": HELD
    + REFUSED
    + """
from neuron_streams import _exit
_exit.PATIENCE_SECONDS = 0.2
thread = threading.Thread(target=refused, args=[done.synchronize])
thread.start()
threading.Thread(target=thread.join).start()
""",
    "an executor with a thread that waits behind a closed gate": HELD
    + REFUSED
    + """
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor(1).submit(refused, done.synchronize)
""",
    "an exit function that waits behind a closed gate": HELD
    + REFUSED
    + """
import atexit
atexit.register(refused, done.synchronize)
""",
}

INTERRUPTED = """
neuron_streams._sleep(50_000_000_000)
done = neuron_streams.current_stream().record_event()
threading.Thread(target=done.synchronize).start()
def interrupt():
    threading.main_thread().join()
    time.sleep(0.5)  # until it waits for the thread: CPython may lose a signal right before
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
"""

OUTLIVES = (
    HELD
    + """
def work():
    threading.main_thread().join()
    first = neuron_streams._exit.main_thread_has_ended()
    gate.open()
    done.synchronize()
    with neuron_streams.stream(neuron_streams.Stream()):
        neuron_streams._sleep(300_000_000)
        y = torch.arange(3.0).to("neuron")
        neuron_streams.current_stream().record_event().synchronize()
    print(first, out.tolist(), y.tolist())
threading.Thread(target=work).start()
"""
)

OUTLIVES_UNUSED = """
def work():
    threading.main_thread().join()
    print(torch.ones(2).to("neuron").tolist())
threading.Thread(target=work).start()
"""

OPENS = (
    HELD
    + """
def wait():
    done.synchronize()
    print(out.tolist())
def open_later():
    time.sleep(0.5)
    gate.open()
threading.Thread(target=wait).start()
threading.Thread(target=open_later).start()
"""
)

EXECUTOR = """
from concurrent.futures import ThreadPoolExecutor
def work(number):
    neuron_streams._sleep(10_000_000)
    neuron_streams.current_stream().synchronize()
    print(number, torch.ones(1).to("neuron").tolist(), flush=True)
pool = ThreadPoolExecutor(1)
neuron_streams.current_stream()
for number in range(3):
    pool.submit(work, number)
"""

AT_EXIT = """
import atexit
def save():
    print(x.tolist(), torch.ones(1).to("neuron").tolist())
atexit.register(save)
x = torch.zeros(1).to("neuron")
"""

SAYS = {
    "a thread that outlives the main thread works on": (
        OUTLIVES,
        f"True {[1.0] * 8} [0.0, 1.0, 2.0]\n",
    ),
    "the first use comes when the main thread has ended": (OUTLIVES_UNUSED, "[1.0, 1.0]\n"),
    "a thread opens the gate that another waits for": (OPENS, f"{[1.0] * 8}\n"),
    "an executor has jobs when the main thread ends": (EXECUTOR, "0 [1.0]\n1 [1.0]\n2 [1.0]\n"),
    "an exit function uses the device": (AT_EXIT, "[0.0] [1.0]\n"),
}


PRELUDE = """
import os, signal, sys, threading, time
import torch
import neuron_streams
from neuron_streams.testing import Gate
"""


@pytest.fixture(scope="module")
def ended():
    says = {name: code for name, (code, _) in SAYS.items()}
    return children.run({**ENDS, **says, "interrupted": INTERRUPTED}, PRELUDE, 20.0)


@pytest.mark.parametrize("name", ENDS)
def test_the_process_ends(ended, name):
    assert str(ended[name]) == "0: "


@pytest.mark.parametrize("name", SAYS)
def test_the_process_says(ended, name):
    assert str(ended[name]) == "0: " + SAYS[name][1]


def test_an_interrupt_ends_what_threads_keep_the_process_for(ended):
    code, out, err = ended["interrupted"]
    assert (code, out) == (0, "")
    assert "KeyboardInterrupt" in err
    assert "synchronize" not in err, "the thread that the exit overtook says nothing"
