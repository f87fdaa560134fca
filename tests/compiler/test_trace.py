import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from neuron_streams._compiler.trace import base_of, is_view, own_outputs, trace, written


def traced(function, *examples):
    return trace(function, examples, FakeTensorMode(allow_non_fake_inputs=True))


def test_windows_lead_back_to_what_made_the_memory():
    found = traced(lambda x: (x[0].view(-1, 1), (x + 1).chunk(2)[1]), torch.ones(4, 6))
    window, part = found.outputs
    assert is_view(window)
    assert base_of(window) is found.inputs[0]
    assert is_view(part)
    assert base_of(part).target is torch.ops.aten.add.Tensor


def test_updates_in_place_stay_in_place():
    found = traced(lambda x, y: x[0].add_(y).view(-1), torch.ones(2, 3), torch.ones(3))
    assert {base_of(arg) for node in found.graph.nodes for arg in written(node)} == {
        found.inputs[0]
    }
    assert base_of(found.outputs[0]) is found.inputs[0]


def test_what_a_function_closes_over_becomes_an_input_once():
    weight, constant = torch.nn.Parameter(torch.ones(3)), torch.arange(3.0)
    found = traced(lambda x: x * weight + constant + weight, torch.ones(3))
    assert found.input_count == 1
    assert [tensor.data_ptr() for tensor in found.weights] == [
        weight.data_ptr(),
        constant.data_ptr(),
    ]


def test_the_function_runs_on_nothing_real():
    x = torch.ones(3)
    traced(lambda y: y.add_(1), x)
    assert x.tolist() == [1, 1, 1]


def test_own_outputs_copies_what_is_not_whole_and_alone():
    found = traced(lambda x: (x, x + 1, (x * 2).T, (x * 3)[0]), torch.ones(2, 3))
    own_outputs(found.graph)
    copied = [node.target is torch.ops.aten.clone.default for node in found.outputs]
    assert copied == [True, False, True, True]
    assert all(node.meta["val"].is_contiguous() for node in found.outputs)
