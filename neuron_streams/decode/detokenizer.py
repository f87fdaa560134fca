"""The text of one request as its tokens arrive, and the stop strings in it.

Text is held back twice: a character whose bytes are not all there, and a tail that may be the
beginning of a stop string. So what has been given out is never taken back, and nothing depends on
where one token ends and the next begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from neuron_streams.decode.sampling_params import SamplingParams

__all__ = ["IncrementalDecoder", "IncrementalDetokenizer", "StopStrings", "Tokenizer"]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 12
_LONGEST_CHARACTER = 4  # tokens of an incomplete one, with the one before it


class Tokenizer(Protocol):
    """What the loop uses of a tokenizer; those of `transformers` have it too."""

    def decode(self, token_ids: list[int], /) -> str: ...


class IncrementalDecoder:
    """Tokens in, text out; never half a character. The cost of a token does not grow.

    A token is decoded in the light of a few before it, since what it spells may depend on them (a
    leading space, the first bytes of a character).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._newest = 0  # where in them those begin that last made text
        self._complete = 0  # how many of them have made text
        self._given = 0  # how many characters of their text were given
        self._rest = ""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        self._rest = text[self._given :]
        if not text.endswith(_INCOMPLETE):
            return self._give(text)
        if len(self._ids) - self._complete > _WINDOW:
            return self._give_up(text)
        return ""

    def flush(self) -> str:
        """What is left at the end: incomplete characters, as replacement characters."""
        rest, self._rest = self._rest, ""
        return rest

    def _give(self, text: str) -> str:
        new, self._rest = self._rest, ""
        self._newest, self._complete, self._given = self._complete, len(self._ids), len(text)
        if self._complete > _WINDOW:
            self._ids = self._ids[self._newest :]
            self._newest, self._complete = 0, len(self._ids)
            self._given = len(self._tokenizer.decode(self._ids))
        return new

    def _give_up(self, text: str) -> str:
        """Bytes that are no text at all: only the last of them may become a character yet."""
        new, self._rest = self._rest[:-1], self._rest[-1:]
        self._ids = self._ids[-_LONGEST_CHARACTER:]
        self._newest = self._complete = 0
        self._given = max(0, len(self._tokenizer.decode(self._ids)) - 1)
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
        new = self._decoder.push(token_id)
        text, old = self._held + new, len(self._held)
        found = self._stops.find(text, old) if self._num_tokens > self._heeds_after else None
        if found is None:
            certain = len(text) - self._stops.held(text)
            self._new, self._held = self._new + text[:certain], text[certain:]
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
