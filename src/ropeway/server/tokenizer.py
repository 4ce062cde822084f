"""Text to token ids and back, and chat messages to prompt text, for one model folder.

Owns: the `tokenizers` object, the special and end tokens, the exact bytes of every token, the pool for long texts.
Must not know: HTTP, the engine, torch, transformers. Called by: server.openai, server.detokenizer, server.stream, cli.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from ropeway.errors import ConfigError, RequestError
from ropeway.server.chat_template import ChatTemplate

T = TypeVar("T")
V = TypeVar("V", bytes, str)
Json = dict[str, Any]

INLINE_CHARS = 2048  # a hop to a thread and back costs about as much as encoding this much text
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PIECEWISE = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
CLEAN_UP_RULES = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"),
    (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class Tokenizer:
    """The tokenizer of one model; safe to use from several threads. Build it with :meth:`load`."""

    vocab_size: int  # largest id + 1; the model's embedding may be padded beyond it
    special_ids: frozenset[int]  # left out of text by skip_special_tokens
    eos_token_ids: tuple[int, ...]  # generation_config.json, config.json, tokenizer_config.json; in that order
    bos_token_id: int | None
    is_byte_level: bool  # every token is a run of raw bytes, so text is their concatenation decoded as UTF-8
    byte_token_ids: frozenset[int]  # `<0xE2>` and the like, which stand for one byte each
    is_piecewise: bool  # after the first one, a token that is not a byte has the same text wherever it stands
    cleans_up_spaces: bool  # the model asks that " ." be written "." and so on, after decoding

    def __init__(self, backend: tokenizers.Tokenizer, settings: Json, eos: Sequence[Any], template: ChatTemplate):
        self._backend = backend
        self._template = template
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.bos_token_id = _token_id(backend, settings.get("bos_token"))
        ids = [*eos, _token_id(backend, settings.get("eos_token"))]
        self.eos_token_ids = tuple(dict.fromkeys(id for id in ids if id is not None))
        # The library ignores the wish for BPE, where it would destroy spaces of the text, unless forced.
        self.cleans_up_spaces = bool(settings.get("clean_up_tokenization_spaces", False)) and (
            type(backend.model).__name__ != "BPE"
            or bool(settings.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
        )
        kinds = _decoder_kinds(backend)
        self.is_byte_level = kinds == ["ByteLevel"]
        self.is_piecewise = PIECEWISE.issuperset(kinds)
        self.byte_token_ids = frozenset(
            id for token, id in vocab.items() if "ByteFallback" in kinds and _fallback_byte(token) is not None
        )
        self._holes = frozenset(range(self.vocab_size)).difference(vocab.values())
        self._bytes: _Table[bytes] = _Table(self._find_bytes)
        self._first_texts: _Table[str] = _Table(lambda token_id: self.raw_decode([token_id], False))

    @classmethod
    def load(cls, folder: Path, chat_template: str = "", *, model_folder: Path | None = None) -> Tokenizer:
        """Read tokenizer.json and what lies beside it.

        chat_template: a file, or the text, of a template that replaces the model's. model_folder: where config.json
        and generation_config.json are, if not in ``folder``. Raises ConfigError naming the file and what to do.
        """
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
        eos = _configured_eos(model_folder or folder)
        named = {name: _content(settings[name]) for name in settings if name.endswith("_token")}
        tokens = {name: token for name, token in named.items() if isinstance(token, str)}
        if isinstance(extra := settings.get("extra_special_tokens"), dict):
            tokens.update({name: text for name, text in extra.items() if isinstance(text, str)})
        return cls(backend, settings, eos, ChatTemplate.load(folder, settings, tokens, chat_template))

    # Text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Chat prompts are encoded with add_special_tokens=False: their template writes its own BOS."""
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError):
            raise RequestError("The text holds a lone surrogate, which is not a valid character.") from None

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of ``ids``; ids outside the vocabulary are left out. ``spaces_between_special_tokens`` is taken for
        compatibility: tokenizers of this kind write no such spaces, so both of its values give the same text."""
        text = self.raw_decode(ids, skip_special_tokens)
        return clean_up(text) if self.cleans_up_spaces else text

    def raw_decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """As decode, before spaces are cleaned up."""
        try:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        except OverflowError:
            raise RequestError("Token ids must be between 0 and 4294967295.") from None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text when it is not the first; part of a character is possible."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """token_bytes as text, U+FFFD where they are not whole characters."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """Id of the vocabulary entry with exactly this text."""
        return _token_id(self._backend, text)

    def is_known(self, token_id: int) -> bool:
        """Whether the id has a vocabulary entry; decoding leaves others out."""
        return 0 <= token_id < self.vocab_size and token_id not in self._holes

    def first_text(self, token_id: int) -> str:
        """The token's text where it is the first: raw_decode of it alone, special or not."""
        return self._first_texts[token_id]

    # Chat

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template.sources)

    def render_chat(
        self,
        messages: list[Json],
        *,
        tools: list[Json] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Json | None = None,
    ) -> str:
        """The prompt text, as :meth:`ChatTemplate.render` says. Encode it with add_special_tokens=False."""
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )

    # The same, without holding up the event loop over long texts

    async def encode_async(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await self._run(len(text), lambda: self.encode(text, add_special_tokens))

    async def decode_async(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return await self._run(len(ids), lambda: self.decode(ids, skip_special_tokens))

    async def render_chat_async(
        self,
        messages: list[Json],
        *,
        tools: list[Json] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Json | None = None,
    ) -> str:
        # A template takes a few µs per message besides its text; tools are always long.
        size = INLINE_CHARS if tools else sum(64 + len(message.get("content") or "") for message in messages)
        return await self._run(
            size,
            lambda: self.render_chat(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=kwargs,
            ),
        )

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size < INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Stop the threads; what they are doing is finished first."""
        self._pool.shutdown()

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if self.is_known(token_id) else None
        if token is None:
            return b""
        if self.is_byte_level:
            # As the decoder does: letters of the internal alphabet are bytes; a token with any other is plain text.
            if all(letter in BYTE_OF_LETTER for letter in token):
                return bytes(BYTE_OF_LETTER[letter] for letter in token)
            return token.encode()
        if token_id in self.byte_token_ids:
            return bytes([int(token[3:5], 16)])
        decoder = self._backend.decoder
        if decoder is None:
            return (" " + token).encode()
        return str(decoder.decode(["a", token])).removeprefix("a").encode()  # not the first: that loses its space


class _Table(dict[int, V]):
    """Values by token id, found on first use; reading a known one is a plain dict access."""

    def __init__(self, find: Callable[[int], V]):
        super().__init__()
        self._find: Callable[[int], V] = find

    def __missing__(self, token_id: int) -> V:
        found = self._find(token_id)
        if found:  # so that ids without an entry cannot fill the memory
            self[token_id] = found
        return found


def clean_up(text: str) -> str:
    """Take out the spaces that word tokenizers put before punctuation and English contractions."""
    for before, after in CLEAN_UP_RULES:
        text = text.replace(before, after)
    return text


def _internal_letters() -> dict[str, int]:
    """Byte-level BPE writes bytes as letters: printable Latin-1 as itself, the others from U+0100 upwards in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_LETTER = _internal_letters()


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


def _content(token: Any) -> Any:
    """Configuration files write a token as its text or as an object with the text in ``content``."""
    return token.get("content") if isinstance(token, dict) else token


def _token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    text = _content(token)
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
    texts = [_content(token) for token in [*(settings.get(name) for name in NAMED_TOKENS), *extra]]
    missing = [text for text in texts if isinstance(text, str) and text not in known]
    backend.add_special_tokens([text for text in missing if backend.token_to_id(text) is not None])


def _configured_eos(folder: Path) -> list[int]:
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
