"""Counters of the decode loop, written by the thread that drives it and by no other.

In asynchronous mode each launched step counts exactly once, either in `async_steps` or in
`sync_fallback_steps` and under one reason of `fallback_reasons`:

=============================================================  ====================
a launched step                                                counts as
=============================================================  ====================
prefill, whatever went before it                               fallback prefill
prefill beside rows that decode, whatever went before it       fallback mixed
decode, other requests than the step before, or none before    fallback composition
decode, same requests, future of another row count             fallback shape
decode, same requests and row count, future of another dtype   fallback dtype
decode, same requests, rows in another order: remapped         fallback reorder
decode, same requests, rows, order and dtype: chained          async
=============================================================  ====================

The first row that fits counts. So the first decode after a prefill is `shape` where the prefill's
row count differs from the decode bucket and the requests are the same, async where both agree,
and `composition` where other requests were already running. A schedule with nothing to run
launches nothing, flushes what is pending and counts nowhere; a decode step right after it is
`composition`. With `policy="gather"` every launched step is async, a prefill too. In synchronous
mode both counters stay 0 and `steps` alone counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neuron_streams.decode.device_times import DeviceTimes
from neuron_streams.decode.metrics import RecentLatencies, RequestMetrics

if TYPE_CHECKING:
    from neuron_streams.decode.request import Request
    from neuron_streams.decode.schedule import SchedulerOutput

__all__ = ["COUNTERS", "GAUGES", "DecodeStats"]

COUNTERS = {
    "prefill_steps": "Steps launched that compute tokens of prompts.",
    "mixed_steps": "Of those, steps that carry running requests along.",
    "decode_steps": "Launches that decode alone.",
    "decode_windows": "Of those, launches of several decode steps.",
    "async_steps": "Steps launched with the tokens of the step before still on the device.",
    "scheduled_requests": "Requests, summed over the steps.",
    "scheduled_tokens": "Tokens computed.",
    "scheduled_prompt_tokens": "Of those, tokens of prompts.",
    "prompt_chunks": "Times that a step computed a part of a prompt and not all of it.",
    "generated_tokens": "Tokens handed out.",
    "extra_tokens_dropped": "Tokens computed for a request that had ended.",
    "preemptions": "Slots taken from a request that still needs one.",
    "host_time": "Seconds of the driving thread at work.",
    "wait_time": "Seconds of the driving thread waiting for the device.",
}
"""The figures of `DecodeStats` that only rise, each with a line of help, to be exported."""

GAUGES = {
    "tokens_per_step": "Tokens computed per launched step, of prompts and otherwise.",
    "requests_per_step": "Requests per launched step.",
    "prefill_share": "Of the tokens computed, those of prompts, 0 to 1.",
    "launches_per_token": "Launches that a request has part in per token decoded; 1/k in windows.",
    "device_idle_share": "Bubble: of the newest steps' time, that in which none ran, 0 to 1.",
}
"""Those that are shares and means."""


@dataclass(slots=True)
class DecodeStats:
    """What a loop has done since it was made.

    `prefill_steps`: those that compute tokens of prompts, `mixed_steps` of them beside rows that
    decode. `scheduled_tokens`: tokens that steps computed, `scheduled_prompt_tokens` of them known
    beforehand. `prompt_chunks`: times that a step computed a part of a prompt and not all of it.
    `decode_windows`: launches of several decode steps.
    `decode_rows` and `decode_row_steps`: rows that decoded, and decode steps of each, summed over
    the launches. A step that was refused counts in all of these but `prefill_steps` and
    `decode_steps`.
    `extra_tokens_dropped`: tokens computed for a request that had already ended, by a stop token
    found one step late or by an abort. `preemptions`: slots taken from a request that still needs
    one. `host_time` and `wait_time`: seconds the driving thread
    spent in steps, at work and waiting for the device. `time_to_first_token` and
    `inter_token_latency`: seconds, of the requests that ended last.
    """

    async_steps: int = 0
    sync_fallback_steps: int = 0
    fallback_reasons: Counter[str] = field(default_factory=Counter)
    prefill_steps: int = 0
    mixed_steps: int = 0
    decode_steps: int = 0
    scheduled_requests: int = 0
    scheduled_tokens: int = 0
    scheduled_prompt_tokens: int = 0
    prompt_chunks: int = 0
    decode_windows: int = 0
    decode_rows: int = 0
    decode_row_steps: int = 0
    generated_tokens: int = 0
    extra_tokens_dropped: int = 0
    preemptions: int = 0
    host_time: float = 0.0
    wait_time: float = 0.0
    device_times: DeviceTimes = field(default_factory=DeviceTimes, repr=False)
    time_to_first_token: RecentLatencies = field(default_factory=RecentLatencies)
    inter_token_latency: RecentLatencies = field(default_factory=RecentLatencies)

    @property
    def steps(self) -> int:
        """Steps launched."""
        return self.prefill_steps + self.decode_steps

    @property
    def tokens_per_step(self) -> float:
        """Tokens computed per launched step, of prompts and otherwise."""
        return self.scheduled_tokens / self.steps if self.steps else 0.0

    @property
    def requests_per_step(self) -> float:
        """Requests per launched step."""
        return self.scheduled_requests / self.steps if self.steps else 0.0

    @property
    def prefill_share(self) -> float:
        """Of the tokens computed, those of prompts, 0 to 1."""
        if not self.scheduled_tokens:
            return 0.0
        return self.scheduled_prompt_tokens / self.scheduled_tokens

    @property
    def launches_per_token(self) -> float:
        """Launches that a request takes part in per token that it decodes: 1, or 1/k in windows."""
        return self.decode_rows / self.decode_row_steps if self.decode_row_steps else 0.0

    @property
    def device_idle_share(self) -> float:
        """Of the time of the newest steps, that in which none of them ran; see `DeviceTimes`."""
        return self.device_times.idle_share

    @property
    def async_share(self) -> float:
        """Async steps per launched step, 0 to 1."""
        return self.async_steps / self.steps if self.steps else 0.0

    @property
    def decode_async_share(self) -> float:
        """Async steps per launched decode step, 0 to 1."""
        return self.async_steps / self.decode_steps if self.decode_steps else 0.0

    def count_launch(self, *, decode: bool) -> None:
        """Count a launched step by its kind."""
        if decode:
            self.decode_steps += 1
        else:
            self.prefill_steps += 1

    def count_schedule(self, chosen: Mapping[Request, int], step: SchedulerOutput) -> None:
        """Count what a step is to compute, before its requests advance."""
        prompts = {request: count for request, count in chosen.items() if request.is_prefilling}
        self.scheduled_requests += len(chosen)
        self.scheduled_tokens += sum(chosen.values())
        self.scheduled_prompt_tokens += sum(prompts.values())
        self.prompt_chunks += sum(
            count < len(request.prefill_token_ids) for request, count in prompts.items()
        )
        self.mixed_steps += 0 < len(prompts) < len(chosen)
        self.decode_windows += step.num_steps > 1
        self.decode_rows += len(chosen) - len(prompts)
        self.decode_row_steps += sum(chosen.values()) - sum(prompts.values())

    def count_path(self, fallback_reason: str | None) -> None:
        """Count a launched step of the asynchronous mode; no reason means that it was async."""
        if fallback_reason is None:
            self.async_steps += 1
        else:
            self.sync_fallback_steps += 1
            self.fallback_reasons[fallback_reason] += 1

    def count_request(self, metrics: RequestMetrics) -> None:
        """Take in the times of a request that has ended."""
        if metrics.time_to_first_token is not None:
            self.time_to_first_token.extend([metrics.time_to_first_token])
            self.inter_token_latency.extend(metrics.inter_token_latencies)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for the device."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.wait_time += time.perf_counter() - start

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Count the time inside, less what of it is waiting, as work of the host."""
        start, waited = time.perf_counter(), self.wait_time
        try:
            yield
        finally:
            self.host_time += time.perf_counter() - start - (self.wait_time - waited)
