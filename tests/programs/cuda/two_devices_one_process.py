"""A model on two devices in one process: the activations and their gradients travel."""

import torch
from torch import nn


class TwoDevices(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16).to("cuda:0")
        self.second = nn.Linear(16, 4).to("cuda:1")

    def forward(self, x):
        x = torch.relu(self.first(x.to("cuda:0")))
        return self.second(x.to("cuda:1", non_blocking=True))


torch.manual_seed(0)
model = TwoDevices()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)
streams = [torch.cuda.Stream(device=i) for i in range(torch.cuda.device_count())]
print(len(streams))
for step in range(5):
    x, y = torch.randn(32, 8), torch.randn(32, 4).to("cuda:1")
    halves = []
    with torch.cuda.device(1):
        streams[1].wait_stream(torch.cuda.current_stream())
    for half in x.split(16):
        with torch.cuda.stream(streams[1]):
            halves.append(model(half))
        torch.cuda.current_stream(1).wait_stream(streams[1])
    loss = nn.functional.mse_loss(torch.cat(halves), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
print([p.device.type == torch.device("cuda").type for p in model.parameters()])
