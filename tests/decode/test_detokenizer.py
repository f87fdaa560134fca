from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_streams.decode import IncrementalDetokenizer, SamplingParams
from neuron_streams.decode.detokenizer import IncrementalDecoder, StopStrings
from tests.decode.hash_model import VOCAB
from tests.decode.toy_tokenizer import EURO, INCOMPLETE, ToyTokenizer, reference_text, tokens_for


def play(
    token_ids: list[int], params: SamplingParams, *, reason: str = "length"
) -> tuple[int, list[str], str | None]:
    """Tokens taken, the text after each, and the stop string that ended it."""
    detokenizer = IncrementalDetokenizer(ToyTokenizer(), params)
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
    count, texts, found = play(token_ids, params, reason=reason)
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
