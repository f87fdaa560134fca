"""Four threads on four streams of two devices, with the extension built for AddressSanitizer."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_streams._runtime import toolchain

SCRIPT = """
import threading
import torch
import neuron_streams as ns

def step(x, y, i):
    z = torch.cat([x @ y, y + i])[1:5].t().contiguous()
    z[0].mul_(2)
    z = z.view(-1)[: 12].clone().reshape(3, 4)
    z.resize_(2, 4).add_(x[:2])
    return torch.nn.functional.layer_norm(z, (4,)).sum(0, keepdim=True).expand(4, 4) + x

def work(device, number, results):
    with ns.device(device), ns.stream(ns.Stream()):
        x, y = (torch.full((4, 4), 1.0 + number).to(f"neuron:{device}") for _ in range(2))
        for i in range(60):
            x = step(x, y, i)
            if i % 7 == 0:
                other = f"neuron:{1 - device}"
                x = (x.to(other) + torch.rand(4, 4, device=other) * 0).to(f"neuron:{device}")
            if i % 11 == 0:
                leaf = x.detach().requires_grad_()
                (leaf * leaf).sum().backward()
                x = x + leaf.grad * 0
            if i % 13 == 0:
                y = x.cpu().clamp_(-2, 2).to(f"neuron:{device}", non_blocking=True)
            x = x.clamp(-2, 2)
        results[number] = x.cpu()

def expected(number):
    x = y = torch.full((4, 4), 1.0 + number)
    for i in range(60):
        x = step(x, y, i)
        if i % 13 == 0:
            y = x.clamp(-2, 2)
        x = x.clamp(-2, 2)
    return x

ns.init()
results = {}
threads = [threading.Thread(target=work, args=(n % 2, n, results)) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
ns.synchronize()
assert all(torch.equal(results[n], expected(n)) for n in range(4)), results
print("same")
"""


def sanitizer():
    """The path of the library that a process has to begin with, or None."""
    compiler = toolchain.cxx_compiler()
    if compiler is None:
        return None
    command = [*compiler, "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found if Path(found).is_absolute() else None


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_operators_of_four_threads_touch_no_memory_that_is_not_theirs(tmp_path):
    library = sanitizer()
    if library is None:
        pytest.skip("the C++ compiler has no AddressSanitizer")
    plainly = ["env", "-u", "LD_PRELOAD"]  # a compiler under the sanitizer takes minutes
    compiler = shlex.join([*plainly, *toolchain.cxx_compiler(), "-fsanitize=address", "-g1"])
    environment = {
        **os.environ,
        "CXX": compiler,
        "NEURON_STREAMS_CACHE": str(tmp_path),
        "NEURON_STREAMS_DEVICE_COUNT": "2",
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch leave much to the end of the process
    }
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stderr[-8000:]
    assert done.stdout == "same\n"
    assert "AddressSanitizer" not in done.stderr
