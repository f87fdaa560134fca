"""Port a CUDA program by text alone, and run what comes out in a process of its own."""

import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
CUDA = HERE / "cuda"

NEURON = [
    (r"\btorch\.cuda\b", "neuron_streams"),
    (r'"cuda(?=[":])', '"neuron'),
    (r"\.cuda\(", ".neuron("),
    (r"^import torch$", "import torch\nimport neuron_streams"),
]
HOST = [
    (r"\btorch\.cuda\b", "host_streams"),
    (r'"cuda(:[^"]*)?"', '"cpu"'),
    (r"^import torch$", "import torch\nimport host_streams"),
    (r"\bpin_memory=True\b", "pin_memory=False"),
    (r"device_ids=\[rank\]", "device_ids=None"),
]
# Modules of libraries that are CUDA code themselves.
LIBRARIES = {"transformers_generate": ("transformers.cache_utils",)}


def port(text, rules):
    for pattern, new in rules:
        text = re.sub(pattern, new, text, flags=re.MULTILINE)
    return text


def start(name, rules, folder, **environment):
    """Start the ported program; `rules` is HOST or NEURON, and the text stays in `folder`."""
    script = folder / f"{name}.py"
    text = port((CUDA / f"{name}.py").read_text(), globals()[rules])
    if name in LIBRARIES:
        hook = f"from tests.programs import library_port; library_port.install({rules!r}, "
        text = f"{hook}{LIBRARIES[name]!r})\n{text}"
    script.write_text(text)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            **environment,
        },
    )


def finish(process, seconds):
    """What the program printed, or an error with how it ended and what it said."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"did not end within {seconds} s: {out}\n{err}") from None
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    return out
