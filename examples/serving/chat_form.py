"""What a request of `/v1/chat/completions` may hold."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator

from examples.serving.errors import ApiError
from examples.serving.form import Form
from examples.serving.tokens import Tokenizer

__all__ = ["ChatForm"]

_UNLIMITED = 2**31 - 1  # the loop cuts it to what the model has room for


class Message(BaseModel):
    """One of a chat; a field such as `name`, for which templates have no place, is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = [
            part["text"]
            for part in content
            if isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ]
        if len(texts) < len(content):
            raise ValueError("its parts must be of type 'text', with a text each")
        return "".join(texts)


class ChatForm(Form):
    """Of `/v1/chat/completions`."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    id_prefix = "chatcmpl"

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int:
        for given in (self.max_completion_tokens, self.max_tokens):
            if given is not None:
                return given
        return _UNLIMITED

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(
                400,
                "top_logprobs is given and logprobs is not true; leave it out, or ask for both.",
                param="top_logprobs",
            )

    def token_ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        # Templates that are older than the name know a developer as the system.
        roles = {"developer": "system"}
        messages = [
            {"role": roles.get(each.role, each.role), "content": each.content}
            for each in self.messages
        ]
        return [tokenizer.encode_chat(messages)]
