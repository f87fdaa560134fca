"""The hash model as tensor code: `compile` makes a device program of it.

A token that is out of range when the device reads it turns every later token of its request into
`BAD`, since a program cannot raise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from neuron_streams.decode import SamplingTensors
from tests.decode.hash_model import BAD, MIX_WEIGHTS, MIXER, PRIME, VOCAB, WEIGHTS, Call, Sizes

Tensor = torch.Tensor


def hash_rows(rows: Tensor, lengths: Tensor, mix: Tensor) -> Tensor:
    """The next token of each row of history, int32 [n]."""
    seen = torch.arange(rows.shape[1], device=rows.device)[None] < lengths[:, None]
    broken = (seen & ((rows < 0) | (rows >= VOCAB))).any(1)
    weights = torch.tensor(WEIGHTS[: rows.shape[1]], device=rows.device)
    value = (torch.where(seen, rows + 1, 0) * weights).sum(1)
    value = (value + mix) % PRIME * MIXER % PRIME
    return torch.where(broken, BAD, (value ^ (value >> 15)) % VOCAB).int()


def prefill(
    input_ids: Tensor,
    lengths: Tensor,
    slots: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    history: Tensor,
    mixes: Tensor,
    last_sampled: Tensor,
) -> Tensor:
    width = input_ids.shape[1]
    valid = torch.arange(width, device=lengths.device)[None] < lengths[:, None]
    padding = torch.full((input_ids.shape[0], history.shape[1] - width), BAD, device=history.device)
    rows = torch.cat([torch.where(valid, input_ids.long(), BAD), padding], 1)
    parts = (seed % PRIME, (temperature * 1024).round().long(), top_k, (top_p * 1024).long())
    mix = torch.stack([p * w for p, w in zip(parts, MIX_WEIGHTS, strict=True)]).sum(0) % PRIME
    history.index_copy_(0, slots.long(), rows)
    mixes.index_copy_(0, slots.long(), mix)
    tokens = hash_rows(rows, lengths, mix)
    last_sampled.index_copy_(0, slots.long(), tokens)
    return tokens


def decode(
    input_ids: Tensor, positions: Tensor, slots: Tensor, history: Tensor, mixes: Tensor
) -> Tensor:
    where = slots.long()
    history.index_put_((where, positions.long()), input_ids.long())
    return torch.where(where == 0, 0, hash_rows(history[where], positions + 1, mixes[where])).int()


def decode_gather(
    input_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    history: Tensor,
    mixes: Tensor,
    last_sampled: Tensor,
) -> Tensor:
    where = slots.long()
    ids = torch.where(input_ids < 0, last_sampled[where], input_ids)
    tokens = decode(ids, positions, slots, history, mixes)
    last_sampled.index_put_((where,), tokens)
    return tokens


def remap(future: Tensor, index: Tensor) -> Tensor:
    return future[index.long()]


MUTATED = {
    prefill: ("history", "mixes", "last_sampled"),
    decode: ("history",),
    decode_gather: ("history", "last_sampled"),
    remap: (),
}


class CompiledHashModel(Sizes):
    """Runs wherever `compile` makes programs for; what is compiled is shared by all instances."""

    _executables: ClassVar[dict[Any, Any]] = {}

    def __init__(self, compile: Callable[..., Any], device: str, **sizes: Any) -> None:  # noqa: A002
        super().__init__(device=torch.device(device), **sizes)
        self._compile = compile
        self.host_state = [
            torch.full((self.num_slots, self.max_length), BAD),
            torch.zeros(self.num_slots, dtype=torch.int64),
            torch.full((self.num_slots,), BAD, dtype=torch.int32),
        ]
        self.state = [tensor.to(device) for tensor in self.host_state]

    def prefill(
        self, input_ids: Tensor, lengths: Tensor, slots: Tensor, sampling: SamplingTensors
    ) -> Tensor:
        inputs = (input_ids, lengths, slots, *sampling[:4])
        return self._run("prefill", prefill, inputs, self.state)

    def decode(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return self._run("decode", decode, (input_ids, positions, slots), self.state[:2])

    def decode_gather(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        inputs = (input_ids, positions, slots)
        return self._run("decode", decode_gather, inputs, self.state)

    def remap(self, future: Tensor, index: Tensor) -> Tensor:
        return self._run("remap", remap, (future, index), [])

    def _run(
        self, kind: str, fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], state: list[Tensor]
    ) -> Tensor:
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
        output: Tensor = self._executables[key](*inputs, *state)
        slots = [] if kind == "remap" else inputs[2].tolist()
        self.calls.append(Call(kind, inputs[0], inputs[1], slots, output))
        return output
