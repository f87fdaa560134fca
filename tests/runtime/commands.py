"""Commands for tests of the port: executables in Python that note when they ran, views, pledges."""

from __future__ import annotations

import torch

from neuron_streams._context import context, core
from neuron_streams._runtime.port import Unit


class Handle:
    """Runs a function as an executable without inputs; it may raise."""

    name = "handle"

    def __init__(self, action=lambda: None):
        self.action = action

    def run(self, inputs):
        self.action()
        return []


class Recorder:
    """A handle that notes when it ran, adds one to its inputs, and fails on demand."""

    name = "recorder"

    def __init__(self, log, label, error=None, action=None):
        self.log, self.label, self.error, self.action = log, label, error, action

    def run(self, inputs):
        self.log.append(self.label)
        if self.action is not None:
            self.action()
        if self.error is not None:
            raise self.error
        return [x + 1 for x in inputs] or [torch.zeros(2)]


def call(action=lambda: None, unit=Unit.COMPUTE, name="call"):
    """A command that runs a function of Python."""
    return core().Execute(Handle(action), [], [], [], unit, name)


def view_of(buffer, n=2, offset=0):
    return core().View(buffer, torch.float32, (n,), (1,), offset)


class Commands:
    """Commands and memory for the runtime of the process."""

    def __init__(self):
        self.runtime = context().runtime
        self.port = context().port

    def buffer(self, nbytes=8, device=0):
        return self.port.allocate(device, nbytes)

    def allocated(self, device=0):
        """Bytes that live on a device, and the count of all that was freed."""
        counts = core().counts(device)["bytes"]
        return counts["current"], counts["freed"]

    def floats(self, *values, device=0):
        view = view_of(self.buffer(4 * len(values), device), len(values))
        view.on_host().copy_(torch.tensor(values))
        return view

    def execute(self, log, label, inputs=(), outputs=(), unit=Unit.COMPUTE, mutated=(), **how):
        """Runs a `Recorder`; buffers stand for views of two floats."""
        views = [view_of(x) for x in outputs or [self.buffer()]]
        return core().Execute(Recorder(log, label, **how), inputs, views, mutated, unit)

    def pledge(self, device=0):
        lane = self.runtime.open_lane(device, host=True)
        return self.runtime.submit(lane, core().Pledge())
