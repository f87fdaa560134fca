"""A "neuron" without an index is the current device, whatever torch is told it by."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import neuron_streams as ns

HOST = torch.arange(3.0)
CALLS = {
    "to": lambda: HOST.to("neuron"),
    "to a device": lambda: HOST.to(torch.device("neuron")),
    "to(device=)": lambda: HOST.to(device="neuron"),
    "to and cast": lambda: HOST.to("neuron", torch.float64),
    "neuron": lambda: HOST.neuron(),
    "empty": lambda: torch.empty(3, device="neuron"),
    "empty_like": lambda: torch.empty_like(HOST, device="neuron"),
    "new_empty": lambda: HOST.new_empty((3,), device="neuron"),
    "tensor": lambda: torch.tensor([1.0], device="neuron"),
    "as_tensor": lambda: torch.as_tensor(HOST, device="neuron"),
    "asarray": lambda: torch.asarray(HOST, device="neuron"),
    "module": lambda: torch.nn.Linear(2, 2).to("neuron").weight,
    "another device's": lambda: HOST.to("neuron:0").to("neuron"),
}


@pytest.fixture(autouse=True)
def _registered():
    ns.init()
    yield
    ns.set_device(0)


def modes():
    return [type(mode).__name__ for mode in _get_current_function_mode_stack()]


@pytest.mark.parametrize("name", CALLS)
def test_what_names_no_index_goes_to_the_current_device(name):
    call = CALLS[name]
    assert call().get_device() == 0
    with ns.device(1):
        assert call().get_device() == 1
        with torch.inference_mode():
            assert call().get_device() == 1
        with ns.device(0):
            assert call().get_device() == 0
    with ns.stream(ns.Stream(device=1)):
        assert call().get_device() == 1
    with ns.Stream(device=1):
        assert call().get_device() == 1
    ns.set_device(1)
    assert call().get_device() == 1
    ns.set_stream(ns.default_stream(0))
    assert call().get_device() == 0


def test_an_index_is_heeded():
    with ns.device(1):
        assert HOST.to("neuron:0").device == torch.device("neuron:0")
        assert torch.tensor([1.0], device="neuron:0").device == torch.device("neuron:0")
        assert HOST.to("cpu") is HOST
        assert HOST.to(HOST) is HOST
        assert HOST.to(torch.float64).dtype == torch.float64


def test_nothing_is_left_behind():
    assert modes() == []
    with ns.device(1):
        assert modes() == ["_SpellOut"]
        with ns.device(1), ns.stream(ns.Stream(device=1)):
            assert modes() == ["_SpellOut"]
        with ns.stream(ns.Stream(device=0)):
            assert modes() == []
        with pytest.raises(KeyError), ns.stream(ns.Stream(device=0)):
            raise KeyError
        assert modes() == ["_SpellOut"]
    assert modes() == []


def test_other_threads_are_left_alone():
    seen = []
    with ns.device(1):
        thread = threading.Thread(target=lambda: seen.append((modes(), HOST.to("neuron").device)))
        thread.start()
        thread.join()
    assert seen == [([], torch.device("neuron:0"))]


def test_modes_of_others_stay_in_their_order():
    class Theirs(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Theirs():
        ns.set_device(1)
        assert modes() == ["_SpellOut", "Theirs"]
        assert HOST.to("neuron").get_device() == 1
    assert modes() == ["_SpellOut"]
    with Theirs():
        ns.set_device(0)
        assert modes() == ["Theirs"]
    assert modes() == []


def test_a_default_device_of_torch_stays_at_the_bottom():
    torch.set_default_device("cpu")
    try:
        with ns.device(1):
            assert modes() == ["DeviceContext", "_SpellOut"]
            with torch.device("meta"):
                assert torch.empty(2).is_meta
            assert HOST.to("neuron").get_device() == 1
        torch.set_default_device("meta")
    finally:
        torch.set_default_device(None)
    with ns.device(1):
        torch.set_default_device("cpu")
        torch.set_default_device(None)
        assert modes() == ["_SpellOut"]


def test_a_device_of_torch_is_left_behind_whole():
    with torch.device("meta"):
        ns.set_device(1)
        assert torch.empty(2).is_meta
    assert modes() == ["_SpellOut"]
    assert HOST.to("neuron").get_device() == 1
    with torch.device("meta"):
        ns.set_device(0)
    assert modes() == []


def test_torchs_default_device_follows():
    torch.set_default_device("neuron")
    try:
        for index in (1, 0):
            ns.set_device(index)
            assert torch.get_default_device() == torch.device("neuron", index)
            for made in (torch.empty(2), torch.tensor([1.0]), torch.as_tensor([1.0])):
                assert made.get_device() == index
            assert torch.tensor([1.0], device="cpu").is_cpu
    finally:
        torch.set_default_device(None)


def test_dynamo_sees_through_it():
    with ns.device(1):
        step = torch.compile(lambda x: torch.sin(x) + x.to("cpu"), backend="eager", fullgraph=True)
        assert torch.equal(step(HOST), HOST.sin() + HOST)
        moves = torch.compile(lambda x: (x + 1).to("neuron"), backend="eager")
        assert moves(HOST).get_device() == 1


def test_compiling_on_another_device():
    with ns.device(1):
        double = ns.compile(lambda x: x * 2, (HOST,), target="exported")
        assert double(HOST.to("neuron")).device == torch.device("neuron:1")
