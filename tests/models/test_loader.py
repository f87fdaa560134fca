import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import loader, toy
from models.loader import folder_of, load, load_weights
from tests.models.driver import Request, run
from tests.models.folders import write_folder
from tests.models.peer import checkpoint
from tests.models.reference import compile_eager

TIED = dataclasses.replace(toy.CONFIG, tie_word_embeddings=True)


def same(left, right):
    return all(
        torch.equal(one, other)
        for one, other in zip(left.parameters(), right.parameters(), strict=True)
    )


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("config", [toy.CONFIG, TIED], ids=["untied", "tied"])
def test_a_folder_gives_back_its_weights(tmp_path, shards, config):
    weights = toy.weights(1, config)
    found = load_weights(write_folder(tmp_path, weights, shards=shards))
    assert found.config == config
    assert same(found, weights)
    assert (found.head is found.embedding) == config.tie_word_embeddings


def test_a_file_without_an_index_may_have_any_name(tmp_path):
    write_folder(tmp_path, toy.weights())
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert same(load_weights(tmp_path), toy.weights())


def test_what_transformers_saves_can_be_read(tmp_path):
    from tests.models.peer import in_transformers

    in_transformers(toy.weights(2)).save_pretrained(tmp_path)
    assert same(load_weights(tmp_path), toy.weights(2))


def test_load_makes_a_model(tmp_path):
    write_folder(tmp_path, toy.weights())
    options = {"max_length": 32, "device": "cpu", "compile": compile_eager}
    loaded = load(str(tmp_path), prompt_buckets=(8,), **options)
    made = toy.toy(**options)
    tokens = [run(model, Request([5, 6], 1), 6) for model in (loaded, made)]
    assert tokens[0] == tokens[1]
    assert load(tmp_path, dtype=torch.bfloat16, **options).weights.norm.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["no/such/folder", "nowhere", "./nowhere", "../x", ""])
def test_what_is_neither_a_folder_nor_an_id_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if not name:
        name = tmp_path / "absent" / "folder"
    with pytest.raises(FileNotFoundError, match=r"is no folder; give a Hugging Face model folder"):
        folder_of(name)


def test_a_hub_id_that_cannot_be_had_is_one_sentence(monkeypatch):
    def refuse(name, **options):
        raise OSError(f"no route to {name}\nand many more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match=r"^owner/name is no folder, and the hub .*route"):
        folder_of("owner/name")


def test_a_hub_id_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(tmp_path))
    assert folder_of("owner/name") == tmp_path


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is not there"):
        load_weights(tmp_path)
    write_folder(tmp_path, toy.weights())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is not there"):
        load_weights(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    write_folder(tmp_path, toy.weights(), shards=2)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-1\.safetensors is not there"):
        load_weights(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', "{}"])
def test_a_corrupt_index_is_named(tmp_path, content):
    write_folder(tmp_path, toy.weights(), shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json is corrupt"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-7], lambda data: b"", lambda data: b"x" * 99]
)
def test_a_corrupt_file_is_named(tmp_path, damage):
    write_folder(tmp_path, toy.weights())
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt .* fetch it again"):
        load_weights(tmp_path)


def test_tensors_that_do_not_fit_the_config_are_named(tmp_path):
    write_folder(tmp_path, toy.weights())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    norm = "model.norm.weight"
    save_file(tensors | {norm: torch.ones(3)}, path)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is of shape \[3\]"):
        load_weights(tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if name != norm}, path)
    with pytest.raises(ValueError, match=r"has no model\.norm\.weight \(1 tensors are missing\)"):
        load_weights(tmp_path)


def test_an_architecture_that_is_not_llama_is_refused(tmp_path):
    write_folder(tmp_path, toy.weights())
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"architectures": ["GPT2LMHeadModel"]})
    )
    with pytest.raises(ValueError, match="is of a GPT2LMHeadModel"):
        load(tmp_path)


def test_every_parameter_has_a_name_in_a_checkpoint():
    weights = toy.weights()
    assert sum(part.numel() for part in checkpoint(weights).values()) == sum(
        parameter.numel() for parameter in weights.parameters()
    )
    assert loader._destinations(weights)["lm_head.weight"] is weights.head
