"""Fully sharded training, the second kind, over gloo."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def run(rank, say):
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(16, 4)).to("cuda")
    for block in model[:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    for step in range(3):
        x, y = torch.randn(8, 16).to("cuda"), torch.randn(8, 4).to("cuda")
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss.item().hex(), norm.full_tensor().item().hex())
    for name, value in model.state_dict().items():
        say(name, value.full_tensor().double().sum().item().hex())


def main(rank, folder):
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    with open(os.path.join(folder, f"out{rank}"), "w") as file:
        run(rank, lambda *words: print(*words, file=file))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder,), nprocs=2)
        for rank in range(2):
            print(open(os.path.join(folder, f"out{rank}")).read())
