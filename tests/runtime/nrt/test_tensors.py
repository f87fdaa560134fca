"""Tensors on memory that the host does not reach, as on hardware: views, operators, statistics."""

from __future__ import annotations

import logging

import pytest
import torch

import neuron_streams
from neuron_streams._context import context, core
from neuron_streams._runtime.nrt.status import NrtError, Status
from neuron_streams.testing import Gate


@pytest.fixture
def device(make):
    return make(reachable=False)


@pytest.fixture
def on_host(monkeypatch, make):
    """A device whose operators run on the host."""
    monkeypatch.setenv("NEURON_STREAMS_HOST_OPERATORS", "1")
    return make(reachable=False)


# -- views and copies ------------------------------------------------------------------------


def test_views_are_windows_on_one_tensor(device):
    x = torch.arange(24.0).reshape(4, 6).to("neuron")
    for view in (lambda t: t[1:3], lambda t: t[:, 2], lambda t: t.t(), lambda t: t[::2, 1::3]):
        assert view(x).cpu().equal(view(torch.arange(24.0).reshape(4, 6)))
    x[2].copy_(torch.zeros(6))
    x[:, 0].copy_(torch.full((4,), 7.0))
    expected = torch.arange(24.0).reshape(4, 6)
    expected[2], expected[:, 0] = 0.0, 7.0
    assert x.cpu().equal(expected)
    assert x.view(torch.int32).cpu().equal(expected.view(torch.int32))
    assert device.double.count("allocated") == 1


def test_a_clone_is_a_copy(device):
    x = torch.arange(24.0).reshape(4, 6).to("neuron")
    for view in (x, x.t(), x[1:3], x[:, 2], x[:0], x[1, 1]):
        made = view.clone()
        assert made.cpu().equal(view.cpu())
        assert made.stride() == torch.empty_like(view, device="meta").stride()
    wide = torch.arange(16.0).reshape(1, 2, 2, 4).to("neuron")
    last = wide.clone(memory_format=torch.channels_last)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert last.cpu().equal(wide.cpu())
    assert x.t().contiguous().cpu().equal(x.cpu().t())


def test_it_shows_its_numbers(device):
    x = torch.tensor([1.5, -2.0]).to("neuron")
    assert repr(x) == "tensor([ 1.5000, -2.0000], device='neuron:0')"


def test_no_address_of_it_is_given_away(device):
    x = torch.arange(3.0).to("neuron")
    with pytest.raises(BufferError, match="^DLPack hands out addresses, and the memory of a"):
        torch.from_dlpack(x)


def test_a_storage_that_grows_keeps_what_it_has(device):
    x = torch.arange(4.0).to("neuron")
    x.resize_(8)
    assert x[:4].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_copies_within_a_device_are_one_request(device):
    x = torch.arange(4.0).to("neuron")
    y = torch.empty(4, device="neuron")
    neuron_streams.synchronize()
    before = device.statistics.scheduled
    y.copy_(x)
    neuron_streams.synchronize()
    assert device.statistics.scheduled == before + 1
    assert y.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_copy_may_read_what_one_in_flight_puts_in_place_of_a_failed_one(device):
    good, failed, last = (torch.full((2,), x).to("neuron") for x in (1.0, 2.0, 3.0))
    neuron_streams.synchronize()
    lane = neuron_streams.current_stream()._state.ticket().lane
    device.double.fail(0, device.double.write, lane % 2, 0, Status.EXEC_OOB)
    failed.copy_(torch.zeros(2).pin_memory(), non_blocking=True)
    with pytest.raises(NrtError):
        neuron_streams.synchronize()
    device.double.set_latency(5_000_000, 0)  # ns
    failed.copy_(good)
    last.copy_(failed)
    assert last.tolist() == failed.tolist() == [1.0, 1.0]


def test_memory_in_use_by_another_stream_is_not_given_away(device):
    """What `record_stream` asks for holds without it, since commands keep what they name."""
    side, x = neuron_streams.Stream(), torch.arange(4.0).to("neuron")
    neuron_streams.synchronize()
    with Gate(side):
        with neuron_streams.stream(side):
            out = x.to("cpu", non_blocking=True)
        x.record_stream(side)
        place = core().buffer_of(x).peer.block.tensor
        del x
        fresh = torch.zeros(4).to("neuron")
        assert core().buffer_of(fresh).peer.block.tensor != place
    side.synchronize()
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]
    device.drain()  # the thread that woke this one may still hold the command
    again = torch.empty(4, device="neuron")
    assert core().buffer_of(again).peer.block.tensor == place, "and then it is used again"


# -- operators -------------------------------------------------------------------------------

CALLS = {
    "aten::add": lambda x: x + x,
    "aten::mul_": lambda x: x.mul_(2),
    "aten::fill_": lambda x: x.fill_(2),
    "aten::nonzero": lambda x: x.nonzero(),
    "aten::equal": lambda x: x.equal(x),
    "aten::arange": lambda x: torch.arange(3, device="neuron"),
    "aten::mm": lambda x: x[None] @ x[:, None],
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_is_refused_with_its_name_and_what_to_do(device, name):
    x = torch.ones(2).to("neuron")
    with pytest.raises(NotImplementedError, match=rf"^{name}.*neuron_streams\.compile.*=1"):
        CALLS[name](x)
    assert x.tolist() == [1.0, 1.0], "nothing was changed"


def test_operators_run_on_the_host_where_that_is_wanted(on_host):
    x = torch.tensor([[3.0, 0.0], [1.0, 2.0]])
    there = x.to("neuron")
    assert (there + there.t()).tolist() == (x + x.t()).tolist()
    assert there.nonzero().tolist() == x.nonzero().tolist()
    assert there.equal(there)
    assert there.sort().values.tolist() == x.sort().values.tolist()
    assert [part.tolist() for part in torch.var_mean(there)] == [
        part.tolist() for part in torch.var_mean(x)
    ]
    assert torch.zeros(2, device="neuron").tolist() == [0.0, 0.0]
    assert torch.arange(3, device="neuron").tolist() == [0, 1, 2]
    there[0].mul_(2)
    there[:, 1] += there[:, 0]
    x[0].mul_(2)
    x[:, 1] += x[:, 0]
    assert there.tolist() == x.tolist()
    out = torch.empty(0, device="neuron")
    torch.add(there, 1, out=out)
    assert out.tolist() == (x + 1).tolist()
    layer = torch.nn.Linear(2, 2).to("neuron")
    layer(there).sum().backward()
    assert layer.bias.grad.tolist() == [2.0, 2.0]


def test_tensors_that_share_memory_do_so_on_the_host(on_host):
    x = torch.arange(6.0).to("neuron")
    x[:3].add_(x[3:])
    torch.mul(x[3:], 2.0, out=x[3:])
    assert x.tolist() == [3.0, 5.0, 7.0, 6.0, 8.0, 10.0]
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        torch.add(x[:4], x[2:], out=x[:4])  # as on the CPU


def test_they_come_after_what_their_stream_has_queued_and_before_what_follows(on_host):
    side, x = neuron_streams.Stream(), torch.zeros(4).to("neuron")
    side.wait_stream(neuron_streams.current_stream())
    on_host.double.set_latency(0, 1_000_000)
    with neuron_streams.stream(side):
        for value in range(5):
            x.copy_(torch.full((4,), float(value)))
            x.add_(10)
        assert x.tolist() == [14.0] * 4


def test_they_are_counted_and_said_once(on_host, caplog):
    caplog.set_level(logging.WARNING, "neuron_streams")
    counted = dict(core().host_operators())
    x = torch.ones(2).to("neuron")
    for _ in range(3):
        x.cosh()
    names = dict(core().host_operators())
    assert names["aten::cosh"] - counted.get("aten::cosh", 0) == 3
    said = [
        r.message for r in caplog.records if r.message.startswith("aten::cosh runs on the host")
    ]
    assert len(said) <= 1, "once in this process"


def test_a_failure_of_their_copies_is_raised(on_host):
    x = torch.ones(2).to("neuron")
    neuron_streams.synchronize()
    double = on_host.double
    lane = neuron_streams.current_stream()._state.ticket().lane
    double.fail(0, double.read, lane % 2, 0, Status.EXEC_HW_ERR_DMA_ABORT)
    with pytest.raises(NrtError, match="DMA_ABORT"):
        x + 1


# -- statistics ------------------------------------------------------------------------------


def test_what_is_cached_is_reserved_and_can_be_given_back(device):
    double = device.double
    assert neuron_streams.mem_get_info() == (1 << 28, 1 << 28)
    x = torch.ones(1000).to("neuron")
    assert neuron_streams.memory_allocated() == 4000
    assert neuron_streams.memory_reserved() == 4096
    assert torch.accelerator.memory_stats()["reserved_bytes.all.current"] == 4096
    del x
    neuron_streams.synchronize()
    device.drain()
    assert (neuron_streams.memory_allocated(), neuron_streams.memory_reserved()) == (0, 4096)
    free, total = neuron_streams.mem_get_info()
    assert total - free == 4096
    neuron_streams.empty_cache()
    assert (neuron_streams.memory_reserved(), neuron_streams.max_memory_reserved()) == (0, 4096)
    neuron_streams.reset_peak_memory_stats()
    assert neuron_streams.max_memory_reserved() == 0
    assert neuron_streams.mem_get_info()[0] == 1 << 28
    assert double.violations() == []


def test_out_of_memory_has_figures_and_is_counted(device):
    device.double.set_memory(1 << 20)
    kept = torch.empty(200_000, device="neuron")
    with pytest.raises(torch.OutOfMemoryError, match=r"400000 bytes were asked for.*of 1048576"):
        torch.empty(100_000, device="neuron")
    assert neuron_streams.memory_stats()["num_ooms"] == 1
    del kept
    assert torch.empty(100_000, device="neuron").numel() == 100_000


def test_a_fraction_is_one_of_the_device_s_memory(device):
    neuron_streams.set_per_process_memory_fraction(0.5)
    assert neuron_streams.get_per_process_memory_fraction() == 0.5
    with pytest.raises(torch.OutOfMemoryError, match="has a total capacity of 128"):
        torch.empty(1 << 27, dtype=torch.int16, device="neuron")


def test_implicit_waits_stay_on(make, monkeypatch):
    """Without one a consumer would be scheduled before its producer has completed."""
    monkeypatch.setenv("NEURON_STREAMS_IMPLICIT_WAITS", "0")
    make(reachable=False)
    assert context().port.implicit_waits
