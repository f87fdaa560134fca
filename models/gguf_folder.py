"""From a GGUF file of a Llama with a GPT-2 style tokenizer to a Hugging Face folder, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["convert"]

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3


def convert(gguf: Path, folder: Path) -> None:
    """Write `config.json`, `model.safetensors` and the tokenizer's files into an existing folder.

    Raises:
        ValueError: The file is not of a Llama, or its tokenizer is of another kind.
    """
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(f"{gguf} is not of a Llama with a GPT-2 style tokenizer")
    tensors = dict(_tensors(reader, fields))
    config = _config(fields, tied="lm_head.weight" not in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(fields).save(str(folder / "tokenizer.json"), pretty=False)
    _write(folder / "config.json", config)
    _write(folder / "tokenizer_config.json", _tokenizer_config(fields))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tensors(reader: GGUFReader, fields: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        *block, kind, suffix = tensor.name.split(".")
        name = f"{_NAMES[kind]}.{suffix}"
        if block:
            name = f"model.layers.{block[1]}.{name}"
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32))
        yield name, _unpermute(values, heads[kind]) if kind in heads else values


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours, Hugging Face rotates halves: put the rows back as they were."""
    pairs = weight.view(heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    splits: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if fields["tokenizer.ggml.pre"] == "smollm":
        splits.insert(0, pre_tokenizers.Digits(individual_digits=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    made.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in kinds if kind == _CONTROL_TOKEN]
    made.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return made


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
