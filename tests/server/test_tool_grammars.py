"""Grammars of forced calls and bounded thoughts: whatever they let pass is read back as what was asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from small_tokenizers import write_folder

from ropeway.constraint import compile_grammar, make_tokenizer
from ropeway.server.openai.answers import AnswerReader
from ropeway.server.openai.schema import ChatRequest
from ropeway.server.openai.tools import ToolUse, closed, read_tools
from ropeway.server.output.families import FAMILIES
from ropeway.server.output.reasoning import THOUGHTS
from ropeway.server.stream import TextDelta
from ropeway.server.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": '^[a-zž"}]{1,6}$'},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 20}, "maxItems": 3},
        "kind": {"enum": ["a", None, {"b": 1}]},
    },
    "required": ["city", "kind"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("get_time", SCHEMA), ("now", EMPTY))
]
BODY = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}


@cache
def tokenizer(special: tuple[str, ...] = ()) -> Tokenizer:
    with TemporaryDirectory() as name:
        folder = write_folder("byte_level", Path(name))
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.add_special_tokens(list(special))
        backend.save(str(folder / "tokenizer.json"))
        return Tokenizer.load(folder)


def generate(source: str, tokens: Tokenizer, seed: int, limit: int = 400) -> list[int]:
    """Any allowed token at each step, until the grammar is complete. The last one may be the end token."""
    table = [tokens.token_bytes(token_id) for token_id in range(tokens.vocab_size)]
    guide = make_tokenizer(table, sorted(tokens.special_ids), tokens.eos_token_ids, num_ids=tokens.vocab_size)
    matcher = compile_grammar(guide, source)
    draw = random.Random(seed)
    ids: list[int] = []
    while not matcher.is_stopped():
        assert len(ids) < limit, tokens.decode(ids)
        bias = np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8)
        allowed = [int(token_id) for token_id in np.flatnonzero(bias)]
        # One in three chances to end where it may: some rules can go on for ever.
        ends = [token_id for token_id in tokens.eos_token_ids if token_id in allowed]
        ids.append(ends[0] if ends and draw.random() < 0.34 else draw.choice(allowed))
        assert matcher.consume_token(ids[-1]), (matcher.get_error(), tokens.decode(ids))
    return ids


def reader(
    use: ToolUse | None, tokens: Tokenizer, family: str, thought: str = "", is_open: bool = False
) -> AnswerReader:
    entry = FAMILIES[family]
    marks = [*entry.special, *((THOUGHTS[thought].start, THOUGHTS[thought].end) if thought else ())]
    shown = frozenset(id for mark in marks if (id := tokens.token_id(mark)) in tokens.special_ids and id is not None)
    return AnswerReader(tokens, THOUGHTS.get(thought), is_open, use, entry if use else None, shown)


def read(answers: AnswerReader, tokens: Tokenizer, ids: Sequence[int]) -> Any:
    hidden = (tokens.special_ids | set(tokens.eos_token_ids)) - answers.shown_special_ids
    text = b"".join(tokens.token_bytes(id) for id in ids if id not in hidden).decode()
    return answers.parser().feed(TextDelta(text, list(ids), finish_reason="stop"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "get_time"}}},
    ],
)
def test_o23_forced_calls_obey_their_schemas(family: str, is_special: bool, fields: dict[str, Any]) -> None:
    tokens = tokenizer(FAMILIES[family].special if is_special else ())
    use = read_tools(ChatRequest(**BODY, **fields))
    assert use is not None
    answers = reader(use, tokens, family)
    source = answers.grammar(None, None)
    seen = set()
    for seed in range(6):
        message = read(answers, tokens, generate(source, tokens, seed))
        calls = message.merged_calls()
        assert message.content == ""
        assert message.finish_reason == "tool_calls"
        assert len(calls) == 1 or (len(calls) > 1 and fields == {"tool_choice": "required"})
        for call in calls:
            schema = {"get_time": SCHEMA, "now": EMPTY}[call.name]
            jsonschema.validate(json.loads(call.arguments), schema)
            seen.add(call.name)
    assert seen == ({"get_time", "now"} if fields["tool_choice"] == "required" else {"get_time"})


def test_objects_are_closed_where_nothing_else_can_add_to_them() -> None:
    inner = {"properties": {"x": {}}}
    closed_inner = {**inner, "additionalProperties": False}
    schema = {"properties": {"a": inner, "b": {"items": inner}, "c": True}}
    assert closed(schema) == {
        "properties": {"a": closed_inner, "b": {"items": closed_inner}, "c": True},
        "additionalProperties": False,
    }
    for open_one in (
        {},
        {"type": "object"},
        {**inner, "additionalProperties": True},
        {**inner, "required": ["x", "y"]},
        {**inner, "minProperties": 2},
        {"properties": {"a": inner}, "allOf": [{"properties": {"a": {"required": ["y"]}}}]},
        {"$ref": "#/$defs/a", "$defs": {"a": inner}},
    ):
        assert closed(open_one) == open_one


def test_auto_with_an_answer_rule_is_one_or_the_other() -> None:
    tokens = tokenizer()
    use = read_tools(ChatRequest(**BODY))
    answers = reader(use, tokens, "hermes")
    assert answers.grammar(None, None) == ""  # free
    source = answers.grammar('"yes"', None)
    kinds = set()
    for seed in range(12):
        message = read(answers, tokens, generate(source, tokens, seed))
        kinds.add("call" if message.tool_calls else message.content)
    assert kinds == {"call", "yes"}


@pytest.mark.parametrize("thought", ["qwen3", "mistral"])
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("rule", ['"{" /[a-z]{1,3}/ "}"', None])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thought_keeps_its_budget(
    thought: str, is_special: bool, is_open: bool, rule: str | None, budget: int
) -> None:
    marks = THOUGHTS[thought]
    tokens = tokenizer((marks.start, marks.end) if is_special else ())
    answers = reader(None, tokens, "json", thought, is_open)
    source = answers.grammar(rule, budget)
    thoughts = 0
    for seed in range(8):
        ids = generate(source, tokens, seed)
        text = b"".join(tokens.token_bytes(id) for id in ids).decode("utf-8", "replace")
        thoughts += is_open or text.startswith(marks.start)
        parser = answers.parser()
        text = text.removesuffix("<|im_end|>")
        message = parser.feed(TextDelta(text, ids, finish_reason="stop"))
        if is_open:
            assert marks.end in text
        inside = text.removeprefix(marks.start).partition(marks.end)[0] if marks.end in text else ""
        if is_open or text.startswith(marks.start):
            assert len(ids) >= parser.num_reasoning_tokens
            assert parser.num_reasoning_tokens <= budget + len(tokens.encode(marks.start + marks.end)) * 4
            assert message.reasoning == inside.strip(" \t\r\n")
        if rule is not None:
            assert message.content.startswith("{")
            assert message.content.endswith("}")
    assert thoughts == 8 if is_open else thoughts >= (rule is not None)
