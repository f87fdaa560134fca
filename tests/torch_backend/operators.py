"""PyTorch's operator database on the device, beside the CPU.

`python -m tests.torch_backend.operators` shows what differs, in groups. Children run the operators,
since one may take its process with it: each writes what it begins and what failed, a line each, and
one that dies or hangs is replaced by a child that goes on behind it.
"""

import argparse
import collections
import json
import os
import re
import selectors
import subprocess
import sys
import threading
import time

SILENCE = 300.0  # seconds that a child may take for one operator, dtype and kind


def entries(pattern=""):
    """Every (operator, dtype, kind), as indices and names that a child can find again."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [(i, op) for i, op in enumerate(op_db) if re.search(pattern, op.full_name)]


def child(pattern, share, shares, skip):
    """Run every `shares`-th entry behind the first `skip` steps; a step is (op, dtype, kind)."""
    import torch

    from tests.torch_backend.checks import DTYPES, KINDS, Checks

    torch.set_num_threads(1)
    checks, number = Checks(), 0
    say = lambda **line: print(json.dumps(line), file=real, flush=True)  # noqa: E731
    real, sys.stdout = sys.stdout, sys.stderr
    for _, op in entries(pattern)[share::shares]:
        for dtype in DTYPES:
            for kind in KINDS:
                number += 1
                if number <= skip:
                    continue
                name = str(dtype).removeprefix("torch.")
                say(begin=[op.full_name, name, kind], step=number)
                for failure in checks.run(op, dtype, kind):
                    say(failure=vars(failure))
    say(calls=checks.calls)
    real.flush()
    os._exit(0)  # how a process ends is the matter of other tests


class Run:
    """The whole database, in as many children at once as there are processors."""

    def __init__(self, pattern="", shares=None, show=lambda line: None):
        self._show = show
        self.shares = shares or os.cpu_count() or 1
        self.failures, self.calls, self.seconds = [], 0, 0.0
        self._lock = threading.Lock()
        started = time.monotonic()
        threads = [
            threading.Thread(target=self._share, args=(pattern, i)) for i in range(self.shares)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.seconds = time.monotonic() - started

    def _share(self, pattern, share):
        done, skip, crashes = False, 0, 0
        while not done and crashes < 200:
            done, skip = self._child(pattern, share, skip)
            crashes += not done

    def _child(self, pattern, share, skip):
        command = [sys.executable, "-m", "tests.torch_backend.operators"]
        command += ["--child", pattern, str(share), str(self.shares), str(skip)]
        at, done = ["(start)", "", ""], False
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        ) as process:
            for line in _lines(process.stdout):
                if line is None:
                    process.kill()
                    break
                self._show(line)
                if "begin" in line:
                    at, skip = line["begin"], line["step"]
                elif "failure" in line:
                    with self._lock:
                        self.failures.append(line["failure"])
                else:
                    done = True
                    with self._lock:
                        self.calls += line["calls"]
            code = process.wait()
        if not done:
            message = "hangs" if code == -9 else f"ends the process: exit code {code}"
            with self._lock:
                self.failures.append(
                    {
                        **dict(zip(("op", "dtype", "kind"), at, strict=True)),
                        "sample": -1,
                        "message": message,
                    }
                )
        return done or at[0] == "(start)", skip

    def by_operator(self):
        found = collections.defaultdict(list)
        for failure in self.failures:
            found[failure["op"]].append(failure)
        return dict(found)


def _lines(pipe):
    """The lines of a child as they come; None where none has come for too long."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if not selector.select(SILENCE):
                yield None
                return
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            yield from map(json.loads, lines)


def table(run):
    """What failed, by kind and dtype, and by message: the most frequent first."""
    lines = [f"{run.calls} calls in {run.seconds:.0f} s, {len(run.by_operator())} operators fail"]
    counts = collections.Counter((f["kind"], f["dtype"]) for f in run.failures)
    lines += [f"{n:6} {kind:9} {dtype}" for (kind, dtype), n in sorted(counts.items())]
    groups = collections.defaultdict(set)
    for f in run.failures:
        text = re.sub(r"0x[0-9a-f]+|-?\d+(\.\d+)?(e[-+]?\d+)?", "N", f["message"])
        text = re.sub(r"'aten::[\w.]+'|\"\w+\"", "OP", text)
        text = re.sub(r"N of N values.*", "values differ", text)
        groups[text].add((f["op"], f["kind"], f["dtype"], f["message"]))
    for text, members in sorted(groups.items(), key=lambda item: -len({m[0] for m in item[1]})):
        operators = sorted({m[0] for m in members})
        lines.append(f"\n{len(operators)} operators: {text}")
        lines.append("    " + ", ".join(operators[:12]) + (" ..." if len(operators) > 12 else ""))
        op, kind, dtype, message = min(members)
        lines.append(f"    {op} {dtype} {kind}: {message}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression of names")
    parser.add_argument("--shares", type=int, help="how many processes; one a processor")
    parser.add_argument("--verbose", action="store_true", help="show each step on stderr")
    parser.add_argument("--json", help="a file for all failures")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        pattern, *numbers = options.child
        child(pattern, *map(int, numbers))
    show = lambda line: print(json.dumps(line), file=sys.stderr, flush=True)  # noqa: E731
    run = Run(options.pattern, options.shares, show if options.verbose else lambda line: None)
    print(table(run))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(run.failures, file, indent=1)


if __name__ == "__main__":
    main()
