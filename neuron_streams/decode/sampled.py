"""A step's tokens on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from neuron_streams.decode.logprobs import TokenLogprobs, logprobs_of_rows, split
from neuron_streams.decode.model import NO_TOKEN, Sampled
from neuron_streams.decode.request import RequestKey

__all__ = ["ModelRunnerOutput"]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The tokens of a step: `sampled_token_ids[i]` are the new ones of `req_ids[i]`.

    `error` is why there are none, where the step failed, and `row_errors` why there are none of
    single requests. `logprobs[i]` are the log-probabilities of
    each of them, None where `req_ids[i]` wants none; it is None where no row does.
    """

    req_ids: list[RequestKey]
    req_id_to_index: dict[RequestKey, int]
    sampled_token_ids: list[list[int]]
    error: Exception | None = None
    logprobs: list[list[TokenLogprobs] | None] | None = None
    row_errors: dict[RequestKey, Exception] = field(default_factory=dict)

    def error_of(self, key: RequestKey) -> Exception | None:
        """Why a request gets no token."""
        return self.error or self.row_errors.get(key)

    @classmethod
    def from_host(
        cls,
        req_ids: list[RequestKey],
        sampled: Sampled,
        partial: frozenset[RequestKey] = frozenset(),
        num_logprobs: Sequence[int | None] = (),
        vocab_size: int | None = None,
    ) -> ModelRunnerOutput:
        """From host tensors of a step, or of a window; rows beyond the requests are padding.

        What was sampled for a `partial` request follows a piece of its prompt: it is no token.
        `num_logprobs` is what each row wants of the log-probabilities, None for none. A token that
        is not below `vocab_size` is its request's error.
        """
        tokens, tensors = split(sampled)
        sampled_token_ids: list[list[int]] = [[] for _ in req_ids]
        row_errors = {}
        for row, (key, token_ids) in enumerate(zip(req_ids, _by_row(tokens), strict=False)):
            if key in partial:
                continue
            errors = (_token_error(token, key.request_id, vocab_size) for token in token_ids)
            error = next(filter(None, errors), None)
            if error is None:
                sampled_token_ids[row] = token_ids
            else:
                row_errors[key] = error
        logprobs = None
        if tensors is not None:
            logprobs = logprobs_of_rows(tensors, num_logprobs, [*map(len, sampled_token_ids)])
        index = {key: row for row, key in enumerate(req_ids)}
        return cls(req_ids, index, sampled_token_ids, logprobs=logprobs, row_errors=row_errors)

    @classmethod
    def of_failure(cls, req_ids: list[RequestKey], error: Exception) -> ModelRunnerOutput:
        """Of a step that failed, as a whole."""
        index = {key: row for row, key in enumerate(req_ids)}
        return cls(req_ids, index, [[] for _ in req_ids], error)


def _by_row(tokens: torch.Tensor) -> list[list[int]]:
    """The tokens of each row; those of a window end where the row has stopped."""
    if tokens.dim() == 1:
        return [[token] for token in tokens.tolist()]
    return [[*takewhile(NO_TOKEN.__ne__, column)] for column in tokens.T.tolist()]


def _token_error(token_id: int, request_id: str, vocab_size: int | None) -> Exception | None:
    """Why a sampled token is none; None where it is one."""
    if token_id >= 0 and (vocab_size is None or token_id < vocab_size):
        return None
    most = "" if vocab_size is None else f" to {vocab_size - 1}"
    return RuntimeError(
        f"The model sampled token {token_id} for request {request_id!r}; it must sample token ids"
        f" from 0{most} (see decode.Model)."
    )
