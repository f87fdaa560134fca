"""Pinned memory from loaders and factories, and what is copied from it."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import neuron_streams
from neuron_streams.testing import Gate
from tests.torch_backend.device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="pins for the device")

DATA = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))


@pytest.mark.filterwarnings("ignore:.*pin_memory_device.*deprecated")
@pytest.mark.parametrize("options", [{}, {"pin_memory_device": DEVICE}])
def test_a_loader_pins(options):
    batches = list(DataLoader(DATA, batch_size=3, pin_memory=True, **options))
    assert all(x.is_pinned() and y.is_pinned() for x, y in batches)
    moved = torch.cat([x.to(DEVICE, non_blocking=True) for x, _ in batches])
    assert moved.flatten().tolist() == list(range(12))


def test_a_loader_with_workers():
    loader = DataLoader(DATA, batch_size=2, num_workers=1, pin_memory=True)
    batches = [(x.is_pinned(), y.to(DEVICE).tolist()) for x, y in loader]
    assert batches == [(True, [0, 1]), (True, [2, 3]), (True, [4, 5])]


PINNED = {
    "pin_memory()": lambda: torch.ones(4).pin_memory(),
    "empty": lambda: torch.empty(4, pin_memory=True).fill_(1),
    "ones": lambda: torch.ones(4, pin_memory=True),
    "tensor": lambda: torch.tensor([1.0] * 4, pin_memory=True),
    "full": lambda: torch.full((4,), 1.0, pin_memory=True),
    "empty_strided": lambda: torch.empty_strided((4,), (1,), pin_memory=True).fill_(1),
    "ones_like": lambda: torch.ones_like(torch.empty(4), pin_memory=True),
    "new_ones": lambda: torch.empty(1).new_ones(4, pin_memory=True),
    "a copy to the host": lambda: torch.ones(4, device=DEVICE).to("cpu", non_blocking=True),
}


@pytest.mark.parametrize("name", PINNED)
def test_pinned(name):
    x = PINNED[name]()
    neuron_streams.synchronize()
    assert x.is_pinned()
    assert x[1:].is_pinned()
    assert x.device.type == "cpu"
    assert x.tolist() == [1.0] * 4
    assert not torch.ones(4).is_pinned()


def test_a_copy_from_pinned_memory_does_not_wait():
    host = torch.ones(4).pin_memory()
    with Gate() as gate:
        x = host.to(DEVICE, non_blocking=True)
        done = neuron_streams.current_stream().record_event()
        assert not done.query()
        host.fill_(2)  # a fault of the program on CUDA, too: the copy has not run
        gate.open()
        assert x.tolist() == [2.0] * 4


def test_a_pinned_tensor_that_is_dropped_lives_until_the_copy_has_run():
    with Gate() as gate:
        x = torch.ones(1 << 16).pin_memory().to(DEVICE, non_blocking=True)
        for _ in range(8):
            torch.zeros(1 << 16).pin_memory()
        gate.open()
        assert x.eq(1).all()


@pytest.mark.parametrize("how", ["data", "set_", "resize_", "del"])
def test_the_host_end_of_a_copy_lives_until_it_has_run(how):
    with Gate() as gate:
        host = torch.ones(4096, device=DEVICE).to("cpu", non_blocking=True)
        if how == "data":
            host.data = torch.zeros(4)
        elif how == "set_":
            host.set_(torch.zeros(4))
        elif how == "resize_":
            host.resize_(1 << 20)
        else:
            del host
        gate.open()
        neuron_streams.synchronize()
