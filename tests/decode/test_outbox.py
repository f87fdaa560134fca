from __future__ import annotations

from collections import deque

import pytest

from neuron_streams.decode import Request, RequestOutput, RequestStatus, SamplingParams
from neuron_streams.decode.outbox import Outbox
from neuron_streams.decode.request import RequestKey


def request(on_output: object) -> Request:
    made = Request(RequestKey("a", 0), [1], SamplingParams(), max_tokens=4, seed=0)
    made.status, made.on_output = RequestStatus.RUNNING, on_output  # type: ignore[assignment]
    return made


def test_what_is_due_is_called_once_and_in_order() -> None:
    heard: list[int] = []
    one = request(lambda output: heard.append(output.num_output_tokens))
    due = deque((one, RequestOutput("a", (n,), n)) for n in (1, 2))
    outbox = Outbox(due)
    outbox.call_back(pytest.fail)
    outbox.call_back(pytest.fail)
    assert heard == [1, 2]
    assert not outbox


def test_a_callback_that_raises_fails_its_request_and_costs_no_output() -> None:
    failed: list[tuple[str, Exception]] = []
    cause = LookupError("of the caller's")

    def fail(_: RequestOutput) -> None:
        raise cause

    outputs = [RequestOutput("a", (n,), n) for n in (1, 2)]
    one = request(fail)
    outbox = Outbox(deque((one, output) for output in outputs))
    outbox.outputs += outputs
    outbox.call_back(lambda *what: failed.append(what))
    assert failed == [("a", cause)], "and called no more"
    with pytest.raises(LookupError) as raised:
        outbox.raise_error()
    assert raised.value is cause
    outbox.raise_error()
    assert outbox.outputs == outputs


def test_a_callback_that_was_interrupted_is_not_called_again_and_fails_its_request() -> None:
    failed: list[tuple[str, Exception]] = []
    heard: list[int] = []

    def hear(output: RequestOutput) -> None:
        heard.append(output.num_output_tokens)
        if output.num_output_tokens == 2:
            raise KeyboardInterrupt

    one = request(hear)
    outbox = Outbox(deque((one, RequestOutput("a", (n,), n)) for n in (1, 2, 3)))
    with pytest.raises(KeyboardInterrupt):
        outbox.call_back(pytest.fail)
    outbox.call_back(lambda *what: failed.append(what))
    assert heard == [1, 2]
    ((request_id, error),) = failed
    assert request_id == "a"
    assert str(error) == "The callback of request 'a' was interrupted."
    with pytest.raises(RuntimeError, match="^The callback of request 'a' was interrupted"):
        outbox.raise_error()
    assert not outbox


def test_a_callback_that_has_ended_before_the_interrupt_is_neither_called_again_nor_failed() -> (
    None
):
    class Interrupted(deque[tuple[Request, RequestOutput]]):
        interrupts = 1

        def __delitem__(self, place: object) -> None:
            if self.interrupts:
                self.interrupts = 0
                raise KeyboardInterrupt
            super().__delitem__(place)  # type: ignore[arg-type]

    heard: list[int] = []
    one = request(lambda output: heard.append(output.num_output_tokens))
    outbox = Outbox(Interrupted((one, RequestOutput("a", (n,), n)) for n in (1, 2)))
    with pytest.raises(KeyboardInterrupt):
        outbox.call_back(pytest.fail)
    outbox.call_back(pytest.fail)
    assert heard == [1, 2]
    assert not outbox


def test_a_failure_alone_is_something_to_tell() -> None:
    outbox = Outbox(deque())
    outbox.errors.append(LookupError())
    assert outbox
