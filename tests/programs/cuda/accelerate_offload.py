"""accelerate keeps the weights in host memory or on two devices, and moves them for each call."""

import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 11)
        self.second.weight.data[:, :8] = self.embed.weight.data

    def forward(self, ids):
        return self.second(self.norm(torch.relu(self.first(self.embed(ids)))))


torch.manual_seed(0)
model = Net().eval()
ids = torch.arange(11)
with torch.no_grad():
    plain = model(ids)

    cpu_offload(model, execution_device=torch.device("cuda"))
    out = model(ids.to("cuda"))
    print(out.device.type == torch.device("cuda").type, out.sum().item().hex())
    assert torch.equal(out.cpu(), plain)
    remove_hook_from_submodules(model)

    places = {"embed": "cuda:0", "first": "cuda:0", "norm": "cuda:1", "second": "cpu"}
    dispatch_model(model, places, main_device="cuda:0")
    out = model(ids.to("cuda"))
    print(out.shape, out.sum().item().hex())
    assert torch.equal(out.cpu(), plain)
