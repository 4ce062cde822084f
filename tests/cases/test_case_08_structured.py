"""Reported faults of kind 8: structured output. And the two of other kinds that come from masks (O-14, O-52)."""

from __future__ import annotations

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from case_client import CHAT, COMPLETIONS, alive, ask, both, post
from e2e_server import Server
from pydantic_core import from_json

pytestmark = pytest.mark.real_model
HI = [{"role": "user", "content": "hi"}]
OBJECT: dict[str, Any] = {"type": "json_object"}
TWO_TEXTS = {
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {"a": {"type": "string", "maxLength": 20}, "b": {"type": "string", "maxLength": 20}},
}  # fmt: skip


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


def is_prefix(text: str) -> bool:
    """Whether some JSON value begins like this, and does not end before."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return False
    try:
        from_json(f"[{text}", allow_partial=True)  # which takes only lists and objects that are cut
    except ValueError:
        return False
    return True


def checked(text: str, reason: str | None, schema: Any) -> None:
    """By the words of O-28."""
    assert reason in ("stop", "length")
    if reason == "stop":
        jsonschema.validate(json.loads(text), schema)
    else:
        assert is_prefix(text), text


def blanks_outside_strings(text: str) -> list[str]:
    return re.findall(r"\s+", re.sub(r'"(?:[^"\\]|\\.)*"?', '""', text))


@pytest.mark.parametrize("form", [OBJECT, schema_format(TWO_TEXTS)])
def test_o27_endless_whitespace(tiny: Server, form: dict[str, Any]) -> None:
    tokens = [
        post(tiny, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
        for text in ("\n", " ", "\n\n", "\t")
    ]
    bias = {str(ids[0]): 20 for ids in tokens if len(ids) == 1}
    body = {"messages": HI, "response_format": form, "max_tokens": 200, "temperature": 0}
    for extra in ({}, {"max_tokens": 60, "temperature": 1.5, "seed": 3}):
        text = ask(tiny, CHAT, **{**body, "logit_bias": bias, **extra}).text
        assert text.startswith("{")
        assert max(map(len, blanks_outside_strings(text)), default=0) <= 16
    free = both(tiny, CHAT, **{**body, "max_tokens": 80})
    checked(free.text, free.finish_reason, {"type": "object"})
    assert free.text == free.text.strip()


@pytest.mark.parametrize("form", [OBJECT, schema_format(TWO_TEXTS)])
def test_o28_complete_ends_and_incomplete_says_length(tiny: Server, form: dict[str, Any]) -> None:
    schema = form.get("json_schema", {}).get("schema", {"type": "object"})

    def run(seed: int, max_tokens: int, extra: dict[str, Any]) -> None:
        body = {"messages": HI, "response_format": form, "max_tokens": max_tokens, "temperature": 1.8, "seed": seed}
        response = post(tiny, CHAT, {**body, **extra, "n": 2})
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            if choice["stop_reason"] is None:
                checked(choice["message"]["content"], choice["finish_reason"], schema)
            else:
                assert is_prefix(choice["message"]["content"])

    extras: list[dict[str, Any]] = [{}, {"stop": ["}"]}, {"stop": ['"']}, {"ignore_eos": True}]
    cases = [
        (seed, limit, extras[seed % 4])
        for seed, limit in zip(range(1, 13), itertools.cycle([1, 2, 5, 20, 80]), strict=False)
    ]
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(run, *case) for case in cases]:
            done.result()


def test_o28_min_tokens_is_capped_by_the_end_of_the_grammar(tiny: Server) -> None:
    body = {"messages": HI, "response_format": schema_format({"enum": [["a"], {"b": 1}]}), "max_tokens": 200}
    for more in ({"min_tokens": 150}, {"min_tokens": 150, "ignore_eos": True}):
        answer = both(tiny, CHAT, **body, **more, temperature=0)
        assert answer.finish_reason == "stop"
        assert json.loads(answer.text) in (["a"], {"b": 1})
        assert answer.num_tokens < 20


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^hello\\!$"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]},
        {"if": {"type": "string"}, "then": {"maxLength": 3}},
        {"type": "string", "format": "email"},
        {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
        {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2, "maxItems": 3},
        {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "null"}},
        {"type": "object", "minProperties": 2, "maxProperties": 2, "additionalProperties": {"type": "null"}},
        {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "number", "maximum": 9}]},
    ],
)
def test_o29_every_keyword_is_held_to_or_refused_by_name(tiny: Server, schema: dict[str, Any]) -> None:
    body = {"messages": HI, "response_format": schema_format(schema), "max_tokens": 40, "temperature": 1.5}
    response = post(tiny, CHAT, {**body, "n": 8, "seed": 1})
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["param"] == "response_format"
        assert any(
            f'"{name}"' in error["message"] or f"'{name}'" in error["message"] or name in error["message"]
            for name in keywords(schema)
        )
        assert post(tiny, CHAT, {**body, "stream": True}).status_code == 400
        return
    for choice in response.json()["choices"]:
        checked(choice["message"]["content"], choice["finish_reason"], schema)


def keywords(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        return set(schema).union(*map(keywords, schema.values()))
    return set().union(*map(keywords, schema)) if isinstance(schema, list) else set()


ENUM_BEHIND_REFERENCE = {
    "type": "array", "minItems": 3, "maxItems": 3, "items": {"$ref": "#/$defs/T"},
    "$defs": {
        "T": {"type": "object", "required": ["who", "mood"], "additionalProperties": False, "properties": {"who": {"$ref": "#/$defs/W"}, "mood": {"$ref": "#/$defs/M"}}},
        "W": {"enum": ["ann", "bob"]}, "M": {"enum": ["up", "down", None, 1, True]},
    },
}  # fmt: skip
TREE = {
    "type": "object", "required": ["v", "kids"], "additionalProperties": False,
    "properties": {"v": {"enum": [1, "x"]}, "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
}  # fmt: skip
INTO_A_LIST = {
    "type": "object", "required": ["left", "right"], "additionalProperties": False,
    "properties": {"left": {"anyOf": [{"enum": ["l", "m"]}, {"type": "null"}]}, "right": {"$ref": "#/properties/left/anyOf/0"}},
}  # fmt: skip


@pytest.mark.parametrize("schema", [ENUM_BEHIND_REFERENCE, TREE, INTO_A_LIST])
def test_o30_references(tiny: Server, schema: dict[str, Any]) -> None:
    body = {"messages": HI, "response_format": schema_format(schema), "max_tokens": 100}
    answers = post(tiny, CHAT, {**body, "temperature": 2.0, "n": 10, "seed": 5}).json()["choices"]
    answers += post(tiny, CHAT, {**body, "temperature": 0}).json()["choices"]
    for choice in answers:
        checked(choice["message"]["content"], choice["finish_reason"], schema)
    assert any(choice["finish_reason"] == "stop" for choice in answers)
    missing = post(tiny, CHAT, {**body, "response_format": schema_format({"$ref": "#/$defs/none"})})
    assert missing.status_code == 400


def numbers_of(response: httpx.Response) -> list[float]:
    """All log-probabilities, of a body that a strict reader takes."""

    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} in JSON")

    text = response.text
    found: list[float] = []
    values = [line.removeprefix("data: ") for line in text.split("\n\n")] if text.startswith("data:") else [text]
    for value in values:
        if value and not value.startswith("[DONE]"):
            json.loads(value, parse_constant=refuse)
            found += [float(number) for number in re.findall(r'"logprob": ?(-?[\d.eE+-]+)', value)]
    return found


def test_o14_masked_tokens_have_finite_log_probabilities(tiny: Server) -> None:
    masked = {
        "messages": [{"role": "user", "content": "yes or no?"}], "response_format": schema_format({"enum": ["yes", "no"]}),
        "logprobs": True, "top_logprobs": 20, "max_tokens": 6,
    }  # fmt: skip
    for body in (masked, {**masked, "stream": True}, {**masked, "top_p": 0.01, "temperature": 0}):
        response = post(tiny, CHAT, body)
        assert response.status_code == 200
        numbers = numbers_of(response)
        assert len(numbers) >= 21
        assert all(-1e4 <= number <= 0 for number in numbers)
    echoed = {"prompt": "correct horse", "echo": True, "logprobs": 1, "temperature": 1, "top_k": 1, "max_tokens": 2}
    response = post(tiny, COMPLETIONS, echoed)
    assert response.status_code == 200
    numbers_of(response)


def test_o52_masks_beside_every_kind_of_row(tiny: Server) -> None:
    """Each answer is that of the request alone."""
    one = {"type": "object", "required": ["k"], "properties": {"k": {"const": 1}}, "additionalProperties": False}
    bodies: list[dict[str, Any]] = [
        {"temperature": 0, "response_format": schema_format(TWO_TEXTS)},
        {"temperature": 1, "top_p": 0.9, "seed": 1},
        {"temperature": 0.01, "top_k": 1, "seed": 2},
        {"temperature": 0, "logit_bias": {str(i): -100 for i in range(300, 320)}},
        {"temperature": 1, "min_p": 0.99, "seed": 3},
        {"temperature": 1, "seed": 4, "response_format": schema_format(one)},
        {"temperature": 1, "seed": 5, "structured_outputs": {"choice": ["only this"]}},
        {"temperature": 1, "seed": 6, "bad_words": ["the", "a"]},
    ]
    bodies = [{"model": "tiny", "messages": HI, "max_tokens": 24, **body} for body in bodies]
    alone = [ask(tiny, CHAT, **body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: ask(tiny, CHAT, **body), bodies))
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert together[6].text == "only this"
    assert json.loads(together[5].text) == {"k": 1}
    none = {"messages": HI, "structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [5], "max_tokens": 4}
    failed = post(tiny, CHAT, none)
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "generation_failed"
    alive(tiny)
