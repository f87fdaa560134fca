"""Mixed precision with a gradient scaler that begins too high, and so skips steps."""

import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda")
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
net.to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scaler = torch.cuda.amp.GradScaler(init_scale=2.0**24, growth_interval=4)
inputs = torch.randn(12, 32, 16).pin_memory()
targets = torch.randn(12, 32, 4).pin_memory()

for step in range(12):
    x = inputs[step].to(device, non_blocking=True)
    y = targets[step].to(device, non_blocking=True)
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
        assert out.dtype is torch.float16
        loss = nn.functional.mse_loss(out, y)
        assert loss.dtype is torch.float32
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item().hex(), norm.item(), scaler.get_scale())

with torch.no_grad(), torch.autocast(device_type="cuda", dtype=torch.bfloat16):
    print(net(inputs[0].to(device)).float().cpu().tolist())
