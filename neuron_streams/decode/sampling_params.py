"""How a request wants its tokens chosen, and when it ends; the names are vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from neuron_streams.decode import coerce
from neuron_streams.decode.coerce import shown
from neuron_streams.decode.model import MAX_LOGPROBS

__all__ = ["FLOAT32_MAX", "SamplingParams"]

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""What is larger is infinite on the device, and a logit less an infinite one is no number."""


_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Numbers may come in any type that converts without loss of meaning, such as those of numpy, and
    are kept as Python's own.

    Args:
        max_tokens: Most tokens to generate, at least 1. Capped where prompt and output together
            would not fit the model's `max_length`; the finish reason is then `"length"` too.
        temperature: 0 is greedy.
        top_k: Keep the k likeliest tokens; 0 keeps all. It must fit 32 bits.
        top_p: Keep the likeliest tokens up to this mass, in (0, 1].
        seed: Of the request's own random stream, 64 bits; None draws one at admission.
        stop_token_ids: Tokens that end the request, as the model's end-of-sequence tokens do. The
            token that ends it is part of the output.
        ignore_eos: Go on after an end-of-sequence token.
        min_p: Exclude tokens less likely than this times the likeliest, in [0, 1]; 0 is off.
        repetition_penalty: Makes what is in the prompt or the output less likely above 1, and more
            likely below; 1 is off, it must be above 0.
        presence_penalty, frequency_penalty: Taken from the logits of what is in the output, once
            and once for each time; 0 is off.
        logit_bias: Added to the logits of these token ids; -inf excludes one.
        logprobs: Also give the log-probability of each token, and of so many likeliest ones, up to
            `MAX_LOGPROBS`. Of the model's own logits, before anything above changes them.
        min_tokens: Sample no stop and no end-of-sequence token, and heed no stop string, before so
            many tokens are out.
        stop: Strings that end the request once its text has one. The loop needs a tokenizer.
        include_stop_str_in_output: Keep the stop string, or the text of a stop token, at the end of
            the text.

    Raises:
        ValueError: A value is out of its range, or of another kind.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, value in self._plain_values():
            object.__setattr__(self, name, value)
        self._check_choice()
        self._check_adjustments()
        self._check_end()

    @property
    def adjusts(self) -> bool:
        """Whether it asks for any of `Adjustments`."""
        return bool(self.adjustments)

    @property
    def adjustments(self) -> tuple[str, ...]:
        """The names of what it asks for of `Adjustments`."""
        asked = {
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty != 1,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "logprobs": self.logprobs is not None,
            "min_tokens": self.min_tokens,
        }
        return tuple(name for name, wanted in asked.items() if wanted)

    def stop_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end the request, on a model with these end-of-sequence tokens."""
        stops = frozenset(self.stop_token_ids)
        return stops if self.ignore_eos else stops | eos_token_ids

    def _plain_values(self) -> Iterator[tuple[str, object]]:
        for name in ("max_tokens", "top_k", "min_tokens"):
            yield name, coerce.whole(name, getattr(self, name))
        for name in ("seed", "logprobs"):
            value = getattr(self, name)
            yield name, None if value is None else coerce.whole(name, value)
        for name in _NUMBERS:
            yield name, coerce.number(name, getattr(self, name))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            yield name, coerce.flag(name, getattr(self, name))
        ids = coerce.items("stop_token_ids", self.stop_token_ids)
        yield "stop_token_ids", tuple(coerce.whole("stop_token_ids", each) for each in ids)
        stop = [self.stop] if isinstance(self.stop, str) else coerce.items("stop", self.stop)
        yield "stop", tuple(coerce.text("stop", each) for each in stop)
        pairs = () if self.logit_bias is None else coerce.mapping("logit_bias", self.logit_bias)
        bias = {
            coerce.whole("logit_bias", token): coerce.number(f"logit_bias of {shown(token)}", by)
            for token, by in pairs
        }
        yield "logit_bias", bias or None

    def _check_choice(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {shown(self.max_tokens)}; it must be 1 or more.")
        if not 0 <= self.temperature <= FLOAT32_MAX:  # as NaN is not
            raise ValueError(
                f"temperature is {self.temperature}; it must be a finite number, 0 or more"
                " (0 is greedy)."
            )
        if not 0 <= self.top_k < 2**31:
            raise ValueError(
                f"top_k is {shown(self.top_k)}; it must be 0 (off) or more, and fit a signed 32-bit"
                " integer."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off).")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {shown(self.seed)}; it must fit a signed 64-bit integer.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be from 0 (off) to 1.")

    def _check_adjustments(self) -> None:
        if not 1 / FLOAT32_MAX < self.repetition_penalty <= FLOAT32_MAX:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}; it must be a finite number above"
                " 0 (1 is off)."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(value := getattr(self, name)) <= FLOAT32_MAX:
                raise ValueError(f"{name} is {value}; it must be a finite number (0 is off).")
        for token_id, bias in (self.logit_bias or {}).items():
            if not bias <= FLOAT32_MAX:  # as NaN is not
                raise ValueError(
                    f"logit_bias of token {shown(token_id)} is {bias}; it must be a number, or"
                    " -inf to exclude the token."
                )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(
                f"logprobs is {shown(self.logprobs)}; it must be from 0 (of the chosen token alone)"
                f" to {MAX_LOGPROBS}, or None (off)."
            )

    def _check_end(self) -> None:
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens is {shown(self.min_tokens)}; it must be from 0 (off) to max_tokens,"
                f" which is {shown(self.max_tokens)}."
            )
        if not all(self.stop):
            raise ValueError(f"stop is {self.stop!r}; it must be strings, none of them empty.")
