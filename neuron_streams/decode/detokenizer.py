"""The text of one request as its tokens arrive, and the stop strings in it.

Text is held back for three reasons: a character whose bytes are not all there, a tail that the
tokenizer may yet rewrite, and one that may be the beginning of a stop string. So what has been
given out is never taken back, and nothing depends on where one token ends and the next begins.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from neuron_streams.decode import coerce
from neuron_streams.decode.sampling_params import SamplingParams

__all__ = [
    "IncrementalDecoder",
    "IncrementalDetokenizer",
    "StopStrings",
    "Tokenizer",
    "check_tokenizer",
    "left_out_token",
]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 12
_LONGEST_CHARACTER = 4  # tokens of an incomplete one, with the one before it
# A clean-up takes the space away before punctuation and contractions (it 's, do n't, they 're), as
# `clean_up_tokenization_spaces` of transformers does, and may know so only from what comes next.
_UNSETTLED = re.compile(r"\s(?:n\s?)?[^\w\s]{0,2}\Z|\s'[rv]\Z")


class Tokenizer(Protocol):
    """What the loop uses of a tokenizer; those of `transformers` have it too.

    One that only ever appends, so that the text of some tokens begins with that of the first of
    them, may say so as those of transformers do, by `clean_up_tokenization_spaces = False`. Its
    text is then not held back before punctuation. One that leaves special tokens out of its text
    should have `encode(text)`, which finds them in a stop string.
    """

    def decode(self, token_ids: list[int], /) -> str: ...


def check_tokenizer(tokenizer: object) -> None:
    """Refuse what cannot decode; None is no tokenizer.

    Raises:
        ValueError: It has no `decode`.
    """
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(
            f"tokenizer is {coerce.shown(tokenizer)}; it must have decode(token_ids) -> str, as"
            " those of transformers."
        )


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of tokens, a plain str.

    Raises:
        TypeError: The tokenizer gives something else.
    """
    text: object = tokenizer.decode([*token_ids])
    if not isinstance(text, str):
        raise TypeError(
            f"{type(tokenizer).__name__}.decode returned {coerce.shown(text)}; a tokenizer's decode"
            " must return a str."
        )
    return coerce.text("text", text)


def left_out_token(tokenizer: Tokenizer, stop: str) -> int | None:
    """A token of a stop string that `decode` leaves out, so that the string is never found.

    Special tokens are what is left out, if anything. None where there is no such token, and where
    the tokenizer cannot `encode`.
    """
    encode = getattr(tokenizer, "encode", None)
    if not callable(encode):
        return None
    # Twice, since many tokenizers strip a space at the beginning of a text.
    token_ids = _ids(encode(stop))
    if stop in decode(tokenizer, token_ids * 2):
        return None
    around = Counter(_ids(encode("")))  # such as a beginning of the sequence
    for token_id in Counter(token_ids) - around:
        if not decode(tokenizer, [token_id] * 2):
            return token_id
    return None


def _ids(encoded: Any) -> list[int]:
    return [*getattr(encoded, "ids", encoded)]


class IncrementalDecoder:
    """Tokens in, text out; never half a character. The cost of a token does not grow.

    A token is decoded in the light of a few before it, since what it spells may depend on them (a
    leading space, the first bytes of a character). All the text together is what `decode` gives
    for all the tokens, as far as that does not rewrite what was settled: then the text goes on with
    what the newer tokens give alone.

    Attributes:
        unsettled: Complete text behind what was given, which the next token may rewrite.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.unsettled = ""
        self._tokenizer = tokenizer
        self._rewrites = getattr(tokenizer, "clean_up_tokenization_spaces", True)
        self._ids: list[int] = []
        self._newest = 0  # where in them those begin that last made text
        self._complete = 0  # how many of them have made text
        self._given = ""  # what of their text was given
        self._rest = ""

    def push(self, token_id: int) -> str:
        """The text that this token settles; empty while a character is incomplete."""
        self._ids.append(token_id)
        text, last = decode(self._tokenizer, self._ids), ""
        if not text.startswith(self._given):
            last, text = self._begin_again()
        self._rest = text[len(self._given) :]
        if not text.endswith(_INCOMPLETE):
            return last + self._give(text)
        if len(self._ids) - self._complete > _WINDOW:
            return last + self._give_up(text)
        return last

    def flush(self) -> str:
        """What is left at the end: unsettled text, incomplete characters as replacement ones."""
        rest, self._rest, self.unsettled = self._rest, "", ""
        return rest

    def _give(self, text: str) -> str:
        old, settled = len(self._given), self._settled(text)
        if text != self._given + self.unsettled:  # or a special token that decode leaves out
            self._newest = self._complete
        self._complete = len(self._ids)
        self._given, self._rest = text[:settled], text[settled:]
        self.unsettled = self._rest
        new = text[old:settled]
        if self._complete > (4 * _WINDOW if self.unsettled else _WINDOW):
            new += self.flush()
            self._ids = self._ids[self._newest :][: _WINDOW + 1]
            self._newest, self._complete = 0, len(self._ids)
            self._given = decode(self._tokenizer, self._ids)
        return new

    def _settled(self, text: str) -> int:
        """How many characters no later token rewrites."""
        tail = _UNSETTLED.search(text, len(self._given)) if self._rewrites else None
        return len(text) if tail is None else tail.start()

    def _begin_again(self) -> tuple[str, str]:
        """Leave out the older tokens, whose text has been given and now reads otherwise.

        A byte that is not one of a character may spoil those before it, for example.

        Returns:
            What was unsettled, and the text of the tokens that are left.
        """
        last, self.unsettled = self.unsettled, ""
        given, text = "", ""
        for start in (self._newest, self._complete):
            older, newer = self._ids[start : self._complete], self._ids[start:]
            given = decode(self._tokenizer, older) if older else ""
            text = decode(self._tokenizer, newer)
            if text.startswith(given):
                break
        self._ids, self._given = self._ids[start:], given
        self._complete, self._newest = self._complete - start, 0
        return last, text

    def _give_up(self, text: str) -> str:
        """Bytes that are no text at all: only the last of them may become a character yet."""
        new, self._rest, self.unsettled = self._rest[:-1], self._rest[-1:], ""
        self._ids = self._ids[-_LONGEST_CHARACTER:]
        self._newest = self._complete = 0
        self._given = decode(self._tokenizer, self._ids)[:-1]
        return new


class StopStrings:
    """Finds the first stop string in a text that grows.

    Of those that the same piece of text completes, the one that begins first wins, and the
    shortest of those that begin together.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)

    def find(self, text: str, old: int = 0) -> tuple[int, int] | None:
        """Where the winner begins and ends; it ends beyond the first `old` characters."""
        ends = []
        for stop in self._stop:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                ends.append((start, start + len(stop)))
        return min(ends, default=None)

    def held(self, text: str) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        return max((_overlap(text, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _num_shared(text: str, other: str) -> int:
    """How many characters at the beginning are the same."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (one, two) in pairs if one != two), min(len(text), len(other)))


class IncrementalDetokenizer:
    """The text of a request, up to the stop string that ends it; the name is vLLM's.

    Args:
        tokenizer: See `Tokenizer`.
        params: Of these `stop`, `include_stop_str_in_output` and `min_tokens`: a stop string that
            one of the first `min_tokens` tokens completes is not heeded.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopStrings(params.stop)
        self._includes_stop = params.include_stop_str_in_output
        self._heeds_after = params.min_tokens
        self._num_tokens = 0
        self._new = ""
        self._held = ""

    def update(self, token_id: int, stop_terminated: bool = False) -> str | None:
        """Take a token; the stop string that it completes, after which none may follow.

        Args:
            token_id: The token.
            stop_terminated: It ends the request by itself. As in vLLM its own text is left out,
                unless stop strings are to be included.
        """
        self._num_tokens += 1
        if stop_terminated and not self._includes_stop:
            return None
        known = self._held + self._decoder.unsettled
        self._held += self._decoder.push(token_id)
        text = self._held + self._decoder.unsettled
        old = _num_shared(known, text)
        found = self._stops.find(text, old) if self._num_tokens > self._heeds_after else None
        if found is None:
            # What is settled may begin one too, whatever becomes of the rest.
            certain = min(len(one) - self._stops.held(one) for one in (self._held, text))
            self._new, self._held = self._new + text[:certain], self._held[certain:]
            return None
        start, end = found
        self._new += text[: end if self._includes_stop else start]
        self._held = ""
        self._decoder.flush()
        return text[start:end]

    def get_next_output_text(self, finished: bool) -> str:
        """The text that has not been given yet; if `finished`, what was held back too."""
        if finished:
            self._new += self._held + self._decoder.flush()
            self._held = ""
        new, self._new = self._new, ""
        return new
