"""The command line: `neuron-streams doctor [--json]`, `neuron-streams build`, `... surface`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="neuron-streams", description="Streams for AWS Neuron.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is in use here, why, and what to change")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("build", help="compile the extension into the cache, and print its folder")
    commands.add_parser("surface", help="every name of torch.cuda and what becomes of it")
    arguments = parser.parse_args(argv)
    if arguments.command == "surface":
        from neuron_streams.surface import markdown

        print(markdown())
        return 0

    try:
        if arguments.command == "build":
            print(_build())
        else:
            print(_report(arguments.json))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"neuron-streams {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _build() -> str:
    """Compile the extension unless it is there; the folder to copy to a machine without g++."""
    from neuron_streams._runtime import cache, extension

    extension.build()
    return str(cache.cache_folder())


def _report(as_json: bool) -> str:
    from neuron_streams.doctor import examine

    report = examine()
    return json.dumps(report.as_dict(), indent=2) if as_json else str(report)


if __name__ == "__main__":
    sys.exit(main())
