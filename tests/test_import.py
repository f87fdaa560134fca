"""Importing makes "neuron" the name of a device, and does nothing else."""

from __future__ import annotations

import subprocess
import sys

CHECK = """
import sys, threading, os, torch
before = dict(os.environ), threading.active_count(), len(os.listdir("/proc/self/task"))
import neuron_streams, neuron_streams.decode, neuron_streams.testing
after = dict(os.environ), threading.active_count(), len(os.listdir("/proc/self/task"))
assert before == after, (before, after)
assert not neuron_streams.is_initialized()
assert torch._C._get_privateuse1_backend_name() == "neuron"
assert torch.neuron is neuron_streams and torch.device("neuron:1").index == 1
assert neuron_streams._runtime.extension._loaded == {}
assert "torch_neuronx" not in sys.modules and "transformers" not in sys.modules
assert torch.ones(2).is_pinned() is False and torch.random.fork_rng is not None
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(3)
assert not neuron_streams.is_initialized()
neuron_streams.Stream()
assert neuron_streams.is_initialized() and torch.empty(1, device="neuron:1").get_device() == 1
"""


def test_import_names_the_device_and_first_use_does_everything():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHECK], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
