"""The contract suite runs on every runtime, and on torch.cuda where there is a GPU."""

from __future__ import annotations

import functools

import pytest
import torch

import neuron_streams
from neuron_streams.testing import EmulatedRuntime, Gate, ManualRuntime, use_runtime
from tests.runtime.nrt.doubled import ABIS, unsteady

RUNTIMES = {
    "manual": ManualRuntime,
    "emulated": EmulatedRuntime,
}


DOUBLES = {f"nrt-{abi}": functools.partial(unsteady, abi, seed) for seed, abi in enumerate(ABIS, 7)}


@pytest.fixture(params=[*RUNTIMES, *DOUBLES])
def runtime(request):
    """A runtime, for the tests of the port."""
    with use_runtime({**RUNTIMES, **DOUBLES}[request.param](devices=2)) as made:
        yield made


@pytest.fixture(
    params=[
        *RUNTIMES,
        "manual-explicit",
        "emulated-explicit",
        "manual-side",
        "emulated-side",
        *DOUBLES,
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def streams(request, monkeypatch):
    """The stream namespace: ours on each runtime, implicit waits on and off, or torch.cuda.

    On "side" another stream than the default one is current from the start (row S38 of
    docs/reports.md), on both devices: a test that means the default stream says so.
    """
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU here")
        yield torch.cuda
        torch.cuda.synchronize()
        return
    kind, how = request.param, ""
    if kind not in DOUBLES:
        kind, _, how = kind.partition("-")
    if how == "explicit":
        monkeypatch.setenv("NEURON_STREAMS_IMPLICIT_WAITS", "0")
    with use_runtime({**RUNTIMES, **DOUBLES}[kind](devices=2)):
        for index in (1, 0) if how == "side" else ():
            neuron_streams.set_stream(neuron_streams.Stream(index))
        yield neuron_streams


@pytest.fixture
def device(streams):
    return "cuda" if streams is torch.cuda else "neuron"


@pytest.fixture
def hold(streams):
    """`hold(stream)` keeps a stream busy; calling what it returns lets it go on."""
    gates = []

    def hold_stream(stream):
        if streams is torch.cuda:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000_000)
            return lambda: None
        gates.append(Gate(stream))
        return gates[-1].open

    yield hold_stream
    for gate in gates:
        gate.open()
