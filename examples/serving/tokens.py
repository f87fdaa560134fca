"""What the server asks of a tokenizer, and how a token is spelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ["Tokenizer", "spell"]


class Tokenizer(Protocol):
    """As `models.tokenizer.Tokenizer`."""

    def encode(self, text: str, /) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, str]], /) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...


def spell(token: bytes, prefix: str = "") -> str:
    r"""The text of a token; `\xe2\x82` behind the prefix where that is part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token)
