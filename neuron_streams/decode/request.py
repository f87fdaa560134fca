"""Requests: what a caller asks for, what the scheduler knows of it, what comes back."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from neuron_streams.decode.coerce import shown
from neuron_streams.decode.detokenizer import IncrementalDetokenizer
from neuron_streams.decode.logprobs import TokenLogprobs
from neuron_streams.decode.metrics import RequestMetrics
from neuron_streams.decode.model import Model, goes_on_with_prompts
from neuron_streams.decode.sampling_params import SamplingParams

__all__ = [
    "Request",
    "RequestKey",
    "RequestOutput",
    "RequestStatus",
    "check_prompt",
]


class RequestKey(NamedTuple):
    """Who a request is: its id may be used again while an older bearer is still in flight."""

    request_id: str
    generation: int


class RequestStatus(enum.Enum):
    """Where a request stands; the value is its finish reason, None while it has not finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        return self not in (RequestStatus.WAITING, RequestStatus.RUNNING)

    @property
    def finish_reason(self) -> str | None:
        return self.value if self.is_finished else None


@dataclass(slots=True, eq=False)
class Request:
    """A request as the scheduler keeps it.

    The counts run ahead of the device, they are of what has been launched. `num_in_flight` launches
    name the request and have not been read; they will bring `num_output_placeholders` tokens, or
    fewer where it stops earlier. Where it runs it first prefills `prefill_token_ids`: its prompt,
    and after a preemption all that had been generated. `num_overtaken` steps have computed later
    prompts and none of it. `arrived_at` and `token_times` are `time.perf_counter`'s.
    """

    key: RequestKey
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    priority: float = 0
    arrival: int = 0
    arrived_at: float = 0.0
    slot: int | None = None
    status: RequestStatus = RequestStatus.WAITING
    paused: bool = False
    prefill_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_output_placeholders: int = 0
    num_overtaken: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    error: Exception | None = None
    detokenizer: IncrementalDetokenizer | None = None
    stop_string: str | None = None
    on_output: Callable[[RequestOutput], object] | None = None

    @property
    def request_id(self) -> str:
        return self.key.request_id

    @property
    def order(self) -> tuple[float, int]:
        """Who goes first has the least; who is preempted first has the largest."""
        return self.priority, self.arrival

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < len(self.prefill_token_ids)

    @property
    def num_tokens_left(self) -> int:
        """Tokens to compute before it decodes."""
        return len(self.prefill_token_ids) - self.num_computed_tokens

    @property
    def num_tokens_to_come(self) -> int:
        """Most tokens that steps which are yet to be launched may bring."""
        return self.max_tokens - (len(self.output_token_ids) + self.num_output_placeholders)

    @property
    def is_ending(self) -> bool:
        """Whether the last token that it may have is in flight."""
        return self.num_tokens_to_come <= 0

    def status_after(self, token_id: int, eos_token_ids: frozenset[int]) -> RequestStatus:
        """The status once `token_id`, already appended, is known."""
        if token_id in self.params.stop_ids(eos_token_ids):
            return RequestStatus.FINISHED_STOPPED
        if len(self.output_token_ids) >= self.max_tokens:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        return self.status

    def detokenize(self, token_id: int, status: RequestStatus) -> RequestStatus:
        """The status once the text of `token_id` is known, which had led to `status`.

        A stop string goes before whatever else the token ends, as in vLLM. A tokenizer that fails
        ends this request alone.
        """
        if self.detokenizer is None:
            return status
        try:
            stopped = status is RequestStatus.FINISHED_STOPPED
            self.stop_string = self.detokenizer.update(token_id, stopped)
        except Exception as error:
            self.error = error
            return RequestStatus.FINISHED_ERROR
        return status if self.stop_string is None else RequestStatus.FINISHED_STOPPED

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or token of `stop_token_ids` that ended it."""
        if self.status is not RequestStatus.FINISHED_STOPPED or self.stop_string is not None:
            return self.stop_string
        last = self.output_token_ids[-1]
        return last if last in self.params.stop_token_ids else None

    @property
    def metrics(self) -> RequestMetrics | None:
        """Its times, as of now; None while it has not finished."""
        if not self.status.is_finished:
            return None
        times, prompt = tuple(self.token_times), len(self.prompt_token_ids)
        return RequestMetrics(self.arrived_at, time.perf_counter(), prompt, times)

    def output(
        self, new_token_ids: tuple[int, ...] = (), logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> RequestOutput:
        """What to tell the caller now; the text in it is told once."""
        text, reason = "", self.status.finish_reason
        if self.detokenizer is not None:
            text = self.detokenizer.get_next_output_text(reason is not None)
        return RequestOutput(
            self.request_id,
            new_token_ids,
            len(self.output_token_ids),
            reason,
            self.error,
            None if self.params.logprobs is None else logprobs,
            text,
            self.stop_reason if reason else None,
            self.metrics if reason else None,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """New tokens of one request, or its end.

    `finish_reason`: None while it runs, then `"stop"` (an end-of-sequence token, a stop token or a
    stop string), `"length"`, `"abort"` or `"error"`, with the cause as `error`.
    `num_output_tokens` counts the tokens given out so far, these included.

    `text` is what is new since the output before, all of it joined the text of the request; empty
    where the loop has no tokenizer. It lags behind the tokens while a character is incomplete or a
    stop string may have begun, and ends where a stop string begins. The token that completed the
    stop string is still among the tokens, and none after it.

    `logprobs` has a dict by token id for each new token, of that token and the likeliest ones; None
    where the request asks for none.

    `stop_reason`: the stop string, or the token of `stop_token_ids`, that ended the request; None
    for an end-of-sequence token, as in vLLM. `metrics`: its times, once it has finished.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    num_output_tokens: int
    finish_reason: str | None = None
    error: Exception | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    text: str = ""
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


def check_prompt(model: Model, request_id: str, prompt: Sequence[int]) -> None:
    """Refuse what a model cannot take.

    Raises:
        ValueError: The prompt is empty, too long, or has ids outside the vocabulary.
    """
    if not prompt:
        raise ValueError(f"Request {request_id!r} has an empty prompt; give it one token at least.")
    longest = model.max_length - 1
    if not goes_on_with_prompts(model):
        longest = min(longest, model.prompt_buckets[-1])
    if len(prompt) > longest:
        raise ValueError(
            f"Request {request_id!r} has a prompt of {len(prompt)} tokens; this model takes"
            f" {longest} at most. Shorten it, or build the model for longer prompts."
        )
    if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
        raise ValueError(
            f"Request {request_id!r} has token ids from {shown(min(prompt))} to"
            f" {shown(max(prompt))}; this model knows 0 to {model.vocab_size - 1}. Use the model's"
            " own tokenizer."
        )
