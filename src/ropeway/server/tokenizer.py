"""Text to token ids and back, and chat messages to prompt text, for one model folder.

Owns: encoding and decoding with the `tokenizers` object, the chat template, the pool for long texts. Must not know: HTTP,
the engine, torch, transformers. Called by: server.openai, server.detokenizer, server.stream, cli.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from ropeway.errors import RequestError
from ropeway.server.chat_template import ChatTemplate
from ropeway.vocabulary import Json, Table, Vocabulary, configured_eos, content_of, read_tokenizer, token_id

T = TypeVar("T")

INLINE_CHARS = 2048  # a hop to a thread and back costs about as much as encoding this much text
PIECEWISE = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
CLEAN_UP_RULES = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"),
    (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class Tokenizer:
    """The tokenizer of one model; safe to use from several threads. Build it with :meth:`load`."""

    vocabulary: Vocabulary
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
        vocabulary = self.vocabulary = Vocabulary(backend, settings, eos)
        self.vocab_size = vocabulary.size
        self.special_ids = vocabulary.special_ids
        self.eos_token_ids = vocabulary.eos_token_ids
        self.is_byte_level = vocabulary.is_byte_level
        self.byte_token_ids = vocabulary.byte_token_ids
        self.bos_token_id = token_id(backend, settings.get("bos_token"))
        # The library ignores the wish for BPE, where it would destroy spaces of the text, unless forced.
        self.cleans_up_spaces = bool(settings.get("clean_up_tokenization_spaces", False)) and (
            type(backend.model).__name__ != "BPE"
            or bool(settings.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
        )
        self.is_piecewise = PIECEWISE.issuperset(vocabulary.decoder_kinds)
        self._first_texts: Table[str] = Table(lambda token_id: self.raw_decode([token_id], False))

    @classmethod
    def load(cls, folder: Path, chat_template: str = "", *, model_folder: Path | None = None) -> Tokenizer:
        """Read tokenizer.json and what lies beside it.

        chat_template: a file, or the text, of a template that replaces the model's. model_folder: where config.json
        and generation_config.json are, if not in ``folder``. Raises ConfigError naming the file and what to do.
        """
        backend, settings = read_tokenizer(folder)
        eos = configured_eos(model_folder or folder)
        named = {name: content_of(settings[name]) for name in settings if name.endswith("_token")}
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
        return self.vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """token_bytes as text, U+FFFD where they are not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """Id of the vocabulary entry with exactly this text."""
        return token_id(self._backend, text)

    def is_known(self, token_id: int) -> bool:
        """Whether the id has a vocabulary entry; decoding leaves others out."""
        return self.vocabulary.is_known(token_id)

    def first_text(self, token_id: int) -> str:
        """The token's text where it is the first: raw_decode of it alone, special or not."""
        return self._first_texts[token_id]

    # Chat

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template.sources)

    @property
    def chat_template_text(self) -> str:
        """All templates of the model, one after the other; empty without any."""
        return "\n".join(self._template.sources.values())

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


def clean_up(text: str) -> str:
    """Take out the spaces that word tokenizers put before punctuation and English contractions."""
    for before, after in CLEAN_UP_RULES:
        text = text.replace(before, after)
    return text
