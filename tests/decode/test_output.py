from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from neuron_streams.decode import (
    AsyncModelRunnerOutput,
    Logprob,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
)
from neuron_streams.decode.output import OutputHandler, resolve_streams
from neuron_streams.decode.request import RequestKey
from tests.decode.fake_streams import FakeStreams, FakeTensor

KEYS = [RequestKey("a", 0), RequestKey("b", 1)]


def make(
    streams: FakeStreams, values: list[int] | None = None, error: Exception | None = None
) -> AsyncModelRunnerOutput:
    values = values or [5, 6, 0, 0]
    tensor: Any = FakeTensor(streams, len(values))
    compute = streams.current_stream()

    def run() -> None:
        tensor.value, tensor.error = values, error

    compute.submit(run)
    return AsyncModelRunnerOutput(KEYS, tensor, compute, streams.Stream(), streams)


def make_with_logprobs(
    streams: FakeStreams,
    copy_stream: Any,
    num_logprobs: list[int | None],
    partial: frozenset[RequestKey] = frozenset(),
    error: Exception | None = None,
) -> AsyncModelRunnerOutput:
    """Two requests and two rows of padding; each alternative of row i is 10 i and its place."""
    compute = streams.current_stream()
    wide = [[10 * row + place for place in range(21)] for row in range(4)]
    values: list[list[Any]] = [[5, 6, 0, 0], wide, [[-value / 8 for value in row] for row in wide]]
    values.append([1, 2, 3, 4])
    tensors: list[Any] = [
        FakeTensor(streams, 4),
        FakeTensor(streams, 4, 21),
        FakeTensor(streams, 4, 21, dtype=torch.float32),
        FakeTensor(streams, 4),
    ]

    def run() -> None:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.value, tensor.error = value, error

    compute.submit(run)
    sampled = SamplerOutput(tensors[0], LogprobsTensors(*tensors[1:]))
    return AsyncModelRunnerOutput(
        KEYS, sampled, compute, copy_stream, streams, partial, num_logprobs
    )


SECOND = [{10: Logprob(-1.25, 2), 11: Logprob(-1.375, 1), 12: Logprob(-1.5, 2)}]


def from_threads(output: AsyncModelRunnerOutput, count: int = 16) -> list[Any]:
    barrier, seen = threading.Barrier(count), list[Any]()

    def read() -> None:
        barrier.wait()
        try:
            seen.append(output.get_output())
        except ArithmeticError as error:
            seen.append(error)

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def test_rows_beyond_the_requests_are_padding() -> None:
    output = make(FakeStreams()).get_output()
    assert output == ModelRunnerOutput(KEYS, {KEYS[0]: 0, KEYS[1]: 1}, [[5], [6]])


def test_logprobs_ride_with_the_tokens() -> None:
    streams = FakeStreams()
    copies = streams.Stream()
    made = make_with_logprobs(streams, copies, [None, 2])
    streams.run()
    assert (streams.copies, streams.blocking_reads) == (4, 0)
    output = made.get_output()
    assert output.sampled_token_ids == [[5], [6]]
    assert output.logprobs == [None, SECOND]
    assert made.get_output() is output


def test_logprobs_are_copied_on_the_copy_stream_ahead_of_the_event() -> None:
    streams = FakeStreams()
    copies = streams.Stream()
    made = make_with_logprobs(streams, copies, [None, 2])
    assert copies.submitted == 5, "one wait and four copies"
    with streams.hold(copies):
        streams.run()
        assert not made.ready()
    while copies.completed < 4:
        copies.step()
    assert not made.ready()
    copies.step()
    assert made.ready()


def test_a_piece_of_a_prompt_brings_neither_token_nor_logprobs() -> None:
    streams = FakeStreams()
    partial = frozenset(KEYS[:1])
    made = make_with_logprobs(streams, streams.Stream(), [None, 2], partial)
    output = made.get_output()
    assert output.sampled_token_ids == [[], [6]]
    assert output.logprobs == [None, SECOND]


def test_logprobs_outlive_the_failure_of_an_older_step() -> None:
    streams = FakeStreams()
    copies, cause = streams.Stream(), ArithmeticError("the device failed")
    failed = make_with_logprobs(streams, copies, [0, 0], error=cause)
    good = make_with_logprobs(streams, copies, [None, 2])
    with pytest.raises(ArithmeticError):
        failed.get_output()
    assert good.get_output().logprobs == [None, SECOND]
    assert ModelRunnerOutput.of_failure(KEYS, cause).logprobs is None


def test_making_an_output_waits_for_nothing() -> None:
    streams = FakeStreams()
    output = make(streams)
    assert not output.done
    assert not output.ready()
    streams.run()
    assert output.ready()
    assert not output.done


def test_sixteen_threads_get_one_copy_and_one_value() -> None:
    streams = FakeStreams()
    seen = from_threads(make(streams))
    assert len(seen) == 16
    assert len({id(value) for value in seen}) == 1
    assert streams.copies == 1


def test_sixteen_threads_get_one_exception() -> None:
    cause = ArithmeticError("the device failed")
    output = make(FakeStreams(), error=cause)
    seen = from_threads(output)
    assert seen == [cause] * 16
    assert output.done
    with pytest.raises(ArithmeticError) as caught:
        output.retire()
    assert caught.value is cause


def test_the_device_tensor_is_kept_until_its_copy_has_ended() -> None:
    streams = FakeStreams()
    output = make(streams)
    assert output._device_tokens is not None
    output.get_output()
    assert output._device_tokens is None
    sampled = make_with_logprobs(streams, streams.Stream(), [0, 0])
    assert isinstance(sampled._device_tokens, SamplerOutput)
    sampled.get_output()
    assert sampled._device_tokens is None


def test_an_interrupt_is_not_the_outputs_own_failure() -> None:
    streams = FakeStreams()
    output = make(streams)
    synchronize = output._copied.synchronize

    def interrupted() -> None:
        raise KeyboardInterrupt

    output._copied.synchronize = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        output.get_output()
    output._copied.synchronize = synchronize  # type: ignore[method-assign]
    assert output.get_output().sampled_token_ids == [[5], [6]]


def test_the_thread_reads_outputs_in_order_and_ends_with_close() -> None:
    streams, handler = FakeStreams(), OutputHandler()
    assert handler._thread is None
    futures = [handler.handle_output(make(streams, [number, 0])) for number in range(5)]
    assert [f.result(10).sampled_token_ids[0][0] for f in futures] == [0, 1, 2, 3, 4]
    assert handler._thread is not None
    assert handler._thread.daemon
    assert handler._thread.name == "neuron-streams-decode-output"
    assert handler.close(10)
    assert not handler._thread.is_alive()


def test_a_failure_in_the_thread_reaches_the_future_and_the_thread_goes_on() -> None:
    streams, handler = FakeStreams(), OutputHandler()
    broken = make(streams)

    def fail() -> ModelRunnerOutput:
        raise ZeroDivisionError

    broken.get_output = fail  # type: ignore[method-assign]
    failed = handler.handle_output(broken)
    good = handler.handle_output(make(streams))
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    assert good.result(10).sampled_token_ids == [[5], [6]]
    assert handler.close(10)


def test_without_a_thread_outputs_wait_to_be_pumped() -> None:
    streams, handler = FakeStreams(), OutputHandler(threaded=False)
    future = handler.handle_output(make(streams))
    assert handler._thread is None
    assert not future.done()
    assert handler.pump()
    assert future.result(0).sampled_token_ids == [[5], [6]]
    assert not handler.pump()
    assert handler.close()
    assert not handler.pump()


def test_an_output_on_the_host_comes_back_at_once() -> None:
    output = ModelRunnerOutput.from_host(KEYS, torch.tensor([1, 2, 3]))
    handler = OutputHandler()
    assert handler.handle_output(output).result(0) is output
    assert handler._thread is None
    assert handler.close()


def test_streams_default_to_neuron_streams() -> None:
    import neuron_streams

    assert resolve_streams(None) is neuron_streams
    assert resolve_streams(torch.cuda) is torch.cuda
