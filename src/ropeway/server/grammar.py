"""Grammars as text: small rules, each for one way to constrain an answer, and the whole that is made of them.

Owns: how a schema, a pattern, a list of texts or a grammar is written in llguidance's language (a dialect of Lark), and
the bounds on their size. Must not know: HTTP, request fields, whether a grammar compiles (grammar_check finds out).
Called by: server.openai (structured, tools), which names the field when a rule is refused.

A rule is an expression that can stand wherever Lark takes one, so rules can be put together:
``f'"<tool_call>" {json_rule(schema)} "</tool_call>"'``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_SOURCE_CHARS = 2**18  # of one rule's text and of a whole grammar
MAX_NESTING = 64  # of a schema, in objects and lists
MAX_CHOICES = 4096
# Between the tokens of JSON, at most once at each place: room for an indented layout, and no way to go on for ever.
JSON_WHITESPACE = r"[ \n\t]{1,16}"


class GrammarError(ValueError):
    """What was asked for cannot be a grammar. The text is for the client: it says what is wrong, not in which field."""


@dataclass(frozen=True, slots=True)
class ReasoningRule:
    """A part of free text before the constrained one, as reasoning models write it."""

    end: str  # what ends it, such as "</think>"
    budget: int | None = None  # tokens of free text at most, after which ``end`` is forced; None: no bound
    end_token: int | None = None  # the id of ``end`` where the tokenizer has it as one special token
    begin: str = ""  # what opens it, if the prompt has not: then an answer may also do without
    begin_token: int | None = None


def json_rule(schema: Any) -> str:
    """Any JSON value that the schema (an object or a boolean) describes. Raises GrammarError."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object that describes at least one value")
    check_nesting(schema)
    _check_schema(schema)
    text = json.dumps({**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}, ensure_ascii=False)
    return f"%json {_bounded(text)}"


def regex_rule(pattern: str) -> str:
    """Text that the pattern matches as a whole, so that anchors at its ends are redundant. Raises GrammarError."""
    body = pattern.removeprefix("^")
    if body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\")) - 1) % 2 == 0:
        body = body[:-1]
    if not body:
        raise GrammarError("the regular expression matches nothing but the empty text")
    pieces: list[str] = []
    escaped = False
    for letter in _bounded(body):
        pieces.append({"/": "/" if escaped else "\\/", "\n": "n" if escaped else "\\n"}.get(letter, letter))
        escaped = letter == "\\" and not escaped
    return f"/{''.join(pieces)}/"


def choice_rule(options: Sequence[str]) -> str:
    """One of the texts. Raises GrammarError."""
    if not options or "" in options:
        raise GrammarError("a choice needs at least one text, and none may be empty")
    if len(options) > MAX_CHOICES:
        raise GrammarError(f"at most {MAX_CHOICES} texts to choose from")
    return _bounded(f"({' | '.join(map(text_rule, dict.fromkeys(options)))})")


def text_rule(text: str) -> str:
    """Exactly this text, which is not empty."""
    return json.dumps(text)  # with escapes: Lark does not take every character as it is


def lark_rule(source: str) -> str:
    """Text that a whole grammar describes: in Lark, or in GBNF (llama.cpp's EBNF, with ``::=``). Raises GrammarError."""
    if not source.strip():
        raise GrammarError("the grammar is empty")
    if re.search(r"(?m)^\s*[\w-]+\s*::=", source):
        return _bounded(f"%gbnf {text_rule(source)}")  # translated where it is checked
    return rules_rule([source])


def rules_rule(lines: Sequence[str]) -> str:
    """Text that these rules of our own describe, of which one is called ``start``."""
    return _bounded("\n".join(["%lark {", *lines, "}"]))


def grammar(body: str | None, *, reasoning: ReasoningRule | None = None) -> str:
    """The source text of a grammar for answers that are ``body`` (None: any text), after a free part if ``reasoning`` is
    given."""
    rules = []
    if body is None:
        body = "rest"
        rules += ["rest: REST", "REST: /(?s:.*)/"]
    if reasoning is None:
        return _bounded("\n".join([f"start: {body}", *rules]) + "\n")
    begin, end = _mark(reasoning.begin, reasoning.begin_token), _mark(reasoning.end, reasoning.end_token)
    opening, thought = f"thought {end}", "thought"
    if reasoning.budget is not None and reasoning.budget < 1:
        opening, thought = end, ""
    elif reasoning.budget is not None:
        stop = "" if reasoning.end_token is not None else f", stop={end}"
        thought = f"thought[max_tokens={reasoning.budget}{stop}]"
    elif reasoning.end_token is None:
        opening, thought = "thought", f"thought[suffix={end}]"
    # Such models like to begin the answer with an empty line.
    start = f"start: ({begin} {opening} gap)? {body}" if begin else f"start: {opening} gap {body}"
    rules += ["gap: GAP?", r"GAP: /[ \n]{1,8}/"]
    if thought:
        rules.append(f"{thought}: /(?s:.*)/")
    if reasoning.begin and reasoning.begin_token is None and rules[0] == "rest: REST":
        rules[1] += rf" & ~/(?s:\s*{_escaped(reasoning.begin)}.*)/"  # else the thought would pass as any text
    return _bounded("\n".join([start, *rules]) + "\n")


def _mark(text: str, token: int | None) -> str:
    return f"<[{token}]>" if token is not None else text_rule(text) if text else ""


def _escaped(text: str) -> str:
    return re.sub(r"([]\\^$.|?*+(){}[/])", r"\\\1", text)


def check_nesting(value: Any) -> None:
    """Raises GrammarError for more than MAX_NESTING objects and lists inside each other; never recurses itself."""
    level, depth = [value], 0
    while level := [
        inner
        for outer in level
        if isinstance(outer, dict | list)
        for inner in (outer.values() if isinstance(outer, dict) else outer)
        if isinstance(inner, dict | list)
    ]:
        depth += 1
        if depth >= MAX_NESTING:
            raise GrammarError(f"the schema is nested more than {MAX_NESTING} levels deep")


def _check_schema(schema: dict[str, Any]) -> None:
    """Refuse what llguidance would take without holding to it."""
    if "x-guidance" in schema:
        raise GrammarError("the keyword 'x-guidance' is not supported")
    level: list[Any] = [schema]
    while level:
        for part in level:
            # Names that the schema does not list may come twice, and then count once.
            if isinstance(part, dict) and isinstance(least := part.get("minProperties"), int | float):
                required = part.get("required")
                if least > max(1, len(required) if isinstance(required, list) else 0):
                    raise GrammarError("'minProperties' above 1 needs as many names in 'required'")
        level = [
            inner
            for part in level
            if isinstance(part, dict | list)
            for inner in (part.values() if isinstance(part, dict) else part)
        ]


def _bounded(text: str) -> str:
    if len(text) > MAX_SOURCE_CHARS:
        raise GrammarError(f"the grammar is longer than {MAX_SOURCE_CHARS} characters")
    return text
