"""Generate text for several prompts at once, on emulated Neuron streams.

Prompts share the batch; the first unfinished answer is shown as it is generated, the others follow
as far as they have got.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence

from models.loader import folder_of, load
from models.smollm2 import smollm2
from models.tokenizer import Tokenizer
from neuron_streams.decode import DecodeLoop, RequestOutput, SamplingParams

PROMPTS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Write one sentence about the sea.",
)
LARGEST_BATCH = 8
LENGTHS = (512, 2048, 8192)
BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Page:
    """Answers in the order of their prompts: the first that is not finished is shown live."""

    def __init__(self, prompts: dict[str, str]) -> None:
        self.prompts = prompts
        self.waiting = dict.fromkeys(prompts, "")
        self.done: set[str] = set()
        self.order = list(prompts)
        self._begin()

    def add(self, output: RequestOutput) -> None:
        self.waiting[output.request_id] += output.text
        if output.finished:
            self.done.add(output.request_id)
        self._show()

    def _begin(self) -> None:
        if self.order:
            print(f"> {self.prompts[self.order[0]]}", flush=True)

    def _show(self) -> None:
        while self.order:
            first = self.order[0]
            print(self.waiting[first], end="", flush=True)
            self.waiting[first] = ""
            if first not in self.done:
                return
            self.order.pop(0)
            print("\n", flush=True)
            self._begin()


def fitting(sizes: Sequence[int], wanted: int) -> int:
    """The smallest size that holds `wanted`, or the largest there is."""
    return next((size for size in sizes if size >= wanted), sizes[-1])


def summary(loop: DecodeLoop, tokens: int, seconds: float) -> str:
    stats = loop.stats
    reasons = ", ".join(f"{name} {count}" for name, count in stats.fallback_reasons.items())
    return (
        f"{tokens} tokens, {tokens / seconds:.1f} tokens/s, {stats.async_steps} async steps, "
        f"{stats.sync_fallback_steps} fallbacks" + (f" ({reasons})" if reasons else "")
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: three of its own")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="for temperature > 0")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end there")
    parser.add_argument("--model", metavar="PATH_OR_ID", help="a Llama; default: SmolLM2-135M")
    parser.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="schedule a step ahead of the device",
    )
    parser.add_argument("--stats", action="store_true", help="one line at the end")
    parser.add_argument("--verbose", action="store_true", help="say what is compiled")
    return parser.parse_args(argv)


def generate(options: argparse.Namespace) -> int:
    """Returns the exit code: 1 if a prompt was refused, which stops no other."""
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        stop=options.stop,
    )
    folder = folder_of(options.model) if options.model else smollm2()
    tokenizer = Tokenizer.load(folder)
    texts = options.prompts or PROMPTS
    prompts = {
        str(number): tokenizer.encode_chat(text) if text.strip() else []
        for number, text in enumerate(texts)
    }
    sizes = [len(ids) for ids in prompts.values() if 0 < len(ids) < LENGTHS[-1]] or [1]
    max_length = fitting(LENGTHS, max(sizes) + options.max_tokens)
    batch = min(len(prompts), LARGEST_BATCH)
    model = load(
        folder,
        max_length=max_length,
        num_slots=batch + 1,
        batch_buckets=(batch,),
        prompt_buckets={fitting(BUCKETS, size) for size in sizes},
    )
    model.warm_up(sampled=options.temperature > 0, progress=sys.stderr.isatty())
    with DecodeLoop(model, async_scheduling=options.async_scheduling, tokenizer=tokenizer) as loop:
        refused = 0
        accepted = {}
        for number, text in enumerate(texts):
            try:
                loop.add_request(str(number), prompts[str(number)], params)
                accepted[str(number)] = text
            except ValueError as error:
                print(f"generate: prompt {number + 1}: {error}", file=sys.stderr)
                refused += 1
        page, tokens, start = Page(accepted), 0, time.perf_counter()
        while loop.has_unfinished_requests():
            for output in loop.step():
                tokens += len(output.new_token_ids)
                page.add(output)
        if options.stats:
            print(summary(loop, tokens, time.perf_counter() - start))
    return 1 if refused else 0


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING)
    try:
        return generate(options)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
