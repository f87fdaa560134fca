"""The command line: `neuron-streams doctor [--json]`, `neuron-streams surface`."""

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
    commands.add_parser("surface", help="every name of torch.cuda and what becomes of it")
    arguments = parser.parse_args(argv)
    if arguments.command == "surface":
        from neuron_streams.surface import markdown

        print(markdown())
        return 0

    from neuron_streams.doctor import examine

    try:
        report = examine()
    except (OSError, RuntimeError, ValueError) as error:
        print(f"neuron-streams doctor: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
