"""Log-probabilities in the two shapes of the API.

Owns: those shapes and the floor. Must not know: how they were computed. Called by: chat_view, completions, prompt_report.
"""

from __future__ import annotations

from typing import Any

from ropeway.protocol import TokenLogprobs
from ropeway.server.stream import TextDelta
from ropeway.server.tokenizer import Tokenizer

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say: a token that a mask made impossible


def finite(logprob: float) -> float:
    """Never NaN nor infinite."""
    return logprob if logprob > FLOOR else FLOOR  # false for NaN too


def chat_entries(tokenizer: Tokenizer, delta: TextDelta) -> list[dict[str, Any]]:
    """One entry per token that is not hidden, each with exactly the alternatives that were asked for."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return [
        {
            **entry(token_id, value.logprob),
            "top_logprobs": [entry(*pair) for pair in zip(value.top_ids, value.top_logprobs, strict=True)],
        }
        for token_id, value in zip(delta.token_ids, delta.logprobs or (), strict=False)
    ]


class CompletionLogprobs:
    """Parallel lists over the tokens of one choice. ``top_logprobs`` holds the alternatives that were asked for and the
    sampled token, if it is not among them. ``text_offset`` counts characters of the choice's text."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        """offset: length of the text before the first token."""
        self._tokenizer = tokenizer
        self._offset = offset

    def block(self, delta: TextDelta) -> dict[str, list[Any]]:
        block: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, text, value in zip(delta.token_ids, delta.token_texts, delta.logprobs or (), strict=False):
            block["text_offset"].append(self._offset)
            block["token_logprobs"].append(finite(value.logprob))
            block["tokens"].append(completion_token(self._tokenizer, token_id))
            block["top_logprobs"].append(completion_top(self._tokenizer, token_id, value, len(value.top_ids)))
            self._offset += len(text)
        return block


def completion_top(tokenizer: Tokenizer, token_id: int, value: TokenLogprobs, most: int) -> dict[str, float]:
    """Of one token: the ``most`` best, and itself."""
    top = {
        completion_token(tokenizer, top_id): finite(logprob)
        for top_id, logprob in zip(value.top_ids[:most], value.top_logprobs, strict=False)
    }
    top.setdefault(completion_token(tokenizer, token_id), finite(value.logprob))
    return top


def completion_token(tokenizer: Tokenizer, token_id: int) -> str:
    r"""The token's text, or ``bytes:\xf0\x9f`` for part of a character, so that two of them are never the same key."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
