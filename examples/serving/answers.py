"""What is sent back: the objects of both APIs, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from examples.serving.chat_form import ChatForm
from examples.serving.form import Form
from examples.serving.logprobs import chat_logprobs, text_logprobs
from examples.serving.text_form import TextForm
from examples.serving.tokens import Tokenizer
from neuron_streams.decode import RequestOutput

__all__ = ["Answer", "ChatAnswer", "TextAnswer"]

_F = TypeVar("_F", bound=Form)
_Object = dict[str, Any]


class Answer(Generic[_F]):
    """The answer to one form: `num_candidates` sequences for each of its prompts, in order.

    Args:
        form: What was asked.
        prompts: The tokens of its prompts.
        tokenizer: Spells the tokens of log-probabilities.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, form: _F, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> None:
        self.id = f"{form.id_prefix}-{uuid.uuid4().hex}"
        self.form = form
        self.tokenizer = tokenizer
        self._created = int(time.time())
        self._num_prompt_tokens = sum(map(len, prompts))

    @property
    def num_choices(self) -> int:
        return self.form.num_prompts * self.form.n

    def opening(self, index: int) -> list[_Object]:
        """What of a choice comes ahead of its first token."""
        raise NotImplementedError

    def pieces(self, index: int, output: RequestOutput) -> list[_Object]:
        """What of a choice an output adds: a chunk each."""
        raise NotImplementedError

    def choice(self, index: int, output: RequestOutput) -> _Object:
        """A whole choice."""
        raise NotImplementedError

    def chunk(self, choice: _Object) -> _Object:
        usage: _Object = {"usage": None} if self.form.includes_usage else {}
        return self._envelope(self.chunk_object, [choice]) | usage

    def usage_chunk(self, num_output_tokens: int) -> _Object:
        """The last one, where `stream_options.include_usage` asks for it."""
        return self._envelope(self.chunk_object, []) | self._usage(num_output_tokens)

    def whole(self, outputs: Sequence[RequestOutput]) -> _Object:
        """All of it, from the whole output of each sequence."""
        count, n = self.form.num_candidates, self.form.n
        chosen: list[RequestOutput] = []
        for start in range(0, len(outputs), count):
            candidates = list(outputs[start : start + count])
            if count > n:
                candidates.sort(key=_mean_logprob, reverse=True)
            chosen += candidates[:n]
        choices = [self.choice(index, output) for index, output in enumerate(chosen)]
        usage = self._usage(sum(output.num_output_tokens for output in outputs))
        return self._envelope(self.whole_object, choices) | usage

    def _envelope(self, kind: str, choices: list[_Object]) -> _Object:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.form.model,
            "choices": choices,
        }

    def _usage(self, num_output_tokens: int) -> _Object:
        usage = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self._num_prompt_tokens + num_output_tokens,
        }
        return {"usage": usage}


class TextAnswer(Answer[TextForm]):
    """Of `/v1/completions`, whose chunks are small answers."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self, form: TextForm, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> None:
        super().__init__(form, prompts, tokenizer)
        self._echoes = form.texts(tokenizer) if form.echo else []
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def opening(self, index: int) -> list[_Object]:
        return [self._choice(index, self._echo(index), None, None)] if self._echoes else []

    def pieces(self, index: int, output: RequestOutput) -> list[_Object]:
        if not (output.text or output.finished or self.form.logprobs is not None):
            return []
        logprobs = self._logprobs(index, output)
        return [self._choice(index, output.text, logprobs, output.finish_reason)]

    def choice(self, index: int, output: RequestOutput) -> _Object:
        text = self._echo(index) + output.text
        return self._choice(index, text, self._logprobs(index, output), output.finish_reason)

    def _choice(
        self, index: int, text: str, logprobs: _Object | None, finish_reason: str | None
    ) -> _Object:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _echo(self, index: int) -> str:
        return self._echoes[index // self.form.n] if self._echoes else ""

    def _logprobs(self, index: int, output: RequestOutput) -> _Object | None:
        most = self.form.logprobs
        if most is None:
            return None
        found, end = text_logprobs(output, self.tokenizer, most, self._offsets[index])
        self._offsets[index] = end
        return found


class ChatAnswer(Answer[ChatForm]):
    """Of `/v1/chat/completions`, whose chunks are deltas."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> list[_Object]:
        return [_delta(index, {"role": "assistant", "content": ""})]

    def pieces(self, index: int, output: RequestOutput) -> list[_Object]:
        found = []
        if output.text or (self.form.logprobs and output.new_token_ids):
            found.append(_delta(index, {"content": output.text}, self._logprobs(output)))
        if output.finished:
            found.append(_delta(index, {}, None, output.finish_reason))
        return found

    def choice(self, index: int, output: RequestOutput) -> _Object:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
        }

    def _logprobs(self, output: RequestOutput) -> _Object | None:
        most = self.form.num_logprobs
        return None if most is None else chat_logprobs(output, self.tokenizer, most)


def _delta(
    index: int,
    delta: _Object,
    logprobs: _Object | None = None,
    finish_reason: str | None = None,
) -> _Object:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _mean_logprob(output: RequestOutput) -> float:
    pairs = zip(output.new_token_ids, output.logprobs or (), strict=True)
    values = [logprobs[token_id].logprob for token_id, logprobs in pairs]
    return sum(values) / max(1, len(values))
