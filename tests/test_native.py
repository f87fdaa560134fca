"""The trial of native streams: on some that break one point of the contract each, and on ours."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

import neuron_streams
from neuron_streams import _native, doctor
from neuron_streams.testing import EmulatedRuntime, use_runtime


class Fake:
    """A module of native streams: lanes of a device that is a clock, and their knobs.

    A lane is the moment until which it is busy; an event holds the moment at which it completes.
    """

    def __init__(self, *, pool=None, enters=True, host_clock=False, moves=False, late=False):
        self.pool, self.enters, self.host_clock, self.moves = pool, enters, host_clock, moves
        self.late, self.made = late, 0
        fake = self

        class Stream:
            def __init__(self):
                fake.made += 1
                number = fake.made
                self.stream_id = number if fake.pool is None else number % fake.pool
                self.busy_until, self.waits = 0.0, []

            def __eq__(self, other):
                return self.stream_id == other.stream_id

            __hash__ = None

            def __enter__(self):
                self.before = fake.current
                if fake.enters:
                    fake.current = self

            def __exit__(self, *_):
                fake.current = self.before

            def wait_event(self, event):
                self.waits.append(event if fake.moves else event.done_at)

            def synchronize(self):
                waits = [w.done_at if fake.moves else w for w in self.waits]
                sleep_until(max([self.busy_until, *waits]))

        class Event:
            def __init__(self, enable_timing=False):
                self.done_at = self.recorded = 0.0

            def record(self, stream=None):
                stream = stream or fake.current
                self.recorded = time.perf_counter()
                self.done_at = max(stream.busy_until, self.recorded)

            def synchronize(self):
                sleep_until(self.done_at)

            def elapsed_time(self, end):
                name = "recorded" if fake.host_clock else "done_at"
                return (getattr(end, name) - getattr(self, name)) * 1e3

        self.Stream, self.Event = Stream, Event
        self.current = Stream()
        self.current.stream_id = -1
        self.default = self.current

    def stream(self, stream):
        before = self.current

        class Context:
            def __enter__(_):
                self.current = stream

            def __exit__(_, *__):
                self.current = before

        return Context()

    def current_stream(self):
        return self.current

    def default_stream(self):
        return self.default

    def synchronize(self):
        sleep_until(self.current.busy_until)

    def work(self, parts):
        start = max(self.current.busy_until, time.perf_counter())
        self.current.busy_until = start + parts * 0.001
        if self.late:
            raise MemoryError("no room")


def sleep_until(moment):
    time.sleep(max(moment - time.perf_counter(), 0.0))


def tried(**knobs):
    fake = Fake(**knobs)
    return _native.faults(fake, fake.work)


def test_streams_that_keep_the_contract_have_no_fault():
    assert tried() == []


def test_ours_have_none():
    with use_runtime(EmulatedRuntime(1)):

        def sleep(parts):
            for _ in range(parts):
                neuron_streams._sleep(2_000_000)

        assert _native.faults(neuron_streams, sleep) == []


BROKEN = {
    "new streams are not": {"pool": 3},
    "`with stream:` does not make it current": {"enters": False},
    "it is that of record()": {"host_clock": True},
    "moves a wait that was made before": {"moves": True},
    "could not be tried: MemoryError: no room": {"late": True},
}


@pytest.mark.parametrize("words", BROKEN)
def test_each_point_is_found_out(words):
    found = tried(**BROKEN[words])
    assert any(words in fault for fault in found)
    assert len(found) == (2 if "late" in BROKEN[words] else 1)


def test_a_stub_that_runs_nothing_is_not_taken_for_streams():
    fake = Fake()
    found = _native.faults(fake, lambda parts: None)
    assert [fault.partition(" could not be told")[0] for fault in found] == [
        "Whether elapsed time is that of completion",
        "Whether a second record leaves earlier waits alone",
    ]


@pytest.fixture
def native(monkeypatch):
    """Puts a module in the place of torch.neuron, as a native package would."""

    def put(module, work):
        monkeypatch.setattr(torch, "neuron", module)
        monkeypatch.setattr(_native, "_matmuls", work)
        return doctor.examine()

    return put


def test_the_doctor_says_that_this_can_go_when_it_can(native):
    fake = Fake()
    report = native(fake, fake.work)
    assert report.native_streams == doctor.KEPT
    assert (report.runtime, report.devices) == ("none", [])
    assert any("uninstall this" in line for line in report.advice)
    assert "torch.neuron is there, and its streams keep" in str(report)


@pytest.mark.parametrize("words", BROKEN)
def test_and_only_then(native, words):
    fake = Fake(**BROKEN[words])
    report = native(fake, fake.work)
    assert words in report.native_streams
    assert not any("uninstall" in line for line in report.advice)
    assert any("Keep this package" in line for line in report.advice)


def test_a_module_without_streams_is_none(native):
    report = native(SimpleNamespace(Stream=None), None)
    assert report.native_streams.startswith("torch.neuron is there, without Event, stream")
    assert not any("uninstall" in line for line in report.advice)
