"""Memory of devices, pinned memory, the counts of both, and capacity."""

from __future__ import annotations

import gc

import pytest
import torch

import neuron_streams as ns
from neuron_streams.testing import EmulatedRuntime, Gate, ManualRuntime, use_runtime


@pytest.fixture(params=[ManualRuntime, EmulatedRuntime])
def runtime(request):
    with use_runtime(request.param(2)) as made:
        yield made


def test_allocated_memory_is_that_of_live_buffers(runtime):
    gc.collect()
    before = ns.memory_allocated()
    x = torch.zeros(1000).to("neuron")
    assert ns.memory_allocated() == before + 4000
    y = x.detach()
    del x
    assert ns.memory_allocated() == before + 4000, "a view keeps its buffer"
    del y
    assert ns.memory_allocated() == before
    assert ns.memory_reserved() == ns.memory_allocated()
    assert ns.max_memory_allocated() >= before + 4000 == ns.max_memory_reserved()
    ns.reset_peak_memory_stats()
    assert ns.max_memory_allocated() == before


def test_memory_is_counted_per_device(runtime):
    before = ns.memory_allocated(0), ns.memory_allocated("neuron:1")
    x = torch.zeros(10).to("neuron:1")
    assert (ns.memory_allocated(0), ns.memory_allocated(1)) == (before[0], before[1] + 40)
    assert x.get_device() == 1


def test_a_pending_command_keeps_its_buffers(runtime):
    before, s = ns.memory_allocated(), ns.Stream()
    with Gate(s):
        x = torch.zeros(10).to("neuron")
        with ns.stream(s):
            x.to("cpu", non_blocking=True)
        del x
        assert ns.memory_allocated() == before + 40
    s.synchronize()
    ns.synchronize()
    gc.collect()
    assert ns.memory_allocated() == before


def test_the_statistics_have_torchs_keys(runtime):
    x = torch.zeros(10).to("neuron")
    stats = ns.memory_stats()
    assert list(stats) == sorted(stats)
    for stat in ("allocation", "active", "allocated_bytes", "reserved_bytes", "requested_bytes"):
        for metric in ("current", "peak", "allocated", "freed"):
            assert isinstance(stats[f"{stat}.all.{metric}"], int)
    nested = ns.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == stats["allocated_bytes.all.current"]
    assert stats["num_ooms"] == 0
    del x
    freed = ns.memory_stats()
    assert freed["allocation.all.freed"] == stats["allocation.all.freed"] + 1
    ns.reset_accumulated_memory_stats()
    assert ns.memory_stats()["allocated_bytes.all.allocated"] == 0
    assert "allocated_bytes" in ns.memory_summary()
    assert len(ns.memory_summary(abbreviated=True)) < len(ns.memory_summary())
    ns.empty_cache()
    free, total = ns.mem_get_info()
    assert 0 < free <= total
    assert ns.get_device_properties().total_memory == total


def test_pinned_memory_is_counted_while_it_lives(runtime):
    gc.collect()
    before = ns.host_memory_stats()["allocated_bytes.current"]
    x = torch.zeros(100).pin_memory()
    assert x.pin_memory() is x
    assert ns.host_memory_stats()["allocated_bytes.current"] == before + 400
    view = x[5:]
    del x
    assert view.is_pinned()
    assert ns.host_memory_stats()["allocated_bytes.current"] == before + 400
    del view
    assert ns.host_memory_stats_as_nested_dict()["allocated_bytes"]["current"] == before
    ns.reset_peak_host_memory_stats()
    ns.reset_accumulated_host_memory_stats()
    assert ns.host_memory_stats()["allocation.allocated"] == 0


def test_pinning_keeps_values_shape_and_type(runtime):
    source = torch.arange(12, dtype=torch.int16).reshape(3, 4).t()
    made = source.pin_memory()
    assert made.equal(source)
    assert made.dtype == source.dtype
    assert made.is_pinned()
    assert not source.is_pinned()
    assert torch.empty(4, pin_memory=True).is_pinned()


def test_a_data_loader_pins(runtime):
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    batches = list(torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True))
    assert all(batch.is_pinned() for (batch,) in batches)


def test_sync_debug_mode_warns_or_raises_where_a_call_waits_for_a_stream(runtime):
    x = torch.ones(2).to("neuron")
    s, e = ns.Stream(), ns.Event()
    assert ns.get_sync_debug_mode() == 0
    waits = {
        "synchronize": s.synchronize,
        "cpu": x.cpu,
        "tolist": x.tolist,
        "item": lambda: torch.ones(1).to("neuron").item(),
        "to": lambda: x.to("cpu"),
    }
    free = [e.synchronize, ns.synchronize, e.query, s.query, e.record, lambda: s.wait_stream(s)]
    try:
        for mode, number in (("warn", 1), ("error", 2)):
            ns.set_sync_debug_mode(mode)
            assert ns.get_sync_debug_mode() == number
            for call in waits.values():
                if mode == "warn":
                    with pytest.warns(UserWarning, match="^called a synchronizing Neuron"):
                        call()
                else:
                    with pytest.raises(RuntimeError, match="^called a synchronizing Neuron"):
                        call()
            for call in free:
                call()
            x.to("cpu", non_blocking=True)
    finally:
        ns.set_sync_debug_mode(0)
    for wrong in ("loud", 3):
        with pytest.raises(RuntimeError, match="^invalid value of debug_mode, expected one of"):
            ns.set_sync_debug_mode(wrong)
    ns.synchronize()


def test_a_device_without_room_says_how_much_there_is(runtime):
    total = ns.mem_get_info(1)[1]
    ns.set_per_process_memory_fraction(1e-6, 1)
    capacity = ns.mem_get_info(1)[1]
    assert capacity == int(total * 1e-6)
    assert ns.get_per_process_memory_fraction(1) == pytest.approx(1e-6, rel=1e-3)
    kept = torch.empty(1000, dtype=torch.uint8, device="neuron:1")
    before = ns.memory_stats(1)
    words = r"^neuron out of memory\. Tried to allocate .* MiB\. NeuronCore 1 has a total capacity"
    with pytest.raises(torch.OutOfMemoryError, match=words) as caught:
        torch.empty(capacity, dtype=torch.uint8, device="neuron:1")
    assert " in 1 buffers is allocated by tensors and pending commands." in str(caught.value)
    assert "csrc" not in str(caught.value)
    after = ns.memory_stats(1)
    assert (after["num_ooms"], after["num_alloc_retries"]) == (
        before["num_ooms"] + 1,
        before["num_alloc_retries"] + 1,
    )
    assert ns.memory_allocated(1) == kept.nbytes
    torch.empty(capacity, dtype=torch.uint8, device="neuron:0")
    with pytest.raises(ValueError, match="^Invalid fraction value: 2"):
        ns.set_per_process_memory_fraction(2)
    ns.set_per_process_memory_fraction(1.0, 1)
    assert ns.mem_get_info(1)[1] == total


def test_room_is_made_by_what_completes(runtime):
    ns.set_per_process_memory_fraction(1e-6)
    capacity = ns.mem_get_info()[1]
    pinned, s = torch.empty(capacity, dtype=torch.uint8).pin_memory(), ns.Stream()
    first = torch.empty(capacity, dtype=torch.uint8, device="neuron")
    with ns.stream(s):
        pinned.copy_(first, non_blocking=True)
    del first
    second = torch.empty(capacity, dtype=torch.uint8, device="neuron")
    assert ns.memory_allocated() == second.nbytes


def test_the_environment_sets_the_capacity(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_MEMORY", "4096")
    with use_runtime(ManualRuntime(2)):
        assert ns.mem_get_info() == (4096, 4096)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4097, dtype=torch.uint8, device="neuron")
    monkeypatch.setenv("NEURON_STREAMS_MEMORY", "4 GB")
    with pytest.raises(ValueError, match="^NEURON_STREAMS_MEMORY='4 GB' is no number of bytes"):
        ns.testing.replace(ManualRuntime(1))
