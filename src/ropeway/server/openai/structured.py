"""The fields that constrain an answer's text, as one grammar rule.

Owns: response_format, structured_outputs and the guided_* names of old: which of them is meant, and what is wrong with
it. Must not know: how rules are written (server.grammar), checked or held to. Called by: chat, completions and the other
generating endpoints, before the call is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ropeway.errors import RequestError
from ropeway.server.grammar import GrammarError, choice_rule, json_rule, lark_rule, regex_rule
from ropeway.server.openai.errors import refused_grammar
from ropeway.server.openai.schema import GenerationBody, ResponseFormat, StructuredOutputs
from ropeway.server.openai.structural_tag import structural_tag_rule


@dataclass(frozen=True, slots=True)
class AnswerRule:
    text: str  # an expression for server.grammar.grammar()
    param: str  # the field it comes from, to be named if the grammar is refused


def answer_rule(body: GenerationBody) -> AnswerRule | None:
    """The rule for the whole answer, None for free text. Raises RequestError(400), also for more than one rule."""
    wanted = [(param, make, value) for param, make, value in _constraints(body) if value is not None]
    if len(wanted) > 1:
        first, second = wanted[0][0], wanted[1][0]
        raise RequestError(
            f"'{first}' and '{second}' cannot be used together: one constraint per request.",
            param=second,
            code="invalid_value",
        )
    for param, make, value in wanted:
        try:
            return AnswerRule(make(value), param)
        except GrammarError as error:
            raise refused_grammar(error, param) from None
    return None


Constraint = tuple[str, Callable[[Any], str], Any]


def _constraints(body: GenerationBody) -> list[Constraint]:
    """(field, how to make a rule of it, its value or None) for all there are."""
    found: list[Constraint] = []
    if body.response_format is not None:
        found.append(_of_response_format(body.response_format))
    if body.structured_outputs is not None:
        found += _of_structured_outputs(body.structured_outputs)
    return [
        *found,
        ("guided_json", _schema_rule, body.guided_json),
        ("guided_regex", regex_rule, body.guided_regex),
        ("guided_choice", choice_rule, body.guided_choice),
        ("guided_grammar", lark_rule, body.guided_grammar),
    ]


def _of_response_format(wanted: ResponseFormat) -> Constraint:
    if wanted.type == "json_object":
        return "response_format", _schema_rule, wanted.object_schema or {"type": "object"}
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.json_schema is None:
            param = "response_format.json_schema" + ("" if wanted.json_schema is None else ".schema")
            raise RequestError(
                f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
            )
        return "response_format", _schema_rule, wanted.json_schema.json_schema
    if wanted.type == "structural_tag":
        return "response_format", structural_tag_rule, {"type": "structural_tag", **(wanted.model_extra or {})}
    return "response_format", str, None


def _of_structured_outputs(wanted: StructuredOutputs) -> list[Constraint]:
    if extra := [name for name, value in (wanted.model_extra or {}).items() if value not in (None, False)]:
        param = f"structured_outputs.{extra[0][:64]}"
        raise RequestError(f"'{param}' is not supported.", param=param, code="unsupported_parameter")
    found: list[Constraint] = [
        ("structured_outputs.json", _schema_rule, wanted.json_schema),
        ("structured_outputs.json_object", _schema_rule, {"type": "object"} if wanted.json_object else None),
        ("structured_outputs.regex", regex_rule, wanted.regex),
        ("structured_outputs.choice", choice_rule, wanted.choice),
        ("structured_outputs.grammar", lark_rule, wanted.grammar),
        ("structured_outputs.structural_tag", structural_tag_rule, wanted.structural_tag),
    ]
    if all(value is None for _, _, value in found):
        raise RequestError(
            "Invalid value for 'structured_outputs': it names no constraint.",
            param="structured_outputs",
            code="invalid_value",
        )
    return found


def _schema_rule(schema: Any) -> str:
    """schema: an object, a boolean, or the JSON text of one."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise GrammarError("it is not valid JSON") from None
    return json_rule(schema)
