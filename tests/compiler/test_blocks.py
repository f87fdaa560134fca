import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from neuron_streams._compiler.blocks import IrregularError, find_blocks, trace_blocks
from neuron_streams._compiler.plan import plan
from tests.compiler.plans import Deep, deep_inputs


class Holder:
    def __init__(self, model):
        self.model = model

    def step(self, *inputs):
        return self.model(*inputs)


def test_layers_are_found_wherever_a_function_has_its_model():
    model = Deep()
    reached = [
        model,
        model.forward,
        Holder(model).step,
        functools.partial(Holder.step, Holder(model)),
        lambda *inputs: model(*inputs),
    ]
    assert [len(find_blocks(function)) for function in reached] == [1] * len(reached)


def replace_tensor(layers):
    layers[1].mix.weight = nn.Parameter(torch.ones(4, 8))


def replace_constant(layers):
    layers[1].scale = 1  # 1 == 1.0, but an integer gives another graph


def add_hook(layers):
    layers[1].register_forward_hook(lambda *_: None)


def set_training(layers):
    layers[1].eval()


def tie_weights(layers):
    layers[1].mix.bias = nn.Parameter(layers[1].mix.weight[0], requires_grad=False)
    layers[1].other = layers[1].mix.bias
    for layer in (layers[0], *layers[2:]):
        layer.other = nn.Parameter(torch.ones(8))


def hide_tensors(layers):
    for layer in layers:
        layer.hidden = [torch.ones(3)]


def drop_all_but_two(layers):
    del layers[2:]


@pytest.mark.parametrize(
    "spoil",
    [
        replace_tensor,
        replace_constant,
        add_hook,
        set_training,
        tie_weights,
        hide_tensors,
        drop_all_but_two,
    ],
)
def test_layers_that_differ_or_are_few_are_no_block(spoil):
    model = Deep()
    spoil(model.layers)
    assert find_blocks(model) == []


def learn(function, *examples):
    blocks = find_blocks(function)
    trace_blocks(function, examples, blocks, FakeTensorMode(allow_non_fake_inputs=True))
    return blocks


class Scaled(nn.Module):
    def forward(self, x, factor):
        return x * factor


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x, equal=False):
        for number, layer in enumerate(self.layers):
            x = layer(x, 2 if equal else number)
        return x


def test_calls_with_other_constants_are_irregular():
    with pytest.raises(IrregularError, match="differ in form"):
        learn(Counting(), torch.ones(3))


def test_calls_with_equal_constants_are_one_block():
    model = Counting()
    (block,) = learn(functools.partial(model, equal=True), torch.ones(3))
    assert block.trace is not None
    assert len(block.outputs) == 1


class Echo(nn.Module):
    def forward(self, x):
        return x.add_(1)


def test_a_block_that_returns_its_input_is_irregular():
    model = nn.Sequential(nn.ModuleList(Echo() for _ in range(3)))

    def function(x):
        for layer in model[0]:
            x = layer(x)
        return x

    with pytest.raises(IrregularError, match="one of its inputs"):
        learn(function, torch.ones(3))
    assert len(plan(function, [torch.ones(3)]).segments) == 1


def test_forward_is_put_back():
    model = Deep()
    plan(model, deep_inputs())
    assert all("forward" not in layer.__dict__ for layer in model.layers)
