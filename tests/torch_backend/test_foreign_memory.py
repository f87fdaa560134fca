"""Tensors over memory of the device that another library made: pickle, DLPack, from_blob."""

import copy
import io
import pickle

import pytest
import torch

import neuron_streams
from neuron_streams.testing import Gate, ManualRuntime, use_runtime


@pytest.mark.parametrize("protocol", [2, 5])
def test_pickle(protocol):
    x = torch.arange(6.0, device="neuron:1").reshape(2, 3)[:, 1:]
    y = pickle.loads(pickle.dumps({"x": x}, protocol=protocol))["x"]
    assert y.device == x.device
    assert y.tolist() == x.tolist()
    y += 1
    assert x.tolist() == [[1.0, 2.0], [4.0, 5.0]]


def test_pickle_of_a_module_keeps_tied_weights():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to("neuron")
    model[1].weight = model[0].weight
    for made in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert made[1].weight is made[0].weight
        assert made[0].weight.device == torch.device("neuron:0")
        assert torch.equal(made[0].weight, model[0].weight)


def test_the_old_format_of_torch_save():
    x = torch.arange(3.0, device="neuron")
    torch.save([x, x[1:]], file := io.BytesIO(), _use_new_zipfile_serialization=False)
    for place in (None, "cpu"):
        file.seek(0)
        a, b = torch.load(file, map_location=place)
        assert a.device == (x.device if place is None else torch.device("cpu"))
        a.fill_(7)
        assert b.tolist() == [7.0, 7.0]


def test_dlpack_shares_memory():
    x = torch.arange(4.0, device="neuron:1")
    y = torch.from_dlpack(x)
    assert y.device == x.device
    y += 1
    z = y * 2
    neuron_streams.synchronize(1)
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert z.tolist() == [2.0, 4.0, 6.0, 8.0]
    assert y.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("part", [slice(None), slice(1, None)], ids=["whole", "part"])
def test_a_read_waits_for_writes_through_dlpack(part):
    with use_runtime(ManualRuntime(1)):
        x = torch.arange(4.0).to("neuron")
        y = torch.from_dlpack(x[part])
        y += 1
        expected = torch.arange(4.0)
        expected[part] += 1
        assert x.tolist() == expected.tolist()
        x.mul_(2)
        assert y.tolist() == (expected * 2)[part].tolist()


def test_dlpack_memory_lives_as_long_as_its_tensor():
    other = torch.zeros(1, device="neuron")
    neuron_streams.synchronize()
    before = neuron_streams.memory_allocated()
    y = torch.from_dlpack(torch.full((1 << 16,), 3.0, device="neuron"))
    assert neuron_streams.memory_allocated() - before == 4 << 16
    assert y.sum().item() == 3 << 16
    del y
    other.add_(1)  # a command lets go of its tensors just behind its completion, before the next
    neuron_streams.synchronize()
    assert neuron_streams.memory_allocated() == before


def test_the_first_use_waits_for_what_may_write_it():
    x = torch.zeros(2, device="neuron")
    y = torch.from_dlpack(x)
    x += 5
    neuron_streams.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing Neuron operation"):
            y.add(1)
    finally:
        neuron_streams.set_sync_debug_mode("default")
    assert y.add(1).tolist() == [6.0, 6.0]
    with Gate() as gate:  # from then on it is a buffer as any other
        z = y * 2
        gate.open()
        assert z.tolist() == [10.0, 10.0]


def test_memory_of_the_host_says_where_it_is():
    assert torch.ones(2).__dlpack_device__()[0].name == "kDLCPU"
    assert torch.ones(2, device="neuron:1").__dlpack_device__()[1] == 1
    assert torch.from_dlpack(torch.ones(2)).device.type == "cpu"
