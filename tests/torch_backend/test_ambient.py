"""Code that stays on the host is as it was: the device is registered, and used, beside it."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.torch_backend.device import DEVICE


@pytest.fixture(autouse=True)
def _used():
    assert (torch.ones(2, device=DEVICE) + 1).tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore:NEURON reports that you have")  # as CUDA does
@pytest.mark.parametrize("options", [{}, {"devices": []}, {"enabled": False}])
def test_fork_rng(options):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with torch.random.fork_rng(**options):
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected) == options.get("enabled", True)


@pytest.mark.filterwarnings(
    "ignore:.*reports that you have 2 available devices"
)  # once, as on CUDA
def test_fork_rng_of_the_device():
    if DEVICE == "cpu":
        pytest.skip("the CPU has no such argument")
    torch.manual_seed(3)
    expected = torch.rand(2, device=DEVICE)
    torch.manual_seed(3)
    with torch.random.fork_rng(device_type=DEVICE):
        torch.rand(5, device=DEVICE)
    assert torch.equal(torch.rand(2, device=DEVICE), expected)


@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
def test_checkpoint(device, reentrant, preserve):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5 if preserve else 0.0)).to(device)
    x = torch.rand(3, 4).to(device).requires_grad_()
    y = checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=preserve)
    y.sum().backward()
    kept = (y != 0).to(x.dtype) * (2.0 if preserve else 1.0)
    assert torch.allclose(x.grad, kept @ layer[0].weight.detach(), atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_checkpoint_sequential(device):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).to(device)
    x = torch.rand(2, 4).to(device).requires_grad_()
    y = checkpoint_sequential(model, 2, x, use_reentrant=False)
    assert torch.equal(y, model(x))
    y.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_autocast_can_be_entered(device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            x = torch.ones(2, 2, device=device)
            assert (x @ x).dtype is torch.bfloat16
        with torch.autocast(torch.device(device).type, enabled=False):
            assert (x @ x).dtype is torch.float32


def test_a_frozen_random_state():
    from torch.testing._internal.common_utils import freeze_rng_state

    torch.manual_seed(0)
    with freeze_rng_state():
        a = torch.rand(3)
    assert torch.equal(torch.rand(3), a)


def test_host_tensors_are_host_tensors():
    x = torch.ones(3)
    assert x.device.type == "cpu"
    assert type(x) is torch.Tensor
    assert not x.is_pinned()


def test_host_code_under_a_default_dtype(monkeypatch):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        x = torch.ones(2, device=DEVICE)
        assert x.dtype is torch.float64
        assert (x / 2).tolist() == [0.5, 0.5]
    finally:
        torch.set_default_dtype(before)


def test_inference_mode_and_no_grad():
    with torch.inference_mode():
        x = torch.ones(2, device=DEVICE)
        assert x.is_inference()
        assert (x + 1).is_inference()
    with torch.no_grad():
        y = torch.ones(2, device=DEVICE, requires_grad=True) * 2
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        (x * torch.ones(2, device=DEVICE, requires_grad=True)).sum().backward()


def test_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.zeros(3, device=DEVICE).index_add_(
            0, torch.tensor([0, 0, 2], device=DEVICE), torch.ones(3, device=DEVICE)
        )
        assert x.tolist() == [2.0, 0.0, 1.0]
    finally:
        torch.use_deterministic_algorithms(False)
