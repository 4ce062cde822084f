"""Calls inside ``<function=f>`` tags: JSON arguments (functionary, Llama 3.1), or one tag per parameter (Qwen3-Coder).

Owns: the reading of such a tag. Must not know: what stands around it. Called by: families.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ropeway.server.output.cursor import Cursor, Steps
from ropeway.server.output.json_calls import MAX_NAME, json_arguments
from ropeway.server.output.python_calls import json_text, literal
from ropeway.server.output.writer import MessageWriter


def tag_call(cursor: Cursor, out: MessageWriter, signatures: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
    """From ``<function=`` to ``</function>``."""
    yield from cursor.expect("<function=")
    name = yield from cursor.word(">\n", MAX_NAME)
    yield from cursor.expect(">")
    yield from cursor.skip_space()
    if (yield from cursor.peek()) != "<":
        yield from json_arguments(cursor, out, name)
        out.end()
        return (yield from cursor.closing("</function>"))
    properties = signatures.get(name, {}).get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    values: dict[str, Any] = {}
    while True:
        yield from cursor.expect("<")
        if (yield from cursor.peek()) != "p":
            break
        yield from cursor.expect("parameter=")
        key = yield from cursor.word(">\n", MAX_NAME)
        yield from cursor.expect(">")
        text = yield from cursor.until("</parameter>")
        values[key] = value_of(text.removeprefix("\n").removesuffix("\n"), properties.get(key))
        yield from cursor.skip_space()
    yield from cursor.expect("/function>")
    out.start(name)
    out.arguments(json_text(values))
    out.end()


def value_of(text: str, schema: Any) -> Any:
    """A parameter's value: text if that is what the schema asks for, else what JSON or Python makes of the text, else
    the text."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string" or (isinstance(schema, Mapping) and "enum" in schema and text in schema["enum"]):
        return text
    for read in (json.loads, literal):
        try:
            value = read(text)
            json_text(value)
            return value
        except (ValueError, TypeError, RecursionError):
            continue
    return text
