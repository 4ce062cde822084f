"""Fields that constrain the answer: what reaches the engine, and what is refused at the door, by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from http_harness import EOS, HI, House, chat_tokenizer, ids, in_loop, says
from prometheus_client.parser import text_string_to_metric_families

from fakes import Script

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GBNF = 'root ::= "yes" | "no"'


@pytest.fixture
def house() -> Iterator[House]:
    house = House(says("{}"))
    yield house
    house.app.state.service.close()


async def ask(house: House, fields: dict[str, Any], url: str = "/v1/chat/completions") -> Any:
    body = {"messages": HI} if "chat" in url else {"prompt": "Hi"}
    async with house.http() as http:
        return await http.post(url, json={**body, **fields})


async def refusal(house: House, fields: dict[str, Any]) -> dict[str, Any]:
    response = await ask(house, fields)
    assert response.status_code == 400, response.text
    assert not house.client.added, "it was admitted"
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, '%json {"type": "object"'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '"required": ["a"]'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            '"required": ["a"]',
        ),
        ({"structured_outputs": {"json": SCHEMA}}, '"required": ["a"]'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '"required": ["a"]'),
        ({"structured_outputs": {"json_object": True}}, '%json {"type": "object"'),
        ({"structured_outputs": {"regex": "^a/b$"}}, r"/a\/b/"),
        ({"structured_outputs": {"choice": ["yes", "nö"]}}, r'("yes" | "n\u00f6")'),
        ({"structured_outputs": {"grammar": 'start: "x"+'}}, 'start: "x"+'),
        ({"structured_outputs": {"grammar": GBNF}}, "start: "),
        ({"guided_json": SCHEMA}, '"required": ["a"]'),
        ({"guided_regex": "[ab]{3}"}, "/[ab]{3}/"),
        ({"guided_choice": ["yes"]}, '("yes")'),
        ({"guided_grammar": GBNF, "guided_decoding_backend": "auto"}, "start: "),
    ],
)
@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
@in_loop
async def test_each_field_gives_the_engine_a_grammar(
    house: House, url: str, fields: dict[str, Any], expected: str
) -> None:
    response = await ask(house, {**fields, "n": 2}, url)
    assert response.status_code == 200, response.text
    assert "X-Ropeway-Ignored-Fields" not in response.headers
    grammars = {request.sampling.grammar for request in house.client.added}
    assert len(house.client.added) == 2
    assert len(grammars) == 1
    assert expected in grammars.pop()


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
@in_loop
async def test_free_text_has_none(house: House, fields: dict[str, Any]) -> None:
    assert (await ask(house, fields)).status_code == 200
    assert house.client.added[0].sampling.grammar == ""


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("not", {"not": {"type": "string"}}),
        ("if", {"if": {"type": "string"}, "then": {"minLength": 1}}),
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("propertyNames", {"type": "object", "propertyNames": {"pattern": "a"}}),
        ("contains", {"type": "array", "contains": {}}),
        ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
        ("x-guidance", {"type": "object", "x-guidance": {"lenient": True}}),
        ("minProperties", {"type": "object", "minProperties": 2}),
        ("format", {"type": "string", "format": "iri"}),
        ("look-around", {"type": "string", "pattern": "(?=a)b"}),
        ("unsatisfiable", {"type": "array", "items": False, "minItems": 1}),
        ("/$defs/q", {"$ref": "#/$defs/q"}),
    ],
)
@in_loop
async def test_o29_what_cannot_be_held_to_is_refused_by_name(
    house: House, keyword: str, schema: dict[str, Any]
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": schema}}
    error = await refusal(house, {"response_format": form})
    assert error["param"] == "response_format"
    assert error["code"] == "invalid_grammar"
    assert keyword in error["message"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("structured_outputs.regex", {"structured_outputs": {"regex": "a("}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": r"(a)\1"}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": ""}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": ["a", ""]}}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": "start: y"}}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": 'root ::= "a'}}),
        ("structured_outputs.json", {"structured_outputs": {"json": "{"}}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs.whitespace_pattern", {"structured_outputs": {"json": {}, "whitespace_pattern": "x"}}),
        ("guided_json", {"guided_json": {"type": "strange"}}),
        ("guided_regex", {"structured_outputs": {"choice": ["a"]}, "guided_regex": "a"}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": ["a"], "regex": "a"}}),
        ("structured_outputs.json", {"response_format": {"type": "json_object"}, "structured_outputs": {"json": {}}}),
        ("response_format.type", {"response_format": {"type": "yaml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
        ("bad_words", {"bad_words": [""]}),
        ("bad_words", {"bad_words": [" "]}),
        ("bad_words", {"bad_words": ["x"] * 200}),
    ],
)  # fmt: skip
@in_loop
async def test_bad_values_are_named(house: House, param: str, fields: dict[str, Any]) -> None:
    assert (await refusal(house, fields))["param"] == param


@in_loop
async def test_a_deep_schema_is_refused_before_anyone_recurses(house: House) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    assert "nested" in (await refusal(house, {"guided_json": schema}))["message"]


@in_loop
async def test_hostile_grammars_are_refused_and_the_next_one_is_served(house: House) -> None:
    """One would compile for a quarter of a minute, one overflows the compiler's stack, one describes nothing."""
    chain = "".join(f"r{i}: r{i + 1} | r{i + 1} r{i + 1}\n" for i in range(5000))
    hostile = [
        {"guided_json": {"type": "integer", "multipleOf": 999983}},
        {"guided_grammar": f'start: r0\n{chain}r5000: "a"\n'},
        {"guided_json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    ]
    for fields in hostile:
        await refusal(house, fields)
    assert (await ask(house, {"guided_json": SCHEMA})).status_code == 200
    samples = {
        (sample.name, sample.labels.get("cause")): sample.value
        for family in text_string_to_metric_families(house.metrics.page().decode())
        for sample in family.samples
    }
    assert samples["ropeway_grammar_refusals_total", "timeout"] == 1
    assert samples["ropeway_grammar_refusals_total", "crash"] == 1
    assert samples["ropeway_grammar_refusals_total", "invalid"] == 1
    assert samples["ropeway_grammar_compile_seconds_count", None] == 4


@in_loop
async def test_requests_with_one_schema_share_a_try(house: House) -> None:
    answers = await asyncio.gather(*(ask(house, {"guided_json": SCHEMA}) for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    page = house.metrics.page().decode()
    assert "ropeway_grammar_compile_seconds_count 1.0" in page


@in_loop
async def test_bad_words_with_and_without_a_space() -> None:
    house = House()
    assert (await ask(house, {"bad_words": ["fox", "q"]})).status_code == 200
    sampling = house.client.added[0].sampling
    runs = {*sampling.bad_words, *((token,) for token in sampling.banned_token_ids)}
    encode = chat_tokenizer().encode
    assert runs == {tuple(encode(text, False)) for text in ("fox", " fox", "q", " q")}
    assert sampling.bad_words
    assert sampling.banned_token_ids


@in_loop
async def test_a_token_that_completes_the_grammar_is_shown() -> None:
    """It ends the request with STOP, but it is neither an end token nor the client's stop token."""
    house = House(lambda request: Script([*ids("{}"), EOS], complete_after=len(ids("{}"))))
    response = await ask(house, {"response_format": {"type": "json_object"}, "min_tokens": 50, "max_tokens": 60})
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] == "{}"
    assert choice["finish_reason"] == "stop"
    assert response.json()["usage"]["completion_tokens"] == len(ids("{}"))
    house.app.state.service.close()


@in_loop
async def test_a_checker_that_somebody_ended_is_started_again(house: House) -> None:
    assert (await ask(house, {"guided_json": SCHEMA})).status_code == 200
    checker = house.app.state.service.grammars._process
    checker.kill()
    checker.join()
    assert (await ask(house, {"guided_choice": ["a"]})).status_code == 200
    assert house.app.state.service.grammars._process is not checker
