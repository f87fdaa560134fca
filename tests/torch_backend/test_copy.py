"""Copies between the host and devices, and what waits for what."""

from __future__ import annotations

import pickle

import pytest
import torch

import neuron_streams
from neuron_streams.testing import Gate, ManualRuntime, use_runtime


@pytest.fixture(autouse=True, params=["normal", "inference", "no_grad"])
def mode(request):
    neuron_streams.init()
    modes = {"inference": torch.inference_mode, "no_grad": torch.no_grad}
    with modes.get(request.param, torch.enable_grad)():
        yield request.param


def test_a_round_trip_keeps_values_shape_and_dtype(mode):
    for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
        x = torch.tensor([[0, 1], [1, 0]]).to(dtype)
        y = x.to("neuron")
        assert (y.shape, y.dtype, y.device) == (x.shape, dtype, torch.device("neuron:0"))
        assert torch.equal(y.cpu(), x)
        assert torch.equal(y.to("cpu"), x)


def test_reading_values(mode):
    x = torch.tensor([3]).to("neuron")
    assert x.item() == 3
    assert x.tolist() == [3]
    assert int(x) == 3
    assert x.numpy(force=True).tolist() == [3]
    with pytest.raises(TypeError, match="^can't convert neuron:0 device type tensor to numpy"):
        x.numpy()


def test_the_second_device(mode):
    x = torch.arange(3).to("neuron:1")
    assert x.device == torch.device("neuron:1")
    assert x.get_device() == 1
    y = x.to("neuron:0")
    assert y.device == torch.device("neuron:0")
    assert y.tolist() == [0, 1, 2]
    assert x.to("neuron:1") is x


def test_strides_and_offsets_of_the_host_tensor_do_not_matter(mode):
    x = torch.arange(12).reshape(3, 4).t()[1:, ::2]
    assert torch.equal(x.to("neuron").cpu(), x)


def test_a_copy_casts(mode):
    x = torch.empty(2, device="neuron")
    x.copy_(torch.tensor([1, 2]))
    assert x.tolist() == [1.0, 2.0]
    out = torch.zeros(2, dtype=torch.int64)
    out.copy_(x)
    assert out.tolist() == [1, 2]


def test_reading_waits_for_its_own_ticket_only(mode):
    with use_runtime(ManualRuntime()):
        x, y = torch.ones(2).to("neuron"), torch.empty(2, device="neuron")
        y.copy_(x)
        busy = neuron_streams.Stream()
        with Gate(busy):
            assert y.tolist() == [1.0, 1.0]
            assert not busy.query()


def test_a_tensor_as_the_target_of_to_means_its_device(mode):
    there = torch.arange(4.0).to("neuron:1")
    for made in (torch.ones(4).to(there), there.to(there), torch.ones(4).type_as(there)):
        assert made.device == torch.device("neuron:1")
    assert there.to(there) is there
    assert torch.ones(2, dtype=torch.int64).to(there).dtype == torch.float32


def test_to_with_copy_is_another_tensor(mode):
    x = torch.arange(4.0).to("neuron:1")
    y = x.to("neuron:1", copy=True)
    assert y is not x
    assert y.device == x.device
    assert y.tolist() == x.tolist()


def test_a_copy_of_the_wrong_shape_is_refused_at_the_call(mode):
    x = torch.zeros(4).to("neuron")
    x.copy_(torch.ones(4))
    for wrong in (torch.ones(3), torch.ones(3).to("neuron")):
        with pytest.raises(RuntimeError, match="must match the existing size"):
            x.copy_(wrong)
    assert x.tolist() == [1.0] * 4
    x.copy_(torch.tensor(3.0))
    assert x.tolist() == [3.0] * 4


def test_tensors_from_values(mode):
    assert torch.tensor([1, 2], device="neuron").tolist() == [1, 2]
    assert torch.tensor([1.5], device="neuron:1").device == torch.device("neuron:1")


def test_layouts_survive_a_round_trip(mode):
    x = torch.arange(6.0).view(2, 3).t()
    assert x.to("neuron").cpu().stride() == x.stride()
    y = torch.zeros(1, 2, 3, 4).to("neuron").cpu(memory_format=torch.channels_last)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_a_pickle_holds_values_and_device(mode):
    x = pickle.loads(pickle.dumps(torch.arange(3).to("neuron:1")))
    assert x.device == torch.device("neuron:1")
    assert x.tolist() == [0, 1, 2]


def test_a_move_to_another_device_keeps_the_gradient():
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones(3, requires_grad=True)
        there = leaf.to("neuron").to("neuron:1")
        assert (there.requires_grad, there.device) == (True, torch.device("neuron:1"))
        (there.cpu() * torch.arange(3.0)).sum().backward()
        assert leaf.grad.tolist() == [0.0, 1.0, 2.0]
        with torch.no_grad():
            assert not leaf.to("neuron").to("neuron:1").requires_grad


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # as on two GPUs
def test_the_gradient_of_a_move_takes_the_streams_of_the_way_there(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_IMPLICIT_WAITS", "0")
    with use_runtime(ManualRuntime(2)), torch.inference_mode(False), torch.enable_grad():
        here, there = neuron_streams.Stream(0), neuron_streams.Stream(1)
        x = torch.ones(2).to("neuron:0").requires_grad_()
        with neuron_streams.stream(here), neuron_streams.stream(there):
            y = x.to("neuron:1")
            grad = torch.zeros(2).to("neuron:1")
            grad.copy_(torch.ones(2).pin_memory().to("neuron:1", non_blocking=True))
            y.backward(grad)
        with neuron_streams.stream(here):
            out = x.grad.to("cpu", non_blocking=True)
        here.synchronize()
        assert out.tolist() == [1.0, 1.0]


def test_modules_move_between_devices():
    linear = torch.nn.Linear(2, 2)
    weight = linear.weight.detach().clone()
    for device in ("neuron", "neuron:1", "neuron:0", "neuron:1", "cpu"):
        linear.to(device)
        assert linear.weight.device == torch.device("neuron:0" if device == "neuron" else device)
        assert linear.weight.requires_grad
        assert torch.equal(linear.weight.detach().cpu(), weight)


def test_a_number_is_formatted_as_one(mode):
    x = torch.tensor(1.256).to("neuron")
    assert (f"{x:.2f}", f"{x}") == ("1.26", str(torch.tensor(1.256).item()))
    y = torch.ones(2).to("neuron")
    assert f"{y}" == repr(y)
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{y:.2f}"


def test_a_host_read_waits_for_nothing_else_on_its_own_stream(mode):
    with use_runtime(ManualRuntime()):
        x = torch.ones(2).to("neuron")
        with Gate():
            assert x.tolist() == [1.0, 1.0]
            assert not neuron_streams.current_stream().query()


def test_pageable_memory_is_read_at_the_call_and_pinned_memory_by_the_stream(mode):
    with use_runtime(ManualRuntime()):
        pageable, pinned = torch.ones(2), torch.ones(2).pin_memory()
        first, second = (torch.zeros(2, device="neuron") for _ in range(2))
        with Gate():
            first.copy_(pageable, non_blocking=True)
            second.copy_(pinned, non_blocking=True)
            pageable.fill_(9)
            pinned.fill_(9)
        assert first.tolist() == [1.0, 1.0]
        assert second.tolist() == [9.0, 9.0]


def test_pinned_memory_is_written_by_the_stream(mode):
    with use_runtime(ManualRuntime()):
        x, out = torch.ones(2).to("neuron"), torch.zeros(2).pin_memory()
        with Gate():
            out.copy_(x, non_blocking=True)
            there = x.to("cpu", non_blocking=True)
            assert out.tolist() == [0.0, 0.0]
        neuron_streams.synchronize()
        assert out.tolist() == there.tolist() == [1.0, 1.0]
        assert there.is_pinned()


def test_memory_that_a_copy_names_stays_what_it_was(mode):
    with use_runtime(ManualRuntime()), torch.inference_mode(False):
        x, out = torch.ones(2).to("neuron"), torch.zeros(2).pin_memory()
        seen = out.numpy()
        with Gate():
            out.copy_(x, non_blocking=True)
            out.data = torch.zeros(3)
            x.data = torch.zeros(3, device="neuron")
        neuron_streams.synchronize()
        assert seen.tolist() == [1.0, 1.0]
        assert (out.tolist(), x.tolist()) == ([0.0] * 3, [0.0] * 3)


def test_between_devices_the_streams_of_both_take_part(mode):
    with use_runtime(ManualRuntime()) as runtime:
        here, there = neuron_streams.Stream(0), neuron_streams.Stream(1)
        x = torch.ones(2).to("neuron:0")
        with Gate(here), neuron_streams.stream(here), neuron_streams.stream(there):
            y = x.to("neuron:1")
            with neuron_streams.stream(here):
                x.zero_()
            runtime.run()
            assert not there.query()
        assert y.tolist() == [1.0, 1.0]
        neuron_streams.synchronize(0)
        assert x.tolist() == [0.0, 0.0]
