"""Readers on one event loop share an engine; a slow one pauses its own request and nobody else's.

The engine's thread drives the device and never waits for a reader: where a stream is full, its
request leaves the batch until half has been read.
"""

from __future__ import annotations

import asyncio
import time

from models.loader import load
from models.smollm2 import smollm2
from models.tokenizer import Tokenizer
from neuron_streams.decode import DecodeEngine, DecodeLoop, RequestStream, SamplingParams

PROMPTS = {
    "quick": "What is the capital of France?",
    "brief": "Name three primary colors.",
    "slow": "Write one sentence about the sea.",
}
PARAMS = {
    "quick": SamplingParams(max_tokens=24),
    "brief": SamplingParams(max_tokens=24, stop=(",",)),
    "slow": SamplingParams(max_tokens=24),
}


async def read(stream: RequestStream, pause: float, start: float) -> None:
    text = ""
    async for output in stream:
        text += output.text
        await asyncio.sleep(pause)
    seconds = time.perf_counter() - start
    print(f"{seconds:5.1f} s  {stream.request_id:6} {output.finish_reason:7} {text!r}", flush=True)


async def serve(engine: DecodeEngine, tokenizer: Tokenizer) -> None:
    start = time.perf_counter()
    readers = []
    for name, prompt in PROMPTS.items():
        stream = engine.add_request(name, tokenizer.encode_chat(prompt), PARAMS[name])
        readers.append(read(stream, 0.5 if name == "slow" else 0.0, start))
    await asyncio.gather(*readers)


def main() -> None:
    folder = smollm2()
    tokenizer = Tokenizer.load(folder)
    model = load(folder, max_length=512, num_slots=4, batch_buckets=(3,), prompt_buckets=(64,))
    model.warm_up()
    with DecodeEngine(DecodeLoop(model, tokenizer=tokenizer), max_queued=4) as engine:
        asyncio.run(serve(engine, tokenizer))
        latency = engine.stats.inter_token_latency
        print(f"between tokens: p50 {latency.p50 * 1e3:.0f} ms, p99 {latency.p99 * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
