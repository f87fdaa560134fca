"""A million commands over a hundred streams: memory stays flat, and no thread is left behind."""

from __future__ import annotations

import gc
import os
import threading

import pytest

import neuron_streams
from neuron_streams.testing import EmulatedRuntime, use_runtime

STREAMS, COMMANDS, WARM = 100, 1_000_000, 200_000


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_million_commands_over_a_hundred_streams():
    threads = threading.active_count()
    with use_runtime(EmulatedRuntime(2)) as runtime:
        streams = [neuron_streams.Stream(device=i % 2) for i in range(STREAMS)]
        events = [neuron_streams.Event(enable_timing=i % 10 == 0) for i in range(STREAMS)]
        lanes = len(runtime.lanes(0)) + len(runtime.lanes(1))
        warm = 0
        for i in range(COMMANDS):
            at = i % STREAMS
            with neuron_streams.stream(streams[at]):
                streams[at].wait_event(events[at - 1])
                neuron_streams._sleep(0)
                if i % 3 == 0:
                    events[at].record()
            if i == WARM:
                neuron_streams.synchronize(0)
                neuron_streams.synchronize(1)
                gc.collect()
                warm = resident()
        for index in range(2):
            neuron_streams.synchronize(index)
        gc.collect()
        assert resident() - warm < 16 << 20, "memory is flat"
        assert len(runtime.lanes(0)) + len(runtime.lanes(1)) == lanes
        assert all(s.query() for s in streams)
    for thread in threading.enumerate():
        if thread.name.startswith("neuron_streams worker"):
            thread.join(10)
    assert threading.active_count() == threads
