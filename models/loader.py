"""From a Hugging Face folder, or an id of its hub, to a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.config import LlamaConfig
from models.layers import Weights
from models.llama import Llama

__all__ = ["folder_of", "load", "load_weights"]

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]


def load(path_or_id: str | Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Llama:
    """A `Llama` with the weights of a folder or of a hub id; `options` are those of `Llama`.

    Raises:
        FileNotFoundError: No such folder, or a file of it is missing, or the hub has no such id.
        ValueError: A file is corrupt, or the architecture is not a plain Llama.
    """
    return Llama(load_weights(folder_of(path_or_id), dtype), **options)


def folder_of(path_or_id: str | Path) -> Path:
    """The folder itself, or where the hub's files of that id were downloaded.

    Only an id, `owner/name` where there is no such folder, touches the network.

    Raises:
        FileNotFoundError: Neither a folder nor something that the hub gave.
    """
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder
    if not isinstance(path_or_id, str) or not _HUB_ID.fullmatch(path_or_id):
        raise FileNotFoundError(
            f"{path_or_id} is no folder; give a Hugging Face model folder or a hub id, owner/name"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(path_or_id, allow_patterns=_PATTERNS))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        cause = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"{path_or_id} is no folder, and the hub did not give it ({cause})"
        ) from error


def load_weights(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    """Read `config.json` and all `*.safetensors` of a folder, in one file or sharded.

    Raises:
        FileNotFoundError: One of them is missing.
        ValueError: One of them is corrupt, or does not hold what `config.json` announces.
    """
    weights = Weights(LlamaConfig.load(folder), dtype)
    wanted = _destinations(weights)
    with torch.no_grad():
        for path in _files(folder):
            for name, tensor in _tensors(path, wanted):
                target = wanted.pop(name)
                if tensor.shape != target.shape:
                    raise ValueError(
                        f"{path}: {name} is of shape {list(tensor.shape)} where config.json "
                        f"announces {list(target.shape)}; the two belong to different models"
                    )
                target.copy_(tensor)
    if wanted:
        raise ValueError(
            f"{folder} has no {min(wanted)} ({len(wanted)} tensors are missing); "
            "it is not a complete Llama, fetch it again"
        )
    return weights


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} is corrupt ({error}); fetch it again") from error
        found = [folder / name for name in shards]
    else:
        single = folder / "model.safetensors"
        found = [single] if single.is_file() else sorted(folder.glob("*.safetensors")) or [single]
    for path in found:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there; fetch the model again")
    return found


def _tensors(path: Path, wanted: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name in wanted:
                    yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt ({error}); delete it and fetch it again") from error


def _destinations(weights: Weights) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes; several share one fused parameter."""
    config = weights.config
    found: dict[str, Tensor] = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
    }
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = weights.head
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    for index, layer in enumerate(weights.blocks):
        qkv = torch.split(layer.qkv, [queries, keys, keys])
        gate_up = torch.split(layer.gate_up, config.intermediate_size)
        parts = {
            "input_layernorm": layer.input_norm,
            "self_attn.q_proj": qkv[0],
            "self_attn.k_proj": qkv[1],
            "self_attn.v_proj": qkv[2],
            "self_attn.o_proj": layer.output,
            "post_attention_layernorm": layer.post_norm,
            "mlp.gate_proj": gate_up[0],
            "mlp.up_proj": gate_up[1],
            "mlp.down_proj": layer.down,
        }
        found |= {f"model.layers.{index}.{name}.weight": part for name, part in parts.items()}
    return found
