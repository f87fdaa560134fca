"""Room, readers that are slow, clients that leave, engines that fail: turned by hand."""

from __future__ import annotations

import asyncio

import pytest

from examples.serving import generation
from examples.serving.app import make_app
from examples.serving.door import Door
from neuron_streams.decode import RequestMetrics
from tests.decode.engines import check_rest
from tests.examples.serving import MODEL, Call, expected, make_door, turning, until

PATH = "/v1/completions"
BODY = {"model": MODEL, "prompt": [1], "seed": 1, "max_tokens": 30, "ignore_eos": True}
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def text_of(call):
    return "".join(event["choices"][0]["text"] for event in call.events)


async def admitted(engine, count):
    await until(lambda: len(engine.unfinished_request_ids) == count)


def test_a_full_server_says_when_to_come_back():
    async def main():
        door, engine = make_door(max_sequences=3)
        app = make_app(door)
        first = Call(app, PATH, BODY | {"n": 2})
        await admitted(engine, 2)
        for _ in range(2):
            full = Call(app, PATH, BODY | {"n": 2})
            await full.task
            assert (full.status, full.headers["retry-after"]) == (503, "1")
            error = full.json["error"]
            assert (error["type"], error["code"]) == ("server_error", "server_overloaded")
            assert error["message"].startswith("All of the server's 3 places are taken;")
        fits = Call(app, PATH, BODY)
        await admitted(engine, 3)
        async with turning(engine):
            await asyncio.gather(first.task, fits.task)
        assert (first.status, fits.status, door.num_sequences) == (200, 200, 0)
        check_rest(engine)

    asyncio.run(main())


def test_when_to_come_back_is_when_half_will_have_ended():
    door, _ = make_door()
    assert door.metrics.retry_after == 1
    seconds_and_answers = [(0.0, 1), (0.2, 1), (4.1, 1), (4.2, 1), (500, 5), (500, 5), (500, 5)]
    for seconds, want in [*seconds_and_answers, (500, 5), (500, 30)]:
        door.metrics.count_end("stop", RequestMetrics(0.0, seconds, 1, (0.1,)))
        assert door.metrics.retry_after == want


@streamed
@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_client_that_leaves_frees_its_place(stream, when):
    async def main():
        door, engine = make_door(max_sequences=2)
        call = Call(make_app(door), PATH, BODY | {"stream": stream, "n": 2})
        await admitted(engine, 2)
        if when == "running":
            while engine.stats.generated_tokens < 6:
                engine.turn()
                await asyncio.sleep(0)
        call.leave()
        await call.task
        assert not call.ended
        assert door.num_sequences == 0
        assert engine.unfinished_request_ids == ()
        while engine.turn():
            pass
        check_rest(engine)
        assert b'request_success_total{finished_reason="abort"} 2.0' in door.metrics.text()

    asyncio.run(main())


def test_a_client_that_leaves_before_it_is_admitted_is_never_added():
    async def main():
        door, _ = make_door()
        call = Call(make_app(door), PATH, b"", [(b"content-length", b"10")])
        call._parts.clear()
        await asyncio.sleep(0)
        call.leave()
        await call.task
        assert (call.status, door.num_sequences) == (None, 0)

    asyncio.run(main())


def test_a_slow_reader_pauses_its_own_request_alone():
    async def main():
        door, engine = make_door(max_queued=4)
        app = make_app(door)
        slow = Call(app, PATH, BODY | {"stream": True})
        await admitted(engine, 1)
        while not slow.body:
            engine.turn()
            await asyncio.sleep(0)
        slow.takes.clear()
        quick = Call(app, PATH, BODY | {"prompt": [2]})
        await admitted(engine, 2)
        async with turning(engine):
            await quick.task
            assert (
                quick.json["choices"][0]["text"]
                == expected([2], 1, max_tokens=30, ignore_eos=True)[2]
            )
            assert not slow.ended
            assert engine.stats.generated_tokens < 30 + 15
            slow.takes.set()
            await slow.task
        assert text_of(slow) == expected([1], 1, max_tokens=30, ignore_eos=True)[2]
        check_rest(engine)

    asyncio.run(main())


@streamed
def test_a_request_that_fails_is_told_so(stream):
    async def main():
        door, engine = make_door()
        engine._core.loop.runner.model.fail_at.add(4)
        call = Call(make_app(door), PATH, BODY | {"stream": stream})
        async with turning(engine):
            await call.task
        assert call.ended
        error = call.events[-1]["error"] if stream else call.json["error"]
        assert call.status == (200 if stream else 500)
        assert (error["type"], error["message"]) == ("server_error", "the device failed in call 4")
        assert b"[DONE]" not in call.body
        assert b'"finish_reason":"error"' not in call.body
        assert b'request_success_total{finished_reason="error"} 1.0' in door.metrics.text()
        assert b'refused_requests_total{status="500"} 1.0' in door.metrics.text()
        check_rest(engine)

    asyncio.run(main())


def test_an_engine_that_has_ended_is_told_of():
    async def main():
        door, engine = make_door()
        app = make_app(door)
        assert await get(app, "/health") == (200, b"")
        engine.close()
        call = Call(app, PATH, BODY)
        await call.task
        assert (call.status, call.json["error"]["message"][:28]) == (
            500,
            "The decode engine is closed;",
        )
        assert (await get(app, "/health"))[0] == 503
        assert door.num_sequences == 0

    asyncio.run(main())


@streamed
def test_a_door_that_closes_tells_all_who_wait(stream):
    async def main():
        door, engine = make_door()
        app = make_app(door)
        call = Call(app, PATH, BODY | {"stream": stream, "n": 2})
        await admitted(engine, 2)
        async with turning(engine):
            await until(lambda: engine.stats.generated_tokens > 8)
            door.close()
            await call.task
        assert call.ended
        error = call.events[-1]["error"] if stream else call.json["error"]
        assert (error["code"], error["type"]) == ("shutting_down", "server_error")
        assert call.status == (200 if stream else 503)
        later = Call(app, PATH, BODY)
        await later.task
        assert later.status == 503
        check_rest(engine)

    asyncio.run(main())


def test_a_door_that_closes_while_a_prompt_is_read(monkeypatch):
    async def main():
        door, engine = make_door()
        encode = door.tokenizer.encode

        def close_and_encode(text):
            door.close()
            return encode(text)

        monkeypatch.setattr(door.tokenizer, "encode", close_and_encode)
        call = Call(make_app(door), PATH, BODY | {"prompt": "ab"})
        async with turning(engine):
            await call.task
        assert (call.status, call.json["error"]["code"]) == (503, "shutting_down")
        check_rest(engine)

    asyncio.run(main())


def test_a_body_that_does_not_come(monkeypatch):
    monkeypatch.setattr(generation, "BODY_SECONDS", 0.0)

    async def main():
        door, _ = make_door()
        call = Call(make_app(door), PATH, b"")
        call._parts.clear()
        await call.task
        assert call.status == 408
        assert call.json["error"]["message"].startswith("The body did not come within 0 s;")

    asyncio.run(main())


def test_a_prompt_that_is_refused_takes_the_others_with_it():
    async def main():
        door, engine = make_door()
        call = Call(make_app(door), PATH, BODY | {"prompt": [[1], [99]]})
        await call.task
        assert (call.status, door.num_sequences) == (400, 0)
        while engine.turn():
            pass
        check_rest(engine)
        assert engine.stats.generated_tokens == 0

    asyncio.run(main())


def test_the_metrics():
    async def main():
        door, engine = make_door()
        app = make_app(door)
        call = Call(app, PATH, BODY | {"n": 2})
        await admitted(engine, 2)
        assert b"neuron_streams_num_requests 2.0" in (await get(app, "/metrics"))[1]
        async with turning(engine):
            await call.task
        status, text = await get(app, "/metrics")
        lines = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if line[0] != "#")
        stats = engine.stats
        assert status == 200
        for name, value in {
            "num_requests": 0,
            'request_success_total{finished_reason="length"}': 2,
            "prompt_tokens_total": 2,
            "generated_tokens_total": 60,
            "decode_steps_total": stats.decode_steps,
            "prefill_steps_total": stats.prefill_steps,
            "async_steps_total": stats.async_steps,
            "time_to_first_token_seconds_count": 2,
            "inter_token_latency_seconds_count": 58,
            "e2e_request_latency_seconds_count": 2,
        }.items():
            assert float(lines[f"neuron_streams_{name}"]) == value
        assert text.decode().count("# HELP") == text.decode().count("# TYPE")

    asyncio.run(main())


def test_a_door_has_room_for_one_at_least():
    _, engine = make_door()
    with pytest.raises(ValueError, match="max_sequences is 0; it must be 1 or more"):
        Door(engine, None, MODEL, 0)


async def get(app, path):
    call = Call(app, path, b"", method="GET")
    await call.task
    return call.status, call.body
