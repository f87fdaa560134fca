"""torch.cuda.comm's functions, on the devices of one process."""

import pytest
import torch

import neuron_streams
from neuron_streams import comm
from neuron_streams.testing import Gate


def at(index, *values):
    return torch.tensor(values, device=f"neuron:{index}")


def test_broadcast_copies_to_every_device():
    x = at(0, 1.0, 2.0)
    here, there = comm.broadcast(x, [0, "neuron:1"])
    assert here is x
    assert there.device == torch.device("neuron:1")
    assert there.tolist() == [1.0, 2.0]
    (only,) = comm.broadcast(torch.ones(2), devices=[torch.device("neuron:1")])
    assert only.device.index == 1


def test_broadcast_into_tensors():
    outs = torch.zeros(2, device="neuron:0"), torch.zeros(2, device="neuron:1")
    assert comm.broadcast(at(0, 1.0, 2.0), out=outs) == outs
    assert [out.tolist() for out in outs] == [[1.0, 2.0]] * 2
    with pytest.raises(RuntimeError, match="^Expected all output tensors to have the shape"):
        comm.broadcast(at(0, 1.0), out=outs)


@pytest.mark.parametrize("given", [{}, {"devices": [0], "out": []}])
def test_exactly_one_place_is_given(given):
    for function in (comm.broadcast, comm.scatter):
        with pytest.raises(RuntimeError, match="^Exactly one of 'devices' and 'out'"):
            function(torch.ones(1), **given)


def test_broadcast_coalesced_gives_a_list_for_each_device():
    here, there = comm.broadcast_coalesced([at(0, 1.0), at(0, 2.0, 3.0)], [0, 1], buffer_size=4)
    assert [x.tolist() for x in there] == [[1.0], [2.0, 3.0]] == [x.tolist() for x in here]
    assert {x.device.index for x in there} == {1}


def test_reduce_add_adds_up_on_the_destination():
    inputs = [at(0, 1.0, 2.0), at(1, 10.0, 20.0)]
    for index in (0, 1):
        total = comm.reduce_add(inputs, destination=index)
        assert (total.device.index, total.tolist()) == (index, [11.0, 22.0])
    assert [x.tolist() for x in inputs] == [[1.0, 2.0], [10.0, 20.0]]
    assert comm.reduce_add(inputs[:1]) is inputs[0]


def test_reduce_add_says_what_does_not_fit():
    with pytest.raises(AssertionError, match="input 1 is on cpu"):
        comm.reduce_add([at(0, 1.0), torch.ones(1)])
    with pytest.raises(ValueError, match="input 1 has invalid size: got 2, but expected 1"):
        comm.reduce_add([at(0, 1.0), at(1, 1.0, 2.0)])
    with pytest.raises(RuntimeError, match="^reduce_add expects destination"):
        comm.reduce_add([at(0, 1.0)], destination=1)


def test_reduce_add_coalesced_adds_position_by_position():
    sums = comm.reduce_add_coalesced([[at(0, 1.0), at(0, 2.0)], [at(1, 3.0), at(1, 4.0)]], 1)
    assert [(x.device.index, x.item()) for x in sums] == [(1, 4.0), (1, 6.0)]


def test_scatter_cuts_and_copies():
    x = torch.arange(6.0)
    assert [p.tolist() for p in comm.scatter(x, [0, 1])] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    parts = comm.scatter(x, [0, 1], chunk_sizes=[2, 4])
    assert [(p.device.index, len(p)) for p in parts] == [(0, 2), (1, 4)]
    columns = comm.scatter(x.reshape(2, 3), [1, 0], chunk_sizes=(1, 2), dim=1)
    assert [p.tolist() for p in columns] == [[[0.0], [3.0]], [[1.0, 2.0], [4.0, 5.0]]]
    with pytest.raises(RuntimeError, match="^Expected devices and chunk_sizes"):
        comm.scatter(x, [0, 1], chunk_sizes=[6])
    with pytest.raises(RuntimeError, match="^'chunk_sizes' must not be specified"):
        comm.scatter(x, out=[at(0, 1.0)], chunk_sizes=[1])


def test_scatter_into_tensors():
    outs = torch.zeros(2, device="neuron:0"), torch.zeros(4, device="neuron:1")
    assert comm.scatter(torch.arange(6.0), out=outs) == outs
    assert [len(out) for out in outs] == [2, 4]
    assert outs[1].tolist() == [2.0, 3.0, 4.0, 5.0]


def test_scatter_takes_a_stream_for_each_part():
    held = neuron_streams.Stream(1)
    x = torch.arange(4.0, device="neuron:0")
    with Gate(held) as gate:
        _, there = comm.scatter(x, [0, 1], streams=[None, held])
        assert not held.query()
        gate.open()
        assert there.tolist() == [2.0, 3.0]


def test_gather_joins():
    parts = at(0, 1.0), at(1, 2.0)
    assert comm.gather(parts, destination=1).device == torch.device("neuron:1")
    assert comm.gather(parts).tolist() == [1.0, 2.0]
    assert comm.gather(parts).device == torch.device("neuron:0")
    assert comm.gather(parts, destination="cpu").device.type == "cpu"
    out = torch.zeros(2, device="neuron:1")
    assert comm.gather(parts, out=out) is out
    assert out.tolist() == [1.0, 2.0]
    with pytest.raises(RuntimeError, match="^'destination' must not be specified"):
        comm.gather(parts, destination=0, out=out)
    with pytest.warns(FutureWarning, match="^Using -1 to represent CPU"):
        assert comm.gather(parts, destination=-1).device.type == "cpu"


def test_nothing_waits_on_the_host():
    with Gate(neuron_streams.current_stream(0)) as gate:
        x = at(0, 1.0) + 1
        copies = comm.broadcast(x, [0, 1])
        total = comm.reduce_add(copies)
        (part,) = comm.scatter(total, [1])
        joined = comm.gather([part, x], destination=1)
        assert not neuron_streams.current_stream(1).query()
        gate.open()
        assert joined.tolist() == [4.0, 2.0]


def test_gradients_pass():
    x = at(0, 1.0, 2.0).requires_grad_()
    comm.gather(comm.scatter(x * 3, [0, 1]), destination=0).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]
