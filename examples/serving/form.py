"""What a request may hold, of whichever API.

The fields are OpenAI's, and vLLM's for what the loop has too. A field that is unknown, or asks for
what is not there, is refused: ignored, it would give another answer than the one that was asked
for. Values are checked for their types alone; their ranges are the loop's to refuse, in its own
words. Each check ends at the first fault: a body has room for a million.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from examples.serving.errors import ApiError
from examples.serving.tokens import Tokenizer
from neuron_streams.decode import SamplingParams

__all__ = ["Form", "read_form"]

_F = TypeVar("_F", bound="Form")

_NEUTRAL: dict[str, Any] = {
    "tools": [],
    "functions": [],
    "tool_choice": "none",
    "function_call": "none",
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "suffix": "",
}
"""Values that ask for nothing, of fields that are refused else."""

_WITHOUT_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        "parallel_tool_calls",
    )
)
"""Fields that change no token."""


class _Strict(BaseModel):
    # "5" is no number, and neither is true.
    model_config = ConfigDict(strict=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(_unsupported(name))
        return given


class Form(_Strict):
    """What both APIs have."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1)
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()

    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], FailFast()] = []
    include_stop_str_in_output: bool = False

    id_prefix: ClassVar[str]

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, stop: Any) -> tuple[str, ...]:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
            raise ValueError("it must be a string or a list of strings")
        if len(stops) > 4:  # each is looked for in every token, on the thread that serves all
            raise ValueError(f"it has {len(stops)} strings; at most 4 can be given")
        return tuple(stops)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_bias(cls, bias: Any) -> dict[int, float]:
        if not isinstance(bias, dict):
            raise ValueError("it must be an object, from token ids to numbers")
        for key, value in bias.items():
            if not (key.isascii() and key.isdecimal() and len(key) < 20):
                raise ValueError(f"{key[:20]!r} is no token id")
            if type(value) not in (int, float) or abs(value) >= 2**1023:  # beyond any float
                raise ValueError(f"the bias of token {key} must be a number")
        return {int(key): float(value) for key, value in bias.items()}

    @property
    def num_prompts(self) -> int:
        raise NotImplementedError

    @property
    def num_candidates(self) -> int:
        """How many sequences to generate for each prompt."""
        return self.n

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens to show with each token, or None."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int:
        raise NotImplementedError

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Refuse fields that contradict each other.

        Raises:
            ApiError: They do.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400,
                "stream_options is given and stream is not true; leave it out, or stream.",
                param="stream_options",
            )

    def token_ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The prompts as tokens; long ones take a while.

        Raises:
            ValueError: The tokenizer, or its chat template, refuses.
        """
        raise NotImplementedError

    def sampling_params(self) -> list[SamplingParams]:
        """Those of each candidate of a prompt; a seed is that of the first, then comes the next.

        Raises:
            ValueError: As `SamplingParams`.
        """
        first = SamplingParams(
            max_tokens=self.most_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            logprobs=self.num_logprobs,
            min_tokens=self.min_tokens,
            stop=self.stop,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )
        if first.seed is None:
            return [first] * self.num_candidates
        seeds = ((first.seed + at + 2**63) % 2**64 - 2**63 for at in range(self.num_candidates))
        return [dataclasses.replace(first, seed=seed) for seed in seeds]


def read_form(kind: type[_F], body: bytes) -> _F:
    """Read the body of a request.

    Raises:
        ApiError: It is no JSON, or not of this form; it names the first field that is at fault.
    """
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.")
    given = {name: value for name, value in data.items() if _asks(name, value)}
    for name in given:
        if name not in kind.model_fields:
            raise ApiError(400, _unsupported(name), param=name[:60])
    try:
        form = kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from error
    form.check()
    return form


def _unsupported(name: str) -> str:
    return f"{name[:60]} is not supported by this server; leave it out."


def _asks(name: str, value: Any) -> bool:
    if value is None or name in _WITHOUT_EFFECT:
        return False
    return name not in _NEUTRAL or _NEUTRAL[name] != value


def _refusal(error: ValidationError) -> ApiError:
    first: Mapping[str, Any] = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    said = str(first["msg"]).removeprefix("Value error, ").removesuffix(".")
    return ApiError(400, f"{place}: {said}.", param=str(first["loc"][0]))
