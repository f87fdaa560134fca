"""A serving loop in the manner of mini-sglang: the next batch is scheduled and launched before the
results of the last one are processed, the scheduler on its stream and the engine on another."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

VOCAB, WIDTH, SLOTS, LENGTH = 61, 32, 8, 48


@dataclass(eq=False)
class Req:
    uid: int
    input_ids: list
    max_tokens: int
    table_idx: int = -1
    device_len: int = 0
    output: list = field(default_factory=list)
    finished: bool = False


class Batch(NamedTuple):
    reqs: list
    input_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor


class ForwardOutput(NamedTuple):
    next_tokens_cpu: torch.Tensor
    copy_done_event: torch.cuda.Event


class Engine:
    def __init__(self, device):
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        with torch.device(self.device):
            self.kv = torch.zeros(SLOTS, LENGTH, WIDTH)
        self.embed = nn.Embedding(VOCAB, WIDTH).to(device)
        self.position = nn.Embedding(LENGTH, WIDTH).to(device)
        self.head = nn.Linear(WIDTH, VOCAB).to(device)

    def forward_batch(self, batch):
        assert torch.cuda.current_stream() == self.stream
        hidden = self.embed(batch.input_ids) + self.position(batch.positions)
        self.kv[batch.rows, batch.positions] = hidden
        keys = self.kv[batch.rows]
        mask = torch.arange(LENGTH, device=self.device)[None] <= batch.positions[:, None]
        scores = torch.einsum("bd,bld->bl", hidden, keys) / WIDTH**0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        logits = self.head(torch.einsum("bl,bld->bd", weights, keys))
        return logits.argmax(-1).to(torch.int32)


class Scheduler:
    def __init__(self, engine):
        self.engine, self.device = engine, engine.device
        self.stream = torch.cuda.Stream(priority=-1)
        self.free, self.waiting, self.running = deque(range(SLOTS)), deque(), []
        self.token_pool = torch.zeros(SLOTS, LENGTH, dtype=torch.int32, device=self.device)
        self.finished = []
        torch.cuda.set_stream(self.stream)

    def schedule_next_batch(self):
        while self.waiting and self.free:
            req = self.waiting.popleft()
            req.table_idx = self.free.popleft()
            ids = torch.tensor(req.input_ids, dtype=torch.int32).pin_memory()
            row = self.token_pool[req.table_idx, : len(ids)]
            row.copy_(ids, non_blocking=True)
            self.running.append(req)
        reqs = [r for r in self.running if r.device_len < len(r.input_ids) + r.max_tokens - 1]
        if not reqs:
            return None
        host = torch.tensor(
            [[r.table_idx for r in reqs], [r.device_len for r in reqs]], pin_memory=True
        )
        rows, positions = host.to(self.device, non_blocking=True)
        return Batch(reqs, self.token_pool, positions, rows)

    def forward(self, batch):
        torch.cuda.current_stream().wait_stream(self.stream)
        batch = batch._replace(input_ids=self.token_pool[batch.rows, batch.positions].long())
        tokens = self.engine.forward_batch(batch)
        prompt = [r.device_len + 1 < len(r.input_ids) for r in batch.reqs]
        keep = torch.tensor(prompt, pin_memory=True).to(self.device, non_blocking=True)
        known = self.token_pool[batch.rows, batch.positions + 1]
        self.token_pool[batch.rows, batch.positions + 1] = torch.where(keep, known, tokens)
        for req in batch.reqs:
            req.device_len += 1
        tokens_cpu = tokens.to("cpu", non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream())
        return ForwardOutput(tokens_cpu, done)

    def process_last_data(self, last):
        if last is None:
            return
        batch, lengths, output = last
        output.copy_done_event.synchronize()
        for req, length, token in zip(batch.reqs, lengths, output.next_tokens_cpu.tolist()):
            if req.finished or length + 1 < len(req.input_ids):
                continue
            req.output.append(token)
            if token == 0 or len(req.output) == req.max_tokens:
                req.finished = True
                self.running.remove(req)
                self.free.append(req.table_idx)
                self.finished.append(req)

    def overlap_loop(self, last):
        batch = self.schedule_next_batch()
        current = None
        if batch is not None:
            lengths = [r.device_len for r in batch.reqs]
            with torch.cuda.stream(self.engine.stream):
                self.engine.stream.wait_stream(self.stream)
                current = batch, lengths, self.forward(batch)
            self.stream.wait_stream(self.engine.stream)
        self.process_last_data(last)
        return current


@torch.inference_mode()
def main():
    scheduler = Scheduler(Engine("cuda"))
    for uid in range(20):
        prompt = [(uid * 7 + i * 3) % (VOCAB - 1) + 1 for i in range(1 + uid % 5)]
        scheduler.waiting.append(Req(uid, prompt, 3 + uid % 11))
    last = None
    while scheduler.waiting or scheduler.running or last is not None:
        last = scheduler.overlap_loop(last)
    torch.cuda.synchronize()
    for req in sorted(scheduler.finished, key=lambda r: r.uid):
        print(req.uid, req.output)


main()
