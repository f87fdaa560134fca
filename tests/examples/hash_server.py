"""The command of `examples/serve.py` with the hash model behind it, for tests that send signals.

The device waits in its twentieth command until there is a line on stdin, or stdin is closed.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque

from examples.serve import main
from neuron_streams.decode import DecodeLoop
from tests.decode.harness import make_loop
from tests.examples.serving import MODEL, SIZES, ChatTokenizer


def load_loop(options: argparse.Namespace) -> tuple[DecodeLoop, ChatTokenizer, str]:
    tokenizer = ChatTokenizer()
    loop, model, _ = make_loop(
        tokenizer=tokenizer, sizes=SIZES, policy="gather", output_thread=True
    )
    model.calls = deque(maxlen=100)  # type: ignore[assignment]
    decode = model._decode

    def wait_once(ids: list[int], positions: list[int], slots: list[int]) -> list[int]:
        if model.executed == 20:
            sys.stdin.readline()
        return decode(ids, positions, slots)

    model._decode = wait_once  # type: ignore[method-assign]
    return loop, tokenizer, MODEL


if __name__ == "__main__":
    sys.exit(main(load_loop=load_loop))
