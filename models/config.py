"""What a Llama is made of: the part of a Hugging Face `config.json` that changes the arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["LlamaConfig", "RopeScaling"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotations beyond the context it was pretrained with."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The sizes of a Llama, under the names of Hugging Face's `LlamaConfig`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share "
                f"{self.num_key_value_heads} key-value heads evenly; check config.json"
            )

    @classmethod
    def load(cls, folder: Path) -> LlamaConfig:
        """Read `config.json`, and the end tokens of `generation_config.json` where there is one.

        Raises:
            FileNotFoundError: There is no `config.json`.
            ValueError: It is not JSON, or asks for an architecture that is not a plain Llama.
        """
        values = _read(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.is_file():
            values["eos_token_id"] = _read(generation).get(
                "eos_token_id", values.get("eos_token_id")
            )
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LlamaConfig:
        """From the content of a `config.json`.

        Raises:
            ValueError: It asks for an architecture that is not a plain Llama, or a size is missing.
        """
        _refuse_what_is_not_llama(values)
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        heads = _size(values, "num_attention_heads")
        hidden = _size(values, "hidden_size")
        return cls(
            vocab_size=_size(values, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(values, "intermediate_size"),
            num_hidden_layers=_size(values, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or hidden // heads,
            max_position_embeddings=values.get("max_position_embeddings", 2048),
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta") or values.get("rope_theta") or 10000.0,
            rope_scaling=_rope_scaling(rope),
            tie_word_embeddings=values.get("tie_word_embeddings", False),
            eos_token_ids=_token_ids(values.get("eos_token_id")),
        )

    def rotations(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every rotation, float32 [length, head_dim] each."""
        exponents = (
            torch.arange(0, self.head_dim, 2, dtype=torch.int64, device="cpu").float()
            / self.head_dim
        )
        frequencies = 1.0 / self.rope_theta**exponents
        if self.rope_scaling is not None:
            frequencies = _stretch(frequencies, self.rope_scaling)
        angles = torch.arange(length, device="cpu").float()[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    context = scaling.original_max_position_embeddings
    turns = context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (share + (1.0 - share) / scaling.factor)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; a Hugging Face model folder has one")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); fetch the model again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object; fetch the model again")
    return values


def _refuse_what_is_not_llama(values: Mapping[str, Any]) -> None:
    kind = (values.get("architectures") or [values.get("model_type")])[0]
    if kind not in ("LlamaForCausalLM", "llama"):
        raise ValueError(f"config.json is of a {kind}; only LlamaForCausalLM can be loaded")
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for name, value in wanted.items():
        found = values.get(name, value)
        if found != value:
            raise ValueError(f"config.json has {name}={found!r}; only {value!r} can be loaded")


def _size(values: Mapping[str, Any], name: str) -> int:
    found = values.get(name)
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"config.json has {name}={found!r}; it needs a size of at least 1")
    return found


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(
            f"config.json has rope_type={kind!r}; only 'default' and 'llama3' are known"
        )
    return RopeScaling(
        rope["factor"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )


def _token_ids(found: int | list[int] | None) -> frozenset[int]:
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
