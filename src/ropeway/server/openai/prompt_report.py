"""What an answer says of its prompts' tokens: the `prompt_logprobs` field, and the log-probabilities of an echo.

Owns: PromptReport, which words both, once for all choices of a prompt. Must not know: how they were computed, how
sequences run. Called by: service (`ready`, before anything of a choice is sent), completions, chat_view.

A long prompt has a hundred thousand alternatives. So they are worded a few tokens at a time, between which other streams
go on, and each token's are JSON at once, because as objects they would take many times the room.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from ropeway.protocol import PromptLogprobs, TokenLogprobs
from ropeway.server.detokenizer import make_detokenizer
from ropeway.server.openai.logprobs import completion_token, completion_top, finite
from ropeway.server.tokenizer import Tokenizer

Block = dict[str, list[Any]]
_SLICE = 16  # tokens worded without a pause; a millisecond or two


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the answer repeats it."""

    text: str = ""
    shows_special_tokens: bool = False


@dataclass(slots=True)
class _Report:
    """Of one prompt. Empty where its first choice ended before anything was known."""

    is_done: asyncio.Event = field(default_factory=asyncio.Event)
    entries: list[Any] | None = None
    block: Block | None = None


class PromptReport:
    def __init__(
        self, tokenizer: Tokenizer, echoes: Sequence[Echo], *, prompt_logprobs: int | None, echo_logprobs: int | None
    ) -> None:
        """echoes: one per prompt. The other two: how many alternatives per token; None: not asked for."""
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._prompt_logprobs = prompt_logprobs
        self._echo_logprobs = echo_logprobs
        self._reports = [_Report() for _ in echoes]

    @staticmethod
    def num_top(prompt_logprobs: int | None, echo_logprobs: int | None) -> int | None:
        """What the engine must be asked for; None: nothing."""
        asked = [count for count in (prompt_logprobs, echo_logprobs) if count is not None]
        return max(asked) if asked else None

    async def fill(self, prompt: int, token_ids: Sequence[int], found: PromptLogprobs | None) -> None:
        """By the prompt's first choice; later calls do nothing. found: None if that choice ended without."""
        report = self._reports[prompt]
        if report.is_done.is_set():
            return
        try:
            if found is not None:
                await self._word(report, self._echoes[prompt], token_ids, found)
        finally:
            report.is_done.set()

    async def wait(self, prompt: int) -> None:
        """By its other choices."""
        await self._reports[prompt].is_done.wait()

    def entries(self, prompt: int) -> list[Any] | None:
        """The field `prompt_logprobs`, to be dumped by orjson: per token null or ``{token id: {logprob, rank,
        decoded_token}}``. The first token, which nothing foretells, has null."""
        return self._reports[prompt].entries

    def block(self, prompt: int) -> Block | None:
        """The echoed tokens' part of a completion's `logprobs`."""
        return self._reports[prompt].block

    async def _word(self, report: _Report, echo: Echo, token_ids: Sequence[int], found: PromptLogprobs) -> None:
        if self._prompt_logprobs is not None:
            report.entries = await self._entries(token_ids, found, self._prompt_logprobs)
        if self._echo_logprobs is not None:
            report.block = await self._block(echo, token_ids, found, self._echo_logprobs)

    async def _entries(self, token_ids: Sequence[int], found: PromptLogprobs, most: int) -> list[Any]:
        entries: list[Any] = [None]
        for token_id, value in zip(token_ids[1:], found, strict=True):
            entries.append(_json(_entry(self._tokenizer, token_id, value, most)))
            if len(entries) % _SLICE == 0:
                await asyncio.sleep(0)
        return entries

    async def _block(self, echo: Echo, token_ids: Sequence[int], found: PromptLogprobs, most: int) -> Block:
        tokenizer = self._tokenizer
        names = [completion_token(tokenizer, token_ids[0])]
        logprobs: list[Any] = [None]
        tops: list[Any] = [None]
        for token_id, value in zip(token_ids[1:], found, strict=True):
            names.append(completion_token(tokenizer, token_id))
            logprobs.append(finite(value.logprob))
            tops.append(_json(completion_top(tokenizer, token_id, value, most)))
            if len(names) % _SLICE == 0:
                await asyncio.sleep(0)
        lengths = map(len, token_pieces(tokenizer, token_ids, echo))
        offsets = [0, *itertools.accumulate(lengths)][:-1]
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": names, "top_logprobs": tops}


def _json(value: Any) -> orjson.Fragment:
    """In bytes of its own length: those that orjson gives hold four times as much memory."""
    return orjson.Fragment(bytes(memoryview(orjson.dumps(value))))


def _entry(tokenizer: Tokenizer, token_id: int, value: TokenLogprobs, most: int) -> dict[str, Any]:
    """The token itself, then the best ones."""

    def worded(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    entry = {str(token_id): worded(token_id, value.logprob, value.rank)}
    for rank, (top_id, logprob) in enumerate(zip(value.top_ids[:most], value.top_logprobs, strict=False), 1):
        entry.setdefault(str(top_id), worded(top_id, logprob, rank))
    return entry


def token_pieces(tokenizer: Tokenizer, token_ids: Sequence[int], echo: Echo) -> list[str]:
    """The text that each token adds to ``echo.text``. Special tokens that the tokenizer put before a text add none."""
    detokenizer = make_detokenizer(tokenizer, (), not echo.shows_special_tokens)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    if pieces:
        pieces[-1] += detokenizer.flush()
    surplus = sum(map(len, pieces)) - len(echo.text)
    for index, token_id in enumerate(token_ids):
        if surplus <= 0 or token_id not in tokenizer.special_ids:
            break
        surplus -= len(pieces[index])
        pieces[index] = ""
    return pieces
