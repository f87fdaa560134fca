"""A model whose next token is a hash of the whole history that the *device* saw.

One stale, lost, swapped or doubled token changes everything after it. `reference` is the oracle:
the tokens of one request, computed with no loop at all. What `Adjustments` do is in the hash too:
see hash_adjustments.py.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from neuron_streams.decode import (
    LogprobsTensors,
    SamplerOutput,
    SamplingParams,
    SamplingTensors,
    Window,
    WindowOutput,
)
from neuron_streams.decode.logprobs import TokenLogprobs
from neuron_streams.decode.model import MAX_LOGPROBS, NO_TOKEN
from tests.decode import hash_adjustments
from tests.decode.fake_streams import FakeStreams, FakeTensor
from tests.decode.hash_adjustments import VOCAB, Adjusted, Counts, choose

EOS = 7
BAD = -1000
PRIME = 2**31 - 1  # all arithmetic stays below 2**63, on the host and in a compiled program
_weights = random.Random(0)
WEIGHTS = [_weights.randrange(1, PRIME) for _ in range(4096)]
MIXER, *MIX_WEIGHTS = (_weights.randrange(1, PRIME) for _ in range(5))


def mix_of(temperature: float, top_k: int, top_p: float, seed: int) -> int:
    parts = (seed % PRIME, round(temperature * 1024), top_k, round(top_p * 1024))
    return sum(part * weight for part, weight in zip(parts, MIX_WEIGHTS, strict=True)) % PRIME


def hash_of(history: Sequence[int], mix: int = 0) -> int:
    value = sum((token + 1) * weight for token, weight in zip(history, WEIGHTS, strict=False))
    value = (value + mix) % PRIME * MIXER % PRIME
    return value ^ (value >> 15)


def reference(
    prompt: Sequence[int], params: SamplingParams, max_length: int
) -> tuple[list[int], str]:
    """Tokens and finish reason of a request."""
    assert params.seed is not None
    mix = mix_of(params.temperature, params.top_k, params.top_p, params.seed)
    adjusted = Adjusted.of_params(params, len(prompt), [EOS])
    history, tokens = list(prompt), list[int]()
    while len(tokens) < min(params.max_tokens, max_length - len(prompt)):
        value = hash_of(history, mix + adjusted.mix_with(prompt, Counter(tokens)))
        tokens.append(choose(value, VOCAB, adjusted.excluded_at(len(history))))
        history.append(tokens[-1])
        stops = tokens[-1] in params.stop_token_ids
        if stops or (tokens[-1] == EOS and not params.ignore_eos):
            return tokens, "stop"
    return tokens, "length"


def reference_logprobs(
    prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams
) -> list[TokenLogprobs] | None:
    """The log-probabilities that come with a request's tokens."""
    if params.logprobs is None:
        return None
    return [
        hash_adjustments.expected_logprobs(
            hash_of([*prompt, *tokens[:at]]), token, VOCAB, params.logprobs
        )
        for at, token in enumerate(tokens)
    ]


@dataclass
class Call:
    """What the loop submitted."""

    kind: str
    input_ids: Any
    positions: torch.Tensor
    slots: list[int]
    output: Any
    host_ids: list[Any] | None = None


@dataclass
class Sizes:
    """The attributes of a model, but for its calls."""

    max_length: int = 24
    num_slots: int = 6
    batch_buckets: tuple[int, ...] = (1, 2, 4)
    prompt_buckets: tuple[int, ...] = (4, 8)
    prefill_batch: int = 1
    vocab_size: int = VOCAB
    eos_token_ids: frozenset[int] = frozenset({EOS})
    on_device_sampling: bool = True
    adjusts_logits: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    prefill_dtype: torch.dtype = torch.int32
    calls: list[Call] = field(default_factory=list)

    def of(self, kind: str) -> list[Call]:
        return [call for call in self.calls if call.kind == kind]


class FakeHashModel(Sizes):
    """On `FakeStreams`; computes when the device gets there, in plain Python."""

    window_sizes = tuple(range(2, 9))

    def __init__(self, streams: FakeStreams, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.streams = streams
        self.history = [[BAD] * self.max_length for _ in range(self.num_slots)]
        self.mix = [0] * self.num_slots
        self.adjusted = [Adjusted()] * self.num_slots
        self.counts = [Counts() for _ in range(self.num_slots)]
        self.wants_logprobs = [False] * self.num_slots  # the host's own, ahead of the device
        self.last_sampled = [BAD] * self.num_slots
        self.stopped: set[int] = set()  # slots whose row has stopped in a window
        self.fail_at: set[int] = set()
        self.refuse_at: set[int] = set()
        self.refused: list[list[int]] = []
        self.executed = 0

    def prefill(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        sampling: SamplingTensors,
    ) -> Any:
        assert input_ids.shape[1] in self.prompt_buckets
        assert input_ids.shape[0] <= self.prefill_batch
        return self._prefill(input_ids, torch.zeros_like(lengths), lengths, slots, sampling)

    def _prefill(
        self,
        input_ids: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        sampling: SamplingTensors,
    ) -> Any:
        begins, where = starts.tolist(), slots.tolist()
        rows = rows_of(input_ids, lengths)
        ends = [start + length for start, length in zip(begins, lengths.tolist(), strict=True)]
        columns = [column.tolist() for column in sampling[:4]]
        mixes = [mix_of(*(column[row] for column in columns)) for row in range(len(rows))]
        adjusted = [Adjusted()] * len(rows)
        if sampling.adjustments is not None:
            adjusted = [Adjusted.of_row(sampling.adjustments, row) for row in range(len(rows))]
        for row, slot in enumerate(where):
            self.wants_logprobs[slot] = adjusted[row].num_logprobs >= 0

        def run() -> list[int]:
            for row, slot in enumerate(where):
                if not slot:
                    continue
                self.mix[slot], self.adjusted[slot] = mixes[row], adjusted[row]
                if not begins[row]:
                    self.stopped.discard(slot)
                    self.history[slot] = [BAD] * self.max_length
                    self.counts[slot] = Counts()
                for position in range(begins[row], ends[row]):
                    token = rows[row][position - begins[row]]
                    self._see(slot, position, self.last_sampled[slot] if token < 0 else token)
            return self._scatter(
                where, [self._next(slot, end) for slot, end in zip(where, ends, strict=True)]
            )

        return self._submit("prefill", input_ids, lengths, where, ends, run, self.prefill_dtype)

    def decode(self, input_ids: Any, positions: torch.Tensor, slots: torch.Tensor) -> Any:
        host = None if isinstance(input_ids, FakeTensor) else input_ids.tolist()
        where = slots.tolist()

        def run() -> list[int]:
            ids = input_ids.read() if host is None else host
            return self._decode(ids, positions.tolist(), where)

        ends = [position + 1 for position in positions.tolist()]
        return self._submit("decode", input_ids, positions, where, ends, run)

    def decode_gather(self, input_ids: Any, positions: torch.Tensor, slots: torch.Tensor) -> Any:
        host, where = input_ids.tolist(), slots.tolist()

        def run() -> list[int]:
            known = [self.last_sampled[slot] for slot in where]
            ids = [last if token < 0 else token for token, last in zip(host, known, strict=True)]
            return self._scatter(where, self._decode(ids, positions.tolist(), where))

        ends = [position + 1 for position in positions.tolist()]
        return self._submit("decode", input_ids, positions, where, ends, run)

    def decode_window(
        self, input_ids: Any, positions: torch.Tensor, slots: torch.Tensor, window: Window
    ) -> Any:
        assert window.num_steps in self.window_sizes
        where, rows = slots.tolist(), len(slots)
        tokens = FakeTensor(self.streams, window.num_steps, rows)
        last = FakeTensor(self.streams, rows)
        wanted = any(self.wants_logprobs[slot] for slot in where)
        logprobs = self._logprobs_futures(window.num_steps, rows) if wanted else []

        def run() -> list[Any]:
            ids = input_ids.read() if isinstance(input_ids, FakeTensor) else input_ids.tolist()
            known = [self.last_sampled[slot] for slot in where]
            ids = [old if token < 0 else token for token, old in zip(ids, known, strict=True)]
            steps, likeliest = self._run_window(ids, positions.tolist(), where, window)
            self._scatter(where, ids)
            return [steps, ids, *(map(list, zip(*likeliest, strict=True)) if logprobs else ())]

        self._submit_all("decode", input_ids, positions, where, [tokens, last, *logprobs], run)
        return WindowOutput(tokens, last, LogprobsTensors(*logprobs) if logprobs else None)  # type: ignore[arg-type]

    def _run_window(
        self, ids: list[int], positions: list[int], slots: list[int], window: Window
    ) -> tuple[list[list[int]], list[list[Any]]]:
        """The tokens of each step, with their log-probabilities; `ids` becomes the last ones."""
        stops = [set(row) for row in window.stop_token_ids.tolist()]
        limits = window.limits.tolist()
        steps, likeliest = [], []
        for step in range(window.num_steps):
            live = [step < limits[row] and ids[row] not in stops[row] for row in range(len(ids))]
            where = [slot if alive else 0 for slot, alive in zip(slots, live, strict=True)]
            at = [position + step for position in positions]
            tokens = self._decode(ids, at, where)
            ends = [position + 1 for position in at]
            likeliest.append(self._logprobs(where, ends, tokens))
            for row, alive in enumerate(live):
                ids[row] = tokens[row] if alive else ids[row]
            steps.append([t if alive else NO_TOKEN for t, alive in zip(tokens, live, strict=True)])
        ended = [last in row_stops for last, row_stops in zip(ids, stops, strict=True)]
        self.stopped.update(itertools.compress(slots, ended))
        return steps, likeliest

    def _decode(self, ids: list[int], positions: list[int], slots: list[int]) -> list[int]:
        for token, position, slot in zip(ids, positions, slots, strict=True):
            if slot:
                self._see(slot, position, token)
        return [self._next(slot, end + 1) for slot, end in zip(slots, positions, strict=True)]

    def _see(self, slot: int, position: int, token: int) -> None:
        assert 0 <= token < self.vocab_size, f"{token} reached the device"
        self.history[slot][position] = token
        if self.adjusted[slot].penalizes:
            in_prompt = position < self.adjusted[slot].num_prompt_tokens
            self.counts[slot].see(token, in_prompt)

    def _scatter(self, slots: list[int], tokens: list[int]) -> list[int]:
        for slot, token in zip(slots, tokens, strict=True):
            self.last_sampled[slot] = token
        return tokens

    def remap(self, future: Any, index: torch.Tensor) -> Any:
        rows = index.tolist()
        return self._submit(
            "remap", future, index, [], [], lambda: [future.read()[row] for row in rows]
        )

    def _next(self, slot: int, length: int) -> int:
        if slot == 0:
            return 0
        history = self.history[slot][:length]
        # A step behind a window that stopped the row leaves a hole, and its token is dropped.
        has_hole = BAD in history and slot not in self.stopped
        assert not has_hole, f"a hole in the history of slot {slot}: {history}"
        adjusted, counts = self.adjusted[slot], self.counts[slot]
        value = hash_of(history, self.mix[slot] + adjusted.mix_with(counts.prompt, counts.output))
        return choose(value, self.vocab_size, adjusted.excluded_at(length))

    def _logprobs(self, slots: list[int], ends: list[int], tokens: list[int]) -> list[Any]:
        """The values of `LogprobsTensors`; what nobody may read is `BAD`."""
        nothing = [BAD] * (1 + MAX_LOGPROBS)
        rows = [
            hash_adjustments.alternatives(hash_of(self.history[slot][:end]), token, self.vocab_size)
            if slot and self.adjusted[slot].num_logprobs >= 0
            else (nothing, nothing, BAD)
            for slot, end, token in zip(slots, ends, tokens, strict=True)
        ]
        return [list(column) for column in zip(*rows, strict=True)]

    def _damage(self, slots: list[int]) -> None:
        """What a failed step leaves behind in the rows that it was updating in place."""
        for slot in slots:
            self.history[slot] = [0] * self.max_length
            self.counts[slot] = Counts()
            self.last_sampled[slot] = 0

    def _submit(
        self,
        kind: str,
        input_ids: Any,
        positions: torch.Tensor,
        slots: list[int],
        ends: list[int],
        run: Callable[[], list[int]],
        dtype: torch.dtype = torch.int32,
    ) -> Any:
        rows = positions.shape[0]
        output = FakeTensor(self.streams, rows, dtype=dtype)
        wanted = any(self.wants_logprobs[slot] for slot in slots)
        logprobs = self._logprobs_futures(rows) if wanted else []

        def values() -> list[Any]:
            tokens = run()
            return [tokens, *(self._logprobs(slots, ends, tokens) if logprobs else ())]

        self._submit_all(kind, input_ids, positions, slots, [output, *logprobs], values)
        return SamplerOutput(output, LogprobsTensors(*logprobs)) if logprobs else output  # type: ignore[arg-type]

    def _submit_all(
        self,
        kind: str,
        input_ids: Any,
        positions: torch.Tensor,
        slots: list[int],
        outputs: list[FakeTensor],
        run: Callable[[], list[Any]],
    ) -> None:
        if len(self.calls) in self.refuse_at:
            self.refuse_at.remove(len(self.calls))
            self.refused.append(slots)
            raise OSError(f"call {len(self.calls)} was refused")
        number = len(self.calls)
        if kind == "decode":
            assert input_ids.shape[0] == positions.shape[0] == len(slots)
            assert input_ids.shape[0] in self.batch_buckets
            live = [slot for slot in slots if slot]
            assert len(live) == len(set(live)), "two rows of one slot"

        def command() -> None:
            self.executed += 1
            try:
                if number in self.fail_at:
                    self._damage(slots)
                    raise ArithmeticError(f"the device failed in call {number}")
                for tensor, value in zip(outputs, run(), strict=True):
                    tensor.value = value
            except Exception as error:
                for tensor in outputs:
                    tensor.error = error
                raise

        host = input_ids.tolist() if isinstance(input_ids, torch.Tensor) else None
        self.calls.append(Call(kind, input_ids, positions, slots, outputs[0], host))
        self.streams.current_stream().submit(command)

    def _logprobs_futures(self, *rows: int) -> list[FakeTensor]:
        ids = FakeTensor(self.streams, *rows, 1 + MAX_LOGPROBS)
        logprobs = FakeTensor(self.streams, *ids.shape, dtype=torch.float32)
        return [ids, logprobs, FakeTensor(self.streams, *rows)]


class FakeChunkModel(FakeHashModel):
    """One that goes on with a prompt."""

    def prefill_chunk(
        self,
        input_ids: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        sampling: SamplingTensors,
    ) -> Any:
        assert input_ids.shape[1] in self.prompt_buckets
        return self._prefill(input_ids, starts, lengths, slots, sampling)


class FakePackedModel(FakeHashModel):
    """One that takes prompts, pieces of them and decode rows in one step."""

    token_block = 2

    def packed(
        self,
        input_ids: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        sampling: SamplingTensors,
    ) -> Any:
        assert input_ids.shape == (int(lengths.sum()),)
        blocks = sum(-(-length // self.token_block) for length in lengths.tolist() if length > 1)
        assert blocks * self.token_block <= self.prompt_buckets[-1]
        assert len(lengths) <= self.batch_buckets[-1]
        return self._prefill(input_ids, starts, lengths, slots, sampling)


def rows_of(input_ids: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """The tokens of each row, of a batch that is padded or packed."""
    if input_ids.dim() == 2:
        return [row.tolist() for row in input_ids]
    return [row.tolist() for row in input_ids.split(lengths.tolist())]
