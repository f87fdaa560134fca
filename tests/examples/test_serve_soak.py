"""64 clients that ask, leave, stall and send nonsense; 15 s, or NEURON_STREAMS_SOAK_SECONDS.

Each answer is compared with the oracle's. In the end the server holds nothing, has not grown, and
ends well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.request import urlopen

import httpx2
import openai
import pytest

from tests.examples.serving import MODEL, ChatTokenizer, expected
from tests.examples.test_serve_server import Process

SECONDS = float(os.environ.get("NEURON_STREAMS_SOAK_SECONDS", "15"))
CLIENTS = 64
BAD = [{"max_tokens": 0}, {"prompt": [99]}, {"prompt": {}}, {"n": 99}, {"stop": ""}, {"tools": 1}]
LONG = {
    "model": MODEL,
    "prompt": [1],
    "n": 3,
    "max_tokens": 60,
    "extra_body": {"ignore_eos": True},
}
NONSENSE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    b"A" * 100_000,
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000,
]


class Client:
    """One of them; its seed decides what it does."""

    def __init__(self, api: openai.AsyncOpenAI, port: int, seed: int, outcomes: Counter[str]):
        self.api = api
        self.port = port
        self.rng = random.Random(seed)
        self.outcomes = outcomes
        self.acts: list[Callable[[], Awaitable[str]]] = [
            self.ask,
            self.ask_in_chat,
            self.read,
            self.read_slowly,
            self.leave_while_reading,
            self.leave_at_once,
            self.ask_for_what_cannot_be,
            self.talk_nonsense,
            self.send_half,
        ]

    async def run(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            act, refusal = self.rng.choice(self.acts), None
            try:
                outcome = await act()
            except openai.APIStatusError as error:
                outcome, refusal = "turned away", error
            if refusal is not None:
                assert (refusal.status_code, refusal.code) == (503, "server_overloaded")
                assert int(refusal.response.headers["retry-after"]) >= 1
                await asyncio.sleep(self.rng.random() / 4)
            self.outcomes[outcome] += 1

    def request(self) -> tuple[dict[str, object], list[str]]:
        """A request, and the text of each of its choices."""
        prompt = [self.rng.randrange(31) for _ in range(self.rng.randrange(1, 12))]
        seed, n, most = (
            self.rng.randrange(1000),
            self.rng.choice([1, 1, 1, 3]),
            self.rng.randrange(1, 40),
        )
        texts = [expected(prompt, seed + at, max_tokens=most)[2] for at in range(n)]
        fields = {"prompt": prompt, "seed": seed, "n": n, "max_tokens": most}
        return {"model": MODEL, **fields}, texts

    async def ask(self) -> str:
        request, texts = self.request()
        answer = await self.api.completions.create(**request)
        assert [choice.text for choice in answer.choices] == texts
        return "answered"

    async def ask_in_chat(self) -> str:
        seed, content = self.rng.randrange(1000), "".join(self.rng.choices("ab €", k=5))
        answer = await self.api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": content}],
            seed=seed,
            max_tokens=20,
            stop=["ba"],
        )
        prompt = ChatTokenizer().encode(f"{content} ")
        _, reason, text, _ = expected(prompt, seed, max_tokens=20, stop=("ba",))
        assert answer.choices[0].message.content == text
        assert answer.choices[0].finish_reason == reason
        return "answered in a chat"

    async def read(self, pause: float = 0.0) -> str:
        request, texts = self.request()
        found = [""] * len(texts)
        ends = 0
        async for chunk in await self.api.completions.create(**request, stream=True):
            found[chunk.choices[0].index] += chunk.choices[0].text
            ends += chunk.choices[0].finish_reason is not None
            await asyncio.sleep(pause)
        assert (found, ends) == (texts, len(texts))
        return "read slowly" if pause else "read"

    async def read_slowly(self) -> str:
        return await self.read(0.05)

    async def leave_while_reading(self) -> str:
        left = self.rng.randrange(8)
        async with await self.api.completions.create(**LONG, stream=True) as stream:
            async for _ in stream:
                left -= 1
                if left < 0:
                    break
        return "left while reading"

    async def leave_at_once(self) -> str:
        task = asyncio.ensure_future(self.api.completions.create(**LONG))
        await asyncio.sleep(self.rng.random() / 2)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, openai.APIStatusError):
            raise result
        return "left at once"

    async def ask_for_what_cannot_be(self) -> str:
        request, _ = self.request()
        with pytest.raises(openai.BadRequestError) as caught:
            await self.api.completions.create(**request, extra_body=self.rng.choice(BAD))
        assert caught.value.type == "invalid_request_error"
        return "refused"

    async def talk_nonsense(self) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.rng.choice(NONSENSE))
        with contextlib.suppress(ConnectionResetError):
            assert (await reader.read(12)).decode() in ("HTTP/1.1 400", "HTTP/1.1 404", "")
        writer.close()
        return "talked nonsense"

    async def send_half(self) -> str:
        body = json.dumps(self.request()[0]).encode()
        whole = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(whole[: self.rng.randrange(len(whole))])
        await asyncio.sleep(self.rng.random() / 4)
        writer.close()
        return "sent half"


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_nothing_is_lost_and_nothing_is_left() -> None:
    with Process("--max-sequences", "40", "--stall-seconds", "600") as process:
        process.go_on()
        outcomes, sizes = asyncio.run(soak(process))
        while metrics(process.port)["num_requests"]:
            pass
        counted = metrics(process.port)
        open_files = len(list(Path(f"/proc/{process.child.pid}/fd").iterdir()))
        process.stop(signal.SIGTERM)
        said = process.child.stderr.read()
        assert process.child.wait() == 0
    ends = {name: count for name, count in counted.items() if "_total{" in name}
    print(f"{sum(outcomes.values())} acts, {dict(outcomes)}\n{ends}\nresident {sizes}")
    assert "Traceback" not in said, said
    assert "cut off" not in said, said
    assert set(outcomes) >= {"answered", "read", "read slowly", "refused", "turned away"}
    assert ends['request_success_total{finished_reason="abort"}'] >= 1
    assert "error" not in str(ends)
    assert ends['refused_requests_total{status="400"}'] >= outcomes["refused"]
    assert open_files < 64, "connections were left open"
    assert sizes[-1] - sizes[1] < 16 << 20, "memory is flat"


async def soak(process: Process) -> tuple[Counter[str], list[int]]:
    outcomes: Counter[str] = Counter()
    start = time.monotonic()
    # Connections that are used once: a client that is starved of time may write on one that the
    # server has closed because nobody seemed to use it.
    once = httpx2.Limits(max_keepalive_connections=0)
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{process.port}/v1",
        api_key="none",
        max_retries=0,
        timeout=600,
        http_client=openai.DefaultAsyncHttpxClient(limits=once),
    ) as api:
        clients = [Client(api, process.port, seed, outcomes) for seed in range(CLIENTS)]
        work = asyncio.gather(*(client.run(start + SECONDS) for client in clients))
        sizes = []
        while not work.done():
            sizes.append(resident(process.child.pid))
            await asyncio.wait([work], timeout=SECONDS / 4)
        await work
    return outcomes, sizes


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def metrics(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        lines = response.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.removeprefix("neuron_streams_"): float(value) for name, value in pairs}
