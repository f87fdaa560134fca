"""Small Hugging Face folders, made of the toy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from safetensors.torch import save_file

from models.layers import Weights
from tests.models.peer import checkpoint


def write_folder(folder: Path, weights: Weights, *, shards: int = 1) -> Path:
    """A checkpoint of the weights, in one file or in several with an index."""
    config = dataclasses.asdict(weights.config)
    config["eos_token_id"] = sorted(config.pop("eos_token_ids"))
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = checkpoint(weights)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    where = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder
