import torch

import neuron_streams
from models import toy
from neuron_streams.decode import DecodeLoop, SamplingParams
from tests.models.driver import Request, run
from tests.models.reference import compile_eager


def test_a_seed_decides_the_weights():
    first, again, other = toy.weights(1), toy.weights(1), toy.weights(2)
    assert torch.equal(first.layers[0].qkv, again.layers[0].qkv)
    assert not torch.equal(first.layers[0].qkv, other.layers[0].qkv)


def test_its_tokens_depend_on_its_prompt():
    made = toy.toy(device="cpu", compile=compile_eager)
    tokens = [tuple(run(made, Request([first, 9], 1), 8)) for first in range(3, 23)]
    assert len(set(tokens)) == 20
    assert all(len(set(row)) > 2 for row in tokens)


def test_options_are_those_of_llama():
    made = toy.toy(device="cpu", compile=compile_eager, max_length=32, num_slots=3)
    assert (made.max_length, made.num_slots, made.prompt_buckets) == (32, 3, (8, 16))


def test_the_loop_gives_the_same_tokens_where_torch_defaults_to_the_device():
    neuron_streams.init()
    params = SamplingParams(max_tokens=5)

    def tokens():
        with DecodeLoop(toy.toy()) as loop:
            return [output.new_token_ids for output in loop.generate([[1, 2, 3]], params)]

    want = tokens()
    with torch.device("neuron"):
        assert tokens() == want
