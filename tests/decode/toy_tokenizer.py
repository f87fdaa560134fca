"""A tokenizer for the hash model's vocabulary, of few letters, so that stop strings are met. Some
tokens are pieces of one character."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from neuron_streams.decode import SamplingParams
from tests.decode.hash_model import VOCAB

EURO = "€".encode()  # three bytes
PIECES = [b"a", b"b", b"ab", b"ba", b"bb", b" ", EURO[:1], EURO[1:2], EURO[2:], EURO[:2], EURO]
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class ToyTokenizer:
    """Counts the tokens that it is asked to decode."""

    def __init__(self) -> None:
        self.decoded = 0
        self.fails_at: int | None = None

    def decode(self, token_ids: Sequence[int], /) -> str:
        self.decoded += len(token_ids)
        if self.fails_at in token_ids:
            raise LookupError(f"no such token: {self.fails_at}")
        return b"".join(piece(token) for token in token_ids).decode("utf-8", "replace")


class SpecialTokenizer(ToyTokenizer):
    """Token 30 is spelled <end> and left out of the text, as is 29, which begins every text."""

    begins = False

    def decode(self, token_ids: Sequence[int], /) -> str:
        return super().decode([token for token in token_ids if token < 29])

    def encode(self, text: str) -> Any:
        ids, rest = [29] if self.begins else [], text
        while rest:
            found = "<end>" if rest.startswith("<end>") else rest[0]
            ids.append(30 if found == "<end>" else PIECES.index(found.encode()))
            rest = rest[len(found) :]
        return SimpleNamespace(ids=ids) if self.begins else ids


def piece(token_id: int) -> bytes:
    assert 0 <= token_id < VOCAB
    return PIECES[token_id % len(PIECES)]


def tokens_for(*pieces: bytes) -> list[int]:
    return [PIECES.index(one) for one in pieces]


def reference_text(
    token_ids: Sequence[int], reason: str, params: SamplingParams
) -> tuple[list[int], str, str, int | str | None]:
    """What a request of those tokens and that finish reason has to give: tokens, finish reason,
    text and stop reason. Decodes everything again for each token, and looks from the start."""
    decode = ToyTokenizer().decode
    known = ""
    shown = len(token_ids) - (reason == "stop" and not params.include_stop_str_in_output)
    for count in range(1, shown + 1):
        text = decode(token_ids[:count])
        if text.endswith(INCOMPLETE):
            continue
        found = _first_stop(text, len(known), params.stop) if count > params.min_tokens else None
        if found is not None:
            start, end = found
            given = text[: end if params.include_stop_str_in_output else start]
            return list(token_ids[:count]), "stop", given, text[start:end]
        known = text
    last = token_ids[-1] if token_ids else None
    stop_reason = last if reason == "stop" and last in params.stop_token_ids else None
    return list(token_ids), reason, decode(token_ids[:shown]), stop_reason


def _first_stop(text: str, old: int, stops: Sequence[str]) -> tuple[int, int] | None:
    places = [
        (start, start + len(stop))
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > old
    ]
    return min(places, default=None)
