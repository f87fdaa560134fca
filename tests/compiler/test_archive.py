import json
import zipfile

import pytest
import torch

from neuron_streams import Executable, compile  # noqa: A004
from tests.compiler.compiled import deep, model, needs_cxx, pair
from tests.compiler.plans import deep_inputs


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "pair.zip"
    pair().save(path)
    return path


def rewrite(path, change):
    """Save an archive again after `change(entries)`."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


@needs_cxx
def test_a_model_comes_back_with_its_weights(tmp_path):
    deep().save(tmp_path / "deep.zip")
    loaded = Executable.load(tmp_path / "deep.zip")
    x, rows, kv = deep_inputs()
    caches = [kv.to("neuron"), kv.to("neuron")]
    results = [e(x, rows, c).cpu() for e, c in zip((deep(), loaded), caches, strict=True)]
    assert torch.equal(*results)
    assert torch.equal(*(cache.cpu() for cache in caches))
    assert repr(loaded) == repr(deep())


def test_an_exported_one_comes_back(tmp_path):
    made = compile(model(), deep_inputs(), mutates=["kv"], target="exported")
    made.save(tmp_path / "deep.zip")
    loaded = Executable.load(tmp_path / "deep.zip")
    x, rows, kv = deep_inputs()
    result = loaded(x, rows, kv.to("neuron")).cpu()
    assert torch.equal(result, model()(x, rows, kv))
    assert loaded.target == "exported"


@needs_cxx
def test_the_manifest_can_be_read_by_others(saved):
    with zipfile.ZipFile(saved) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        assert set(manifest["sha256"]) == set(archive.namelist()) - {"manifest.json"}
    assert manifest["inputs"] == [["x", "float32", [2, 3], [3, 1]], ["y", "float32", [3], [1]]]
    assert manifest["mutates"] == []


@needs_cxx
def test_saving_leaves_the_old_file_when_it_fails(saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr(zipfile.ZipFile, "writestr", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pair().save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["pair.zip"]


@needs_cxx
def test_saving_where_no_file_can_be(tmp_path, saved):
    executable = Executable.load(saved)
    with pytest.raises(
        FileNotFoundError, match="^save: there is no folder .*missing; give the name"
    ):
        executable.save(tmp_path / "missing" / "x.zip")
    with pytest.raises(IsADirectoryError, match="^save: .* is a folder; give the name of a file"):
        executable.save(tmp_path)
    assert sorted(tmp_path.iterdir()) == [saved]


def test_a_file_cut_short_is_refused(saved):
    saved.write_bytes(saved.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"pair.zip is not an executable, or is cut short"):
        Executable.load(saved)


@needs_cxx
def test_a_damaged_entry_is_refused(saved):
    rewrite(saved, lambda entries: entries.update({"0.so": entries["0.so"][:-1] + b"?"}))
    with pytest.raises(ValueError, match=r"pair.zip is damaged"):
        Executable.load(saved)


@needs_cxx
def test_a_flipped_byte_is_refused(saved):
    data = bytearray(saved.read_bytes())
    data[len(data) // 2] ^= 1
    saved.write_bytes(data)
    with pytest.raises(ValueError, match=r"pair.zip is "):
        Executable.load(saved)


@pytest.mark.parametrize("text", ["", "hello", "PK"])
def test_a_foreign_file_is_refused(tmp_path, text):
    (tmp_path / "other").write_text(text)
    with pytest.raises(ValueError, match=r"other is not an executable"):
        Executable.load(tmp_path / "other")


def test_a_foreign_zip_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("manifest.json", "[]")
    with pytest.raises(ValueError, match=r"other.zip is not an executable"):
        Executable.load(tmp_path / "other.zip")


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        Executable.load(tmp_path / "nothing.zip")


@needs_cxx
@pytest.mark.parametrize("what", ["torch", "machine"])
def test_one_for_another_machine_is_refused(saved, what):
    def change(entries):
        manifest = json.loads(entries["manifest.json"])
        manifest[what] = "other"
        entries["manifest.json"] = json.dumps(manifest).encode()

    rewrite(saved, change)
    with pytest.raises(ValueError, match=rf"was compiled for {what} other"):
        Executable.load(saved)
