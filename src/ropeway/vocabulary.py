"""The vocabulary of one model: the exact bytes of every token, and which tokens are special or end a text.

Owns: reading tokenizer.json with the settings beside it, and what follows from them token by token. Must not know: text
beyond one token, chat templates, HTTP, torch. Called by: server.tokenizer; worker.constraints (in the engine process,
which has no tokenizer otherwise).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import tokenizers

from ropeway.errors import ConfigError

V = TypeVar("V", bytes, str)
Json = dict[str, Any]

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Vocabulary:
    """Build it with :meth:`load`, or around a backend that is there."""

    size: int  # largest id + 1; the model's embedding may be padded beyond it
    special_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]  # generation_config.json, config.json, tokenizer_config.json; in that order
    decoder_kinds: list[str]  # the types of the decoder's steps, in order
    is_byte_level: bool  # every token is a run of raw bytes, so text is their concatenation decoded as UTF-8
    byte_token_ids: frozenset[int]  # `<0xE2>` and the like, which stand for one byte each

    def __init__(self, backend: tokenizers.Tokenizer, settings: Json, eos: Sequence[Any]):
        self.backend = backend
        ids_of: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.size = max(ids_of.values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        ids = [*eos, token_id(backend, settings.get("eos_token"))]
        self.eos_token_ids = tuple(dict.fromkeys(id for id in ids if id is not None))
        self.decoder_kinds = _decoder_kinds(backend)
        self.is_byte_level = self.decoder_kinds == ["ByteLevel"]
        self.byte_token_ids = frozenset(
            id
            for token, id in ids_of.items()
            if "ByteFallback" in self.decoder_kinds and _fallback_byte(token) is not None
        )
        self._holes = frozenset(range(self.size)).difference(ids_of.values())
        self._bytes: Table[bytes] = Table(self._find_bytes)

    @classmethod
    def load(cls, folder: Path, model_folder: Path | None = None) -> Vocabulary:
        """model_folder: where config.json and generation_config.json are, if not in ``folder``. Raises ConfigError."""
        backend, settings = read_tokenizer(folder)
        return cls(backend, settings, configured_eos(model_folder or folder))

    def is_known(self, token_id: int) -> bool:
        """Whether the id has a vocabulary entry; decoding leaves others out."""
        return 0 <= token_id < self.size and token_id not in self._holes

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text when it is not the first; part of a character is possible."""
        return self._bytes[token_id]

    def all_token_bytes(self) -> list[bytes]:
        """token_bytes of every id; empty for ids without an entry. Costs about 1 µs per token of a byte-level kind."""
        if not self.is_byte_level:
            return [self._find_bytes(id) for id in range(self.size)]
        found = [b""] * self.size
        for token, id in self.backend.get_vocab(with_added_tokens=True).items():
            found[id] = _letters_to_bytes(token)
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id) if self.is_known(token_id) else None
        if token is None:
            return b""
        if self.is_byte_level:
            return _letters_to_bytes(token)
        if token_id in self.byte_token_ids:
            return bytes([int(token[3:5], 16)])
        decoder = self.backend.decoder
        if decoder is None:
            return (" " + token).encode()
        return str(decoder.decode(["a", token])).removeprefix("a").encode()  # not the first: that loses its space


class Table(dict[int, V], Generic[V]):
    """Values by token id, found on first use; reading a known one is a plain dict access."""

    def __init__(self, find: Callable[[int], V]):
        super().__init__()
        self._find: Callable[[int], V] = find

    def __missing__(self, token_id: int) -> V:
        found = self._find(token_id)
        if found:  # so that ids without an entry cannot fill the memory
            self[token_id] = found
        return found


def read_tokenizer(folder: Path) -> tuple[tokenizers.Tokenizer, Json]:
    """The backend with all tokens declared, and tokenizer_config.json. Raises ConfigError with what to do."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing; copy it from the model's repository, or give --tokenizer a folder that has one "
            "(a tokenizer.model alone must first be converted to tokenizer.json)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} cannot be read: {error}; fetch the file again") from error
    settings = _read_settings(folder)
    _declare_tokens(backend, settings, folder)
    return backend, settings


def _internal_letters() -> dict[str, int]:
    """Byte-level BPE writes bytes as letters: printable Latin-1 as itself, the others from U+0100 upwards in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = {ord(letter): byte for letter, byte in _internal_letters().items()}


def _letters_to_bytes(token: str) -> bytes:
    """As the decoder does: letters of the internal alphabet are bytes; a token with any other is plain text."""
    if all(ord(letter) in _BYTE_OF_LETTER for letter in token):
        return token.translate(_BYTE_OF_LETTER).encode("latin-1")
    return token.encode()


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """Types of the decoder's steps, in order."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]


def _fallback_byte(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def content_of(token: Any) -> Any:
    """Configuration files write a token as its text or as an object with the text in ``content``."""
    return token.get("content") if isinstance(token, dict) else token


def token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    text = content_of(token)
    return backend.token_to_id(text) if isinstance(text, str) else None


def _read_json(path: Path) -> Json:
    """The object in the file, or an empty one if there is no file. Raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def _read_settings(folder: Path) -> Json:
    """tokenizer_config.json, with special_tokens_map.json where the former is of the old kind that needs it."""
    settings = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= _read_json(folder / "special_tokens_map.json")
    return settings


def _declare_tokens(backend: tokenizers.Tokenizer, settings: Json, folder: Path) -> None:
    """Tell the backend of added and special tokens that only tokenizer_config.json knows.

    A named token without an id in the vocabulary (often a padding token) is not added, unlike in other libraries: its
    id would lie beyond the model's embedding.
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    try:
        listed = sorted((int(id), token) for id, token in settings.get("added_tokens_decoder", {}).items())
        backend.add_tokens([tokenizers.AddedToken(**token) for _, token in listed if token["content"] not in known])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder cannot be understood: {error}"
        ) from error
    # What the vocabulary already lists as an added token keeps its flags, even if these say that it is not special.
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    texts = [content_of(token) for token in [*(settings.get(name) for name in NAMED_TOKENS), *extra]]
    missing = [text for text in texts if isinstance(text, str) and text not in known]
    backend.add_special_tokens([text for text in missing if backend.token_to_id(text) is not None])


def configured_eos(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json, then of config.json, there also of a nested text_config."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        inner = config.get("text_config")
        for part in (config, inner if isinstance(inner, dict) else {}):
            value = part.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in ids):
                raise ConfigError(f"{folder / name}: eos_token_id must be a token id or a list of them, not {value!r}")
            found += ids
    return found
