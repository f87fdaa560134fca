"""What is refused at admission: later it would end the loop for all."""

from __future__ import annotations

from collections.abc import Sequence

from neuron_streams.decode.model import Model
from neuron_streams.decode.request import check_prompt
from neuron_streams.decode.sampling_params import FLOAT32_MAX, SamplingParams

__all__ = ["check_request"]


def check_request(
    model: Model,
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    has_tokenizer: bool = False,
) -> None:
    """Refuse what a model cannot take, or cannot honour.

    Raises:
        ValueError: The prompt is empty, too long, or has ids outside the vocabulary; so have the
            stop ids or the bias; no token is left to sample; `min_tokens` do not fit; the model
            adjusts no logits and is asked to; there are stop strings and no tokenizer; its own
            `check_sampling` refuses.
    """
    check_prompt(model, request_id, prompt)
    _check_ids(model, request_id, params)
    _check_adjusts(model, request_id, params)
    _check_min_tokens(model, request_id, len(prompt), params)
    _check_something_is_left(model, request_id, params)
    _check_stop(request_id, params, has_tokenizer)
    check_sampling = getattr(model, "check_sampling", None)
    if check_sampling is not None:
        check_sampling(params)


def _check_ids(model: Model, request_id: str, params: SamplingParams) -> None:
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(params.logit_bias or ())),
    ):
        wrong = [token_id for token_id in ids if not 0 <= token_id < model.vocab_size]
        if wrong:
            raise ValueError(
                f"Request {request_id!r} has {name} of token {wrong[0]}; this model knows 0 to"
                f" {model.vocab_size - 1}. Use the ids of the model's own tokenizer."
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
            f"Request {request_id!r} asks for min_tokens of {params.min_tokens}; behind a prompt of"
            f" {num_prompt_tokens} this model has room for {room}. Ask for fewer, shorten the"
            " prompt, or build the model for more."
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


def _check_stop(request_id: str, params: SamplingParams, has_tokenizer: bool) -> None:
    if params.stop and not has_tokenizer:
        raise ValueError(
            f"Request {request_id!r} has stop strings, and the loop no tokenizer to find them"
            " with; make it with tokenizer=, or use stop_token_ids."
        )
