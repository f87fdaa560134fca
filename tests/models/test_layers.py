import dataclasses

import pytest
import torch

from models import toy
from models.config import RopeScaling
from models.layers import attend, project, write
from models.packed import Packed, pack
from models.steps import Decode
from tests.models.peer import in_transformers

CONFIGS = {
    "untied": toy.CONFIG,
    "tied": dataclasses.replace(toy.CONFIG, tie_word_embeddings=True),
    "no groups": dataclasses.replace(toy.CONFIG, num_key_value_heads=4),
    "one group": dataclasses.replace(toy.CONFIG, num_key_value_heads=1, rope_theta=500.0),
    "llama3": dataclasses.replace(toy.CONFIG, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 16)),
}


@pytest.mark.parametrize("written_out", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name, written_out, monkeypatch):
    monkeypatch.setattr("models.layers.written_out", lambda tensor: written_out)
    weights = toy.weights(3, CONFIGS[name])
    peer = in_transformers(weights)
    prompts = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    kv = torch.zeros(2, 2, 4, weights.config.num_key_value_heads, 20, 8)
    slots = torch.tensor([3, 1])
    with torch.inference_mode():
        wanted = peer(prompts).logits
        lengths = torch.tensor([9, 7])
        known = [*prompts[0, :9].tolist(), *prompts[1, :7].tolist()]
        rows = known, [0, 0], lengths.tolist(), slots.tolist()
        packing = pack(*rows, rows=2, buckets=(24,), block=4)
        first = Packed(weights, 20)(*packing, kv)
        torch.testing.assert_close(first[0], wanted[0, 8], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(first[1], wanted[1, 6], atol=1e-4, rtol=1e-4)
        decode = Decode(weights, 20)
        for step in range(3):
            at = lengths + step
            ids = prompts[torch.arange(2), at]
            logits = decode(ids, at, slots, kv)
            for row in range(2):
                torch.testing.assert_close(logits[row], wanted[row, at[row]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 40])
@pytest.mark.parametrize("outputs", [1, 3, 32, 97])
@pytest.mark.parametrize("large", [1, 2**17])
def test_project_is_a_product_with_the_transposed_weight(rows, outputs, large, monkeypatch):
    monkeypatch.setattr("models.layers._LARGE", large)
    left, weight = torch.randn(rows, 24), torch.randn(outputs, 24)
    torch.testing.assert_close(project(left, weight), left @ weight.T)


@pytest.mark.parametrize("large", [1, 2**17])
def test_a_row_of_few_does_not_depend_on_the_others(large, monkeypatch):
    monkeypatch.setattr("models.layers._LARGE", large)
    left, weight = torch.randn(8, 24), torch.randn(32, 24)
    together = project(left, weight)
    assert all(torch.equal(project(left[:n], weight), together[:n]) for n in range(1, 9))


@pytest.mark.parametrize("written_out", [True, False])
def test_attend_looks_at_its_own_slot_up_to_its_position(written_out, monkeypatch):
    monkeypatch.setattr("models.layers.written_out", lambda tensor: written_out)
    queries = torch.randn(2, 4, 8)
    keys, values = torch.randn(3, 2, 10, 8), torch.randn(3, 2, 10, 8)
    positions, slots = torch.tensor([4, 0]), torch.tensor([2, 1])
    before = attend(queries, keys, values, positions, slots)
    for part in (keys, values):
        part[0] = 1e6
        part[2, :, 5:] = 1e6
        part[1, :, 1:] = 1e6
    torch.testing.assert_close(attend(queries, keys, values, positions, slots), before)
    wanted = values[1, :, 0].repeat_interleave(2, 0).flatten()
    torch.testing.assert_close(before[1], wanted)


def test_write_puts_keys_and_values_where_they_belong():
    kv = torch.zeros(2, 4, 3, 6, 5)
    new = torch.randn(2, 2, 3, 5)
    write(kv, new, torch.tensor([[3], [1]]), torch.tensor([[5], [0]]))
    wanted = torch.zeros_like(kv)
    wanted[:, 3, :, 5] = new[:, 0]
    wanted[:, 1, :, 0] = new[:, 1]
    assert torch.equal(kv, wanted)
