"""Run a plan with eager operators: what the compiled libraries must do, without a compiler."""

import torch
from torch import fx, nn

from neuron_streams._compiler.plan import Plan
from neuron_streams._runtime.program import Run


def run_plan(plan: Plan, *inputs: torch.Tensor) -> list[torch.Tensor]:
    values = dict(enumerate((*inputs, *plan.weights)))
    for step in plan.steps:
        if isinstance(step, Run):
            segment = fx.GraphModule({}, plan.segments[step.library].graph)
            made = segment(*(values[value] for value in step.inputs))
            values.update(zip(step.outputs, made, strict=True))
        else:
            source = values[step.source]
            offset = source.storage_offset() + step.offset
            values[step.target] = source.as_strided(step.size, step.stride, offset)
    return [values[value] for value in plan.results]


class Layer(nn.Module):
    """A layer that mixes, and keeps what it saw in a cache."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        keys, values = self.mix(x).chunk(2, -1)
        kv[0].index_put_((rows,), keys)
        kv[1].index_put_((rows,), values)
        seen = torch.cat((kv[0][rows], kv[1].flip(0)[rows]), -1)
        return x + self.scale * torch.tanh(seen)


class Deep(nn.Module):
    """Layers of one kind, each with its part of one cache, and something before and after them."""

    def __init__(self, layers: int = 4, width: int = 8, scales: tuple[float, ...] = ()) -> None:
        super().__init__()
        scales = scales or (1.0,) * layers
        self.layers = nn.ModuleList(Layer(width, scale) for scale in scales)
        self.register_buffer("bias", torch.linspace(-1, 1, width))

    def forward(self, x: torch.Tensor, rows: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        hidden, where = x * self.bias, rows.long()
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, kv[number], where)
        return hidden.softmax(-1)


def deep_inputs(layers: int = 4, width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, width, generator=generator)
    kv = torch.randn(layers, 2, 5, width // 2, generator=generator)
    return [x, torch.tensor([3, 1], dtype=torch.int32), kv]
