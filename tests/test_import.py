"""Nothing happens at import."""

from __future__ import annotations

import subprocess
import sys

CHECK = """
import sys, threading, os, torch
before = dict(os.environ), torch._C._get_privateuse1_backend_name(), threading.active_count()
import neuron_streams, neuron_streams.decode, neuron_streams.testing
after = dict(os.environ), torch._C._get_privateuse1_backend_name(), threading.active_count()
assert before == after, (before, after)
assert not neuron_streams.is_initialized()
assert not hasattr(torch, "neuron")
assert "torch_neuronx" not in sys.modules and "transformers" not in sys.modules
neuron_streams.Stream()
assert neuron_streams.is_initialized() and torch.device("neuron:1").type == "neuron"
"""


def test_import_does_nothing_and_first_use_does_everything():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHECK], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
