"""A Llama behind the decode loop's `Model`: static shapes, its own cache, sampling on the device.

Each bucket is one executable, compiled at its first use or by `warm_up`; all of them share one copy
of the weights. A batch in which no slot asks for sampling runs the greedy executable, which never
pays for a sampler, and one in which no slot asks for more the sampled one; the same token comes out
of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from models import adjusting
from models.choosers import CHOOSERS, SAMPLING_TABLES
from models.config import LlamaConfig
from models.kinds import Compile, Executable, Step
from models.layers import Weights
from models.packed import pack
from models.state import empty_state
from models.steps import Remap
from models.windows import WindowStep
from neuron_streams.decode import LogprobsTensors, SamplingTensors, Window, WindowOutput
from neuron_streams.decode.logprobs import split
from neuron_streams.decode.model import MAX_STOP_IDS, Sampled

__all__ = ["Compile", "Llama", "LlamaConfig"]

_BLOCK = 16
"""Tokens that share a read of their slot: fewer leave less padding, more read the cache less."""

_Program: TypeAlias = tuple[str, int, int]
"""An executable: its kind, its rows or tokens, and the length of the cache that it reads."""


class Llama:
    """A Llama of static shapes on one device.

    The calls submit to the current stream. Host: returns at once, but for the first call of a
    bucket, which compiles it. Stream: runs the step. Where the slot of a row wants
    log-probabilities, a step gives a `SamplerOutput`, else the tokens alone.

    Args:
        weights: The parameters; shared, never written.
        max_length: Tokens that a slot can hold, prompt and output together.
        num_slots: Slots of the KV cache, the scratch slot 0 among them.
        batch_buckets: Row counts of a decode step; those beyond `num_slots - 1` are left out.
        prompt_buckets: Token counts of a step that takes in prompts, whosever they are; those
            beyond `max_length` are cut to it, and all are rounded up to whole blocks.
        length_buckets: Cache lengths below `max_length` that have executables of their own: a step
            attends over the smallest that holds its rows. Each is compiled for each kind of step.
        device: Where the caches live; the current Neuron device when None.
        compile: `neuron_streams.compile` when None, or a function of its signature.

    Raises:
        ValueError: The sizes do not fit each other or the model.
    """

    on_device_sampling = True
    adjusts_logits = True
    window_sizes = (2, 4, 8)

    def __init__(
        self,
        weights: Weights,
        *,
        max_length: int = 512,
        num_slots: int = 12,
        batch_buckets: Iterable[int] = (1, 2, 4, 8),
        prompt_buckets: Iterable[int] = (64, 256, 512),
        length_buckets: Iterable[int] = (),
        device: torch.device | str | None = None,
        compile: Compile | None = None,  # noqa: A002
    ) -> None:
        config = weights.config
        _check_sizes(config, max_length, num_slots)
        self.config = config
        self.weights = weights
        self.max_length, self.num_slots = max_length, num_slots
        self.batch_buckets = _buckets("batch_buckets", batch_buckets, num_slots - 1, cut=False)
        sizes = _buckets("prompt_buckets", prompt_buckets, max_length, cut=True)
        lengths = (*length_buckets, max_length)
        self.length_buckets = _buckets("length_buckets", lengths, max_length, cut=True)
        self.token_block = min(_BLOCK, sizes[0])
        self.prompt_buckets = _in_blocks(sizes, self.token_block)
        self.prefill_batch = self.batch_buckets[-1]
        self.vocab_size, self.eos_token_ids = config.vocab_size, config.eos_token_ids
        self.device = _neuron_device() if device is None else torch.device(device)
        self._compile = _neuron_compile() if compile is None else compile
        self._executables: dict[_Program, Executable] = {}
        self._states: dict[str, tuple[str, ...]] = {}
        self._sampling_slots: set[int] = set()
        self._adjusted_slots: set[int] = set()
        self._logprobs_slots: set[int] = set()
        self._state = {name: made.to(self.device) for name, made in self._empty_state().items()}

    def prefill(
        self, input_ids: Tensor, lengths: Tensor, slots: Tensor, sampling: SamplingTensors
    ) -> Sampled:
        """Fill the slots with prompts and return the token that follows each, int32 [n] or more.

        Raises:
            ValueError: They are too many for one step.
        """
        rows = zip(input_ids.tolist(), lengths.tolist(), strict=True)
        known = [token for row, length in rows for token in row[:length]]
        return self.packed(_int32(known), torch.zeros_like(lengths), lengths, slots, sampling)

    def packed(
        self,
        input_ids: Tensor,
        starts: Tensor,
        lengths: Tensor,
        slots: Tensor,
        sampling: SamplingTensors,
    ) -> Sampled:
        """Append tokens to the slots and return the token that follows each row, int32 [n] or more.

        Raises:
            ValueError: They are too many for one step.
        """
        rows = self.batch_buckets[-1]
        given = (each.tolist() for each in (input_ids, starts, lengths, slots))
        packing = pack(*given, rows=rows, buckets=self.prompt_buckets, block=self.token_block)
        choice = "sampled" if bool((sampling.temperature > 0).any()) else "greedy"
        choice = choice if sampling.adjustments is None else "adjusted"
        kind = f"{choice}_prefill"
        run = self._executable(kind, len(packing.input_ids) - rows, self._length(starts + lengths))
        self._admit((starts == 0).nonzero()[:, 0], slots, sampling)
        fields = [
            _filled(field, rows, value)
            for field, value in zip(sampling[:4], (0, 0, 1, 0), strict=True)
        ]
        return self._sampled(slots, run(*packing, *fields, *self._state_of(kind)))

    def _admit(self, fresh: Tensor, slots: Tensor, sampling: SamplingTensors) -> None:
        """Note what new requests want of later steps, and clear their slots of the last tenants.

        Args:
            fresh: int64 [m], which rows are new requests.
            slots: int32 [n].
            sampling: Of n rows.
        """
        numbers, adjustments = slots[fresh].tolist(), sampling.adjustments
        _note(self._sampling_slots, numbers, (sampling.temperature[fresh] > 0).tolist())
        if adjustments is None and self._adjusted_slots.isdisjoint(numbers):
            return
        self._allocate()
        rows = self.prefill_batch
        wanted = adjusting.neutral(rows, self.vocab_size)
        if adjustments is not None:
            for into, field in zip(wanted, adjustments, strict=True):
                into[: len(numbers)] = field[fresh]
        fields = wanted._asdict()
        logprobs = fields.pop("num_logprobs") >= 0
        run = self._executable("admit", rows)
        run(_filled(slots[fresh], rows, 0), *fields.values(), *self._state_of("admit"))
        _note(self._adjusted_slots, numbers, [adjustments is not None] * len(numbers))
        _note(self._logprobs_slots, numbers, logprobs[: len(numbers)].tolist())

    def _allocate(self) -> None:
        """Make the tables that only adjustments need, once the first request asks for them."""
        if "token_counts" not in self._state:
            tables = adjusting.empty_tables(self.num_slots, self.vocab_size)
            self._state |= {name: table.to(self.device) for name, table in tables.items()}

    def _sampled(self, slots: Tensor, result: Sampled) -> Sampled:
        """What the step gave, without log-probabilities where nobody wants them."""
        wanted = not self._logprobs_slots.isdisjoint(slots.tolist())
        return result if wanted else split(result)[0]

    def decode(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Sampled:
        """Append `input_ids` to the slots at `positions` and return the next tokens, int32 [B].

        Raises:
            ValueError: No such bucket.
        """
        return self._decode("", input_ids, positions, slots)

    def decode_gather(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Sampled:
        """As `decode`; a negative id stands for the token last sampled for the row's slot."""
        return self._decode("gathered_", input_ids, positions, slots)

    def decode_window(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, window: Window
    ) -> WindowOutput:
        """So many steps of `decode_gather`, each on the tokens of the one before.

        Raises:
            ValueError: No such bucket, or no window of so many steps.
        """
        kind = f"windowed{window.num_steps}_{self._choice(slots)}_decode"
        run = self._executable(kind, len(input_ids), self._length(positions + window.limits))
        inputs = input_ids, positions, slots, window.limits, window.stop_token_ids
        tokens, last, *logprobs = run(*inputs, *self._state_of(kind))
        if not logprobs or self._logprobs_slots.isdisjoint(slots.tolist()):
            return WindowOutput(tokens, last)
        return WindowOutput(tokens, last, LogprobsTensors(*logprobs))

    def _decode(self, how: str, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Sampled:
        kind = f"{how}{self._choice(slots)}_decode"
        run = self._executable(kind, len(input_ids), self._length(positions + 1))
        return self._sampled(slots, run(input_ids, positions, slots, *self._state_of(kind)))

    def _length(self, ends: Tensor) -> int:
        """The smallest bucket of cache lengths that holds rows which end there."""
        needed = int(ends.max())
        return next((size for size in self.length_buckets if size >= needed), self.max_length)

    def _choice(self, slots: Tensor) -> str:
        """The least that honours what the slots want."""
        numbers = slots.tolist()
        choice = "greedy" if self._sampling_slots.isdisjoint(numbers) else "sampled"
        return choice if self._adjusted_slots.isdisjoint(numbers) else "adjusted"

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
        adjusted: bool = False,
        gather: bool = False,
        steps_per_launch: int = 1,
        progress: bool = False,
    ) -> None:
        """Compile ahead of use: the buckets asked for, all when None. Host: blocks.

        Args:
            sampled: Also what a request with a temperature needs.
            adjusted: Also what a request needs that asks for any of `Adjustments`.
            gather: The decode steps of `policy="gather"` instead of the others.
            steps_per_launch: Also the windows of a loop with so many.
            progress: Show a bar on stderr.
        """
        rows = self.batch_buckets if batch_buckets is None else tuple(batch_buckets)
        lengths = self.prompt_buckets if prompt_buckets is None else tuple(prompt_buckets)
        asked = {"greedy": True, "sampled": sampled, "adjusted": adjusted}
        kinds = [kind for kind in CHOOSERS if asked[kind]]
        wanted = [(f"{kind}_prefill", size) for kind in kinds for size in lengths]
        how = "gathered_" if gather else ""
        wanted += [(f"{how}{kind}_decode", size) for kind in kinds for size in rows]
        windows = [steps for steps in self.window_sizes if steps <= steps_per_launch]
        wanted += [
            (f"windowed{steps}_{kind}_decode", size)
            for steps in windows
            for kind in kinds
            for size in rows
        ]
        every = [("admit", self.prefill_batch, self.max_length)] if adjusted else []
        every += [(kind, size, length) for kind, size in wanted for length in self.length_buckets]
        for kind, size, length in _with_bar(every, progress):
            self._executable(kind, size, length)

    def _executable(self, kind: str, size: int, length: int | None = None) -> Executable:
        """The executable, compiled at first use; the whole length of the cache when None."""
        length = self.max_length if length is None else length
        found = self._executables.get((kind, size, length))
        if found is None:
            found = self._executables[kind, size, length] = self._build(kind, size, length)
        return found

    def _build(self, kind: str, size: int, length: int) -> Executable:
        name = f"{kind}_{size}_of_{length}" if length < self.max_length else f"{kind}_{size}"
        if kind == "remap":
            return self._compile(Remap(), {"future": _ints(size), "index": _ints(size)}, name=name)
        if kind == "admit":
            return self._build_admit(size, name)
        buckets = self.prompt_buckets if kind.endswith("prefill") else self.batch_buckets
        if size not in buckets:
            raise ValueError(f"{kind} of {size}: no such bucket; pad to one of {buckets}")
        step = self._step(kind, length)
        self._states[kind] = step.state
        state = self._empty_state() | adjusting.empty_tables(self.num_slots, self.vocab_size)
        inputs = self._inputs(step, size) | {name: state[name] for name in step.state}
        return self._compile(step, inputs, mutates=step.mutates, name=name)

    def _step(self, kind: str, length: int) -> Step | WindowStep:
        how, _, choice = kind.partition("_")
        if not how.startswith("windowed"):
            return Step(kind, self.weights, length)
        num_steps = int(how.removeprefix("windowed"))
        if num_steps not in self.window_sizes:
            raise ValueError(f"a window of {num_steps} steps: choose from {self.window_sizes}")
        return WindowStep(choice.split("_")[0], num_steps, self.weights, length)

    def _build_admit(self, rows: int, name: str) -> Executable:
        tables = adjusting.empty_tables(self.num_slots, self.vocab_size)
        self._states["admit"] = tuple(tables)
        fields = adjusting.neutral(rows, self.vocab_size)._asdict()
        del fields["num_logprobs"]
        inputs = {"slots": _ints(rows)} | fields | tables
        return self._compile(adjusting.Admit(), inputs, mutates=tuple(tables), name=name)

    def _state_of(self, kind: str) -> list[Tensor]:
        return [self._state[name] for name in self._states[kind]]

    def _inputs(self, step: Step | WindowStep, size: int) -> dict[str, Tensor]:
        """Examples of what the host gives."""
        if not step.keeps:
            inputs = {name: _ints(size) for name in step.inputs}
            if "stop_token_ids" in inputs:
                inputs["stop_token_ids"] = _ints(size, MAX_STOP_IDS)
            return inputs
        rows = self.batch_buckets[-1]
        packing = pack([], [], [], [], rows=rows, buckets=(size,), block=self.token_block)
        return packing._asdict() | {
            name: torch.zeros(rows, dtype=dtype, device="cpu")
            for name, dtype in SAMPLING_TABLES.values()
        }

    def _empty_state(self) -> dict[str, Tensor]:
        dtype = self.weights.embedding.dtype
        return empty_state(self.config, dtype, self.num_slots, self.max_length)


def _note(slots: set[int], numbers: Sequence[int], wanted: Sequence[bool]) -> None:
    """Have the wanted ones of the numbered slots in the set, and the others not."""
    for number, is_wanted in zip(numbers, wanted, strict=True):
        (slots.add if is_wanted else slots.discard)(number)


def _filled(values: Tensor, rows: int, value: float) -> Tensor:
    """[n] -> [rows], with a value for those that are missing."""
    return functional.pad(values, (0, rows - values.shape[0]), value=value)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _ints(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device="cpu")


def _buckets(name: str, wanted: Iterable[int], limit: int, *, cut: bool) -> tuple[int, ...]:
    sizes = {min(size, limit) if cut else size for size in wanted}
    kept = tuple(sorted(size for size in sizes if 1 <= size <= limit))
    if not kept:
        raise ValueError(f"{name}={sorted(sizes)}: none is between 1 and {limit}")
    return kept


def _in_blocks(sizes: Iterable[int], block: int) -> tuple[int, ...]:
    """Token counts rounded up to whole blocks."""
    return tuple(sorted({-(-size // block) * block for size in sizes}))


def _check_sizes(config: LlamaConfig, max_length: int, num_slots: int) -> None:
    if num_slots < 2:
        raise ValueError(f"num_slots={num_slots}: slot 0 is scratch, so at least 2 are needed")
    if not 2 <= max_length <= config.max_position_embeddings:
        raise ValueError(
            f"max_length={max_length}: this model knows positions up to "
            f"{config.max_position_embeddings}; choose from 2 to that"
        )


def _with_bar(items: Sequence[_Program], progress: bool) -> Iterable[_Program]:
    if not progress:
        return items
    from tqdm import tqdm

    bar: Iterable[_Program] = tqdm(items, desc="compiling", unit="executable")
    return bar


def _neuron_device() -> torch.device:
    import neuron_streams

    return torch.device("neuron", neuron_streams.current_device())


def _neuron_compile() -> Compile:
    import neuron_streams

    made: Compile = neuron_streams.compile
    return made
