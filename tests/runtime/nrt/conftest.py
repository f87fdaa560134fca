"""Runtimes on the double of libnrt, of each ABI; closed behind the test, with no violation."""

from __future__ import annotations

import pytest
import torch

from neuron_streams._context import context, core, replace
from tests.runtime.nrt.doubled import ABIS, DoubleRuntime, payload


@pytest.fixture(params=ABIS)
def abi(request):
    return request.param


@pytest.fixture
def make(abi):
    """Makes runtimes of the ABI."""
    made = []

    def make_one(**kwargs):
        made.append(DoubleRuntime(abi=abi, **kwargs))
        replace(made[-1])
        return made[-1]

    yield make_one
    for runtime in made:
        for device in range(2):
            for unit in {runtime.double.read, runtime.double.write, runtime.double.copy}:
                runtime.double.release(device, unit, 0, -1)
                runtime.double.release(device, unit, 1, -1)
            runtime.double.release(device, runtime.double.compute, 0, -1)
        replace(None)
        runtime.close(5.0)


@pytest.fixture
def runtime(make):
    return make()


def buffer_of(nbytes, device=0):
    """Fresh device memory."""
    return context().port.allocate(device, nbytes)


def view_of(runtime, n, device=0):
    """Fresh device memory for n floats."""
    return core().View(buffer_of(4 * n, device), torch.float32, (n,), (1,))


def floats(runtime, *values, device=0):
    view = view_of(runtime, len(values), device)
    view.on_host().copy_(torch.tensor(values))
    return view


class Kernels:
    """Executions of the double's kernels on views of n floats."""

    def __init__(self, runtime, n=2, device=0, time=0):
        self.runtime, self.n, self.device = runtime, n, device
        self.increment = runtime.load(payload("increment", {"x": n}, {"y": n}, time), device)
        self.sum = runtime.load(payload("sum", {"a": n, "b": n}, {"y": n}, time), device)
        self.update = runtime.load(
            payload("increment", {"x": n}, {"y": n}, time, aliases={0: "y"}), device
        )

    def run(self, lane, handle, *views, after=(), name="execute"):
        """Submit; the ticket, and the view of the output."""
        made = view_of(self.runtime, self.n, self.device)
        command = core().Execute(handle, views, [made], name=name)
        return self.runtime.submit(lane, command, after), made

    def plus_one(self, lane, view, after=()):
        return self.run(lane, self.increment, view, after=after)

    def add(self, lane, one, other, after=()):
        return self.run(lane, self.sum, one, other, after=after)

    def update_in_place(self, lane, view, after=()):
        return self.runtime.submit(lane, core().Execute(self.update, [view], [], [0]), after)


def read(runtime, lane, view, after=()):
    """The view's values, once all that the lane has is done."""
    out = torch.zeros(view.size, dtype=view.dtype)
    runtime.wait(runtime.submit(lane, core().Copy(view, out), after), 30)
    return out.tolist()
