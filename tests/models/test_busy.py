"""The model that keeps the device busy."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

import neuron_streams
from models.busy import BusyModel, spin
from neuron_streams.decode import DecodeLoop, SamplingParams

EXPORTED = partial(neuron_streams.compile, target="exported")


def test_a_step_takes_longer_where_more_is_asked_for() -> None:
    layers = [BusyModel(ms, compile=EXPORTED)._step.name for ms in (0.01, 20)]
    assert layers[0] == "busy step of 1 layers"
    assert int(layers[1].split()[3]) > 5


@pytest.mark.parametrize(
    "options", [{"async_scheduling": False}, {}, {"policy": "gather"}], ids=str
)
def test_its_tokens_do_not_depend_on_the_loop(options: dict[str, object]) -> None:
    expected = [(1 * 7 + 3 + 1) % 1000]
    for position in range(3, 8):
        expected.append((expected[-1] * 7 + position + 1) % 1000)
    with DecodeLoop(BusyModel(0.01, compile=EXPORTED), **options) as loop:  # type: ignore[arg-type]
        outputs = list(loop.generate([[1, 2, 3]], SamplingParams(max_tokens=6)))
    assert [token for output in outputs for token in output.new_token_ids] == expected


def test_host_time_is_spent_in_a_decode_call() -> None:
    model, ids = BusyModel(0.01, host_ms=3.0, compile=EXPORTED), torch.zeros(4, dtype=torch.int32)
    start = time.perf_counter()
    model.decode(ids, ids, ids)
    assert time.perf_counter() - start >= 3e-3
    assert spin(1e-3) > 0


def test_it_refuses_to_remap() -> None:
    model = BusyModel(0.01, compile=EXPORTED)
    with pytest.raises(RuntimeError, match="remap: a BusyModel's rows never change their order"):
        model.remap(model._examples[0], model._examples[0])
