"""Structural tags: text in which only some passages are constrained, each between a begin and an end.

Owns: the two forms in which clients write them (``structures`` with ``triggers``, and ``format``, a tree of parts).
Must not know: how grammars are checked or held to. Called by: structured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ropeway.server.grammar import GrammarError, check_nesting, json_rule, lark_rule, regex_rule, rules_rule, text_rule

MAX_PARTS = 256


def structural_tag_rule(value: Any) -> str:
    """value: an object or its JSON text. Raises GrammarError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise GrammarError("it is not valid JSON") from None
    check_nesting(value)
    if not isinstance(value, dict):
        raise GrammarError("a structural tag must be an object")
    if "format" in value:
        part = value["format"]
    else:
        part = {
            "type": "triggered_tags",
            "triggers": value.get("triggers"),
            "tags": [
                {
                    "begin": _field(tag, "begin", str),
                    "content": {"type": "json_schema", "json_schema": tag.get("schema", {})},
                    "end": _field(tag, "end", str),
                }
                for tag in _list(value, "structures")
            ],
        }
    rules = _Rules()
    start = rules.of(part)
    return rules_rule([f"start: {start}", *rules.lines])


class _Rules:
    """The rules of one structural tag, numbered."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def of(self, part: Any) -> str:
        """An expression for one part of the tree."""
        if not isinstance(part, dict):
            raise GrammarError("each part of a structural tag must be an object")
        kind = part.get("type")
        make = _KINDS.get(kind) if isinstance(kind, str) else None
        if make is None:
            raise GrammarError(f"structural tags of type {str(kind)[:64]!r} are not supported")
        return make(self, part)

    def add(self, text: str, options: str = "", name: str = "part") -> str:
        if len(self.lines) >= MAX_PARTS:
            raise GrammarError(f"a structural tag has at most {MAX_PARTS} parts")
        name = f"{name}_{len(self.lines)}"
        self.lines.append(f"{name}{options}: {text}")
        return name

    def text(self, part: dict[str, Any]) -> str:
        return text_rule(_field(part, "value", str)) if part.get("value") else '""'

    def schema(self, part: dict[str, Any]) -> str:
        return self.add(json_rule(part.get("json_schema")))

    def sequence(self, part: dict[str, Any]) -> str:
        return self.add(" ".join(self.of(inner) for inner in _list(part, "elements")))

    def either(self, part: dict[str, Any]) -> str:
        return self.add(" | ".join(self.of(inner) for inner in _list(part, "elements")))

    def tag(self, part: dict[str, Any], known: str = "") -> str:
        """known: the first characters of ``begin``, if they have been written."""
        begin, end = _field(part, "begin", str)[len(known) :], part.get("end", "")
        ends = end if isinstance(end, list) else [end]
        if not all(isinstance(text, str) for text in ends):
            raise GrammarError("'end' must be a text or a list of texts")
        content = part.get("content")
        pieces = [text_rule(begin)] if begin else []
        if isinstance(content, dict) and content.get("type") == "any_text":
            if len(ends) != 1 or not ends[0]:
                raise GrammarError("a tag around any text needs one 'end'")
            pieces.append(self.add("/(?s:.*)/", f"[suffix={text_rule(ends[0])}]"))
        else:
            pieces.append(self.of(content))
            choices = [text_rule(text) if text else '""' for text in ends]
            pieces.append(choices[0] if len(choices) == 1 else f"({' | '.join(choices)})")
        return self.add(" ".join(pieces))

    def triggered(self, part: dict[str, Any]) -> str:
        triggers = _list(part, "triggers")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise GrammarError("'triggers' must be texts that are not empty")
        options = []
        for tag in _list(part, "tags"):
            begin = _field(tag, "begin", str)
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(found) != 1:
                raise GrammarError(f"{begin[:64]!r} must begin with exactly one of the triggers")
            opening = self.add(f"TEXT {text_rule(found[0])}", "[lazy]")
            options.append(self.add(f"{opening} {self.tag(tag, found[0])}"))
        if not any(line.startswith("TEXT:") for line in self.lines):
            self.lines.append("TEXT: /(?s:.*)/")
        tags = f"({' | '.join(options)})"
        times = "" if part.get("stop_after_first") else "+" if part.get("at_least_one") else "*"
        if part.get("stop_after_first"):
            return self.add(tags) if part.get("at_least_one") else self.add(f"{tags} | {self._free()}")
        return self.add(f"{tags}{times} {self._free()}")

    def _free(self) -> str:
        return self.add("TEXT")

    def separated(self, part: dict[str, Any]) -> str:
        tags = self.add(" | ".join(self.tag(tag) for tag in _list(part, "tags")))
        separator = _field(part, "separator", str)
        if part.get("stop_after_first"):
            list_of = tags
        else:
            list_of = f"{tags} ({text_rule(separator) if separator else ''} {tags})*"
        return self.add(list_of if part.get("at_least_one") else f"({list_of})?")

    def any_text(self, part: dict[str, Any]) -> str:
        return self.add("/(?s:.*)/")


_KINDS: dict[str, Callable[[_Rules, dict[str, Any]], str]] = {
    "const_string": _Rules.text,
    "json_schema": _Rules.schema,
    "regex": lambda rules, part: regex_rule(_field(part, "pattern", str)),
    "grammar": lambda rules, part: rules.add(lark_rule(_field(part, "grammar", str))),
    "sequence": _Rules.sequence,
    "or": _Rules.either,
    "tag": _Rules.tag,
    "any_text": _Rules.any_text,
    "triggered_tags": _Rules.triggered,
    "tags_with_separator": _Rules.separated,
}


def _field(part: Any, name: str, kind: type) -> Any:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, kind):
        raise GrammarError(f"'{name}' is missing or has the wrong type")
    return value


def _list(part: Any, name: str) -> list[Any]:
    values: list[Any] = _field(part, name, list)
    if not 0 < len(values) <= MAX_PARTS:
        raise GrammarError(f"'{name}' must have 1 to {MAX_PARTS} entries")
    return values
