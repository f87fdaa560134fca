"""A decode loop in stream names only: chain, remap, synchronize when the batch changes.

Each step's sampled tokens stay on the device and are the next step's input; a copy stream brings
them to the host meanwhile. `--streams torch.cuda` runs the same lines on a GPU.
"""

import argparse
import importlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from models import cuda_graph

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def model(tokens: torch.Tensor, slots: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The next token hashes all that came before in the slot: one wrong token changes the rest."""
    state = (memory[slots] * 31 + tokens * 7 + 1) % 65521
    memory.index_copy_(0, slots, state)
    return state % 1000


def gather(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return tokens.index_select(0, rows)


class Loop:
    """A row is a slot; `history` holds each slot's tokens once they are on the host."""

    def __init__(self, streams: Any, device: str, step: Step, remap: Any, slots: int) -> None:
        self.streams, self.device, self.step, self.remap = streams, device, step, remap
        self.memory = torch.zeros(slots, dtype=torch.int64).to(device)
        self.copies = streams.Stream()
        self.slots: list[int] = []
        self.future: torch.Tensor | None = None
        self.pending: deque[tuple[list[int], torch.Tensor, torch.Tensor, Any]] = deque()
        self.history: dict[int, list[int]] = {}

    def launch(self, slots: list[int]) -> str:
        """One step for the rows `slots`; says how its input came about."""
        if self.future is not None and slots == self.slots:
            tokens, how = self.future, "chained"
        elif self.future is not None and sorted(slots) == sorted(self.slots):
            rows = torch.tensor([self.slots.index(slot) for slot in slots])
            tokens, how = self.remap(self.future, rows.to(self.device)), "remapped"
        else:
            self.drain(0)  # the composition changed: the host has to know the tokens
            last = [self.history.setdefault(slot, [slot])[-1] for slot in slots]
            tokens, how = torch.tensor(last).to(self.device), "synchronized"
        self.future = self.step(tokens, torch.tensor(slots).to(self.device), self.memory)
        self.slots = slots
        self.copies.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.copies):
            host = self.future.to("cpu", non_blocking=True)
            self.pending.append((slots, self.future, host, self.copies.record_event()))
        self.drain(1)
        return how

    def drain(self, keep: int) -> None:
        """Take tokens to the history until only `keep` steps are in flight."""
        while len(self.pending) > keep:
            slots, _, host, copied = self.pending.popleft()
            copied.synchronize()
            for slot, token in zip(slots, host.tolist(), strict=True):
                self.history[slot].append(token)


BATCHES = [[0, 1, 2, 3]] * 4 + [[3, 1, 2, 0]] * 3 + [[3, 4, 2, 0]] * 4


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="neuron_streams", help="or torch.cuda")
    streams = importlib.import_module(parser.parse_args(argv).streams)
    device, compiler = "cuda", cuda_graph.compile
    if streams.__name__ == "neuron_streams":
        device, compiler = "neuron", streams.compile
    rows = torch.zeros(4, dtype=torch.int64)
    step = compiler(model, (rows, rows, torch.zeros(5, dtype=torch.int64)), mutates=("memory",))
    loop = Loop(streams, device, step, compiler(gather, (rows, rows)), slots=5)
    print("steps:", ", ".join(loop.launch(batch) for batch in BATCHES))
    loop.drain(0)

    memory, expected = torch.zeros(5, dtype=torch.int64), {slot: [slot] for slot in range(5)}
    for batch in BATCHES:
        tokens = model(torch.tensor([expected[s][-1] for s in batch]), torch.tensor(batch), memory)
        for slot, token in zip(batch, tokens.tolist(), strict=True):
            expected[slot].append(token)
    assert loop.history == expected
    print("tokens as in a plain loop:", expected[0])


if __name__ == "__main__":
    main()
