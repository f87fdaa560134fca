"""What a loop records of its steps."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import neuron_streams
from neuron_streams.decode import DecodeLoop, SamplingParams, Span, StepRecord, StepTrace
from neuron_streams.decode.trace import ROWS
from neuron_streams.testing import EmulatedRuntime, ManualRuntime, use_runtime
from tests.decode.compiled_hash_model import CompiledHashModel
from tests.decode.fake_streams import FakeStreams
from tests.decode.harness import make_loop

SYNC: dict[str, Any] = {"async_scheduling": False}
LONG = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
HOST = ("schedule", "prepare", "launch", "read", "update")


def traced(loop: DecodeLoop, prompts: int = 1) -> StepTrace:
    with loop.trace() as trace:
        for number in range(prompts):
            loop.add_request(str(number), [1, 2], LONG)
        while loop.has_unfinished_requests():
            loop.step()
    return trace


def on_fake_streams(**options: Any) -> StepTrace:
    """A wait serves the copies first, so that the device runs no step that nobody waits for."""
    streams = FakeStreams()
    streams.rng.random = lambda: 0.99  # type: ignore[method-assign]
    loop, *_ = make_loop(streams, **options)
    trace = traced(loop)
    streams.run()
    return trace


def span(record: StepRecord, name: str) -> Span:
    found = getattr(record, name)
    assert found is not None, (name, record)
    assert found.start <= found.end
    return found


def check(trace: StepTrace) -> None:
    """What holds of every trace of a loop that has come to its end."""
    for record in trace.records:
        host = [span(record, name) for name in HOST]
        for before, after in itertools.pairwise(host):
            assert before.end <= after.start, record
        device = span(record, "device")
        assert device.row == "device"
        assert span(record, "prepare").end <= device.end <= span(record, "read").end + 1e-3
    for before, after in itertools.pairwise(trace.records):
        assert after.number == before.number + 1
        assert span(before, "launch").end <= span(after, "launch").start
        assert span(before, "update").end <= span(after, "update").start
        assert span(before, "device").end <= span(after, "device").start


@pytest.mark.parametrize("options", [SYNC, {}, {"policy": "gather"}, {"depth": 4}])
def test_the_spans_of_a_step_follow_one_another(options: dict[str, Any]) -> None:
    trace = on_fake_streams(**options)
    check(trace)
    assert [record.number for record in trace.records] == list(range(1, 9))
    assert [record.kind for record in trace.records] == ["prefill"] + ["decode"] * 7
    assert all(record.request_ids == ("0",) for record in trace.records)
    assert {span.row for span in trace.spans} <= set(ROWS)


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        (SYNC, ["sync"] * 8),
        ({}, ["prefill", *["async"] * 7]),
        ({"sizes": {"batch_buckets": (2,)}}, ["prefill", "shape", *["async"] * 6]),
        ({"policy": "gather"}, ["async"] * 8),
    ],
)
def test_the_path_of_each_step(options: dict[str, Any], paths: list[str]) -> None:
    assert [record.path for record in on_fake_streams(**options).records] == paths


def test_a_step_runs_within_its_device_span() -> None:
    loop, model, _ = make_loop(FakeStreams())
    compute, ran = model._next, list[tuple[float, float]]()

    def slowly(slot: int, length: int) -> int:
        start = time.perf_counter()
        while time.perf_counter() < start + 2e-3:
            pass
        ran.append((start, time.perf_counter()))
        return compute(slot, length)

    model._next = slowly  # type: ignore[method-assign]
    for record, (start, end) in zip(traced(loop).records, ran, strict=True):
        device = span(record, "device")
        # The reference event is placed to within the time that waiting for it took.
        assert device.start - 1e-3 <= start < end <= device.end + 1e-3
        assert device.end - device.start >= end - start


def test_async_launches_before_the_step_before_has_ended_and_sync_does_not() -> None:
    def ahead(trace: StepTrace) -> list[bool]:
        return [
            span(after, "launch").end <= span(before, "device").end
            for before, after in itertools.pairwise(trace.records)
        ]

    assert all(ahead(on_fake_streams()))
    assert not any(ahead(on_fake_streams(**SYNC)))


@pytest.mark.parametrize("options", [SYNC, {}], ids=["sync", "async"])
@pytest.mark.parametrize("runtime", [ManualRuntime, EmulatedRuntime])
def test_on_our_own_streams(runtime: Any, options: dict[str, Any]) -> None:
    with use_runtime(runtime()):
        model = CompiledHashModel(neuron_streams.compile, "neuron:0")
        with DecodeLoop(model, **options) as loop:
            check(traced(loop, prompts=3))


def test_who_reads_is_on_its_row() -> None:
    rows = {}
    for mode, options in {"sync": SYNC, "thread": {"output_thread": True}}.items():
        loop, *_ = make_loop(FakeStreams(), **options)
        # The last is read by whoever is first, since the loop has nothing else to do.
        rows[mode] = {span(record, "read").row for record in traced(loop).records[:-1]}
        loop.close()
    assert rows == {"sync": {"worker main thread"}, "thread": {"output thread"}}


def test_a_broken_flow_is_read_inside_the_next_prepare() -> None:
    trace = on_fake_streams(sizes={"batch_buckets": (2,)})
    prefill, decode, *_ = trace.records
    assert decode.path == "shape"
    outer, inner = span(decode, "prepare"), span(prefill, "read")
    assert outer.start <= inner.start <= inner.end <= outer.end
    assert inner.row == "worker main thread"


def test_no_record_when_off() -> None:
    loop, *_ = make_loop()
    with loop.trace() as trace:
        pass
    list(loop.generate([[1, 2]], LONG))
    assert trace.records == ()
    assert loop.runner.trace is None


def test_it_keeps_the_newest_steps() -> None:
    loop, *_ = make_loop(FakeStreams())
    with loop.trace(max_steps=3) as trace:
        list(loop.generate([[1, 2]], LONG))
    assert [record.number for record in trace.records] == [6, 7, 8]
    with pytest.raises(ValueError, match="max_steps is 0; it must be 1 or more"):
        loop.trace(max_steps=0)


def test_a_step_in_flight_has_no_device_span_yet() -> None:
    loop, _, streams = make_loop(FakeStreams())
    loop.add_request("a", [1, 2], LONG)
    with loop.trace() as trace:
        loop.step()
    (record,) = trace.records
    assert record.device is record.read is record.update is None
    streams.run()
    assert span(trace.records[0], "device")


def test_it_may_begin_and_end_between_any_two_steps() -> None:
    loop, *_ = make_loop(FakeStreams())
    loop.add_request("a", [1, 2], LONG)
    for _ in range(2):
        loop.step()
    with loop.trace() as trace:
        for _ in range(2):
            loop.step()
    loop.drain()
    with trace:
        loop.step()
    loop.drain()
    assert [record.number for record in trace.records] == [3, 4, 5]
    assert [record.update is None for record in trace.records] == [False, True, True]
    assert all(span(record, "device") for record in trace.records)


def test_one_trace_at_a_time() -> None:
    loop, *_ = make_loop(FakeStreams())
    with loop.trace(), pytest.raises(RuntimeError, match="trace: the loop is being traced"):
        loop.trace().__enter__()


def test_a_step_that_fails_has_its_spans_and_one_of_long_ago_stops_no_trace() -> None:
    loop, model, _ = make_loop(FakeStreams())
    model.fail_at = {2}
    outputs = list(loop.generate([[1, 2]], LONG))
    assert outputs[-1].finish_reason == "error"
    model.fail_at = {len(model.calls) + 1}
    trace = traced(loop)
    check(trace)
    assert len(trace.records) >= 2


def test_spans_of_the_callers_own() -> None:
    loop, *_ = make_loop(FakeStreams())
    before = time.perf_counter()
    with loop.trace(max_steps=2) as trace:
        for name in "abc":
            with trace.span(name):
                pass
    assert [span.name for span in trace.spans] == ["b", "c"]
    assert all(before <= span.start <= span.end for span in trace.spans)


def test_ranges_are_spans_while_the_trace_is_on() -> None:
    nvtx = neuron_streams.nvtx
    streams = FakeStreams()
    streams.nvtx = nvtx  # type: ignore[attr-defined]
    loop, *_ = make_loop(streams)
    with nvtx.range("before"):
        pass
    with loop.trace() as trace:
        with nvtx.range("tokenise {}", 7):
            pass
        thread = threading.Thread(target=nvtx.mark, args=("elsewhere",))
        thread.start()
        thread.join()
    with nvtx.range("behind"):
        pass
    assert [(s.row, s.name) for s in trace.spans] == [
        ("engine core", "tokenise 7"),
        ("output thread", "elsewhere"),
    ]
    assert nvtx.listeners == []


def test_the_saved_trace_is_what_chrome_reads(tmp_path: Path) -> None:
    loop, *_ = make_loop(FakeStreams())
    trace = traced(loop)
    with trace.span("detokenize"):
        pass
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {event["pid"] for event in events} == {1}
    assert list(names.values()) == list(ROWS)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 8 * 6 + 1
    assert min(event["ts"] for event in spans) == 0
    assert all(event["dur"] >= 0 for event in spans)
    device = [event for event in spans if names[event["tid"]] == "device"]
    assert [event["name"] for event in device] == [
        "prefill 1",
        *(f"decode {n}" for n in range(2, 9)),
    ]
    assert device[3]["args"] == {"path": "async", "requests": "0", "tokens": "0: 1"}
    assert "detokenize" in {event["name"] for event in spans}


def test_windows_and_chunks_are_drawn() -> None:
    loop, *_ = make_loop(
        packs=True,
        steps_per_launch=4,
        max_num_batched_tokens=4,
        policy="gather",
        sizes={"max_length": 64, "prompt_buckets": (8,)},
    )
    with loop.trace() as trace:
        loop.add_request("a", [1] * 9, SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
        for _ in range(3):
            loop.step()
        loop.add_request("b", [1] * 5, SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
        while loop.has_unfinished_requests():
            loop.step()
    kinds = [record.kind for record in trace.records]
    assert kinds[:3] == ["chunk", "chunk", "window"]
    assert kinds.count("mixed") == 2
    assert "decode" not in kinds[:5]
    window = trace.records[2]
    assert (window.num_steps, window.num_tokens) == (4, (4,))
    assert span(window, "device").name == "window of 4"
    mixed = next(record for record in trace.records if record.kind == "mixed")
    assert dict(zip(mixed.request_ids, mixed.num_tokens, strict=True)) == {"a": 1, "b": 3}
    (event,) = (e for e in trace.chrome_events() if e["name"] == f"mixed {mixed.number}")
    assert event["args"]["tokens"] == "a: 1, b: 3"
