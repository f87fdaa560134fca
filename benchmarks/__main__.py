"""`python -m benchmarks [--json] [--quick] [NAME...]`: run all benchmarks, or those named."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import importlib
import inspect
import json
import pkgutil
import sys

import benchmarks
from benchmarks.report import render

HELPERS = {"__main__", "loads", "pictures", "report"}


def names() -> list[str]:
    """Every module of this folder that measures something: it has `run() -> Sequence[Row]`."""
    return sorted({m.name for m in pkgutil.iter_modules(benchmarks.__path__)} - HELPERS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names()))
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="measure less, where that is offered")
    parser.add_argument("--plot", metavar="PATH", help="save a picture, where there is one")
    arguments = parser.parse_args()
    options = {"quick": arguments.quick, "plot": arguments.plot}
    unknown = sorted(set(arguments.names) - set(names()))
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(names())}")
    found = {}
    for name in arguments.names or names():
        run = importlib.import_module(f"benchmarks.{name}").run
        offered = inspect.signature(run).parameters
        rows = run(**{key: value for key, value in options.items() if key in offered})
        found[name] = [row.as_dict() for row in rows]
        if not arguments.json:
            print(render(name, rows), flush=True)
    if arguments.json:
        print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
