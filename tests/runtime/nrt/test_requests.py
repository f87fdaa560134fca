"""Copies of every kind, executions on views: the right bytes on the right queue."""

from __future__ import annotations

import itertools

import pytest
import torch

from neuron_streams._context import core
from neuron_streams._runtime.nrt.requests import _model_of, block_of
from neuron_streams.testing import ManualRuntime
from tests.runtime.nrt.conftest import Kernels, buffer_of, floats, read, view_of


def memory(runtime, tensor, device=0):
    """A device copy of a host tensor, as a contiguous view."""
    whole = tensor.contiguous()
    view = core().View(buffer_of(tensor.nbytes, device), whole.dtype, whole.shape, whole.stride())
    view.on_host().copy_(whole)
    return view


def windows():
    """Ways to look at 24 elements: size, stride, offset."""
    yield (24,), (1,), 0
    yield (2, 3, 4), (12, 4, 1), 0
    yield (4, 6), (1, 4), 0
    yield (3, 4), (8, 1), 0
    yield (5,), (2,), 3
    yield (), (), 7
    yield (2, 0), (1, 1), 0
    yield (2, 3), (0, 1), 4


def all_of(runtime, lane, buffer):
    return read(runtime, lane, core().View(buffer, torch.float32, (24,), (1,)))


@pytest.mark.parametrize("window", [*windows()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["same", "cast"])
def test_copies_between_host_and_device(runtime, window, dtype):
    size, stride, offset = window
    there = torch.arange(24.0)
    view = core().View(memory(runtime, there).buffer, torch.float32, size, stride, offset)
    lane, out = runtime.open_lane(0), torch.zeros(size, dtype=dtype)
    runtime.wait(runtime.submit(lane, core().Copy(view, out)), 30)
    assert out.equal(there.as_strided(size, stride, offset).to(dtype))
    if 0 in stride:
        return  # nothing writes to memory that overlaps itself
    values = torch.rand(size, dtype=dtype)
    runtime.wait(runtime.submit(lane, core().Copy(values, view)), 30)
    expected = there.clone()
    expected.as_strided(size, stride, offset).copy_(values)
    assert all_of(runtime, lane, view.buffer) == expected.tolist()


@pytest.mark.parametrize("devices", [(0, 0), (0, 1), (1, 0)], ids=str)
def test_copies_between_devices_and_layouts(runtime, devices):
    lane = runtime.open_lane(devices[1])
    for one, other in itertools.product([((4, 6), (6, 1)), ((4, 6), (1, 4))], repeat=2):
        for dtype in (torch.float32, torch.int32):
            source = torch.arange(24, dtype=dtype)
            target = torch.zeros(24)
            there = memory(runtime, source, devices[0])
            here = memory(runtime, target, devices[1])
            a = core().View(there.buffer, dtype, *one)
            b = core().View(here.buffer, torch.float32, *other)
            runtime.wait(runtime.submit(lane, core().Copy(a, b)), 30)
            target.as_strided(*other).copy_(source.as_strided(*one))
            assert all_of(runtime, lane, here.buffer) == target.tolist()


def test_a_copy_that_broadcasts(runtime):
    lane, view = runtime.open_lane(0), memory(runtime, torch.zeros(24))
    rows = core().View(view.buffer, torch.float32, (4, 6), (6, 1))
    runtime.wait(runtime.submit(lane, core().Copy(torch.arange(6.0), rows)), 30)
    assert all_of(runtime, lane, view.buffer) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] * 4


def test_a_host_tensor_of_conjugates_or_strides(runtime):
    lane, view = runtime.open_lane(0), view_of(runtime, 4)
    complex_view = core().View(view.buffer, torch.complex64, (2,), (1,))
    values = torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex64).conj()
    runtime.wait(runtime.submit(lane, core().Copy(values, complex_view)), 30)
    assert read(runtime, lane, view) == [1.0, -2.0, 3.0, -4.0]
    out = torch.zeros(8)[::2]
    runtime.wait(runtime.submit(lane, core().Copy(view, out)), 30)
    assert out.tolist() == [1.0, -2.0, 3.0, -4.0]


def test_a_host_copy_needs_no_device(runtime):
    out = torch.zeros(2)
    runtime.wait(runtime.submit(runtime.open_lane(0), core().Copy(torch.ones(2), out)), 30)
    assert out.tolist() == [1.0, 1.0]
    assert runtime.statistics.scheduled == 0


def test_an_execution_reads_a_window_of_a_buffer(runtime):
    lane, kernels = runtime.open_lane(0), Kernels(runtime)
    four = floats(runtime, 1.0, 2.0, 3.0, 4.0)
    back = core().View(four.buffer, torch.float32, (2,), (1,), 2)
    _, made = kernels.plus_one(lane, back)
    assert read(runtime, lane, made) == [4.0, 5.0]


def test_each_lane_keeps_to_one_queue_of_a_unit(runtime):
    lanes = [runtime.open_lane(0) for _ in range(4)]
    for lane in lanes * 2:
        read(runtime, lane, floats(runtime, 1.0))
    ran = [record.queue for record in runtime.double.history()]
    assert ran == [lane % 2 for lane in lanes * 2]


def failure_of(runtime, lane, command):
    ticket = runtime.submit(lane, command)
    runtime.wait(ticket, 30)
    (failure,) = runtime.failures(ticket, ticket.value - 1)
    return failure.error


def test_tensors_of_another_core_are_refused(runtime):
    kernels = Kernels(runtime)
    far, out = floats(runtime, 1.0, 2.0, device=1), view_of(runtime, 2)
    error = failure_of(
        runtime, runtime.open_lane(0), core().Execute(kernels.increment, [far], [out])
    )
    assert str(error).startswith("it was submitted to neuron:0 and a tensor of it is on neuron:1")
    assert out.buffer.failure.error is error
    error = failure_of(
        runtime, runtime.open_lane(1), core().Execute(kernels.increment, [far], [far])
    )
    assert str(error).startswith("execute: it is loaded on neuron:0 and was submitted to neuron:1")


def test_a_handle_of_another_runtime_is_refused(runtime):
    class Foreign:
        name = "foreign"

    with pytest.raises(TypeError, match="Foreign was not loaded by the nrt runtime"):
        _model_of(core().Execute(Foreign(), [], []), 0)


def test_a_buffer_of_another_runtime_is_refused():
    port = core().ForeignPort(ManualRuntime(1))
    with pytest.raises(ValueError, match="^a buffer of another runtime"):
        block_of(port.allocate(0, 8), 0)


def test_a_sleep_keeps_its_unit(runtime):
    lane, other, kernels = runtime.open_lane(0), runtime.open_lane(0), Kernels(runtime)
    runtime.submit(lane, core().Sleep(0.05))
    ticket, _ = kernels.plus_one(other, floats(runtime, 1.0, 2.0))
    assert runtime.statistics.scheduled == 0
    runtime.wait(ticket, 30)
    assert runtime.completed(lane) == 1, "it was over first"
    names = [interval[4] for interval in runtime.busy_intervals()]
    assert names == ["sleep", "execute"]
