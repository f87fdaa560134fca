"""A model that keeps the device, and if wanted the host, busy for a set time and knows nothing.

For pictures and measurements of what a loop hides. Its tokens depend on the last token and the
position only.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import neuron_streams
from models.llama import Compile
from neuron_streams.decode import SamplingTensors, Window, WindowOutput

__all__ = ["BusyModel", "spin"]

SIZE = 192
TRIAL_LAYERS, TRIALS = 20, 9


class Product(nn.Module):
    """What the device is kept busy with; all are alike, so that one is compiled."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight


class BusyStep(nn.Module):
    """So many products of matrices; negative ids stand for the slot's last token."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Product() for _ in range(layers))

    def forward(
        self, ids: Tensor, positions: Tensor, slots: Tensor, weight: Tensor, last_sampled: Tensor
    ) -> Tensor:
        where = slots.long()
        known = torch.where(ids < 0, last_sampled[where], ids)
        x = known.to(torch.float32).sum() * 1e-9 + weight
        for layer in self.layers:
            x = layer(x, weight)
        nothing = (x[0, 0] > 3e38).to(torch.int32)  # never, which no compiler can know
        tokens = (known * 7 + positions + slots + nothing) % 1000
        last_sampled.index_put_((where,), tokens)
        return tokens


class BusyWindow(nn.Module):
    """Several busy steps, each on the tokens of the one before. No row stops."""

    def __init__(self, layers: int, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.step = BusyStep(layers)

    def forward(
        self, ids: Tensor, positions: Tensor, slots: Tensor, weight: Tensor, last_sampled: Tensor
    ) -> tuple[Tensor, Tensor]:
        found = []
        for step in range(self.num_steps):
            ids = self.step(ids, positions + step, slots, weight, last_sampled)
            found.append(ids)
        return torch.stack(found), ids + 0


class BusyModel:
    """A `GatherModel` and a `WindowModel` on the current Neuron device.

    Args:
        device_ms: How long a step takes there, about: it is measured when the model is made.
        host_ms: How long a decode call holds the GIL before it submits the step.
        compile: `neuron_streams.compile` when None, or a function of its signature.
    """

    max_length, num_slots, vocab_size, prefill_batch = 4096, 5, 50_000, 4
    batch_buckets, prompt_buckets = (4,), (8,)
    eos_token_ids: frozenset[int] = frozenset()
    on_device_sampling = True
    window_sizes = (8,)

    def __init__(
        self,
        device_ms: float,
        host_ms: float = 0.0,
        *,
        compile: Compile | None = None,  # noqa: A002
    ) -> None:
        self.device = torch.device("neuron", neuron_streams.current_device())
        self.host_ms = host_ms
        generator, on_host = torch.Generator("cpu").manual_seed(0), torch.device("cpu")
        size = (SIZE, SIZE)
        weight = torch.randn(size, generator=generator, dtype=torch.float32, device=on_host)
        weight /= SIZE**0.5
        ids, table = (
            torch.zeros(n, dtype=torch.int32, device=on_host) for n in (4, self.num_slots)
        )
        self._examples = (ids, ids, ids, weight, table)
        self._weight, self._last_sampled = weight.to(self.device), table.to(self.device)
        self._compile: Any = neuron_streams.compile if compile is None else compile
        trial = self._step_of(TRIAL_LAYERS)
        self._layers = max(1, round(device_ms / self._layer_ms(trial)))
        self._step = self._step_of(self._layers)
        self._windows: dict[int, Any] = {}

    def _step_of(self, layers: int, num_steps: int = 1) -> Any:
        names = ("ids", "positions", "slots", "weight", "last_sampled")
        examples = dict(zip(names, self._examples, strict=True))
        module = BusyStep(layers) if num_steps == 1 else BusyWindow(layers, num_steps)
        name = f"busy step of {layers} layers" + ("" if num_steps == 1 else f", {num_steps} times")
        return self._compile(module, examples, mutates=names[-1:], name=name)

    def _layer_ms(self, trial: Any) -> float:
        """The least time that one layer took, of runs that were queued behind one another."""
        ids = self._examples[0]
        marks = [neuron_streams.Event(enable_timing=True) for _ in range(TRIALS + 1)]
        for mark in marks:
            trial(ids, ids, ids, self._weight, self._last_sampled)
            mark.record()
        marks[-1].synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        return min(times) / TRIAL_LAYERS

    def step(self, ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """`decode` without the host's part."""
        output: Tensor = self._step(ids, positions, slots, self._weight, self._last_sampled)
        return output

    def prefill(
        self, input_ids: Tensor, lengths: Tensor, slots: Tensor, sampling: SamplingTensors
    ) -> Tensor:
        """Looks at the first token only; returns as many rows as a decode step."""
        missing = self.batch_buckets[0] - lengths.shape[0]
        rows = (input_ids[:, 0], lengths, slots)
        return self.step(*(functional.pad(row, (0, missing)).contiguous() for row in rows))

    def decode(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """See `Model.decode`."""
        spin(self.host_ms / 1e3)
        return self.step(input_ids, positions, slots)

    decode_gather = decode

    def decode_window(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, window: Window
    ) -> WindowOutput:
        """Of rows that end at no token, and at no limit of their own."""
        spin(self.host_ms / 1e3)
        steps = window.num_steps
        if steps not in self._windows:
            self._windows[steps] = self._step_of(self._layers, steps)
        run = self._windows[steps]
        return WindowOutput(*run(input_ids, positions, slots, self._weight, self._last_sampled))

    def warm_up(self, num_steps: int) -> None:
        """Compile windows of so many steps ahead of use. Host: blocks."""
        self._windows[num_steps] = self._step_of(self._layers, num_steps)

    def remap(self, future: Tensor, index: Tensor) -> Tensor:
        """Refused: its rows never change their order."""
        raise RuntimeError("remap: a BusyModel's rows never change their order")


def spin(seconds: float) -> int:
    """Host work: a Python loop that holds the GIL for about `seconds`; returns its iterations."""
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        count += 1
    return count
