"""Several decode steps a launch: where rows stop, who waits for a window, what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neuron_streams.decode import (
    DecodeEngine,
    DecodeLoop,
    RequestOutput,
    SamplingParams,
    Window,
    WindowOutput,
)
from neuron_streams.errors import UnsupportedError
from tests.decode.fake_streams import FakeStreams
from tests.decode.harness import drive, make_loop, modes
from tests.decode.hash_model import FakeHashModel, reference
from tests.decode.toy_tokenizer import ToyTokenizer


def limited(max_tokens: int, seed: int = 1, **wanted: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **{"ignore_eos": True, **wanted})


def tokens_of(outputs: list[RequestOutput], request_id: str = "a") -> list[int]:
    return [t for out in outputs if out.request_id == request_id for t in out.new_token_ids]


def sizes_of(loop: DecodeLoop) -> list[tuple[int, list[int]]]:
    """From here on: the steps and the rows' tokens of each launch that decodes."""
    found: list[tuple[int, list[int]]] = []
    schedule = loop.scheduler.schedule

    def recorded() -> Any:
        step = schedule()
        counts = list(step.num_scheduled_tokens.values())
        if counts and any(step.num_computed_tokens.values()):
            found.append((step.num_steps, counts))
        return step

    loop.scheduler.schedule = recorded  # type: ignore[method-assign]
    return found


@modes
def test_a_launch_runs_so_many_steps_and_no_row_goes_beyond_its_limit(
    options: dict[str, Any],
) -> None:
    loop, model, _ = make_loop(steps_per_launch=4, **options)
    launches = sizes_of(loop)
    for name, max_tokens in {"a": 14, "b": 7}.items():
        loop.add_request(name, [1, 2], limited(max_tokens))
    outputs = drive(loop, model)
    assert tokens_of(outputs) == reference([1, 2], limited(14), 24)[0]
    assert tokens_of(outputs, "b") == reference([1, 2], limited(7), 24)[0]
    windows = [launch for launch in launches if launch[0] > 1]
    assert windows[0] == (4, [4, 4])
    assert loop.stats.launches_per_token < 0.5
    assert loop.stats.extra_tokens_dropped == 0


def test_launches_per_token_are_one_for_each_window() -> None:
    loop, model, _ = make_loop(steps_per_launch=8)
    loop.add_request("a", [1, 2], limited(17))
    drive(loop, model)
    assert loop.stats.launches_per_token == 1 / 8
    assert loop.stats.decode_windows == loop.stats.decode_steps == 2


def test_the_last_tokens_come_in_smaller_windows() -> None:
    loop, model, _ = make_loop(steps_per_launch=8)
    launches = sizes_of(loop)
    loop.add_request("a", [1, 2], limited(13))
    drive(loop, model)
    assert launches == [(8, [8]), (4, [4])]


@modes
def test_a_row_stops_on_the_device_behind_a_stop_token(options: dict[str, Any]) -> None:
    tokens, _ = reference([1, 2], limited(16), 24)
    at = next(n for n in range(3, 12) if tokens[n] not in tokens[:n])
    p = limited(16, stop_token_ids=(tokens[at],))
    loop, model, _ = make_loop(steps_per_launch=8, **options)
    loop.add_request("a", [1, 2], p)
    outputs = drive(loop, model)
    assert tokens_of(outputs) == tokens[: at + 1]
    assert outputs[-1].finish_reason == "stop"
    assert loop.stats.extra_tokens_dropped == 0, "a token of a row that had stopped"
    written = [token for token in model.history[1] if token >= 0]
    assert written == [1, 2, *tokens[:at]], "a row that had stopped was written to"


@modes
def test_a_stop_string_ends_on_the_host_and_the_surplus_is_counted(
    options: dict[str, Any],
) -> None:
    tokens, _ = reference([1, 2], limited(17), 24)
    text = ToyTokenizer().decode(tokens[:4])
    loop, model, _ = make_loop(steps_per_launch=8, tokenizer=ToyTokenizer(), **options)
    loop.add_request("a", [1, 2], limited(17, stop=(text,)))
    outputs = drive(loop, model)
    assert outputs[-1].finish_reason == "stop"
    got = tokens_of(outputs)
    assert got == tokens[: len(got)]
    assert loop.stats.extra_tokens_dropped >= 9 - len(got)


def test_who_waits_to_join_waits_for_the_windows_in_flight_alone() -> None:
    depth, steps = 2, 8
    loop, model, _ = make_loop(
        policy="gather",
        depth=depth,
        steps_per_launch=steps,
        sizes={"max_length": 128, "batch_buckets": (1, 2)},
    )
    loop.add_request("a", [1, 2], limited(100))
    for _ in range(4):
        loop.step()
    launches = sizes_of(loop)
    loop.add_request("b", [3], limited(20, 2))
    in_flight = sum(step.scheduler_output.num_steps for step in loop.batch_queue)
    assert in_flight <= depth * steps
    while "b" not in {key.request_id for s in loop.batch_queue for key in s.output.req_ids}:
        loop.step()
    assert not launches, "a decode step went before the prompt"
    loop.add_request("c", [4], limited(3, 3))  # there is no row for it
    loop.step()
    assert [steps for steps, _ in launches] == [1]
    drive(loop, model)


@pytest.mark.parametrize("paused", [False, True])
def test_a_request_that_has_a_slot_and_no_row_waits_too(paused: bool) -> None:
    loop, model, _ = make_loop(steps_per_launch=4, max_batch_size=1)
    loop.add_request("a", [1, 2], limited(12), priority=1)
    loop.step()
    loop.add_request("b", [3], limited(12, 2))
    loop.step()
    launches = sizes_of(loop)
    if paused:
        loop.pause_request("a")
    while not launches:
        loop.step()
    assert launches[0][0] == (4 if paused else 1)
    loop.resume_request("a")
    drive(loop, model)


def test_an_abort_takes_effect_between_two_windows() -> None:
    loop, model, _ = make_loop(policy="gather", steps_per_launch=8, sizes={"max_length": 64})
    loop.add_request("a", [1, 2], limited(50))
    outputs = [out for _ in range(3) for out in loop.step()]
    assert loop.abort_request("a")
    outputs += drive(loop, model)
    assert outputs[-1].finish_reason == "abort"
    assert loop.stats.extra_tokens_dropped % 8 == 0 < loop.stats.extra_tokens_dropped


@modes
@pytest.mark.parametrize("kept", [0, 2])
def test_a_model_that_stops_a_row_for_no_reason_fails_its_request(
    options: dict[str, Any], kept: int
) -> None:
    class Lazy(FakeHashModel):
        def decode_window(self, *args: Any) -> WindowOutput:
            *inputs, window = args
            limits = window.limits.clamp(max=kept)
            return super().decode_window(  # type: ignore[no-any-return]
                *inputs, Window(limits, window.stop_token_ids, window.num_steps)
            )

    streams = FakeStreams()
    loop = DecodeLoop(
        Lazy(streams), streams=streams, output_thread=False, steps_per_launch=4, **options
    )
    outputs = list(loop.generate([[1, 2]], limited(9)))
    assert outputs[-1].finish_reason == "error"
    assert str(outputs[-1].error).startswith("The model stopped request '0' behind [")


def test_what_stops_a_row_is_given_in_full_shape() -> None:
    given: list[Window] = []

    class Watched(FakeHashModel):
        def decode_window(self, *args: Any) -> WindowOutput:
            given.append(args[-1])
            return super().decode_window(*args)  # type: ignore[no-any-return]

    streams = FakeStreams()
    model = Watched(streams, batch_buckets=(4,))
    loop = DecodeLoop(model, streams=streams, output_thread=False, steps_per_launch=4)
    many = tuple(range(8, 30))
    p = SamplingParams(max_tokens=5, min_tokens=5, seed=1, stop_token_ids=many)
    list(loop.generate([[1, 2]], p))
    (window,) = given
    assert window.limits.tolist() == [4, 0, 0, 0]
    assert window.stop_token_ids.dtype == window.limits.dtype == torch.int32
    assert window.stop_token_ids.tolist()[0] == [7, *many][:16]
    assert window.stop_token_ids.tolist()[1:] == [[-1] * 16] * 3


def test_a_stream_holds_room_for_outputs_not_for_tokens() -> None:
    loop, *_ = make_loop(policy="gather", steps_per_launch=8, sizes={"max_length": 128})
    engine = DecodeEngine(loop, max_queued=4, thread=False)
    stream = engine.add_request("a", [1, 2], limited(100))
    for _ in range(3):
        engine.turn()
    assert loop.scheduler.num_output_placeholders("a") > 4
    assert loop.scheduler.num_outputs_in_flight("a") <= 2
    assert loop.scheduler.has_work, "it was paused for want of room"
    stream.close()
    engine.close()


def test_windows_that_the_model_does_not_run_are_refused() -> None:
    streams = FakeStreams()
    with pytest.raises(ValueError, match="^steps_per_launch is 9; this model runs windows of 2, 3"):
        DecodeLoop(FakeHashModel(streams), streams=streams, steps_per_launch=9)
    with pytest.raises(ValueError, match="^steps_per_launch is 0; it must be 1 or more"):
        DecodeLoop(FakeHashModel(streams), streams=streams, steps_per_launch=0)

    class Plain(FakeHashModel):
        window_sizes = None  # type: ignore[assignment]

    with pytest.raises(UnsupportedError, match="^steps_per_launch=2: Plain has no decode_window"):
        DecodeLoop(Plain(streams), streams=streams, steps_per_launch=2)
    DecodeLoop(Plain(streams), streams=streams, steps_per_launch=1)
