"""A Llama of two layers with random weights: the same code as the real one, in milliseconds."""

from __future__ import annotations

from typing import Any

import torch

from models.config import LlamaConfig
from models.layers import Weights
from models.llama import Llama

__all__ = ["CONFIG", "toy", "weights"]

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    eos_token_ids=frozenset({2}),
)


def weights(
    seed: int = 0, config: LlamaConfig = CONFIG, dtype: torch.dtype = torch.float32
) -> Weights:
    """Random weights that a seed decides, scaled so that the tokens do not repeat themselves."""
    generator = torch.Generator("cpu").manual_seed(seed)
    made = Weights(config, dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            noise = (
                torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
                * spread
            )
            parameter.copy_(noise if parameter.dim() > 1 else 1.0 + noise)
        made.embedding.mul_(config.hidden_size**0.5)
    return made


def toy(seed: int = 0, **options: Any) -> Llama:
    """A toy model; `options` are those of `Llama`, of smaller sizes where they are not given."""
    sizes: dict[str, Any] = {
        "max_length": 64,
        "num_slots": 6,
        "batch_buckets": (1, 2, 4),
        "prompt_buckets": (8, 16),
    }
    return Llama(weights(seed), **(sizes | options))
