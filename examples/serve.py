"""Serve a model over HTTP, with the API of OpenAI's completions.

    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Hi"}]}'

One engine serves all: who reads slowly holds up nobody else, who leaves frees its place at once.
SIGTERM lets no more in, waits for what is there, and ends; a second one aborts that. It has no
passwords and no TLS: put a proxy in front where others than you can reach it.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from examples.serving.app import make_app
from examples.serving.door import Door
from examples.serving.server import make_server
from examples.serving.tokens import Tokenizer
from models.llama import Llama
from models.loader import folder_of, load
from models.smollm2 import smollm2
from models.tokenizer import Tokenizer as ModelTokenizer
from neuron_streams.decode import DecodeEngine, DecodeLoop, SamplingParams

BUCKETS = (32, 256)  # tokens of a step with prompts: while others decode, and while none does


_KINDS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0}, {"logprobs": 0})


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", metavar="PATH_OR_ID", help="a Llama; default: SmolLM2-135M")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-length", type=int, default=1024, help="tokens, prompt and answer")
    parser.add_argument("--batch", type=int, default=8, help="sequences that run at a time")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=40,
        help="tokens of a step while any sequence decodes: fewer for shorter gaps between tokens,"
        " more for an earlier first token",
    )
    parser.add_argument(
        "--steps-per-launch",
        type=int,
        choices=(1, *Llama.window_sizes),
        default=1,
        help="decode steps of a launch: more where the host is slower than the device",
    )
    parser.add_argument("--max-sequences", type=int, default=256, help="running and waiting")
    parser.add_argument(
        "--lazy", action="store_true", help="compile at first use, not at the start"
    )
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="after SIGTERM")
    parser.add_argument("--stall-seconds", type=float, default=30.0, help="for a client to go on")
    return parser.parse_args(argv)


def load_loop(options: argparse.Namespace) -> tuple[DecodeLoop, Tokenizer, str]:
    """The loop to serve, its tokenizer, and the name of its model."""
    folder = folder_of(options.model) if options.model else smollm2()
    tokenizer = ModelTokenizer.load(folder)
    model = load(
        folder,
        max_length=options.max_length,
        num_slots=options.batch + 4,  # some for those whose last tokens are in flight
        batch_buckets=(options.batch,),
        prompt_buckets=BUCKETS,
    )
    loop = DecodeLoop(
        model,
        policy="gather",
        tokenizer=tokenizer,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.batch),
        steps_per_launch=options.steps_per_launch,
    )
    return loop, tokenizer, folder.name


def serve(loop: DecodeLoop, tokenizer: Tokenizer, name: str, options: argparse.Namespace) -> None:
    with DecodeEngine(loop) as engine:
        if not options.lazy:
            warm_up(engine, options.max_length, options.steps_per_launch)
        door = Door(engine, tokenizer, name, options.max_sequences)
        server = make_server(
            make_app(door),
            door,
            host=options.host,
            port=options.port,
            drain_seconds=options.drain_seconds,
            stall_seconds=options.stall_seconds,
        )
        server.run()


def warm_up(engine: DecodeEngine, max_length: int, steps_per_launch: int = 1) -> None:
    """Have requests compile all that requests need, while nobody waits behind them.

    Twice as many tokens as the largest window take one window of each size, and a single step.
    """
    most = 2 * steps_per_launch
    for length in (1, *BUCKETS):
        for options in _KINDS:
            if length + most <= max_length:
                params = SamplingParams(max_tokens=most, ignore_eos=True, **options)
                engine.add_request("warm-up", [0] * length, params).result()


def main(
    argv: Sequence[str] | None = None,
    load_loop: Callable[[argparse.Namespace], tuple[DecodeLoop, Tokenizer, str]] = load_loop,
) -> int:
    options = arguments(argv)
    logging.basicConfig(level=logging.WARNING)
    # uvicorn raises its signals again once it has ended: that is a good end, and this cleans up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve(*load_loop(options), options)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
