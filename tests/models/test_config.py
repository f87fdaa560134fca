import dataclasses
import json

import pytest
import torch

from models.config import LlamaConfig, RopeScaling
from models.toy import CONFIG

VALUES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_absent_values_are_those_of_hugging_face():
    found = LlamaConfig.from_dict(VALUES)
    assert found.num_key_value_heads == found.num_attention_heads == 4
    assert (found.head_dim, found.rms_norm_eps, found.rope_theta) == (8, 1e-6, 10000.0)
    assert not found.tie_word_embeddings
    assert found.eos_token_ids == frozenset()


def test_both_ways_to_write_the_rotations_are_read():
    old = LlamaConfig.from_dict(VALUES | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = LlamaConfig.from_dict(VALUES | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert old == new
    assert old.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(("value", "wanted"), [(2, {2}), ([2, 5], {2, 5}), (None, set())])
def test_end_tokens_are_a_set(value, wanted):
    assert LlamaConfig.from_dict(VALUES | {"eos_token_id": value}).eos_token_ids == wanted


def test_generation_config_has_the_last_word_on_end_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VALUES | {"eos_token_id": 2}))
    assert LlamaConfig.load(tmp_path).eos_token_ids == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert LlamaConfig.load(tmp_path).eos_token_ids == {3, 4}


@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0, 1.0, 4.0, 64)])
def test_rotations_are_those_of_transformers(scaling):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from models.toy import weights
    from tests.models.peer import in_transformers

    config = dataclasses.replace(CONFIG, head_dim=16, rope_scaling=scaling)
    theirs = LlamaRotaryEmbedding(in_transformers(weights(config=config)).config)
    cos, sin = theirs(torch.zeros(1), torch.arange(100)[None])
    mine = config.rotations(100)
    torch.testing.assert_close(mine[0], cos[0])
    torch.testing.assert_close(mine[1], sin[0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "config.json is of a MistralForCausalLM"),
        ({"architectures": None}, "config.json is of a None"),
        ({"hidden_act": "gelu"}, "config.json has hidden_act='gelu'"),
        ({"attention_bias": True}, "config.json has attention_bias=True"),
        ({"rope_scaling": {"type": "yarn"}}, "config.json has rope_type='yarn'"),
        ({"hidden_size": None}, "config.json has hidden_size=None"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ],
)
def test_what_is_not_a_plain_llama_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_dict(VALUES | values)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is not there"):
        LlamaConfig.load(tmp_path)
    for content, message in (("{", r"config\.json is not JSON"), ("[]", "holds no JSON object")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            LlamaConfig.load(tmp_path)
