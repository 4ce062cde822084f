"""Token ids to text, one at a time: never half a character, never a change to what was already given out.

Owns: what is held back until a character or a run of byte tokens is complete. Must not know: stop strings, requests.
Called by: server.stream.

The promise: all pieces joined are ``decode(output)``, except that the output does not lose its leading space if the
prompt has text before it. Special tokens that are skipped do not separate the bytes around them, as in a whole decode.
Each token costs the same however long the output is.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from ropeway.server.tokenizer import Tokenizer, clean_up

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that is now certain."""
        ...

    def extend(self, token_ids: Sequence[int]) -> str:
        """What pushing each of them gives, joined."""
        ...

    def flush(self) -> str:
        """What is still held back, as the end of the text: unfinished characters become U+FFFD."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    skip_special_tokens: bool,
    shown: frozenset[int] = frozenset(),
) -> Detokenizer:
    """The one for this kind of tokenizer. shown: special tokens that are not skipped in any case."""
    hidden = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
    detokenizer: Detokenizer
    if tokenizer.is_byte_level:
        detokenizer = ByteDetokenizer(tokenizer, hidden)
    else:
        detokenizer = WindowDetokenizer(tokenizer, prompt_token_ids, hidden)
    return CleaningDetokenizer(detokenizer) if tokenizer.cleans_up_spaces else detokenizer


class ByteDetokenizer:
    """Byte-level BPE: text is the tokens' bytes as UTF-8. Invalid bytes are replaced as in a whole decode, because
    Python and the library both put one U+FFFD for each longest valid beginning of a character."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = hidden
        self._tail = b""  # the beginning of a character

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        data = self._tail + self._token_bytes(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        return text

    def extend(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self.push(token_ids[0])
        token_bytes, hidden = self._token_bytes, self._hidden
        data = self._tail + b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in hidden])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        return text

    def flush(self) -> str:
        text = self._tail.decode("utf-8", "replace")
        self._tail = b""
        return text


class WindowDetokenizer:
    """Any other tokenizer: decode the new tokens after the last one that was given out, and take what that adds.

    A decoder treats the first token differently (it loses its space), so there is always one token of context. A run
    of byte tokens is decoded as one: if any of it is invalid, all of it becomes U+FFFD. So it is held until it ends.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden  # never in the window
        context = next((id for id in reversed(prompt_token_ids) if self._is_context(id)), None)
        self._window: list[int] = [] if context is None else [context]  # one token of context, then the pending ones
        self._shown = "" if context is None else tokenizer.first_text(context)  # the context's text
        self._pending = 0

    def push(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        if token_id in self._hidden or not tokenizer.is_known(token_id):
            return ""
        is_byte = token_id in tokenizer.byte_token_ids
        if tokenizer.is_piecewise and self._window and not self._pending and not is_byte:
            return tokenizer.token_text(token_id)  # the same, quicker; and any context is as good as another
        self._window.append(token_id)
        self._pending += 1
        if is_byte:
            return ""
        text = tokenizer.raw_decode(self._window, False)
        if text.endswith(REPLACEMENT) and self._pending < 8:  # maybe the beginning of a character
            return ""
        piece = text[len(self._shown) :]
        self._window = [token_id]
        self._shown = tokenizer.first_text(token_id)
        self._pending = 0
        return piece

    def extend(self, token_ids: Sequence[int]) -> str:
        return "".join([self.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        if not self._pending:
            return ""
        piece = self._tokenizer.raw_decode(self._window, False)[len(self._shown) :]
        self._window = []
        self._pending = 0
        return piece

    def _is_context(self, id: int) -> bool:
        tokenizer = self._tokenizer
        return id not in self._hidden and id not in tokenizer.byte_token_ids and tokenizer.is_known(id)


class CleaningDetokenizer:
    """Cleans up spaces like a whole decode, in parts. Every rule's match begins with a space, and none reaches over a
    space that follows a character other than a space, an apostrophe or an n; so the text may be cut there."""

    def __init__(self, inner: Detokenizer) -> None:
        self._inner = inner
        self._raw = ""

    def push(self, token_id: int) -> str:
        piece = self._inner.push(token_id)
        if not piece:
            return ""
        self._raw += piece
        at = self._raw.rfind(" ")
        while at > 0 and self._raw[at - 1] in " 'n":
            at = self._raw.rfind(" ", 0, at)
        if at <= 0:
            return ""
        text, self._raw = self._raw[:at], self._raw[at:]
        return clean_up(text)

    def extend(self, token_ids: Sequence[int]) -> str:
        return "".join([self.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        text, self._raw = self._raw + self._inner.flush(), ""
        return clean_up(text)
