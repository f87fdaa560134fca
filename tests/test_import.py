"""Importing makes "neuron" the name of a device, and does nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

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


REPLACED = """
import inspect, json, sys, torch, torch.distributed

def look():
    spaces = {n: vars(m) for n, m in sys.modules.items() if n.split(".")[0] == "torch"}
    for owner in (torch.Tensor, torch.UntypedStorage, torch.nn.Module):
        names = {name: inspect.getattr_static(owner, name) for name in dir(owner)}
        spaces[owner.__qualname__] = names  # inherited ones, too
    return {
        (space, name): value
        for space, names in spaces.items()
        for name, value in list(names.items())
        if callable(value)
    }

before = look()
import neuron_streams
after = look()
print(json.dumps(sorted({key[1] for key in before if after.get(key) is not before[key]})))
"""


def test_the_readme_names_the_functions_of_torch_that_importing_replaces():
    done = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    replaced = json.loads(done.stdout)
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (bullet,) = (part for part in readme.split("\n- ") if part.startswith("The import wraps"))
    named = {
        name.rpartition(".")[2] for name in re.findall(r"`(?:torch\.|Tensor\.)([\w.]+)`", bullet)
    }
    assert set(replaced) <= named
    assert {1: "one", 2: "two", 3: "three"}[len(replaced)] in bullet
