import dataclasses

import pytest
import torch
from torch.export import export

from models import toy
from models.kinds import Step
from models.llama import Llama
from models.packed import Packing
from neuron_streams.decode import SamplerOutput
from tests.models.reference import compile_eager

ONE_LAYER = dataclasses.replace(toy.CONFIG, num_hidden_layers=1)
KINDS = [
    *(f"{choice}_prefill" for choice in ("greedy", "adjusted")),
    *(f"{how}{choice}_decode" for how in ("", "gathered_") for choice in ("greedy", "adjusted")),
]


def test_a_step_names_what_it_takes_and_what_it_changes():
    weights = toy.weights()
    decode = Step("gathered_sampled_decode", weights, 16)
    assert decode.inputs == ("input_ids", "positions", "slots")
    tables = ("temperatures", "top_ks", "top_ps", "seeds")
    assert decode.state == ("kv_cache", *tables, "last_sampled")
    assert decode.mutates == ("kv_cache", "last_sampled")
    prefill = Step("greedy_prefill", weights, 16)
    fields = ("temperature", "top_k", "top_p", "seed")
    assert prefill.inputs == (*Packing._fields, *fields)
    assert prefill.state == prefill.mutates == ("kv_cache", *tables, "last_sampled")
    adjusted = Step("adjusted_decode", weights, 16)
    assert adjusted.mutates == ("kv_cache", "token_counts")
    assert set(tables) < set(adjusted.state)


def test_steps_of_all_kinds_share_the_weights():
    weights = toy.weights()
    own = {parameter.data_ptr() for parameter in weights.parameters()}
    for kind in KINDS:
        assert {p.data_ptr() for p in Step(kind, weights, 16).parameters()} == own


@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # torch.export's own
@pytest.mark.parametrize(
    ("kind", "strict"),
    [
        ("greedy_decode", True),
        pytest.param("gathered_adjusted_decode", False, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_traceable(kind, strict):
    seen = {}

    def compiler(module, inputs, /, *, mutates, name):
        program = export(module, (), dict(inputs), strict=strict).run_decompositions({})
        seen[name] = set(program.graph_signature.user_inputs_to_mutate.values()) == set(mutates)
        return compile_eager(module, inputs, mutates=mutates, name=name)

    made = Llama(toy.weights(config=ONE_LAYER), max_length=16, device="cpu", compile=compiler)
    made._executable(kind, 2)
    assert seen == {f"{kind}_2": True}


def test_an_adjusted_step_gives_log_probabilities_and_the_others_none():
    for choice, kind in (("greedy", torch.Tensor), ("adjusted", SamplerOutput)):
        made = toy.toy(device="cpu", compile=compile_eager)
        examples = made._inputs(Step(f"{choice}_decode", made.weights, 64), 2)
        run = made._executable(f"{choice}_decode", 2)
        made._allocate()
        result = run(*examples.values(), *made._state_of(f"{choice}_decode"))
        assert isinstance(result, kind)
