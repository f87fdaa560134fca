"""Fully sharded training, the first kind, over gloo."""

import functools
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def run(rank, strategy, say):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(16, 4)).to("cuda")
    model = FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=500),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    for step in range(3):
        x, y = torch.randn(8, 16).to("cuda"), torch.randn(8, 4).to("cuda")
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss.item().hex())
    with FullyShardedDataParallel.summon_full_params(model):
        for name, value in model.module.named_parameters():
            say(name.replace("_fsdp_wrapped_module.", ""), value.double().sum().item().hex())


def main(rank, folder):
    torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    with open(os.path.join(folder, f"out{rank}"), "w") as file:
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            run(rank, strategy, lambda *words: print(*words, file=file))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder,), nprocs=2)
        for rank in range(2):
            print(open(os.path.join(folder, f"out{rank}")).read())
