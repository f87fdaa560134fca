"""What CUDA programs name of their device module: there, or a sentence when it is used."""

import importlib

import pytest
import torch

import neuron_streams
from tests.torch_backend.device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="the device's module")


def test_submodules_are_imported_by_name():
    for name in ("amp", "comm", "nvtx"):
        module = importlib.import_module(f"neuron_streams.{name}")
        assert getattr(neuron_streams, name) is module
    from neuron_streams.amp import GradScaler, autocast

    assert issubclass(GradScaler, torch.amp.GradScaler)
    assert issubclass(autocast, torch.amp.autocast)


def test_autocast_and_scaler_are_of_this_device():
    with neuron_streams.amp.autocast(dtype=torch.bfloat16):
        x = torch.ones(2, 2, device=DEVICE)
        assert (x @ x).dtype is torch.bfloat16
        assert torch.nn.functional.softmax(x @ x, -1).dtype is torch.float32
    assert torch.is_autocast_enabled(DEVICE) is False
    assert torch.get_autocast_dtype(DEVICE) is torch.float16
    scaler = neuron_streams.amp.GradScaler(init_scale=8.0)
    assert scaler.scale(torch.ones(1, device=DEVICE)).tolist() == [8.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cast_lists_are_as_on_cuda(dtype):
    x = torch.ones(3, 3, device=DEVICE)
    half = x.to(dtype)
    with torch.autocast(DEVICE, dtype=dtype):
        lower = [x @ x, torch.nn.functional.linear(x, x), torch.einsum("ab,bc", x, x), x.mv(x[0])]
        full = [half.exp(), half.sum(), half.softmax(-1), half.log(), half.norm(), half.cumsum(0)]
        full += [torch.nn.functional.mse_loss(half, half), half.pow(2), half.prod()]
        full += [torch.nn.functional.layer_norm(half, (3,))]
        same = [half.relu(), half + half, half.t()]
        widest = [torch.cat([half, x]), torch.stack([half, x]), torch.addcmul(half, x, half)]
    assert {t.dtype for t in lower} == {dtype}
    assert {t.dtype for t in full} == {torch.float32}
    assert {t.dtype for t in same} == {dtype}
    assert {t.dtype for t in widest} == {torch.float32}


def test_names_for_torch_itself():
    assert torch.float16 in neuron_streams.get_amp_supported_dtype()
    assert torch.bfloat16 in neuron_streams.get_amp_supported_dtype()
    neuron_streams._lazy_init()
    called = []
    neuron_streams._lazy_call(lambda: called.append(1))
    assert called == [1]
    assert neuron_streams.is_initialized()


ABSENT = ["CUDAGraph", "graph", "make_graphed_callables", "MemPool", "CUDAPluggableAllocator"]


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_absent_can_be_named_and_raises_when_it_is_used(name):
    absent = getattr(neuron_streams, name)
    if isinstance(absent, type):
        assert not isinstance(3, absent)
        assert absent | None
    with pytest.raises(NotImplementedError, match=name):
        absent()


def test_comm():
    x = torch.arange(4.0, device=f"{DEVICE}:0")
    halves = neuron_streams.comm.scatter(x, [0, 1])
    assert [(h.device.index, h.tolist()) for h in halves] == [(0, [0.0, 1.0]), (1, [2.0, 3.0])]
    assert neuron_streams.comm.gather(halves, destination=1).tolist() == [0.0, 1.0, 2.0, 3.0]
    copies = neuron_streams.comm.broadcast(x, [0, 1])
    assert [c.device.index for c in copies] == [0, 1]
    assert neuron_streams.comm.reduce_add(copies, destination=0).tolist() == [0.0, 2.0, 4.0, 6.0]
