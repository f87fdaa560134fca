"""Text to tokens and back: a Hugging Face `tokenizer.json` and its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

__all__ = ["Tokenizer"]


class Tokenizer:
    """The tokenizer of a model folder.

    Built on `tokenizers` alone: importing transformers takes longer than loading a small model.
    """

    clean_up_tokenization_spaces = False
    """Whether `decode` may rewrite the end of a text once more tokens follow; the name is that of
    transformers. `tokenizers` only appends."""

    def __init__(self, fast: FastTokenizer, config: Mapping[str, Any] | None = None) -> None:
        self._fast = fast
        self._config = dict(config or {})

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read `tokenizer.json` and, where they are, `tokenizer_config.json` and the template.

        Raises:
            FileNotFoundError: There is no `tokenizer.json`.
            ValueError: One of the files is corrupt.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there; a Hugging Face model folder has one")
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises the bare class
            raise ValueError(f"{path} is corrupt ({error}); fetch it again") from error
        return cls(fast, _read_config(Path(folder)))

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, special tokens included where the text spells them."""
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def encode_chat(self, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt for the assistant's next turn; a string is one message of a user.

        Raises:
            ValueError: The model has no chat template, or its template refuses the messages.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.encode(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of that prompt."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self._config.get("chat_template")
        if not isinstance(template, str):
            raise ValueError("this model has no chat template; use encode() on a plain text")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        special = {name: _content(self._config.get(name)) for name in ("bos_token", "eos_token")}
        try:
            return environment.from_string(template).render(
                messages=messages, add_generation_prompt=True, **special
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without the special ones."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What a token alone spells, which may be a part of a character; none if there is no such.

        A special token spells its own name.
        """
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if isinstance(self._fast.decoder, decoders.ByteLevel):
            # An added token may have characters that are not of the alphabet.
            known = all(character in _BYTES for character in token)
            return bytes(_BYTES[character] for character in token) if known else token.encode()
        text: str = self._fast.decode([token_id], skip_special_tokens=False)
        return text.encode()


def _byte_alphabet() -> dict[str, int]:
    """What byte each character of a byte-level vocabulary stands for.

    As in GPT-2: printable ones for themselves, the others in order for those beyond 255.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = {}
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}); fetch it again") from error
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return config


def _content(token: Any) -> str:
    """A special token is a string, or an object whose `content` is."""
    return token["content"] if isinstance(token, Mapping) else token or ""


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
