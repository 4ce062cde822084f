"""Grammar rules, put together in every way: which texts they accept, and what cannot be a rule."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import small_tokenizer

from ropeway.constraint import compile_grammar, make_tokenizer
from ropeway.server.grammar import (
    GrammarError,
    ReasoningRule,
    choice_rule,
    grammar,
    json_rule,
    lark_rule,
    regex_rule,
    text_rule,
)
from ropeway.server.grammar_check import try_grammar
from ropeway.server.openai.structural_tag import structural_tag_rule

OBJECT = {"type": "object"}
TOOL_END = small_tokenizer("byte_level").token_id("</tool>")


@cache
def vocabulary() -> Any:
    words = small_tokenizer("byte_level").vocabulary
    return make_tokenizer(words.all_token_bytes(), sorted(words.special_ids), words.eos_token_ids, num_ids=words.size)


def outcome(source: str, text: str | list[int]) -> str:
    """ "complete" if nothing may follow the text, "accepted" if it may end here, "open" if it must go on, "no"."""
    cause, checked = try_grammar(vocabulary(), source)
    assert not cause, checked
    matcher = compile_grammar(vocabulary(), checked)
    for token in small_tokenizer("byte_level").encode(text) if isinstance(text, str) else text:
        if not matcher.consume_token(token):
            return "no"
    return "complete" if matcher.is_stopped() else "accepted" if matcher.is_accepting() else "open"


@pytest.mark.parametrize(
    ("rule", "texts"),
    [
        (json_rule(OBJECT), {'{"a": [1, 2]}': "complete", "{ }": "complete", " {}": "no", '{"a"': "open", "{" + " " * 17: "no"}),
        (json_rule({**OBJECT, "maxProperties": 0}), {"{" + " " * 16 + "}": "complete", "{" + "\n" * 16 + "}": "complete"}),
        (json_rule(True), {"3": "accepted", '"x"': "complete", "null": "complete"}),
        (regex_rule("^a/b{2}$"), {"a/bb": "complete", "a/b": "open", "xa/bb": "no"}),
        (regex_rule(r"cost\$"), {"cost$": "complete", "cost": "open"}),
        (regex_rule(r"x\\$"), {"x\\": "complete"}),
        (regex_rule("[/]\n\\/"), {"/\n/": "complete"}),
        (regex_rule("a|bc"), {"a": "complete", "bc": "complete"}),
        (choice_rule(["yes", "yes sir", 'q"\\\n/', "日本"]), {"yes": "accepted", "yes sir": "complete", 'q"\\\n/': "complete", "日本": "complete", "y": "open"}),
        (lark_rule('start: a+\na: "x" | "}"\n'), {"x}": "accepted", "y": "no"}),
        (lark_rule('root ::= "a" rest\nrest ::= [0-9]+ "!"'), {"a12!": "complete", "a!": "no"}),
        (lark_rule('start: a\na: "x ::= y"'), {"x ::= y": "complete"}),
        (json_rule({"const": "\x7f"}), {'"\\u007f"': "complete"}),
        (f'"<t>" {json_rule(OBJECT)} "</t>"', {"<t>{}</t>": "complete", "<t>{}": "open", "<t> {}": "no"}),
        (f"({regex_rule('[0-9]')} | {lark_rule('start: /[a-c]/')}) {text_rule('.')}", {"5.": "complete", "b.": "complete", "5": "open"}),
    ],
)  # fmt: skip
def test_rules(rule: str, texts: dict[str, str]) -> None:
    for text, expected in texts.items():
        assert outcome(grammar(rule), text) == expected, text


RULES = {json_rule(OBJECT): "{}", choice_rule(["x", "y"]): "y", lark_rule('start: "{" | "a"'): "{"}
ENDS = [ReasoningRule("</think>"), ReasoningRule("</think>", 40), ReasoningRule("</tool>", None, TOOL_END), ReasoningRule("</tool>", 40, TOOL_END)]  # fmt: skip


@pytest.mark.parametrize(("rule", "reasoning"), [*itertools.product(RULES, ENDS)])
def test_free_reasoning_before_the_constrained_part(rule: str, reasoning: ReasoningRule) -> None:
    source = grammar(rule, reasoning=reasoning)
    encode = small_tokenizer("byte_level").encode
    end = [reasoning.end_token] if reasoning.end_token is not None else encode(reasoning.end)
    for thought, gap in (("so </ it\n", ""), ("", "\n\n"), ("{", "\n")):
        tokens = [*encode(thought), *end, *(token for letter in gap for token in encode(letter)), *encode(RULES[rule])]
        assert outcome(source, tokens) == "complete", (thought, gap)
        assert outcome(source, [*encode(thought), *end]) == "open"
    assert outcome(source, encode("no end in sight")) == "open"


@pytest.mark.parametrize("end_token", [None, TOOL_END])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_forces_the_end(budget: int, end_token: int | None) -> None:
    source = grammar(choice_rule(["x"]), reasoning=ReasoningRule("</tool>", budget, end_token))
    encode = small_tokenizer("byte_level").encode
    matcher = compile_grammar(vocabulary(), source)
    for count in range(budget):
        assert matcher.consume_token(encode("a")[0]), count
    ids = [
        i for i, byte in enumerate(matcher.compute_bitmask()) for i in range(8 * i, 8 * i + 8) if byte >> (i % 8) & 1
    ]
    assert (
        ids == [TOOL_END]
        if end_token is not None
        else all("</tool>".startswith(small_tokenizer("byte_level").token_text(id)) for id in ids)
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), min_size=1, max_size=5))
def test_any_texts_can_be_chosen_from(options: list[str]) -> None:
    source = grammar(choice_rule(options))
    for option in options:
        data = option.encode()
        matcher = compile_grammar(vocabulary(), source)
        assert all(matcher.consume_token(token) for token in vocabulary().greedy_tokenize(data.decode()))
        assert matcher.is_accepting()


@pytest.mark.parametrize(
    "make",
    [
        lambda: json_rule(False),
        lambda: json_rule([]),
        lambda: json_rule({"enum": ["x" * 300_000]}),
        lambda: json_rule({"x-guidance": {}}),
        lambda: json_rule({"properties": {"a": {"minProperties": 2}}}),
        lambda: regex_rule(""),
        lambda: regex_rule("^$"),
        lambda: choice_rule([]),
        lambda: choice_rule(["a", ""]),
        lambda: choice_rule([str(i) for i in range(5000)]),
        lambda: lark_rule(" \n"),
        lambda: structural_tag_rule("{"),
        lambda: structural_tag_rule([]),
        lambda: structural_tag_rule({"format": {"type": "odd"}}),
        lambda: structural_tag_rule({"format": {"type": "sequence", "elements": []}}),
        lambda: structural_tag_rule({"format": {"type": "tag", "begin": "<a>", "end": "", "content": {"type": "any_text"}}}),
        lambda: structural_tag_rule({"structures": [{"begin": "<a", "schema": {}, "end": ""}], "triggers": ["<b"]}),
        lambda: structural_tag_rule({"structures": [{"begin": "<a", "schema": {}}], "triggers": ["<a"]}),
    ],
)  # fmt: skip
def test_what_cannot_be_a_rule(make: Any) -> None:
    with pytest.raises(GrammarError):
        make()


def test_nesting_is_bounded_without_recursion() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(GrammarError, match="nested"):
        json_rule(schema)


CALL = {"begin": "<call=f>", "schema": {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}, "end": "</call>"}  # fmt: skip
TAG = {"type": "tag", "begin": "<t>", "content": {"type": "json_schema", "json_schema": OBJECT}, "end": "</t>"}
NUMBER = {"type": "regex", "pattern": "[0-9]"}


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (
            {"type": "structural_tag", "structures": [CALL, {**CALL, "begin": "<call=g>"}], "triggers": ["<call="]},
            {
                "no call": "accepted", 'so <call=f>{"n": 1}</call> and <call=g>{"n":2}</call>.': "accepted",
                'so <call=f>{"n": "x': "no", "<call=h": "no", '<call=f>{"n": 1}': "open",
            },
        ),
        ({"format": TAG}, {"<t>{}</t>": "complete", "{}": "no"}),
        ({"format": {**TAG, "end": ["</t>", "!"]}}, {"<t>{}!": "complete", "<t>{}</t>": "complete"}),
        ({"format": {**TAG, "content": {"type": "any_text"}}}, {"<t>any < thing</t>": "complete", "<t>x": "open"}),
        ({"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, NUMBER]}}, {"a1": "complete"}),
        ({"format": {"type": "or", "elements": [{"type": "const_string", "value": "a"}, NUMBER]}}, {"a": "complete", "1": "complete"}),
        ({"format": {"type": "grammar", "grammar": 'root ::= "ab"+'}}, {"abab": "accepted", "a": "open"}),
        ({"format": {"type": "any_text"}}, {"what ever": "accepted"}),
        (
            {"format": {"type": "triggered_tags", "triggers": ["<t"], "tags": [TAG], "at_least_one": True, "stop_after_first": True}},
            {"say <t>{}</t>": "complete", "say": "open"},
        ),
        (
            {"format": {"type": "tags_with_separator", "tags": [TAG], "separator": ",", "at_least_one": True}},
            {"<t>{}</t>": "accepted", "<t>{}</t>,<t>{}</t>": "accepted", "<t>{}</t><": "no"},
        ),
    ],
)  # fmt: skip
def test_structural_tags(value: dict[str, Any], texts: dict[str, str]) -> None:
    for form in (value, json.dumps(value)):
        source = grammar(structural_tag_rule(form))
        for text, expected in texts.items():
            assert outcome(source, text) == expected, text
