import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from models.tokenizer import Tokenizer
from neuron_streams.decode.detokenizer import IncrementalDecoder

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level():
    """All bytes and a few merges, as GPT-2's."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    fast.train_from_iterator(["the cat and the hat", "naïve 😀 café"], trainer)
    fast.add_special_tokens([AddedToken("<end>", normalized=False)])
    return fast


def with_leading_spaces():
    """Words that carry their space in front, as SentencePiece's."""
    fast = FastTokenizer(models.WordLevel({"▁a": 0, "▁cat": 1, "s": 2, "<unk>": 3}, "<unk>"))
    fast.normalizer = normalizers.Prepend("▁")
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast


FAST = byte_level()


@given(st.text())
def test_encoding_and_decoding_are_inverse(text):
    tokenizer = Tokenizer(FAST)
    if "<end>" not in text:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def pieces(tokenizer, ids):
    stream = IncrementalDecoder(tokenizer)
    return [*(stream.push(token) for token in ids), stream.flush()]


@given(st.text(max_size=30))
def test_pushed_text_is_the_text_without_half_characters(text):
    tokenizer = Tokenizer(FAST)
    parts = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == tokenizer.decode(tokenizer.encode(text))
    assert "\N{REPLACEMENT CHARACTER}" in text or not any(
        "\N{REPLACEMENT CHARACTER}" in part for part in parts
    )


@given(st.lists(st.integers(0, 300), max_size=30))
def test_any_tokens_give_the_text_of_all_of_them(ids):
    tokenizer = Tokenizer(FAST)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_of_several_tokens_comes_at_once():
    tokenizer = Tokenizer(FAST)
    parts = pieces(tokenizer, tokenizer.encode("x🦉y"))
    assert [part for part in parts if part] == ["x", "🦉", "y"]
    assert pieces(tokenizer, tokenizer.encode("🦉")[:-1])[-1] == "\N{REPLACEMENT CHARACTER}"


def test_spaces_that_a_lone_token_would_lose_are_kept():
    tokenizer = Tokenizer(with_leading_spaces())
    assert pieces(tokenizer, [0, 1, 2, 1]) == ["a", " cat", "s", " cat", ""]


def test_special_tokens_are_not_shown():
    end = FAST.token_to_id("<end>")
    tokenizer = Tokenizer(FAST)
    assert tokenizer.encode("<end>") == [end]
    assert pieces(tokenizer, [*tokenizer.encode("cat"), end])[-2:] == ["", ""]


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_chat_is_rendered_by_the_template_of_the_folder(tmp_path, place):
    FAST.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "<end>"}}
    if place == "chat_template.jinja":
        (tmp_path / place).write_text(TEMPLATE)
    else:
        config["chat_template"] = TEMPLATE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = "<s><system>be brief<end>\n<user>hi<end>\n<assistant>"
    assert tokenizer.render_chat(messages) == text
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text)
    assert tokenizer.render_chat(messages[1:]) == "<s><user>hi<end>\n<assistant>"
    assert tokenizer.encode_chat("hi") == tokenizer.encode_chat(messages[1:])
    with pytest.raises(ValueError, match="the chat template refuses these messages: no tools"):
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])


@given(st.text(max_size=20))
def test_the_bytes_of_tokens_are_those_of_the_text(text):
    tokenizer = Tokenizer(FAST)
    ids = tokenizer.encode(text.replace("<end>", ""))
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text.replace("<end>", "")


def test_the_bytes_of_a_token_alone():
    tokenizer = Tokenizer(FAST)
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("ü ")] == [b"\xc3", b"\xbc", b" "]
    assert tokenizer.token_bytes(FAST.token_to_id("<end>")) == b"<end>"
    assert tokenizer.token_bytes(FAST.get_vocab_size()) == b""
    fast = byte_level()
    fast.add_special_tokens([AddedToken("<a b>", normalized=False)])
    assert Tokenizer(fast).token_bytes(fast.token_to_id("<a b>")) == b"<a b>"
    assert Tokenizer(with_leading_spaces()).token_bytes(2) == b"s"


def test_without_a_template_there_is_no_chat(tmp_path):
    FAST.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == FAST.get_vocab_size()
    with pytest.raises(ValueError, match="this model has no chat template; use encode"):
        tokenizer.encode_chat("hi")


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is not there"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is corrupt"):
        Tokenizer.load(tmp_path)
    FAST.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.load(tmp_path)
