"""torch.distributed over gloo on device tensors, in a world of one; two take a program's test."""

import pytest
import torch
import torch.distributed as dist

from tests.torch_backend.device import DEVICE, gate, synchronize


@pytest.fixture
def world(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parts():
    return [torch.zeros(3, device=DEVICE)]


COLLECTIVES = {
    "all_reduce": lambda x: dist.all_reduce(x) or x,
    "broadcast": lambda x: dist.broadcast(x, 0) or x,
    "all_gather": lambda x: [dist.all_gather(p := parts(), x), p][1],
    "all_gather_into_tensor": lambda x: [
        dist.all_gather_into_tensor(p := torch.zeros(3, device=DEVICE), x),
        p,
    ][1],
    "reduce_scatter_tensor": lambda x: [
        dist.reduce_scatter_tensor(p := torch.zeros(3, device=DEVICE), x),
        p,
    ][1],
    "all_to_all_single": lambda x: [
        dist.all_to_all_single(p := torch.zeros(3, device=DEVICE), x),
        p,
    ][1],
    "gather": lambda x: [dist.gather(x, p := parts(), 0), p][1],
    "scatter": lambda x: [dist.scatter(p := torch.zeros(3, device=DEVICE), [x], 0), p][1],
    "reduce": lambda x: dist.reduce(x, 0) or x,
    "asynchronous": lambda x: dist.all_reduce(x, async_op=True).wait() and x,
}


@pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_sees_what_was_computed_before_it(world, name):
    x = torch.ones(3, device=DEVICE)
    for _ in range(20):
        x = x + 1
    y = COLLECTIVES[name](x)
    y = y[0] if isinstance(y, list) else y
    assert (y * 2).tolist() == [42.0] * 3
    assert y.device.type == torch.device(DEVICE).type


def test_objects_and_a_barrier(world):
    got = [None]
    dist.all_gather_object(got, {"a": torch.ones(2, device=DEVICE)})
    assert got[0]["a"].tolist() == [1.0, 1.0]
    dist.barrier()


@pytest.mark.skipif(DEVICE == "cpu", reason="a stream to hold")
def test_a_collective_is_a_command_of_the_stream(world):
    with gate() as held:
        x = torch.ones(3, device=DEVICE) + 1
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        held.open()
        work.wait()
        assert x.tolist() == [2.0] * 3
    synchronize()
