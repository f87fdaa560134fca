"""Device memory: cached, given back by destructors, trimmed, and out of it with figures."""

from __future__ import annotations

import gc

import pytest
import torch

from neuron_streams._context import core
from neuron_streams._runtime.nrt.memory import rounded
from tests.runtime.nrt.conftest import Kernels, buffer_of, floats, view_of


def test_sizes_are_rounded_by_an_eighth_at_most():
    assert [rounded(n) for n in (0, 1, 512, 513)] == [512, 512, 512, 1024]
    for n in (1000, 12345, 1 << 20, (1 << 20) + 1, 123456789):
        assert n <= rounded(n) <= max(n * 9 / 8, n + 512)
        assert rounded(rounded(n)) == rounded(n)


def test_memory_comes_back_and_is_used_again(runtime):
    tensor = buffer_of(1000).peer.block.tensor
    assert buffer_of(900).peer.block.tensor == tensor, "of the same rounded size"
    assert runtime.double.count("allocated") == 1
    assert buffer_of(900, 1).peer.block.tensor != tensor, "each device has its own"


def test_slices_are_kept_with_the_memory(runtime):
    lane, kernels = runtime.open_lane(0), Kernels(runtime)
    x = floats(runtime, 1.0, 2.0)
    counts = []
    for _ in range(4):
        ticket, made = kernels.plus_one(lane, x)
        runtime.wait(ticket)
        runtime._drop()
        del made
        gc.collect()
        counts.append(runtime.double.count("slices"))
    assert counts[-1] == counts[-2] <= 4
    assert runtime.double.count("allocated") <= 4


def test_out_of_memory_says_how_much_there_is(runtime):
    runtime.double.set_memory(1 << 20)
    kept = buffer_of(900_000)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        buffer_of(500_000)
    words = str(caught.value)
    assert words.startswith("neuron:0 is out of memory: 500000 bytes were asked for")
    assert "of 1048576 bytes in use there, 917504 bytes of it in tensors and 0 cached" in words
    assert kept.peer
    assert core().counts(0)["number"]["current"] == 1, "what failed is not counted"


def test_what_is_cached_is_given_up_first(runtime):
    runtime.double.set_memory(1 << 20)
    for _ in range(2):
        buffer_of(700_000)
        gc.collect()
        buffer_of(900_000)
        gc.collect()


def test_sets_that_name_tensors_go_before_these(runtime):
    runtime.double.set_memory(1 << 20)
    lane, kernels = runtime.open_lane(0), Kernels(runtime)
    ticket, made = kernels.plus_one(lane, floats(runtime, 1.0, 2.0))
    runtime.wait(ticket)
    runtime._drop()
    del made
    gc.collect()
    buffer_of(1 << 20)  # the fixture finds no violation


def test_memory_of_what_is_in_flight_is_waited_for(runtime):
    runtime.double.set_memory(1 << 20)
    lane = runtime.open_lane(0)
    view = view_of(runtime, 200_000)
    out = torch.zeros(200_000)
    with runtime.double.held(runtime.double.read, queue=lane % 2):
        runtime.submit(lane, core().Copy(view, out))
        del view
    assert buffer_of(900_000).peer, "waits for the copy, which holds the memory"


def test_a_buffer_that_dies_in_flight_is_not_given_away(runtime):
    lane, gate = runtime.open_lane(0), runtime.open_lane(0, host=True)
    held = runtime.submit(gate, core().Pledge())
    view, out = floats(runtime, 1.0, 2.0), torch.zeros(2)
    runtime.submit(lane, core().Copy(view, out), [held])
    del view
    gc.collect()
    floats(runtime, 7.0, 7.0)
    runtime.complete(held)
    runtime.wait(runtime.submit(lane, core().Marker()), 10)
    assert out.tolist() == [1.0, 2.0]
