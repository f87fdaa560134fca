"""Operators on device tensors; most of what they do is shown in test_tensor."""

from __future__ import annotations

import io

import pytest
import torch

import neuron_streams


@pytest.mark.parametrize("where", ["neuron", "neuron:1"])
def test_loading_to_the_device_says_what_to_do(where):
    neuron_streams.init()
    file = io.BytesIO()
    torch.save(torch.arange(3.0), file)
    file.seek(0)
    with pytest.raises(neuron_streams.UnsupportedError, match=r"^torch.load\(map_location='neuron"):
        torch.load(file, map_location=where)
    file.seek(0)
    assert torch.load(file, map_location="cpu").to("neuron").tolist() == [0.0, 1.0, 2.0]


def test_an_operator_that_is_not_there_says_so():
    with pytest.raises(neuron_streams.UnsupportedError, match="eager operators on Neuron tensors"):
        torch.ones(2).to("neuron") + 1
