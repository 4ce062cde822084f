"""Calls that are JSON objects: ``{"name": "f", "arguments": {...}}`` and the arguments alone.

Owns: the incremental reading of JSON. Must not know: what stands around a call. Called by: families.

Only as much of JSON is checked as is needed to find a value's end: the arguments are given out as they come, in the
model's own words, so what is wrong inside them is for the client to see.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container

from ropeway.server.output.cursor import Cursor, Malformed, Steps
from ropeway.server.output.writer import MessageWriter

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_NAME = 256
_BRACKETS = re.compile(r'["\[\]{}]')
_IN_STRING = re.compile(r'["\\]')
_OPENING = {"}": "{", "]": "["}


def json_call(cursor: Cursor, out: MessageWriter, names: Container[str] | None = None) -> Steps[None]:
    """An object with a name and arguments, whatever their order; ``names``: the only ones that make it a call.

    Without ``names`` the arguments may be missing. Before the name and the arguments there may be a type and an id,
    after them anything.
    """
    yield from cursor.expect("{")
    name: str | None = None
    early: str | None = None  # arguments that came before the name
    is_open = False
    while True:
        yield from cursor.skip_space()
        key = yield from json_string(cursor, MAX_NAME)
        yield from cursor.skip_space()
        yield from cursor.expect(":")
        yield from cursor.skip_space()
        if key == "name" and name is None:
            name = yield from json_string(cursor, MAX_NAME)
            if not name or (names is not None and name not in names):
                raise Malformed
            if early is not None:
                out.start(name)
                out.arguments(early)
                is_open = True
        elif key in ARGUMENT_KEYS and not is_open and early is None:
            if name is not None:
                yield from json_arguments(cursor, out, name)
                is_open = True
            else:
                pieces: list[str] = []
                yield from json_value(cursor, pieces.append)
                early = _as_object("".join(pieces))
        elif is_open or key in ("type", "id"):
            yield from json_value(cursor, lambda text: None)
        else:
            raise Malformed
        yield from cursor.skip_space()
        letter = yield from cursor.peek()
        if letter not in (",", "}"):
            raise Malformed
        if letter == "}" and not is_open:
            if name is None or names is not None:
                raise Malformed
            out.start(name)
            out.arguments("{}")
        cursor.pos += 1
        if letter == "}":
            return out.end()


def json_arguments(cursor: Cursor, out: MessageWriter, name: str) -> Steps[None]:
    """Open the call and give out its arguments as they come; the caller ends it. Besides an object they may be null or
    the text of an object in a string, as some models write them."""
    if (yield from cursor.peek()) == "{":
        out.start(name)
        yield from json_value(cursor, out.arguments)
        return
    pieces: list[str] = []
    yield from json_value(cursor, pieces.append)
    arguments = _as_object("".join(pieces))
    out.start(name)
    out.arguments(arguments)


def _as_object(text: str) -> str:
    """Raises Malformed for what cannot be arguments."""
    if text.startswith('"'):
        text = _string(text).strip() or "{}"
    elif text == "null":
        text = "{}"
    if not text.startswith("{"):
        raise Malformed
    return text


def json_string(cursor: Cursor, limit: int) -> Steps[str]:
    pieces: list[str] = []
    if (yield from cursor.peek()) != '"':
        raise Malformed
    start = cursor.num_read

    def keep(text: str) -> None:
        pieces.append(text)
        if cursor.num_read - start > limit:
            raise Malformed

    yield from json_value(cursor, keep)
    return _string("".join(pieces))


def _string(text: str) -> str:
    try:
        value: str = json.loads(text, strict=False)
        value.encode()  # refuses half a surrogate pair
    except ValueError:
        raise Malformed from None
    return value


def json_value(cursor: Cursor, emit: Callable[[str], None]) -> Steps[None]:
    """Give one value to ``emit``, in pieces. Raises Malformed where its brackets do not match, and at the end."""
    first = yield from cursor.peek()
    if first not in ("{", "[", '"'):
        emit((yield from cursor.word(",]} \t\r\n", 64)))
        return
    open_brackets: list[str] = []
    in_string = False
    while True:
        if not (yield from cursor.peek()):
            raise Malformed
        match = (_IN_STRING if in_string else _BRACKETS).search(cursor.text, cursor.pos, cursor.limit)
        end = min(len(cursor.text), cursor.limit) if match is None else match.end()
        if match is not None:
            letter = match.group()
            if letter == '"':
                in_string = not in_string
            elif letter == "\\":
                _emit(cursor, emit, end)
                if not (yield from cursor.peek()):
                    raise Malformed
                end = cursor.pos + 1
            elif letter in "{[":
                open_brackets.append(letter)
            elif not open_brackets or open_brackets.pop() != _OPENING[letter]:
                _emit(cursor, emit, end - 1)
                raise Malformed
        _emit(cursor, emit, end)
        if match is not None and not in_string and not open_brackets:
            return


def _emit(cursor: Cursor, emit: Callable[[str], None], end: int) -> None:
    piece = cursor.text[cursor.pos : end]
    cursor.pos = end
    emit(piece)
