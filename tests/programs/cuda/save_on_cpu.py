"""Activations go to pinned host memory for the time between forward and backward."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)).cuda()
x = torch.randn(8, 16).cuda().requires_grad_()


def forward(x, again=False):
    for layer in layers:
        step = lambda y, layer=layer: torch.tanh(layer(y))  # noqa: E731
        x = checkpoint(step, x, use_reentrant=False) if again else step(x)
    return x.square().mean()


grads = []
for pin in (False, True):
    layers.zero_grad()
    x.grad = None
    with torch.autograd.graph.save_on_cpu(pin_memory=pin):
        loss = forward(x)
    loss.backward()
    grads.append([p.grad.clone() for p in layers.parameters()])
    print(loss.item().hex(), x.grad.sum().item().hex())
layers.zero_grad()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    loss = forward(x, again=True)
    loss.backward()
torch.cuda.current_stream().wait_stream(side)
grads.append([p.grad.clone() for p in layers.parameters()])
for other in grads[1:]:
    print([torch.equal(a, b) for a, b in zip(grads[0], other)])
print([g.double().sum().item().hex() for g in grads[0]])
