"""The hash model as tensor code: `compile` makes a device program of it.

A token that is out of range when the device reads it turns every later token of its request into
`BAD`, since a program cannot raise. Every program also gives log-probabilities; they are handed
out where a row wants some.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from neuron_streams.decode import (
    Adjustments,
    LogprobsTensors,
    Sampled,
    SamplerOutput,
    SamplingTensors,
)
from neuron_streams.decode.model import MAX_LOGPROBS
from tests.decode.hash_adjustments import (
    BIAS,
    FREQUENCY,
    MIN_P,
    PRESENCE,
    REPETITION,
    SCALE,
    STRIDE,
)
from tests.decode.hash_model import BAD, MIX_WEIGHTS, MIXER, PRIME, VOCAB, WEIGHTS, Call, Sizes

Tensor = torch.Tensor
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def finish(value: Tensor) -> Tensor:
    value = value % PRIME * MIXER % PRIME
    return value ^ (value >> 15)


def sample(
    rows: Tensor,
    lengths: Tensor,
    mixes: Tensor,
    penalties: Tensor,
    min_lengths: Tensor,
    banned: Tensor,
    stops: Tensor,
    prompt_seen: Tensor,
    counts: Tensor,
) -> Outputs:
    """The next token of each row of history, int32 [n], and its `LogprobsTensors`."""
    seen = torch.arange(rows.shape[1], device=rows.device)[None] < lengths[:, None]
    broken = (seen & ((rows < 0) | (rows >= VOCAB))).any(1)
    weights, repetition, presence, frequency = (
        constant(tuple(each), rows.device) for each in (WEIGHTS, REPETITION, PRESENCE, FREQUENCY)
    )
    bare = (torch.where(seen, rows + 1, 0) * weights[: rows.shape[1]]).sum(1)
    taken = penalties[:, :1] * repetition * ((prompt_seen + counts) > 0)
    taken = taken + penalties[:, 1:2] * presence * (counts > 0)
    taken = taken + penalties[:, 2:] * frequency * counts
    places = torch.arange(VOCAB, device=rows.device)[None]
    excluded = (banned > 0) | ((stops > 0) & (lengths < min_lengths)[:, None])
    order = (finish(bare + mixes + taken.sum(1))[:, None] + places) % VOCAB
    allowed = ~excluded.gather(1, order)
    first = torch.where(allowed, places, VOCAB).amin(1, keepdim=True)
    tokens = torch.where(broken, BAD, order.gather(1, first)[:, 0]).int()
    return tokens, *logprobs_of(finish(bare), tokens)


def logprobs_of(value: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    places = torch.arange(VOCAB, device=value.device)[None]
    ids = (value[:, None] + STRIDE * places) % VOCAB
    rank = (ids == tokens[:, None]).int().argmax(1)
    logprobs = -(places + value[:, None] % SCALE / SCALE) / 8
    chosen = logprobs.gather(1, rank[:, None])
    return (
        torch.cat([tokens[:, None], ids[:, :MAX_LOGPROBS]], 1).int(),
        torch.cat([chosen, logprobs[:, :MAX_LOGPROBS]], 1).float(),
        (rank + 1).int(),
    )


def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    return _on_a_gpu(values) if device.type == "cuda" else torch.tensor(values)


@functools.cache
def _on_a_gpu(values: tuple[int, ...]) -> Tensor:
    """Made once, since a CUDA graph may not copy from the host."""
    return torch.tensor(values, device="cuda")


def prefill(
    input_ids: Tensor,
    lengths: Tensor,
    slots: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    num_prompt_tokens: Tensor,
    min_length: Tensor,
    num_logprobs: Tensor,
    logit_bias: Tensor,
    stop_mask: Tensor,
    history: Tensor,
    mixes: Tensor,
    penalties: Tensor,
    num_prompts: Tensor,
    min_lengths: Tensor,
    banned: Tensor,
    stops: Tensor,
    prompt_seen: Tensor,
    counts: Tensor,
    last_sampled: Tensor,
) -> Outputs:
    where, columns = slots.long(), torch.arange(input_ids.shape[1], device=lengths.device)[None]
    valid = columns < lengths[:, None]
    padding = (0, history.shape[1] - input_ids.shape[1])
    rows = torch.nn.functional.pad(torch.where(valid, input_ids.long(), BAD), padding, value=BAD)
    hot = torch.nn.functional.one_hot(input_ids.long(), VOCAB)
    in_prompt = (columns < num_prompt_tokens[:, None]) & valid
    parts = (seed % PRIME, (temperature * 1024).round().long(), top_k, (top_p * 1024).long())
    mix = torch.stack([p * w for p, w in zip(parts, MIX_WEIGHTS, strict=True)]).sum(0) % PRIME
    bias = torch.where(logit_bias == -torch.inf, 0, (logit_bias * SCALE).round()).long()
    mix = mix + (min_p * SCALE).round().long() * MIN_P
    mix = mix + (bias * constant(tuple(BIAS), bias.device)).sum(1)
    penalty = torch.stack([repetition_penalty - 1, presence_penalty, frequency_penalty], 1)
    fresh = (
        mix,
        (penalty * SCALE).round().long(),
        min_length.long(),
        (logit_bias == -torch.inf).long(),
        stop_mask.long(),
        (hot * in_prompt[:, :, None]).sum(1),
        (hot * (valid & ~in_prompt)[:, :, None]).sum(1),
    )
    state = (mixes, penalties, min_lengths, banned, stops, prompt_seen, counts)
    for kept, value in zip(state, fresh, strict=True):
        kept.index_copy_(0, where, value)
    history.index_copy_(0, where, rows)
    num_prompts.index_copy_(0, where, num_prompt_tokens.long() + 0 * num_logprobs)
    outputs = sample(rows, lengths, *fresh)
    last_sampled.index_copy_(0, where, outputs[0])
    return outputs


def decode(
    input_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    history: Tensor,
    mixes: Tensor,
    penalties: Tensor,
    num_prompts: Tensor,
    min_lengths: Tensor,
    banned: Tensor,
    stops: Tensor,
    prompt_seen: Tensor,
    counts: Tensor,
) -> Outputs:
    where = slots.long()
    history.index_put_((where, positions.long()), input_ids.long())
    cell = (where, input_ids.long().clamp(0, VOCAB - 1))
    in_prompt = (positions < num_prompts[where]).long()
    prompt_seen.index_put_(cell, in_prompt, accumulate=True)
    counts.index_put_(cell, 1 - in_prompt, accumulate=True)
    state = (mixes, penalties, min_lengths, banned, stops, prompt_seen, counts)
    tokens, *logprobs = sample(history[where], positions + 1, *(kept[where] for kept in state))
    return torch.where(where == 0, 0, tokens).int(), logprobs[0], logprobs[1], logprobs[2]


def decode_gather(
    input_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    history: Tensor,
    mixes: Tensor,
    penalties: Tensor,
    num_prompts: Tensor,
    min_lengths: Tensor,
    banned: Tensor,
    stops: Tensor,
    prompt_seen: Tensor,
    counts: Tensor,
    last_sampled: Tensor,
) -> Outputs:
    where = slots.long()
    ids = torch.where(input_ids < 0, last_sampled[where], input_ids)
    kept = (history, mixes, penalties, num_prompts, min_lengths, banned, stops)
    outputs = decode(ids, positions, slots, *kept, prompt_seen, counts)
    last_sampled.index_put_((where,), outputs[0])
    return outputs


def remap(future: Tensor, index: Tensor) -> Tensor:
    return future[index.long()]


SEEN = ("history", "prompt_seen", "counts")
ADMITTED = ("mixes", "penalties", "num_prompts", "min_lengths", "banned", "stops")
MUTATED: dict[Any, tuple[str, ...]] = {
    prefill: (*SEEN, *ADMITTED, "last_sampled"),
    decode: SEEN,
    decode_gather: (*SEEN, "last_sampled"),
    remap: (),
}


def neutral(lengths: Tensor) -> Adjustments:
    zeros, ones = torch.zeros(len(lengths)), torch.ones(len(lengths))
    wide = torch.zeros(len(lengths), VOCAB)
    penalties = (zeros, ones, zeros, zeros)
    return Adjustments(*penalties, lengths, lengths, -ones.int(), wide, wide.bool())


class CompiledHashModel(Sizes):
    """Runs wherever `compile` makes programs for; what is compiled is shared by all instances."""

    _executables: ClassVar[dict[Any, Any]] = {}

    def __init__(self, compile: Callable[..., Any], device: str, **sizes: Any) -> None:  # noqa: A002
        super().__init__(device=torch.device(device), **sizes)
        self._compile = compile
        slots = self.num_slots
        widths = [(), (3,), (), (), (VOCAB,), (VOCAB,), (VOCAB,), (VOCAB,)]
        self.host_state = [
            torch.full((slots, self.max_length), BAD),
            *(torch.zeros((slots, *width), dtype=torch.int64) for width in widths),
            torch.full((slots,), BAD, dtype=torch.int32),
        ]
        self.state = [tensor.to(device) for tensor in self.host_state]
        self.wants_logprobs = [False] * slots

    def prefill(
        self, input_ids: Tensor, lengths: Tensor, slots: Tensor, sampling: SamplingTensors
    ) -> Sampled:
        adjustments = sampling.adjustments or neutral(lengths)
        for slot, most in zip(slots.tolist(), adjustments.num_logprobs.tolist(), strict=True):
            self.wants_logprobs[slot] = most >= 0
        inputs = (input_ids, lengths, slots, *sampling[:4], *adjustments)
        return self._step("prefill", prefill, inputs, self.state)

    def decode(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Sampled:
        return self._step("decode", decode, (input_ids, positions, slots), self.state[:-1])

    def decode_gather(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Sampled:
        return self._step("decode", decode_gather, (input_ids, positions, slots), self.state)

    def remap(self, future: Tensor, index: Tensor) -> Tensor:
        output: Tensor = self._run("remap", remap, (future, index), [])
        self.calls.append(Call("remap", future, index, [], output))
        return output

    def _step(
        self, kind: str, fn: Callable[..., Outputs], inputs: tuple[Tensor, ...], state: list[Tensor]
    ) -> Sampled:
        tokens, *logprobs = self._run(kind, fn, inputs, state)
        slots = inputs[2].tolist()
        self.calls.append(Call(kind, inputs[0], inputs[1], slots, tokens))
        wanted = any(self.wants_logprobs[slot] for slot in slots)
        return SamplerOutput(tokens, LogprobsTensors(*logprobs)) if wanted else tokens

    def _run(
        self, kind: str, fn: Callable[..., Any], inputs: tuple[Tensor, ...], state: list[Tensor]
    ) -> Any:
        key = (self._compile, fn, inputs[0].shape, self.host_state[0].shape)
        if key not in self._executables:
            names = list(inspect.signature(fn).parameters)
            examples = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in inputs]
            self._executables[key] = self._compile(
                fn,
                dict(zip(names, [*examples, *self.host_state[: len(state)]], strict=True)),
                mutates=[name for name in names if name in MUTATED[fn]],
                name=kind,
                target="exported",
            )
        return self._executables[key](*inputs, *state)
