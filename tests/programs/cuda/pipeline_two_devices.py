"""A model cut in two stages, each on a device of its own, trained with micro batches."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def stage(rank):
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def run(rank, file, lines):
    device = torch.device(f"cuda:{rank}")
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(7)
    x, y = torch.randn(16, 8).to(device), torch.randn(16, 8).to(device)
    for kind in (ScheduleGPipe, Schedule1F1B):
        module = stage(rank).to(device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        schedule = kind(
            PipelineStage(module, rank, 2, device),
            n_microbatches=4,
            loss_fn=nn.functional.mse_loss,
        )
        for _ in range(3):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x)
            else:
                losses = []
                schedule.step(target=y, losses=losses)
                lines.append([loss.item().hex() for loss in losses])
            optimizer.step()
        total = sum(p.double().sum() for p in module.parameters())
        lines.append((rank, total.item().hex()))
    dist.destroy_process_group()
    for line in lines:
        print(line, flush=True)


def main(rank, folder):
    import sys

    sys.stdout = open(os.path.join(folder, f"out{rank}"), "w")
    run(rank, os.path.join(folder, "store"), [])
    sys.stdout.flush()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder,), nprocs=2)
        for rank in range(2):
            print(open(os.path.join(folder, f"out{rank}")).read())
