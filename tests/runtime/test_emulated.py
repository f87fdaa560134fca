"""Which workers play the device, and that they say so."""

from __future__ import annotations

import logging

import pytest

from neuron_streams._runtime.worker.library import why_not
from neuron_streams.testing import EmulatedRuntime

needs_native = pytest.mark.skipif(why_not() is not None, reason=f"no native worker: {why_not()}")


def made(**kwargs):
    runtime = EmulatedRuntime(1, **kwargs)
    runtime.close(0.0)
    return runtime


@needs_native
def test_the_native_worker_is_used_where_a_compiler_is(monkeypatch, caplog):
    monkeypatch.setenv("NEURON_STREAMS_WORKER", "auto")
    with caplog.at_level(logging.INFO, "neuron_streams"):
        assert made().worker == "native"
    assert "the workers of the emulated runtime are native" in caplog.text


@pytest.mark.parametrize("worker", [pytest.param("native", marks=needs_native), "python"])
def test_the_environment_chooses(monkeypatch, worker):
    monkeypatch.setenv("NEURON_STREAMS_WORKER", worker)
    runtime = made()
    assert (runtime.worker, runtime.why) == (worker, f"NEURON_STREAMS_WORKER={worker}")


def test_an_argument_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_WORKER", "native")
    assert made(worker="python").worker == "python"


def test_without_a_compiler_python_does_the_work(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_COMPILER", "none")
    monkeypatch.setenv("NEURON_STREAMS_WORKER", "auto")
    runtime = made()
    assert (runtime.worker, runtime.why) == ("python", "there is no C compiler")
    with pytest.raises(RuntimeError, match="^the native worker cannot be had: there is no C"):
        made(worker="native")


def test_an_unknown_worker_is_refused(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_WORKER", "rust")
    with pytest.raises(ValueError, match="^NEURON_STREAMS_WORKER='rust' names no worker"):
        made()
