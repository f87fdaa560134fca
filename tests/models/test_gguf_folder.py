import json

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from models import toy
from models.config import LlamaConfig
from models.gguf_folder import _NAMES, convert
from models.loader import load_weights
from models.tokenizer import Tokenizer as FolderTokenizer
from tests.models.peer import checkpoint

TOKENS = ["<end>", *"abcdefgh123", "Ġ", "ab", "Ġab", "12"]
PAIRS = {"q": toy.CONFIG.num_attention_heads, "k": toy.CONFIG.num_key_value_heads}


def permuted(weight, heads):
    """The rows of a query or key weight as llama.cpp orders them."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path, weights, *, architecture="llama", pre="smollm", quantised=False):
    writer = gguf.GGUFWriter(path, architecture)
    config = weights.config
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b", "Ġ ab", "1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}<end>")
    theirs = {ours: name for name, ours in _NAMES.items()}
    for name, tensor in checkpoint(weights).items():
        parts = name.removesuffix(".weight").split(".")
        block = f"blk.{parts[2]}." if "layers" in parts else ""
        kind = theirs[".".join(parts[3:]) if block else ".".join(parts)]
        if kind in ("attn_q", "attn_k"):
            tensor = permuted(tensor, PAIRS[kind[-1]])
        values, options = tensor.numpy(), {}
        if quantised and values.ndim == 2 and values.shape[1] % 32 == 0:
            values = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            options = {"raw_dtype": gguf.GGMLQuantizationType.Q8_0}
        writer.add_tensor(f"{block}{kind}.weight", np.ascontiguousarray(values), **options)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_and_config_come_through_unchanged(tmp_path):
    weights = toy.weights(5)
    convert(write_gguf(tmp_path / "toy.gguf", weights), tmp_path)
    found = load_weights(tmp_path)
    for name in ("vocab_size", "head_dim", "rope_theta", "num_key_value_heads"):
        assert getattr(found.config, name) == getattr(weights.config, name)
    assert found.config.eos_token_ids == {0}
    for one, other in zip(found.parameters(), weights.parameters(), strict=True):
        assert torch.equal(one, other)


def test_quantised_weights_are_dequantised_to_float32(tmp_path):
    weights = toy.weights(5)
    convert(write_gguf(tmp_path / "toy.gguf", weights, quantised=True), tmp_path)
    found = load_weights(tmp_path)
    assert found.embedding.dtype == torch.float32
    for one, other in zip(found.parameters(), weights.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=0.06, rtol=0.02)


def test_without_a_head_the_embedding_is_tied(tmp_path):
    config = LlamaConfig(
        **{name: getattr(toy.CONFIG, name) for name in toy.CONFIG.__slots__}
        | {"tie_word_embeddings": True}
    )
    convert(write_gguf(tmp_path / "toy.gguf", toy.weights(config=config)), tmp_path)
    assert load_weights(tmp_path).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("pre", "tokens"), [("smollm", ["ab", "Ġab", "1", "2"]), ("gpt-2", ["ab", "Ġab", "12"])]
)
def test_the_tokenizer_splits_digits_where_its_model_does(tmp_path, pre, tokens):
    convert(write_gguf(tmp_path / "toy.gguf", toy.weights(), pre=pre), tmp_path)
    fast = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert fast.encode("ab ab12").tokens == tokens
    found = FolderTokenizer.load(tmp_path)
    assert found.encode_chat("ab") == [TOKENS.index("ab"), 0]
    assert found.decode([*found.encode("ab ab1"), 0]) == "ab ab1"


def test_transformers_reads_the_folder(tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    convert(write_gguf(tmp_path / "toy.gguf", toy.weights()), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("ab ab1", add_special_tokens=False).input_ids == FolderTokenizer.load(
        tmp_path
    ).encode("ab ab1")
    assert AutoConfig.from_pretrained(tmp_path).model_type == "llama"
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 0


def test_another_architecture_is_refused(tmp_path):
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_tokenizer_model("gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="is not of a Llama with a GPT-2 style tokenizer"):
        convert(path, tmp_path)
