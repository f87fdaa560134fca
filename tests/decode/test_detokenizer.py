from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_streams.decode import IncrementalDetokenizer, SamplingParams
from neuron_streams.decode.detokenizer import (
    IncrementalDecoder,
    StopStrings,
    Tokenizer,
    check_tokenizer,
    left_out_token,
)
from tests.decode.hash_model import VOCAB
from tests.decode.toy_tokenizer import (
    EURO,
    INCOMPLETE,
    SpecialTokenizer,
    ToyTokenizer,
    piece,
    reference_text,
    tokens_for,
)


class AppendingTokenizer(ToyTokenizer):
    clean_up_tokenization_spaces = False


def play(
    token_ids: list[int],
    params: SamplingParams,
    *,
    reason: str = "length",
    tokenizer: Tokenizer | None = None,
) -> tuple[int, list[str], str | None]:
    """Tokens taken, the text after each, and the stop string that ended it."""
    detokenizer = IncrementalDetokenizer(tokenizer or AppendingTokenizer(), params)
    texts = []
    for count, token_id in enumerate(token_ids, 1):
        last = count == len(token_ids)
        stop = detokenizer.update(token_id, last and reason == "stop")
        texts.append(detokenizer.get_next_output_text(last or stop is not None))
        if stop is not None:
            return count, texts, stop
    return len(token_ids), texts, None


def params_of(*stop: str, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=99, stop=stop, **options)  # type: ignore[arg-type]


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=40)
stops = st.lists(st.text("ab €", min_size=1, max_size=5), max_size=3)


@given(tokens, stops, st.booleans(), st.integers(0, 10), st.sampled_from(["length", "stop"]))
def test_any_tokens_give_what_decoding_all_of_them_gives(
    token_ids: list[int], stop: list[str], include: bool, min_tokens: int, reason: str
) -> None:
    params = params_of(*stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    want, _, text, stop_reason = reference_text(token_ids, reason, params)
    for tokenizer in (ToyTokenizer(), AppendingTokenizer()):
        count, texts, found = play(token_ids, params, reason=reason, tokenizer=tokenizer)
        assert (count, "".join(texts), found) == (len(want), text, stop_reason)


@given(tokens, stops)
def test_text_comes_as_soon_as_it_is_certain(token_ids: list[int], stop: list[str]) -> None:
    """What is held back is an incomplete character, or may begin a stop string."""
    params = params_of(*stop)
    count, texts, _ = play(token_ids, params)
    given_out = ""
    for n in range(1, count):
        given_out += texts[n - 1]
        text = ToyTokenizer().decode(token_ids[:n])
        held = text[len(given_out) :]
        if not text.endswith(INCOMPLETE):
            assert held == "" or any(one.startswith(held) and one != held for one in stop)


def test_a_character_of_several_tokens_comes_at_once() -> None:
    ids = tokens_for(b"a", EURO[:1], EURO[1:2], EURO[2:], b"b")
    assert play(ids, params_of())[1] == ["a", "", "", "€", "b"]


def test_an_incomplete_character_at_the_end_is_shown_as_one() -> None:
    assert play(tokens_for(b"a", EURO[:2]), params_of())[1] == ["a", INCOMPLETE]


def test_a_stop_string_over_token_borders_is_held_back_and_cut() -> None:
    ids = tokens_for(b"b", b"a", b"b", b" ", b"a")
    assert play(ids, params_of("ab ")) == (4, ["b", "", "", ""], "ab ")
    kept = params_of("ab ", include_stop_str_in_output=True)
    assert play(ids, kept) == (4, ["b", "", "", "ab "], "ab ")


def test_what_does_not_become_a_stop_string_is_given_back() -> None:
    assert play(tokens_for(b"a", b"b", b"b"), params_of("aba"))[1] == ["", "", "abb"]
    assert play(tokens_for(b"a", b"b"), params_of("aba"))[1] == ["", "ab"], "at the end too"
    assert play(tokens_for(b"ab", b"ab", b" "), params_of("abab "))[1:] == (["", "", ""], "abab ")
    assert play(tokens_for(b"a", b"a", b"b"), params_of("ab"))[1:] == (["", "a", ""], "ab")


def test_text_behind_a_stop_string_in_the_same_token_is_cut() -> None:
    assert play(tokens_for(b"ba"), params_of("b")) == (1, [""], "b")
    assert play(tokens_for(b"ba"), params_of("b", include_stop_str_in_output=True))[1] == ["b"]


@pytest.mark.parametrize(
    ("text", "stop", "found"),
    [
        ("a b", ("b", "a "), (0, 2)),
        ("abc", ("bc", "abc"), (0, 3)),
        ("abc", ("abc", "ab"), (0, 2)),
        ("xab", ("ab",), (1, 3)),
        ("xyz", ("ab",), None),
        ("xyz", (), None),
    ],
)
def test_of_those_that_end_together_the_first_to_begin_wins(
    text: str, stop: tuple[str, ...], found: tuple[int, int] | None
) -> None:
    assert StopStrings(stop).find(text) == found


def test_a_stop_string_must_end_in_what_is_new() -> None:
    stops = StopStrings(("bc", "abcd"))
    assert stops.held("abc") == 3
    assert stops.find("abcx", 3) is None
    assert stops.find("abcd", 3) == (0, 4)
    assert stops.held("abcx") == 0
    assert StopStrings(()).held("abc") == 0


def test_min_tokens_go_before_stop_strings() -> None:
    ids = tokens_for(b"a", b"b", b"a", b"b", b" ")
    assert play(ids, params_of("b", min_tokens=1))[0] == 2
    count, texts, stop = play(ids, params_of("b", min_tokens=2))
    assert (count, "".join(texts), stop) == (4, "aba", "b")
    assert play(ids, params_of("ab", min_tokens=5)) == (5, ["", "ab", "", "ab", " "], None)
    count, texts, stop = play(ids, params_of("ba", min_tokens=2))
    assert (count, "".join(texts), stop) == (3, "a", "ba"), "begun before, completed after"


def test_a_stop_tokens_own_text_is_left_out_as_in_vllm() -> None:
    ids = tokens_for(b"a", b"b")
    assert play(ids, params_of(), reason="stop")[1] == ["a", ""]
    kept = params_of(include_stop_str_in_output=True)
    assert play(ids, kept, reason="stop")[1] == ["a", "b"]
    held = params_of("ab")
    assert play(ids, held, reason="stop") == (2, ["", "a"], None)


@pytest.mark.parametrize("piece", [b"a", EURO, EURO[:1], EURO[2:]])
def test_a_long_text_costs_each_token_the_same(piece: bytes) -> None:
    tokenizer = ToyTokenizer()
    decoder = IncrementalDecoder(tokenizer)
    text = "".join(decoder.push(token) for token in tokens_for(piece) * 2000) + decoder.flush()
    assert text == (piece * 2000).decode(errors="replace")
    assert tokenizer.decoded < 2000 * 20


def test_bytes_that_are_no_text_come_out_and_a_character_after_them_is_whole() -> None:
    decoder = IncrementalDecoder(ToyTokenizer())
    junk = tokens_for(*[EURO[2:]] * 17, EURO[:1], EURO[1:2])
    shown = "".join(decoder.push(token) for token in junk)
    assert shown == INCOMPLETE * 17 or len(shown) < 17
    end = tokens_for(EURO[2:], b"a")
    assert shown + "".join(decoder.push(token) for token in end) == INCOMPLETE * 17 + "€a"


# Tokenizers that rewrite what they gave


WORDS = ["it", "'", "s", "n", "do", "t", "re", "ve", "we", "a", ",", ".", "!", "(", ")", "m"]
CLEAN_UPS = ((" .", "."), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"))
CLEAN_UPS = (*CLEAN_UPS, (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))


class CleaningTokenizer:
    """Joins words and cleans up as transformers' clean_up_tokenization does."""

    def decode(self, token_ids: list[int], /) -> str:
        text = " ".join(WORDS[token_id] for token_id in token_ids)
        for old, new in CLEAN_UPS:
            text = text.replace(old, new)
        return text


def words(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=40),
    st.lists(st.text("it's n,", min_size=1, max_size=5), max_size=2),
)
def test_a_text_that_is_cleaned_up_comes_out_as_it_is_at_the_end(
    token_ids: list[int], stop: list[str]
) -> None:
    known = text = ""
    want: tuple[int, str, str | None] = (
        len(token_ids),
        CleaningTokenizer().decode(token_ids),
        None,
    )
    for count in range(1, len(token_ids) + 1):
        known, text = text, CleaningTokenizer().decode(token_ids[:count])
        found = StopStrings(stop).find(text, len(os.path.commonprefix([known, text])))  # noqa: RUF071
        if found is not None:
            want = (count, text[: found[0]], text[slice(*found)])
            break
    got, texts, stopped = play(token_ids, params_of(*stop), tokenizer=CleaningTokenizer())
    assert (got, "".join(texts), stopped) == want


def test_the_space_before_an_apostrophe_is_held_back_until_it_is_settled() -> None:
    given_out = play(words("it ' s a ."), params_of(), tokenizer=CleaningTokenizer())
    assert given_out[1] == ["it", "", "'s", " a", "."]
    given_out = play(words("do n ' t"), params_of(), tokenizer=CleaningTokenizer())
    assert given_out[1] == ["do", "", "", "n't"]


@pytest.mark.parametrize(
    ("text", "stop", "count", "given_out"),
    [
        ("it ' s a", "it's", 3, ""),
        ("a it ' s a", "'s", 4, "a it"),
        ("a it ' s a", " '", 3, "a it"),
        ("we do n ' t a", "don't", 5, "we "),
        ("we do n ' t a", "n't", 5, "we do"),
        ("we do n a", " n", 3, "we do"),
    ],
)
def test_a_stop_string_is_met_in_the_text_as_it_then_is(
    text: str, stop: str, count: int, given_out: str
) -> None:
    played = play(words(text), params_of(stop), tokenizer=CleaningTokenizer())
    assert (played[0], "".join(played[1]), played[2]) == (count, given_out, stop)


def test_one_that_says_that_it_only_appends_is_not_held_back() -> None:
    ids = tokens_for(b"a", b" ", b"b")
    assert play(ids, params_of())[1] == ["a", " ", "b"]
    assert play(ids, params_of(), tokenizer=ToyTokenizer())[1] == ["a", "", " b"]


class SpacingTokenizer(ToyTokenizer):
    """Leaves token 0 out, and puts a space before each other but the first."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        self.decoded += len(token_ids)
        return " ".join(str(token_id) for token_id in token_ids if token_id)


@given(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=20, max_size=60))
def test_tokens_that_are_left_out_of_the_text_take_no_context_away(token_ids: list[int]) -> None:
    _, texts, _ = play(token_ids, params_of(), tokenizer=SpacingTokenizer())
    assert "".join(texts) == SpacingTokenizer().decode(token_ids)


def test_many_tokens_that_are_left_out_cost_each_the_same() -> None:
    tokenizer = SpacingTokenizer()
    play([1, *[0] * 2000, 2], params_of(), tokenizer=tokenizer)
    assert tokenizer.decoded < 2000 * 30


class FallingBackTokenizer(ToyTokenizer):
    """Where a run of bytes is no text, each of them is a replacement character."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        raw = b"".join(map(piece, token_ids))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "".join(chr(byte) if byte < 128 else INCOMPLETE for byte in raw)


def test_a_byte_that_is_no_text_does_not_spoil_the_character_before_it() -> None:
    for end in ((b"a",), ()):
        ids = tokens_for(b"b", *[EURO[:1], EURO[1:2], EURO[2:]], EURO[:1], *end)
        _, texts, _ = play(ids, params_of(), tokenizer=FallingBackTokenizer())
        assert "".join(texts) == "b€" + INCOMPLETE + "a" * len(end)


def test_characters_in_a_row_come_out_whole_where_an_incomplete_one_spoils_the_run() -> None:
    ids = tokens_for(*[EURO[:1], EURO[1:2], EURO[2:]] * 20, b"a")
    _, texts, _ = play(ids, params_of(), tokenizer=FallingBackTokenizer())
    assert texts == ["", "", "€"] * 20 + ["a"]


class Fickle:
    """Gives another text at each call, all of them with what the newest token spells."""

    def __init__(self) -> None:
        self.calls = 0

    def decode(self, token_ids: list[int], /) -> str:
        self.calls += 1
        return f"{self.calls}:{token_ids[-1]};"


def test_one_that_changes_its_text_at_each_call_loses_no_token() -> None:
    _, texts, _ = play([*range(60)], params_of(), tokenizer=Fickle())
    assert all(f":{token_id};" in text for token_id, text in enumerate(texts))


def test_unsettled_text_is_given_where_the_text_before_it_reads_otherwise() -> None:
    class Shouting(CleaningTokenizer):
        def decode(self, token_ids: list[int], /) -> str:
            text = super().decode(token_ids)
            return text if len(token_ids) < 3 else text.upper()

    assert play(words("it ' s"), params_of(), tokenizer=Shouting())[1] == ["it", "", " ' s"]


def test_one_that_changes_the_list_that_it_gets_spoils_nothing() -> None:
    class Consuming(ToyTokenizer):
        def decode(self, token_ids: Sequence[int], /) -> str:
            text = super().decode(token_ids)
            token_ids.clear()  # type: ignore[attr-defined]
            return text

    ids = tokens_for(b"a", b"b") * 20
    assert "".join(play(ids, params_of(), tokenizer=Consuming())[1]) == "ab" * 20


@pytest.mark.parametrize(
    "text", [None, b"a", 3, ["a"], object()], ids=lambda text: type(text).__name__
)
def test_one_that_gives_no_text_is_named(text: Any) -> None:
    class Wrong:
        def decode(self, token_ids: list[int], /) -> Any:
            return text

    detokenizer = IncrementalDetokenizer(Wrong(), params_of("a"))
    with pytest.raises(TypeError, match=r"^Wrong.decode returned .*; a tokenizer's decode must"):
        detokenizer.update(3)
    assert detokenizer.get_next_output_text(True) == ""


def test_a_str_of_another_class_becomes_a_plain_one() -> None:
    class Loud(str):
        def endswith(self, *args: object) -> bool:
            raise ZeroDivisionError

    class Odd(ToyTokenizer):
        def decode(self, token_ids: Sequence[int], /) -> str:
            return Loud(super().decode(token_ids))

    (text,) = play(tokens_for(b"a"), params_of("b"), tokenizer=Odd())[1]
    assert (type(text), text) == (str, "a")


@pytest.mark.parametrize("tokenizer", [object(), ToyTokenizer, "decode", lambda ids: "a"])
def test_what_cannot_decode_is_no_tokenizer(tokenizer: Any) -> None:
    if tokenizer is not ToyTokenizer:
        with pytest.raises(ValueError, match=r"^tokenizer is .*; it must have decode\(token_ids\)"):
            check_tokenizer(tokenizer)
    check_tokenizer(None)
    check_tokenizer(ToyTokenizer())


# Stop strings that the text never shows


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(
    ("stop", "left_out"),
    [("<end>", 30), ("a<end>", 30), ("<end> ", 30), ("ab", None), (" ", None), ("€", None)],
)
def test_a_special_token_in_a_stop_string_is_found(
    begins: bool, stop: str, left_out: int | None
) -> None:
    tokenizer = SpecialTokenizer()
    tokenizer.begins = begins
    assert left_out_token(tokenizer, stop) == left_out
    assert left_out_token(ToyTokenizer(), stop) is None, "it cannot encode"


def test_a_stop_string_that_another_spelling_hides_has_no_token_that_is_left_out() -> None:
    class Lower(SpecialTokenizer):
        def encode(self, text: str) -> Any:
            return super().encode(text.lower())

    assert left_out_token(Lower(), "A") is None


@pytest.mark.slow
def test_a_loop_takes_the_tokenizers_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast.add_tokens(alphabet)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=fast)
    decoder = IncrementalDecoder(tokenizer)
    ids = tokenizer.encode("xay")
    assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids)
