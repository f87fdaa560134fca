from __future__ import annotations

from neuron_streams.decode import Adjustments, LogprobsTensors, Model, SamplingTensors
from tests.decode.compiled_hash_model import CompiledHashModel
from tests.decode.fake_streams import FakeStreams
from tests.decode.hash_model import FakeHashModel


def test_sampling_tensors_have_the_order_of_the_models_arguments() -> None:
    assert SamplingTensors._fields[:4] == ("temperature", "top_k", "top_p", "seed")


def test_the_hash_models_are_models() -> None:
    """Checked by mypy; at run time the names alone."""
    fake = FakeHashModel(FakeStreams())
    compiled = CompiledHashModel(lambda fn, *_, **__: fn, "cpu")
    models: list[Model] = [fake, compiled]
    assert len(models) == 2
    wanted = {name for name in vars(Model) if not name.startswith("_")}
    for model in (fake, compiled):
        assert wanted <= set(dir(model))
        assert model.adjusts_logits


def test_adjustments_have_the_order_of_the_models_arguments() -> None:
    assert SamplingTensors._field_defaults == {"adjustments": None}
    assert LogprobsTensors._fields == ("logprob_token_ids", "logprobs", "selected_token_ranks")
    assert Adjustments._fields == (
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "num_prompt_tokens",
        "min_length",
        "num_logprobs",
        "logit_bias",
        "stop_mask",
    )
