"""llguidance, as both processes use it: one way to build its tokenizer, one set of limits, one way to compile.

Owns: what a grammar may cost, and the words in which it is refused. Must not know: requests, rows, torch.
Called by: server.grammar_check (in a process of its own, to try a grammar) and worker.constraints (to use it): with the
same limits, so that what the one lets pass does not fail in the other. llguidance is imported at first use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class RefusedGrammarError(ValueError):
    """The grammar cannot be compiled; the text says why, in a line or a few."""


class _Wrapped:
    """The vocabulary in the form in which llguidance takes one from Python."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        encode: Callable[[str], Sequence[int]] | None,
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True
        self._encode = encode
        self._id_of = {token: id for id, token in enumerate(tokens) if token}
        for id in special_ids:
            self._id_of.pop(tokens[id], None)
        self._longest = max(map(len, self._id_of), default=1)

    def __call__(self, text: str) -> list[int]:
        """Token ids whose bytes are exactly those of ``text``: as the tokenizer itself would cut it, if that is exact
        (some put a space before the first word), else the longest token first."""
        wanted = text.encode()
        if self._encode is not None:
            ids = list(self._encode(text))
            if b"".join(self.tokens[id] for id in ids) == wanted:
                return ids
        ids, start = [], 0
        while start < len(wanted):
            for end in range(min(len(wanted), start + self._longest), start, -1):
                if (id := self._id_of.get(wanted[start:end])) is not None:
                    ids.append(id)
                    start = end
                    break
            else:
                return []  # no token goes on here: such a text cannot be generated
        return ids


def make_tokenizer(
    tokens: Sequence[bytes],
    special_ids: Sequence[int],
    eos_token_ids: Sequence[int],
    *,
    num_ids: int,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> LLTokenizer:
    """tokens: the bytes of each id; num_ids: the width of the model's output, at least as many, of which the further
    ones are never allowed. encode: how the model's own tokenizer cuts text that a grammar leaves no choice about."""
    from llguidance import LLTokenizer

    table = [*tokens, *[b""] * (num_ids - len(tokens))]
    ends = [id for id in eos_token_ids if id < len(table)]
    if not ends:  # llguidance wants one; this one's bit lies beyond the model's output
        ends = [len(table)]
        table.append(b"<end>")
    special = sorted({*special_ids, *ends})
    wrapped: Any = _Wrapped(table, special, ends, encode)
    return LLTokenizer(wrapped, eos_token=ends)


def compile_grammar(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Releases the GIL for nearly all of its time. Raises RefusedGrammarError."""
    from llguidance import LLMatcher, LLParserLimits

    # Beside these, the try has a time limit. They are what bounds a step later: a mask takes from the step's limits
    # only, and a request whose grammar needs more ends alone, with an error.
    limits = LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=200_000,  # about 15 ms
        step_max_items=50_000,  # about 3 ms
        max_items_in_row=2_000,
        max_lexer_states=50_000,  # 1 to 2 kB each
        max_grammar_size=300_000,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise RefusedGrammarError(reason_of(matcher))
    return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Why a matcher is in error, without llguidance's places in a text that the client never saw."""
    text = re.split(r"\n<(?:state|non-verbose)", matcher.get_error())[0]
    text = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", text)
    text = re.sub(r"(?m)^\s*\d+ \|.*\n?|^\s*\^+\s*$\n?", "", text)
    if keys := re.match(r"Unimplemented keys: \[(.*)\]", text):
        return f"the JSON schema keywords {keys[1]} are not supported"
    return " ".join(text.split())[:500] or "it is too complex"
