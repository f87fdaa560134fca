"""Run many small scripts, each in a process of its own, at the price of one import.

One process imports what all need and forks for each script; the script ends as any program does.
"""

import json
import os
import signal
import subprocess
import sys
from typing import NamedTuple

DRIVER = """
import gc, json, os, sys, tempfile, time
gc.collect()
gc.freeze()  # a child that ends need not look at all of torch again
scripts, seconds = json.load(sys.stdin)
results, running = [None] * len(scripts), {}

def collect(child, status):
    number, files, _ = running.pop(child)
    texts = [os.pread(file, 1 << 16, 0).decode(errors="replace") for file in files]
    for file in files:
        os.close(file)
    results[number] = [os.waitstatus_to_exitcode(status), *texts]

def wait(most):
    while len(running) > most:
        for child in list(running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                collect(child, status)
            elif time.monotonic() > running[child][2]:
                os.kill(child, 9)
                collect(child, os.waitpid(child, 0)[1])
        time.sleep(0.005)

for number, script in enumerate(scripts):
    wait(3)
    files = []
    for _ in range(2):
        file, name = tempfile.mkstemp()
        os.unlink(name)
        files.append(file)
    child = os.fork()
    if child == 0:
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        exec(compile(script, "script", "exec"), dict(globals()))
        break
    running[child] = number, files, time.monotonic() + seconds
else:
    wait(0)
    json.dump(results, sys.stdout)
"""


class Ended(NamedTuple):
    code: int  # -9: it hung
    out: str
    err: str

    @property
    def crashed(self):
        return self.code < 0

    def __str__(self):
        name = signal.Signals(-self.code).name if self.code < 0 else self.code
        return f"{name}: {self.out}{self.err}"


def run(scripts, prelude="import torch\nimport neuron_streams\n", seconds=30.0, **environment):
    """How each of the scripts of a dict ended."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", prelude + DRIVER],
        input=json.dumps([list(scripts.values()), seconds]),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=seconds * (len(scripts) + 3),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    return dict(zip(scripts, (Ended(*result) for result in results), strict=True))
