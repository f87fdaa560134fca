"""The same weights in transformers: what the models are compared with."""

from __future__ import annotations

from typing import Any

import torch

from models.layers import Weights
from models.loader import _destinations


def in_transformers(weights: Weights) -> Any:
    """A `LlamaForCausalLM` of the same configuration and the same parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = weights.config
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {name: getattr(scaling, name) for name in scaling.__slots__}
        rope["rope_type"] = "llama3"
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    lacking = made.load_state_dict(checkpoint(weights), strict=False)
    assert set(lacking.missing_keys) <= {"lm_head.weight"}
    assert not lacking.unexpected_keys
    return made.eval()


def checkpoint(weights: Weights) -> dict[str, torch.Tensor]:
    """The parameters under the names of a Hugging Face checkpoint."""
    return {name: part.detach().clone() for name, part in _destinations(weights).items()}


@torch.inference_mode()
def greedy_tokens(peer: Any, prompt: list[int], count: int) -> list[int]:
    """`count` tokens by the whole sequence, anew for each."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(peer(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
