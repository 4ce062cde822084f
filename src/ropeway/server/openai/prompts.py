"""The four forms in which a prompt, or an embedding's input, may come.

Owns: telling them apart. Must not know: tokenizers, what the prompts are for. Called by: completions, embeddings.
"""

from __future__ import annotations

from typing import Any

from ropeway.errors import RequestError


def split_prompts(value: Any, param: str, *, may_be_empty: bool = False) -> list[str] | list[list[int]]:
    """A text, token ids, a list of texts or a list of lists of ids, as a list. may_be_empty: a text may. Raises
    RequestError(400)."""

    def bad(reason: str, code: str = "invalid_value") -> RequestError:
        return RequestError(f"Invalid value for '{param}': {reason}.", param=param, code=code)

    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise bad("must be a string, a list of strings, a list of token ids, or a list of such lists")
    kinds = set(map(type, value))
    if kinds == {int}:  # exactly: true is no token id
        value, kinds = [value], {list}
    if kinds not in ({str}, {list}):
        raise bad("must not be empty" if not kinds else "a list holds texts, token ids or lists of token ids")
    for item in value:
        if not item and not (may_be_empty and isinstance(item, str)):
            raise RequestError(f"'{param}' must not be empty.", param=param, code="empty_prompt")
        if isinstance(item, list) and set(map(type, item)) != {int}:
            raise bad("token ids must be integers")
    return list(value)
