"""How families of models write tool calls: one small reader each, and the form that a forced call is made to take.

Owns: the families, by the names that --tool-call-parser takes, and which one a chat template speaks. Must not know: HTTP,
grammars. Called by: server.openai.tools.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ropeway.server.output.calls import ReadCalls, Signatures
from ropeway.server.output.cursor import Cursor, Steps
from ropeway.server.output.json_calls import MAX_NAME, json_arguments, json_call
from ropeway.server.output.python_calls import python_call
from ropeway.server.output.tag_calls import tag_call
from ropeway.server.output.writer import MessageWriter, call_id, mistral_call_id


@dataclass(frozen=True, slots=True)
class Form:
    """How a list of calls is written: ``opening call separator call closing``."""

    opening: str
    before_name: str
    before_arguments: str
    after_arguments: str
    separator: str
    closing: str


@dataclass(frozen=True, slots=True)
class Family:
    marks: tuple[str, ...]  # any of them may begin a call
    read: ReadCalls
    form: Form  # of forced calls; the same reader reads it
    special: tuple[str, ...] = ()  # parts of the form that may be special tokens, which the text must then show
    make_id: Callable[[], str] = call_id


def _hermes(cursor: Cursor, out: MessageWriter, signatures: Signatures) -> Steps[None]:
    """``<tool_call>{"name": "f", "arguments": {}}</tool_call>``, or with a ``<function=f>`` tag inside; also either of
    the two alone, because small models like to forget what is around it."""
    if (yield from cursor.peek()) != "<":
        return (yield from _json(cursor, out, signatures))
    if (yield from _letter_at(cursor, 1)) == "f":
        return (yield from tag_call(cursor, out, signatures))
    yield from cursor.expect("<tool_call>")
    yield from cursor.skip_space()
    if (yield from cursor.peek()) == "<":
        yield from tag_call(cursor, out, signatures)
    else:
        yield from json_call(cursor, out)
    yield from cursor.closing("</tool_call>")


def _json(cursor: Cursor, out: MessageWriter, signatures: Signatures) -> Steps[None]:
    """``{"name": "f", "arguments": {}}`` of a tool of the request, anywhere in the text or in a block of its own; Llama 3
    says ``parameters`` and may put ``<|python_tag|>`` before it and a semicolon between calls."""
    if (yield from cursor.peek()) == "`":
        yield from cursor.expect("```json")
        yield from cursor.skip_space()
        yield from json_call(cursor, out, signatures)
        return (yield from cursor.closing("```"))
    if (yield from cursor.peek()) == "<":
        yield from cursor.expect("<|python_tag|>")
        yield from cursor.skip_space()
    yield from json_call(cursor, out, signatures)
    yield from cursor.skip_space()
    cursor.pos = (
        cursor.pos + 1 if (yield from cursor.peek()) == ";" else cursor.mark
    )  # else the space belongs to the text


def _mistral(cursor: Cursor, out: MessageWriter, signatures: Signatures) -> Steps[None]:
    """``[TOOL_CALLS]`` and a list of objects, or a name and its arguments with ``[ARGS]`` or nothing between them."""
    yield from cursor.expect("[TOOL_CALLS]")
    yield from cursor.skip_space()
    letter = yield from cursor.peek()
    if letter == "{":
        return (yield from json_call(cursor, out))
    if letter != "[":
        name = yield from cursor.word("[{", MAX_NAME)
        if (yield from cursor.peek()) == "[" and (yield from _letter_at(cursor, 1)) == "C":
            yield from cursor.expect("[CALL_ID]")
            yield from cursor.word("[", MAX_NAME)
        if (yield from cursor.peek()) == "[":
            yield from cursor.expect("[ARGS]")
            yield from cursor.skip_space()
        yield from json_arguments(cursor, out, name.strip())
        return out.end()
    cursor.pos += 1
    while True:
        yield from cursor.skip_space()
        yield from json_call(cursor, out)
        yield from cursor.skip_space()
        if (yield from cursor.peek()) != ",":
            return (yield from cursor.closing("]"))
        cursor.pos += 1


def _pythonic(cursor: Cursor, out: MessageWriter, signatures: Signatures) -> Steps[None]:
    """``[f(a=1), g()]`` of tools of the request, anywhere in the text."""
    if (yield from cursor.peek()) != "[":
        return (yield from _json(cursor, out, signatures))
    yield from cursor.expect("[")
    while True:
        yield from cursor.skip_space()
        yield from python_call(cursor, out, signatures)
        yield from cursor.skip_space()
        if (yield from cursor.peek()) != ",":
            return (yield from cursor.closing("]"))
        cursor.pos += 1


def _gemma(cursor: Cursor, out: MessageWriter, signatures: Signatures) -> Steps[None]:
    """A ``tool_code`` block of Python calls, one a line."""
    if (yield from cursor.peek()) == "{" or (yield from _letter_at(cursor, 3)) == "j":
        return (yield from _json(cursor, out, signatures))
    yield from cursor.expect("```tool_code")
    num_calls = out.num_calls
    while True:
        yield from cursor.skip_space()
        if out.num_calls > num_calls and (yield from cursor.peek()) in ("`", ""):
            return (yield from cursor.closing("```"))
        yield from python_call(cursor, out, signatures)


def _letter_at(cursor: Cursor, offset: int) -> Steps[str]:
    """The letter that far after the next one; empty at the end."""
    cursor.pos += offset
    letter = yield from cursor.peek()
    cursor.pos -= offset
    return letter


_OBJECTS = Form("", '{"name": "', '", "arguments": ', "}", "\n", "")
_HERMES = Form("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "")
_LLAMA = Form("", '{"name": "', '", "parameters": ', "}", "; ", "")
_MISTRAL_LIST = Form("[TOOL_CALLS][", '{"name": "', '", "arguments": ', "}", ", ", "]")
_MISTRAL = Form("", "[TOOL_CALLS]", "[ARGS]", "", "", "")
_TAGS = Form("", "<function=", ">", "</function>", "", "")

_JSON_MARKS = ("{", "```json")
FAMILIES = {
    "hermes": Family(("<tool_call>", *_JSON_MARKS), _hermes, _HERMES),
    # It would write a tag per parameter; grammars of schemas are of JSON, which the same reader reads.
    "qwen3_coder": Family(("<tool_call>", "<function=", *_JSON_MARKS), _hermes, _HERMES),
    "llama3_json": Family((*_JSON_MARKS, "<|python_tag|>"), _json, _LLAMA, ("<|python_tag|>",)),
    "mistral": Family(("[TOOL_CALLS]",), _mistral, _MISTRAL, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), mistral_call_id),
    "mistral_list": Family(("[TOOL_CALLS]",), _mistral, _MISTRAL_LIST, ("[TOOL_CALLS]",), mistral_call_id),
    "functionary": Family(("<function=",), tag_call, _TAGS),
    # And these Python; likewise.
    "pythonic": Family(("[", *_JSON_MARKS), _pythonic, _OBJECTS),
    "gemma": Family(("```tool_code", *_JSON_MARKS), _gemma, _OBJECTS),
    "json": Family(_JSON_MARKS, _json, _OBJECTS),
}
ALIASES = {"llama4_json": "llama3_json", "llama4_pythonic": "pythonic"}

# What a chat template that shows tools says of how to call them; the first that it contains names the family.
_SIGNS = (
    ("[ARGS]", "mistral"),
    ("[TOOL_CALLS]", "mistral_list"),
    ("<parameter=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<function=", "functionary"),
    ("[func_name1(", "pythonic"),
    ("```tool_code", "gemma"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)


def detect_family(template: str) -> str:
    """Of the text of a chat template: a name in FAMILIES."""
    return next((name for sign, name in _SIGNS if sign in template), "json")
