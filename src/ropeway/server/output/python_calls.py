"""Calls that are written as Python: ``f(a=1, b="x")``.

Owns: finding the end of such an expression, and its values as JSON. Must not know: what stands around it. Nothing is
ever executed. Called by: families.

A call is given out as a whole at its end, because only then its arguments are JSON.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from ropeway.server.output.cursor import Cursor, Malformed, Steps
from ropeway.server.output.writer import MessageWriter

_STOPS = {"": re.compile(r"""['"\[\](){}]"""), "'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}
_OPENING = {"}": "{", "]": "[", ")": "("}


def python_call(cursor: Cursor, out: MessageWriter, signatures: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
    """One call of a tool of the request; also ``print(f(...))``, as Gemma likes to write it."""
    start = cursor.pos
    name = yield from _name(cursor)
    if name == "print" and name not in signatures:
        yield from cursor.expect("(")
        yield from python_call(cursor, out, signatures)
        yield from cursor.closing(")")
        return
    if name not in signatures:
        raise Malformed
    yield from _brackets(cursor)
    arguments = _arguments(cursor.text[start : cursor.pos], signatures[name])
    out.start(name)
    out.arguments(arguments)
    out.end()


def _name(cursor: Cursor) -> Steps[str]:
    start = cursor.pos
    while (letter := (yield from cursor.peek())) and (letter.isalnum() or letter in "_.-"):
        cursor.pos += 1
    return cursor.text[start : cursor.pos]


def _brackets(cursor: Cursor) -> Steps[None]:
    """From one bracket to the one that closes it."""
    if (yield from cursor.peek()) != "(":
        raise Malformed
    open_brackets: list[str] = []
    quote = ""
    while True:
        if not (yield from cursor.peek()):
            raise Malformed
        match = _STOPS[quote].search(cursor.text, cursor.pos, cursor.limit)
        cursor.pos = min(len(cursor.text), cursor.limit) if match is None else match.end()
        if match is None:
            continue
        letter = match.group()
        if letter == "\\":
            if not (yield from cursor.peek()):
                raise Malformed
            cursor.pos += 1
        elif letter in "'\"":
            quote = "" if quote else letter
        elif letter in "([{":
            open_brackets.append(letter)
        elif open_brackets.pop() != _OPENING[letter]:
            raise Malformed
        if not open_brackets:
            return


def _arguments(source: str, schema: Mapping[str, Any]) -> str:
    """JSON text. Values without a name get the names of the schema's properties, in order. Raises Malformed."""
    _, _, rest = source.partition("(")
    try:
        call = _parse(f"f({rest}")
        if not isinstance(call, ast.Call):
            raise Malformed
        names = list(schema.get("properties") or {})[: len(call.args)]
        values = {name: ast.literal_eval(value) for name, value in zip(names, call.args, strict=True)}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in values:
                raise Malformed
            values[keyword.arg] = ast.literal_eval(keyword.value)
        return json_text(values)
    except (ValueError, TypeError, RecursionError):
        raise Malformed from None


def literal(source: str) -> Any:
    """The value of a Python literal. Raises ValueError or TypeError."""
    return ast.literal_eval(_parse(source))


def _parse(source: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the model's escapes: nobody can mend them, and they are nobody's to read
        try:
            return ast.parse(source.strip(), mode="eval").body
        except (SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(str(error)) from None


def json_text(value: Any) -> str:
    """Raises ValueError or TypeError for what JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can say
        return json.dumps(value)
    return text
