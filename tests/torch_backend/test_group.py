"""The backend of process groups: two ranks in one process, on a device each, over gloo."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import neuron_streams
from neuron_streams._context import core
from neuron_streams._runtime import extension
from neuron_streams.testing import Gate
from tests.torch_backend import children


def connect(timeout=30.0):
    """The backends of two ranks, connected with each other."""
    neuron_streams.init()
    store, made = dist.HashStore(), [None, None]

    def run(rank):
        limit = timedelta(seconds=timeout)
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, limit)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    library = extension.load(extension.PROCESS_GROUP)
    return [library.group(transport, core().collective_door()) for transport in made]


@pytest.fixture
def ranks():
    return connect()


def on(rank, *values):
    return torch.tensor(values, device=f"neuron:{rank}")


def test_work_orders_the_stream_and_not_the_host(ranks):
    x, y = on(0, 1.0, 2.0), on(1, 10.0, 20.0)
    work = ranks[0].allreduce([x])
    work.wait()
    later = x + 1
    assert not work.is_completed()
    assert not neuron_streams.current_stream(0).query()
    ranks[1].allreduce([y]).wait()
    assert later.tolist() == [12.0, 23.0]
    assert y.tolist() == [11.0, 22.0]
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0].tolist() == [11.0, 22.0]


def test_collectives_meet_those_of_the_same_call_whatever_their_streams(ranks):
    first, second = neuron_streams.Stream(0), neuron_streams.Stream(0)
    works = []
    with Gate(first) as gate:
        for stream, value in ((first, 1.0), (second, 2.0)):
            with neuron_streams.stream(stream):
                works.append(ranks[0].allreduce([on(0, value)]))
        theirs = [ranks[1].allreduce([on(1, value)]) for value in (10.0, 20.0)]
        assert not works[1].is_completed()
        gate.open()
        assert [w.result()[0].item() for w in works + theirs] == [11.0, 22.0, 11.0, 22.0]


def test_what_is_computed_before_is_sent_and_what_comes_after_waits(ranks):
    with Gate(neuron_streams.current_stream(0)) as gate:
        x = on(0, 1.0) * 3
        ranks[0].send([x], 1, 0).wait()
        y = torch.empty(1, device="neuron:1")
        ranks[1].recv([y], 0, 0)
        z = y + 1  # without wait(): the reader of a tensor waits for its writer
        assert not neuron_streams.current_stream(1).query()
        gate.open()
        assert z.tolist() == [4.0]


def test_late_arrivals_hold_up_nothing(ranks):
    late = [torch.zeros(1, device="neuron:0") for _ in range(8)]
    works = [ranks[0].recv([x], 1, tag) for tag, x in enumerate(late)]
    x, y = on(0, 1.0), on(1, 2.0)
    ranks[0].allreduce([x]).wait()
    ranks[1].allreduce([y]).wait()
    assert (x + y.to("neuron:0")).item() == 6.0
    assert not any(work.is_completed() for work in works)
    for tag in reversed(range(8)):
        ranks[1].send([on(1, float(tag))], 0, tag)
        assert late[tag].item() == tag


def test_an_exchange_needs_no_order(ranks):
    x, y = on(0, 1.0), on(1, 2.0)
    got = torch.empty(1, device="neuron:0"), torch.empty(1, device="neuron:1")
    for rank, (mine, other) in enumerate(((x, got[0]), (y, got[1]))):
        ranks[rank].send([mine], 1 - rank, 0)
        ranks[rank].recv([other], 1 - rank, 0)
    assert [t.item() for t in got] == [2.0, 1.0]


def test_a_received_rank_is_told(ranks):
    x = torch.empty(1, device="neuron:0")
    work = ranks[0].recv_anysource([x], 0)
    ranks[1].send([on(1, 7.0)], 0, 0)
    assert work._source_rank() == 1
    assert x.item() == 7.0


def test_a_barrier_holds_the_host_until_the_streams_are_there(ranks):
    passed = threading.Event()

    def wait():
        neuron_streams.set_device(1)  # on the stream of rank 0 it would follow what waits for it
        ranks[1].barrier().wait()
        passed.set()

    with Gate(neuron_streams.current_stream(0)) as gate:
        work = ranks[0].barrier()
        thread = threading.Thread(target=wait)
        thread.start()
        assert not work.is_completed()
        assert not passed.is_set()
        gate.open()
        work.wait()
        thread.join()
    assert passed.is_set()


def test_a_future_orders_the_stream_that_waits_for_it(ranks):
    work = ranks[0].allreduce([on(0, 1.0)])
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    ranks[1].allreduce([on(1, 2.0)])
    assert doubled.wait().item() == 6.0


def test_a_collective_that_fails_poisons_what_it_was_to_write():
    ranks = connect(timeout=0.2)
    x = torch.zeros(1, device="neuron:0")
    work = ranks[0].recv([x], 1, 0)
    work.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
            x.item()
    assert not work.is_success()
    assert work.exception() is not None
    with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
        neuron_streams.synchronize(0)
    neuron_streams.synchronize(0)
    x.fill_(3)
    assert x.item() == 3


def test_what_was_never_computed_is_not_sent(ranks):
    x = on(0, 1.0, 2.0).index_select(0, on(0, 9))
    work = ranks[0].allreduce([x])
    for _ in range(2):
        with pytest.raises(IndexError, match="out of range"):
            x.item()
    with pytest.raises(IndexError, match="out of range"):
        neuron_streams.synchronize(0)
    neuron_streams.synchronize(0)
    assert not work.is_success()
    assert "was never computed" in str(work.exception())


def test_a_limit_of_time_is_for_the_host(ranks):
    x = torch.zeros(1, device="neuron:0")
    work = ranks[0].recv([x], 1, 0)
    with pytest.raises(RuntimeError, match=r"^RECV: not done after 20 ms"):
        work.wait(timedelta(milliseconds=20))
    ranks[1].send([on(1, 5.0)], 0, 0)
    work.wait(timedelta(seconds=30))
    assert work.is_completed()
    assert x.item() == 5.0


def test_tensors_of_the_host_are_refused_at_the_call(ranks):
    with pytest.raises(RuntimeError, match="a neuron tensor is expected, but got one of cpu"):
        ranks[0].allreduce([torch.ones(1)])


CHILDREN = {
    "a wait for another rank does not hold up the exit": """
x = torch.zeros(1, device="neuron")
work = ranks[0].recv([x], 1, 0)
y = x + 1
""",
    "nor does a group that is destroyed with work in flight": """
x = torch.zeros(1, device="neuron")
ranks[0].recv([x], 1, 0)
del ranks
""",
}
CONNECT = """
import threading
import torch.distributed as dist
from neuron_streams._runtime import extension
from neuron_streams._context import core
neuron_streams.init()
store, made = dist.HashStore(), [None, None]
def run(rank):
    made[rank] = dist.ProcessGroupGloo(store, rank, 2)
threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
[t.start() for t in threads]
[t.join() for t in threads]
library = extension.load(extension.PROCESS_GROUP)
ranks = [library.group(transport, core().collective_door()) for transport in made]
"""
HOST_ONLY = """
import tempfile
import torch.distributed as dist
from neuron_streams._runtime import extension
from neuron_streams._torch import distributed
def begin(backend):
    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
"""
CHILDREN = {name: CONNECT + text for name, text in CHILDREN.items()} | {
    name: HOST_ONLY + text
    for name, text in {
        "groups of a program without a device compile nothing and go away": """
first = torch.nn.Parameter(torch.ones(2))
first.sum().backward()
torch.optim.Adam([first]).step()  # torch keeps the group that exists at its first step
for _ in range(3):
    begin("gloo")
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.barrier()
    dist.new_group([0])
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.Adam([weight]).step()
    assert dist.get_backend() == "gloo"
    assert dist.distributed_c10d._get_default_group().name() == "gloo"
    dist.destroy_process_group()
    import gc; gc.collect()
    assert len(distributed._waiting) == 0, list(distributed._waiting)
assert not neuron_streams.is_initialized()
assert extension._loaded == {}
""",
        "a group that is older than the first use serves the device": """
begin("gloo")
assert not neuron_streams.is_initialized()
x = torch.ones(2, device="neuron") + 1
dist.all_reduce(x)
y = torch.ones(2)
dist.all_reduce(y)
assert x.tolist() == [2.0, 2.0]
dist.destroy_process_group()
""",
        "a device and a backend for each": """
begin("cpu:gloo,neuron:gloo")
x = torch.ones(2, device="neuron") + 1
dist.all_reduce(x)
dist.all_reduce(torch.ones(1))
assert x.tolist() == [2.0, 2.0]
dist.destroy_process_group()
""",
        "no backend is named": """
begin(None)
x = torch.ones(2, device="neuron") + 1
dist.all_reduce(x)
dist.all_reduce(torch.ones(1))
dist.barrier()
assert x.tolist() == [2.0, 2.0]
assert dist.get_default_backend_for_device("neuron") == "gloo"
dist.destroy_process_group()
""",
        "a program without the device's name": """
begin("cpu:gloo")
dist.all_reduce(torch.ones(1))
assert len(distributed._waiting) == 0
""",
    }.items()
}


@pytest.fixture(scope="module")
def ended():
    return children.run(CHILDREN)


@pytest.mark.parametrize("name", CHILDREN)
def test_processes(ended, name):
    assert ended[name].code == 0, str(ended[name])
