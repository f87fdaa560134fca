"""Log-probabilities of tokens, in the forms of the two APIs."""

from __future__ import annotations

from typing import Any

from examples.serving.tokens import Tokenizer, spell
from neuron_streams.decode import RequestOutput

__all__ = ["chat_logprobs", "text_logprobs"]

_LEAST = -9999.0
"""In place of minus infinity, which JSON does not have."""


def text_logprobs(
    output: RequestOutput, tokenizer: Tokenizer, most: int, offset: int
) -> tuple[dict[str, Any], int]:
    """The object of `/v1/completions`, and the offset behind it.

    Args:
        output: With log-probabilities.
        tokenizer: Spells the tokens.
        most: How many of the likeliest tokens were asked for.
        offset: Characters of the text ahead of the first of these tokens.
    """
    tokens, values, tops, offsets = [], [], [], []
    for token_id, logprobs in zip(output.new_token_ids, output.logprobs or (), strict=True):
        data = tokenizer.token_bytes(token_id)
        tokens.append(spell(data, "bytes:"))
        values.append(max(logprobs[token_id].logprob, _LEAST))
        tops.append(
            {
                spell(tokenizer.token_bytes(other), "bytes:"): max(logprob.logprob, _LEAST)
                for other, logprob in logprobs.items()
            }
        )
        offsets.append(offset)
        offset += sum(byte & 0xC0 != 0x80 for byte in data)  # of a character its first byte counts
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if most else None,
        "text_offset": offsets,
    }, offset


def chat_logprobs(output: RequestOutput, tokenizer: Tokenizer, most: int) -> dict[str, Any]:
    """The object of `/v1/chat/completions`; `most` as above."""
    content = []
    for token_id, logprobs in zip(output.new_token_ids, output.logprobs or (), strict=True):
        likeliest = sorted(logprobs.items(), key=lambda item: item[1].rank)[:most]
        content.append(
            {
                **_described(token_id, logprobs[token_id].logprob, tokenizer),
                "top_logprobs": [
                    _described(other, logprob.logprob, tokenizer) for other, logprob in likeliest
                ],
            }
        )
    return {"content": content, "refusal": None}


def _described(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": spell(data), "logprob": max(logprob, _LEAST), "bytes": list(data)}
