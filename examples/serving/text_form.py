"""What a request of `/v1/completions` may hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import field_validator

from examples.serving.errors import ApiError
from examples.serving.form import Form
from examples.serving.tokens import Tokenizer

__all__ = ["TextForm"]


class TextForm(Form):
    """Of `/v1/completions`."""

    prompt: str | list[Any]
    max_tokens: int = 16
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None

    id_prefix = "cmpl"

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        kinds = set(map(type, prompt)) if isinstance(prompt, list) else {type(prompt)}
        if kinds == {list}:
            inside = {type(token) for tokens in prompt for token in tokens}
            kinds = {int} if inside <= {int} else {list}
        if not isinstance(prompt, str | list) or kinds not in (set(), {str}, {int}):
            raise ValueError(
                "it must be a string, a list of strings, a list of token ids, or a list of such"
                " lists"
            )
        return prompt

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        whole = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if whole else self.prompt

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def num_candidates(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        # Candidates are ranked by the log-probabilities of their tokens.
        return 0 if self.logprobs is None and self.num_candidates > self.n else self.logprobs

    @property
    def most_tokens(self) -> int:
        return self.max_tokens

    def check(self) -> None:
        super().check()
        if self.num_candidates < self.n:
            raise ApiError(
                400, f"best_of is {self.best_of}; it must be n, {self.n}, or more.", param="best_of"
            )
        if self.num_candidates > self.n and self.stream:
            raise ApiError(
                400,
                "best_of is above n, and the best are known at the end alone; do not stream them.",
                param="best_of",
            )
        if self.echo and self.logprobs is not None:
            raise ApiError(
                400,
                "echo with logprobs asks for those of the prompt, which the loop does not compute;"
                " leave one of them out.",
                param="echo",
            )

    def token_ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        return [
            tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in self.prompts
        ]

    def texts(self, tokenizer: Tokenizer) -> list[str]:
        """The prompts as text, to echo."""
        return [
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
            for prompt in self.prompts
        ]
