import torch
from torch import nn
from torch.utils import _pytree as pytree

from neuron_streams._compiler.signature import describe, input_names, output_names


class Step(nn.Module):
    def forward(self, ids, *rest):
        return ids


def names_of(results):
    return output_names(pytree.tree_structure(results))


def test_inputs_are_named_by_the_signature_or_the_mapping():
    one = torch.ones(1)
    assert input_names(Step(), [one]) == ("ids",)
    assert input_names(Step(), [one] * 3) == ("ids", "input_1", "input_2")
    assert input_names(lambda a, b: a, [one, one]) == ("a", "b")
    assert input_names(torch.add, [one, one]) == ("input_0", "input_1")
    assert input_names(Step(), {"x": one, "y": one}) == ("x", "y")


def test_outputs_are_named_by_their_places():
    assert names_of(0) == ("output",)
    assert names_of((0, 0)) == ("output_0", "output_1")
    assert names_of({"logits": 0, "cache": 0}) == ("logits", "cache")
    assert names_of({"a": (0, 0)}) == ("a.0", "a.1")


def test_describe_is_short():
    assert describe(torch.int32, (4, 2)) == "int32[4, 2]"
    assert describe(torch.float32, ()) == "float32[]"
