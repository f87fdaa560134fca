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
results = []
for script in scripts:
    files = [tempfile.mkstemp()[0] for _ in range(2)]
    child = os.fork()
    if child == 0:
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        exec(compile(script, "script", "exec"), dict(globals()))
        break
    until = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, 9)
        ended = os.waitpid(child, 0)
    texts = [os.pread(file, 1 << 16, 0).decode(errors="replace") for file in files]
    results.append([os.waitstatus_to_exitcode(ended[1]), *texts])
else:
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
        timeout=seconds * 4 + len(scripts),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    return dict(zip(scripts, (Ended(*result) for result in results), strict=True))
