"""Code written against torch.accelerator runs on our streams and devices."""

from __future__ import annotations

import pytest
import torch

import neuron_streams as ns
from neuron_streams import accelerator
from neuron_streams.errors import ForeignError
from neuron_streams.testing import Gate


@pytest.fixture(autouse=True)
def _registered():
    ns.init()
    yield
    ns.set_device(0)


def test_streams_of_the_accelerator_are_ours():
    s, before = ns.Stream(device=1), ns.current_stream()
    assert torch.accelerator.current_stream() == before
    torch.accelerator.set_stream(s)
    assert ns.current_stream() is torch.accelerator.current_stream() is s
    assert torch.accelerator.current_device_index() == ns.current_device() == 1
    assert torch.accelerator.current_stream("neuron:0") == before
    torch.accelerator.set_stream(before)
    assert torch.accelerator.current_device_index() == 0
    with s:
        assert torch.accelerator.current_stream() == s


def test_devices_of_the_accelerator_are_ours():
    with torch.accelerator.device_index(1):
        assert ns.current_device() == 1
        with torch.accelerator.device_index(None):
            assert ns.current_device() == 1
    torch.accelerator.set_device_index("neuron:1")
    torch.accelerator.set_device_index(-1)
    assert ns.current_device() == 1
    with pytest.warns(FutureWarning):
        torch.accelerator.set_device_idx(0)
    with pytest.warns(FutureWarning):
        assert torch.accelerator.current_device_idx() == 0


def test_synchronize_waits():
    s = ns.Stream()
    with ns.stream(s):
        ns._sleep(1_000_000)
        done = torch.accelerator.current_stream().record_event()
    torch.accelerator.synchronize()
    assert done.query()
    with Gate(ns.default_stream(0)):
        torch.accelerator.synchronize(1)


def test_memory_of_the_accelerator_is_ours():
    torch.accelerator.reset_peak_memory_stats(1)
    before = torch.accelerator.memory_allocated(1)
    x = torch.empty(1000, dtype=torch.uint8, device="neuron:1")
    assert torch.accelerator.memory_allocated("neuron:1") == before + x.nbytes
    with ns.device(1):
        assert torch.accelerator.memory.max_memory_allocated() == before + x.nbytes
        assert torch.accelerator.memory_stats() == ns.memory_stats(1)
    assert torch.accelerator.memory_reserved(1) == torch.accelerator.max_memory_reserved(1)
    torch.accelerator.reset_accumulated_memory_stats(1)
    assert ns.memory_stats(1)["allocation.all.allocated"] == 0
    assert torch.accelerator.get_memory_info(1)[1] == ns.mem_get_info(1)[1]
    assert torch.accelerator.empty_cache() is torch.accelerator.empty_host_cache() is None
    with pytest.raises(ValueError, match="^Expected a neuron device, but got: cpu"):
        torch.accelerator.memory_allocated("cpu")


def test_what_is_of_another_accelerator_is_refused():
    for call in (torch.accelerator.current_stream, torch.accelerator.synchronize):
        with pytest.raises(ValueError, match="^Expected a neuron device, but got: cpu"):
            call("cpu")
    for wrong in (torch.Stream("cpu"), None):
        with pytest.raises(ForeignError, match="^a Neuron stream is expected"):
            torch.accelerator.set_stream(wrong)


def test_another_accelerator_is_left_alone(monkeypatch):
    def theirs():
        pass

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "synchronize", theirs)
    accelerator.take_over()
    assert torch.accelerator.synchronize is theirs
