"""torch.save and the plain torch.load, with weights only, to any device."""

import io

import pytest
import torch
from torch import nn

from tests.torch_backend.device import DEVICE, is_here


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_tensor_comes_back_to_its_device(weights_only):
    x = torch.arange(6).reshape(2, 3).to(DEVICE)
    y = torch.load(saved(x), weights_only=weights_only)
    assert is_here(y)
    assert torch.equal(y, x)


@pytest.mark.parametrize("place", ["cpu", DEVICE, torch.device(DEVICE), {DEVICE: "cpu"}])
def test_a_place_is_chosen_at_load(place):
    x = torch.arange(3.0, device=DEVICE)
    y = torch.load(saved({"x": x}), map_location=place)["x"]
    assert y.tolist() == [0.0, 1.0, 2.0]
    target = "cpu" if isinstance(place, dict) else torch.device(place).type
    if not (isinstance(place, dict) and DEVICE != "cpu"):  # a dict maps tagged names: "neuron:0"
        assert y.device.type == target


def test_a_host_checkpoint_is_loaded_onto_the_device():
    model = nn.Linear(2, 2)
    state = torch.load(saved(model.state_dict()), map_location=DEVICE)
    assert all(is_here(v) for v in state.values())
    assert torch.equal(state["weight"].cpu(), model.weight)


def test_views_share_their_storage_again():
    x = torch.arange(6.0, device=DEVICE)
    a, b = torch.load(saved([x[:3], x[2:]]))
    a.fill_(7)
    assert b.tolist() == [7.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
def test_every_dtype(dtype):
    x = torch.ones(3, dtype=dtype, device=DEVICE)
    y = torch.load(saved(x))
    assert (y.dtype, y.tolist()) == (dtype, x.tolist())


def test_what_is_not_finished_is_saved_finished():
    x = torch.ones(1000, device=DEVICE)
    for _ in range(50):
        x = x + 1
    assert torch.load(saved(x), map_location="cpu").eq(51).all()


def test_parameters_and_their_flags():
    p = nn.Parameter(torch.ones(2, device=DEVICE), requires_grad=False)
    q = torch.load(saved(p))
    assert (type(q), q.requires_grad) == (nn.Parameter, False)


def test_a_generator_state_is_saved():
    state = torch.get_rng_state()
    assert torch.equal(torch.load(saved(state)), state)


def test_safetensors_take_device_tensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    x = torch.arange(4.0).to(DEVICE)
    safetensors.save_file({"x": x}, tmp_path / "x.safetensors")
    assert torch.equal(safetensors.load_file(tmp_path / "x.safetensors")["x"], x.cpu())
