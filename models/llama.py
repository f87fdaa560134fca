"""A Llama behind the decode loop's `Model`: static shapes, its own cache, sampling on the device.

Each bucket is one executable, compiled at its first use or by `warm_up`; all of them share one copy
of the weights. A batch in which no slot asks for sampling runs the greedy executable, which never
pays for a sampler; the same token comes out of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from models.chunks import GreedyChunk, SampledChunk
from models.config import LlamaConfig
from models.layers import Weights
from models.sampling import SHORT_LIST
from models.steps import (
    GatheredGreedyDecode,
    GatheredSampledDecode,
    GreedyDecode,
    GreedyPrefill,
    Remap,
    SampledDecode,
    SampledPrefill,
)
from neuron_streams.decode import SamplingTensors

__all__ = ["Compile", "Llama", "LlamaConfig"]

Executable: TypeAlias = Callable[..., Any]
_TABLES = ("temperatures", "top_ks", "top_ps", "seeds")
_TABLE_TYPES = (torch.float32, torch.int32, torch.float32, torch.int64)
_DECODE_STATE = {
    "greedy_decode": ("kv_cache",),
    "sampled_decode": ("kv_cache", *_TABLES),
    "gathered_greedy_decode": ("kv_cache", "last_sampled"),
    "gathered_sampled_decode": ("kv_cache", *_TABLES, "last_sampled"),
}


class Compile(Protocol):
    """The signature of `neuron_streams.compile`, as far as a model uses it."""

    def __call__(
        self,
        fn: nn.Module,
        example_inputs: Mapping[str, Tensor],
        /,
        *,
        mutates: Sequence[str] = (),
        name: str | None = None,
    ) -> Executable: ...


class Llama:
    """A Llama of static shapes on one device.

    The calls submit to the current stream. Host: returns at once, but for the first call of a
    bucket, which compiles it. Stream: runs the step.

    Args:
        weights: The parameters; shared, never written.
        max_length: Tokens that a slot can hold, prompt and output together.
        num_slots: Slots of the KV cache, the scratch slot 0 among them.
        batch_buckets: Row counts of a decode step; those beyond `num_slots - 1` are left out.
        prompt_buckets: Lengths of a prefill step; those beyond `max_length` are cut to it.
        device: Where the caches live; the current Neuron device when None.
        compile: `neuron_streams.compile` when None, or a function of its signature.

    Raises:
        ValueError: The sizes do not fit each other or the model.
    """

    on_device_sampling = True
    prefill_batch = 1

    def __init__(
        self,
        weights: Weights,
        *,
        max_length: int = 512,
        num_slots: int = 9,
        batch_buckets: Iterable[int] = (1, 2, 4, 8),
        prompt_buckets: Iterable[int] = (64, 128, 256, 512),
        device: torch.device | str | None = None,
        compile: Compile | None = None,  # noqa: A002
    ) -> None:
        config = weights.config
        _check_sizes(config, max_length, num_slots)
        self.config = config
        self.weights = weights
        self.max_length, self.num_slots = max_length, num_slots
        self.batch_buckets = _buckets("batch_buckets", batch_buckets, num_slots - 1, cut=False)
        self.prompt_buckets = _buckets("prompt_buckets", prompt_buckets, max_length, cut=True)
        self.vocab_size, self.eos_token_ids = config.vocab_size, config.eos_token_ids
        self.device = _neuron_device() if device is None else torch.device(device)
        self._compile = _neuron_compile() if compile is None else compile
        self._executables: dict[tuple[str, int], Executable] = {}
        self._sampling_slots: set[int] = set()
        self._state = {name: made.to(self.device) for name, made in self._empty_state().items()}

    def prefill(
        self, input_ids: Tensor, lengths: Tensor, slots: Tensor, sampling: SamplingTensors
    ) -> Tensor:
        """Fill the slots with prompts and return the token that follows each, int32 [n].

        Raises:
            ValueError: No such bucket, or `top_k` beyond what the sampler looks at.
        """
        return self._prefill("", (input_ids, lengths, slots), sampling)

    def prefill_chunk(
        self,
        input_ids: Tensor,
        starts: Tensor,
        lengths: Tensor,
        slots: Tensor,
        sampling: SamplingTensors,
    ) -> Tensor:
        """As `prefill`, on slots that hold `starts` tokens already."""
        return self._prefill("chunked_", (input_ids, starts, lengths, slots), sampling)

    def _prefill(self, how: str, inputs: tuple[Tensor, ...], sampling: SamplingTensors) -> Tensor:
        self._check_top_k(sampling.top_k)
        sampled, slots = (sampling.temperature > 0).tolist(), inputs[-1]
        kind = how + ("sampled_prefill" if any(sampled) else "greedy_prefill")
        executable = self._executable(kind, inputs[0].shape[1])
        for slot, wanted in zip(slots.tolist(), sampled, strict=True):
            (self._sampling_slots.add if wanted else self._sampling_slots.discard)(slot)
        result: Tensor = executable(*inputs, *sampling[:4], *self._state.values())
        return result

    def decode(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Append `input_ids` to the slots at `positions` and return the next tokens, int32 [B].

        Raises:
            ValueError: No such bucket.
        """
        return self._decode("", input_ids, positions, slots)

    def decode_gather(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """As `decode`; a negative id stands for the token last sampled for the row's slot."""
        return self._decode("gathered_", input_ids, positions, slots)

    def _decode(self, how: str, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        sampled = not self._sampling_slots.isdisjoint(slots.tolist())
        kind = how + ("sampled_decode" if sampled else "greedy_decode")
        executable = self._executable(kind, input_ids.shape[0])
        state = [self._state[name] for name in _DECODE_STATE[kind]]
        result: Tensor = executable(input_ids, positions, slots, *state)
        return result

    def remap(self, future: Tensor, index: Tensor) -> Tensor:
        """Row i of the result is row `index[i]` of the future."""
        result: Tensor = self._executable("remap", future.shape[0])(future, index)
        return result

    def warm_up(
        self,
        *,
        batch_buckets: Iterable[int] | None = None,
        prompt_buckets: Iterable[int] | None = None,
        sampled: bool = False,
        gather: bool = False,
        progress: bool = False,
    ) -> None:
        """Compile ahead of use: the buckets asked for, all when None. Host: blocks.

        Args:
            sampled: Also what a request with a temperature needs.
            gather: The decode steps of `policy="gather"` instead of the others.
            progress: Show a bar on stderr.
        """
        rows = self.batch_buckets if batch_buckets is None else tuple(batch_buckets)
        lengths = self.prompt_buckets if prompt_buckets is None else tuple(prompt_buckets)
        kinds = ("greedy", "sampled") if sampled else ("greedy",)
        wanted = [(f"{kind}_prefill", size) for kind in kinds for size in lengths]
        how = "gathered_" if gather else ""
        wanted += [(f"{how}{kind}_decode", size) for kind in kinds for size in rows]
        for kind, size in _with_bar(wanted, progress):
            self._executable(kind, size)

    def _executable(self, kind: str, size: int) -> Executable:
        found = self._executables.get((kind, size))
        if found is None:
            found = self._executables[kind, size] = self._build(kind, size)
        return found

    def _build(self, kind: str, size: int) -> Executable:
        if kind == "remap":
            inputs = {"future": _ints(size), "index": _ints(size)}
            return self._compile(Remap(), inputs, name=f"remap_{size}")
        buckets = self.prompt_buckets if kind.endswith("prefill") else self.batch_buckets
        if size not in buckets:
            raise ValueError(f"{kind} of {size}: no such bucket; pad to one of {buckets}")
        module = _MODULES[kind](self.weights, self.max_length)
        inputs, mutates = self._inputs(kind, size)
        return self._compile(module, inputs, mutates=mutates, name=f"{kind}_{size}")

    def _inputs(self, kind: str, size: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        state = self._empty_state()
        if kind.endswith("decode"):
            inputs = {name: _ints(size) for name in ("input_ids", "positions", "slots")}
            used = {name: state[name] for name in _DECODE_STATE[kind]}
            return inputs | used, tuple(name for name in used if name not in _TABLES)
        rows = self.prefill_batch
        names = ("temperature", "top_k", "top_p", "seed")
        sampling = {
            name: torch.ones(rows, dtype=dtype)
            for name, dtype in zip(names, _TABLE_TYPES, strict=True)
        }
        inputs = {
            "input_ids": torch.zeros(rows, size, dtype=torch.int32),
            **({"starts": _ints(rows)} if kind.startswith("chunked") else {}),
            "lengths": torch.ones(rows, dtype=torch.int32),
            "slots": _ints(rows),
        }
        return inputs | sampling | state, tuple(state)

    def _empty_state(self) -> dict[str, Tensor]:
        config = self.config
        size = (
            *(config.num_hidden_layers, 2, self.num_slots),
            *(config.num_key_value_heads, self.max_length, config.head_dim),
        )
        # Zeros, since attention multiplies what it masks by 0, and 0 times garbage may be NaN.
        state = {"kv_cache": torch.zeros(size, dtype=self.weights.embedding.dtype)}
        for name, dtype in zip(_TABLES, _TABLE_TYPES, strict=True):
            state[name] = torch.zeros(self.num_slots, dtype=dtype)
        return state | {"last_sampled": _ints(self.num_slots)}

    def _check_top_k(self, top_k: Tensor) -> None:
        largest = int(top_k.max())
        if SHORT_LIST < largest < self.vocab_size:
            raise ValueError(
                f"top_k={largest}: the sampler on the device looks at the {SHORT_LIST} likeliest "
                "tokens; use a smaller top_k, or 0 to draw from the whole vocabulary"
            )


_MODULES: dict[str, Callable[[Weights, int], nn.Module]] = {
    "greedy_prefill": GreedyPrefill,
    "sampled_prefill": SampledPrefill,
    "chunked_greedy_prefill": GreedyChunk,
    "chunked_sampled_prefill": SampledChunk,
    "greedy_decode": GreedyDecode,
    "sampled_decode": SampledDecode,
    "gathered_greedy_decode": GatheredGreedyDecode,
    "gathered_sampled_decode": GatheredSampledDecode,
}


def _ints(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32)


def _buckets(name: str, wanted: Iterable[int], limit: int, *, cut: bool) -> tuple[int, ...]:
    sizes = {min(size, limit) if cut else size for size in wanted}
    kept = tuple(sorted(size for size in sizes if 1 <= size <= limit))
    if not kept:
        raise ValueError(f"{name}={sorted(sizes)}: none is between 1 and {limit}")
    return kept


def _check_sizes(config: LlamaConfig, max_length: int, num_slots: int) -> None:
    if num_slots < 2:
        raise ValueError(f"num_slots={num_slots}: slot 0 is scratch, so at least 2 are needed")
    if not 2 <= max_length <= config.max_position_embeddings:
        raise ValueError(
            f"max_length={max_length}: this model knows positions up to "
            f"{config.max_position_embeddings}; choose from 2 to that"
        )


def _with_bar(items: Sequence[tuple[str, int]], progress: bool) -> Iterable[tuple[str, int]]:
    if not progress:
        return items
    from tqdm import tqdm

    bar: Iterable[tuple[str, int]] = tqdm(items, desc="compiling", unit="executable")
    return bar


def _neuron_device() -> torch.device:
    import neuron_streams

    return torch.device("neuron", neuron_streams.current_device())


def _neuron_compile() -> Compile:
    import neuron_streams

    made: Compile = neuron_streams.compile
    return made
