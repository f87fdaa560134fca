"""What is refused at admission, and what is admitted: later it would fail in a step of several."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from neuron_streams.decode import coerce
from neuron_streams.decode.coerce import shown
from neuron_streams.decode.detokenizer import Tokenizer, left_out_token
from neuron_streams.decode.model import Model
from neuron_streams.decode.request import check_prompt
from neuron_streams.decode.sampling_params import FLOAT32_MAX, SamplingParams

__all__ = ["AdmittedRequest", "check_request"]


class AdmittedRequest(NamedTuple):
    """What a caller has asked for, checked: plain values, and copies of what may still change."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: float


def check_request(
    model: Model,
    request_id: object,
    prompt: Any,
    params: object = None,
    priority: object = 0,
    tokenizer: Tokenizer | None = None,
) -> AdmittedRequest:
    """Refuse what a model cannot take, or cannot honour.

    Raises:
        ValueError: The prompt is no list of token ids, or is empty, too long, or has ids outside
            the vocabulary; so have the stop ids or the bias; no token is left to sample;
            `min_tokens` do not fit; the model adjusts no logits and is asked to; there are stop
            strings and no tokenizer, or one that cannot show them; its own `check_sampling`
            refuses; the id is no string, the priority no number, or the parameters are no
            `SamplingParams`.
    """
    request_id = coerce.text("request_id", request_id)
    admitted = AdmittedRequest(
        request_id,
        _prompt_of(request_id, prompt),
        _params_of(request_id, params),
        _priority_of(request_id, priority),
    )
    prompt, params = admitted.prompt_token_ids, admitted.params
    check_prompt(model, request_id, prompt)
    _check_ids(model, request_id, params)
    _check_adjusts(model, request_id, params)
    _check_min_tokens(model, request_id, len(prompt), params)
    _check_something_is_left(model, request_id, params)
    _check_stop(request_id, params, tokenizer)
    check_sampling = getattr(model, "check_sampling", None)
    if check_sampling is not None:
        check_sampling(params)
    return admitted


def _prompt_of(request_id: str, prompt: Any) -> list[int]:
    name = f"The prompt of request {request_id!r}"
    return [coerce.whole(name, token_id) for token_id in coerce.items(name, prompt)]


def _params_of(request_id: str, params: object) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ValueError(
            f"Request {request_id!r} has sampling_params {shown(params)}; they must be"
            " SamplingParams, or None for the defaults."
        )
    return replace(params)  # which converts and checks again, and copies logit_bias


def _priority_of(request_id: str, priority: object) -> float:
    for convert in (coerce.whole, coerce.number):  # a large int would lose its order as a float
        with suppress(ValueError):
            plain = convert("priority", priority)
            if plain == plain:  # as NaN is not
                return plain
    raise ValueError(
        f"Request {request_id!r} has priority {shown(priority)}; it must be a number, since it is"
        " compared with those of other requests."
    )


def _check_ids(model: Model, request_id: str, params: SamplingParams) -> None:
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(params.logit_bias or ())),
    ):
        wrong = [token_id for token_id in ids if not 0 <= token_id < model.vocab_size]
        if wrong:
            raise ValueError(
                f"Request {request_id!r} has {name} of token {shown(wrong[0])}; this model"
                f" knows 0 to {model.vocab_size - 1}. Use the ids of the model's own tokenizer."
            )


def _check_adjusts(model: Model, request_id: str, params: SamplingParams) -> None:
    if params.adjusts and not getattr(model, "adjusts_logits", False):
        raise ValueError(
            f"Request {request_id!r} asks for {', '.join(params.adjustments)}, and"
            f" {type(model).__name__} adjusts no logits; leave that out, or give the model what"
            " decode.Adjustments asks for and adjusts_logits = True."
        )
    if (params.logprobs or 0) > model.vocab_size:
        raise ValueError(
            f"Request {request_id!r} asks for logprobs of {params.logprobs} tokens; this model"
            f" knows {model.vocab_size}. Ask for so many at most."
        )


def _check_min_tokens(
    model: Model, request_id: str, num_prompt_tokens: int, params: SamplingParams
) -> None:
    room = model.max_length - num_prompt_tokens
    if params.min_tokens > room:
        raise ValueError(
            f"Request {request_id!r} asks for min_tokens of {shown(params.min_tokens)}; behind a"
            f" prompt of {num_prompt_tokens} this model has room for {room}. Ask for fewer, shorten"
            " the prompt, or build the model for more."
        )


def _check_something_is_left(model: Model, request_id: str, params: SamplingParams) -> None:
    bias = params.logit_bias or {}
    excluded = {token_id for token_id, value in bias.items() if value < -FLOAT32_MAX}
    if params.min_tokens:
        excluded |= params.stop_ids(model.eos_token_ids)
    if len(excluded) == model.vocab_size:
        raise ValueError(
            f"Request {request_id!r} excludes all {model.vocab_size} tokens of this model, by"
            " logit_bias or as stop tokens before min_tokens; leave one to sample."
        )


def _check_stop(request_id: str, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    if params.stop and tokenizer is None:
        raise ValueError(
            f"Request {request_id!r} has stop strings, and the loop no tokenizer to find them"
            " with; make it with tokenizer=, or use stop_token_ids."
        )
    for stop in params.stop:
        token_id = None if tokenizer is None else left_out_token(tokenizer, stop)
        if token_id is not None:
            raise ValueError(
                f"Request {request_id!r} has the stop string {stop!r}, which cannot be found:"
                f" token {token_id} of it is one that the tokenizer's decode leaves out of the"
                f" text. Use stop_token_ids=({token_id},)."
            )
