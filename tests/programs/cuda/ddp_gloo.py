"""DistributedDataParallel over gloo, with no_sync, a join and the plain collectives."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def run(rank, say):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 3))
    model = DistributedDataParallel(model.to(device), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + rank)
    for step in range(4):
        x, y = torch.randn(16, 8), torch.randint(3, (16,))
        with model.no_sync():
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss.item().hex())
    say([p.double().sum().item().hex() for p in model.parameters()])

    x = torch.arange(4.0, device=device) + rank
    dist.all_reduce(x)
    parts = [torch.empty(4, device=device) for _ in range(2)]
    dist.all_gather(parts, x + rank)
    y = torch.full((2,), float(rank), device=device)
    dist.broadcast(y, 1)
    work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    dist.barrier()
    say(x.tolist(), [p.tolist() for p in parts], y.tolist())
    if rank == 0:
        dist.send(x * 2, 1)
    else:
        dist.recv(y.resize_(4), 0)
        say(y.tolist())


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
