"""Bad requests: the status, the error body and the field, the same with and without streaming, before anything runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_harness import HI, MAX_MODEL_LEN, VOCAB_SIZE, House, in_loop

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# Fields of both endpoints: (field, bad value)
BAD_FIELDS: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", 2.1),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", [1]),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.5),
    ("n", 0),
    ("n", 129),
    ("n", "2"),
    ("n", True),
    ("n", 2.0),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("presence_penalty", 2.5),
    ("presence_penalty", "x"),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("seed", 1.5),
    ("seed", "1"),
    ("seed", 2**70),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", ["x"] * 17),
    ("stream", "true"),
    ("stream", 1),
    ("stream_options", {"include_usage": "yes"}),
    ("stream_options", []),
    ("logit_bias", {str(VOCAB_SIZE): 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"99999999999": 5}),
    ("logit_bias", {"AI": 5}),
    ("logit_bias", {"1.5": 5}),
    ("logit_bias", {"٣": 5}),
    ("logit_bias", {"": 5}),
    ("logit_bias", {"1": 5, "01": 6}),
    ("logit_bias", {"1": "x"}),
    ("logit_bias", {"1": None}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": -100.5}),
    ("logit_bias", [1]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", ["1"]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [VOCAB_SIZE]),
    ("banned_token_ids", [-1]),
    ("user", 5),
    ("metadata", "x"),
    ("ignore_eos", "yes"),
    ("skip_special_tokens", 0),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("request_id", "a b"),
    ("request_id", "x" * 129),
    ("cache_salt", 5),
    ("model", 5),
]
NOT_YET: list[tuple[str, Any]] = [
    ("service_tier", "flex"),
    ("store", True),
    ("functions", [{"name": "f"}]),
]
ASKS_NOTHING: list[tuple[str, Any]] = [
    ("best_of", 1),
    ("suffix", ""),
    ("response_format", {"type": "text"}),
    ("response_format", None),
    ("prompt_logprobs", None),
    ("structured_outputs", None),
    ("bad_words", []),
    ("guided_json", None),
    ("priority", 0),
    ("service_tier", "auto"),
    ("store", False),
    ("functions", []),
    ("metadata", {"a": 1}),
    ("logit_bias", {}),
    ("logit_bias", {str(VOCAB_SIZE - 1): 1}),
    ("stop", []),
    ("stop_token_ids", []),
    # added by routers
    ("kv_transfer_params", {"do_remote_decode": True}),
    ("bootstrap_room", 5),
    ("session_params", {"id": 1}),
    ("separate_reasoning", True),
]


def _bodies(**fields: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(CHAT, {"messages": HI, **fields}), (COMPLETIONS, {"prompt": "Hi", **fields})]


async def _refused(house: House, url: str, body: dict[str, Any] | bytes, status: int = 400) -> dict[str, Any]:
    """The error, after checking its form; asked with and without streaming."""
    errors = []
    async with house.http() as http:
        for stream in (False, True):
            if isinstance(body, bytes):
                content = body
            else:
                content = json.dumps(body if "stream" in body else {**body, "stream": stream}).encode()
            response = await http.post(url, content=content)
            assert response.status_code == status, response.text
            assert response.headers["content-type"] == "application/json"
            [(key, error)] = response.json().items()
            assert key == "error"
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
            errors.append(error)
    assert errors[0] == errors[1]
    assert house.client.added == []
    return errors[0]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
@in_loop
async def test_bad_values_name_their_field(field: str, value: Any) -> None:
    house = House()
    for url, body in _bodies(**{field: value}):
        error = await _refused(house, url, body)
        assert error["param"].split(".")[0].split("[")[0] == field
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("field", "value"), NOT_YET)
@in_loop
async def test_known_fields_that_cannot_be_honoured(field: str, value: Any) -> None:
    house = House(unknown_fields="ignore")
    for url, body in _bodies(**{field: value}):
        error = await _refused(house, url, body)
        assert "not supported yet" in error["message"]
        assert error["param"] == field


@pytest.mark.parametrize(("field", "value"), ASKS_NOTHING)
@in_loop
async def test_values_that_ask_for_nothing(field: str, value: Any) -> None:
    house = House(unknown_fields="reject")
    async with house.http() as http:
        for url, body in _bodies(**{field: value}):
            response = await http.post(url, json=body)
            assert response.status_code == 200, response.text
            assert "x-ropeway-ignored-fields" not in response.headers


@in_loop
async def test_null_is_absent() -> None:
    """O-32."""
    fields = [
        "temperature",
        "top_p",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stop",
        "stream",
        "stream_options",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "presence_penalty",
        "frequency_penalty",
        "response_format",
        "tools",
        "tool_choice",
        "user",
        "parallel_tool_calls",
        "metadata",
        "top_k",
        "min_p",
        "min_tokens",
        "ignore_eos",
        "add_generation_prompt",
        "request_id",
        "priority",
        "foo",
        "echo",
        "suffix",
        "best_of",
        "model",
    ]
    house = House()
    async with house.http() as http:
        for url, body in _bodies(seed=1):
            for extra in [{}, *({field: None} for field in fields), dict.fromkeys(fields)]:
                response = await http.post(url, json={**body, **extra})
                assert response.status_code == 200, (extra, response.text)
        by_url = len(fields) + 2
        for start in (0, by_url):
            samplings = {str(request.sampling) for request in house.client.added[start : start + by_url]}
            assert len(samplings) == 1
        for url, missing in ((CHAT, "messages"), (COMPLETIONS, "prompt")):
            error = (await http.post(url, json={missing: None})).json()["error"]
            assert (error["param"], error["code"]) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [""],
        [],
        [[]],
        ["ok", ""],
        [[], [1, 2]],
        [VOCAB_SIZE],
        [999999],
        [-1],
        [1.5],
        ["a", 1],
        [[1, 2], [3, VOCAB_SIZE]],
        [True],
        [9223372036854775808],
        [10**30],
        [None],
        [[1], "a"],
        [[1.0]],
        [["a"]],
        [[[1]]],
        {"a": 1},
        5,
        True,
    ],
)
@in_loop
async def test_bad_prompts(prompt: Any) -> None:
    """O-31, O-33."""
    error = await _refused(House(), COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HI, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": HI, "logprobs": 2}, "logprobs"),
        ({"messages": HI, "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"messages": HI, "min_tokens": 10**6}, "min_tokens"),
        ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": HI, "stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": HI, "chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"messages": HI, "reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": HI, "allowed_token_ids": [1], "banned_token_ids": [1]}, "banned_token_ids"),
    ],
)
@in_loop
async def test_bad_chat_requests(body: dict[str, Any], param: str) -> None:
    error = await _refused(House(), CHAT, body)
    assert (error["param"] or "").startswith(param)


@in_loop
async def test_completions_logprobs_is_a_number_with_a_limit() -> None:
    house = House()
    for value in (21, -1, True, "3", 1.5):
        assert (await _refused(house, COMPLETIONS, {"prompt": "x", "logprobs": value}))["param"] == "logprobs"
    house = House(max_logprobs=3)
    assert (await _refused(house, COMPLETIONS, {"prompt": "x", "logprobs": 4}))["param"] == "logprobs"


@in_loop
async def test_too_long_for_the_context() -> None:
    """O-01: before the first byte, in the code that clients look for."""
    house = House()
    error = await _refused(house, CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert str(MAX_MODEL_LEN) in error["message"]
    for prompt, max_tokens in (([5] * MAX_MODEL_LEN, 1), ([5] * 10, MAX_MODEL_LEN - 9)):
        error = await _refused(house, COMPLETIONS, {"prompt": prompt, "max_tokens": max_tokens})
        assert error["code"] == "context_length_exceeded"
    async with house.http() as http:
        body = {"prompt": [5] * 10, "max_tokens": MAX_MODEL_LEN - 10, "ignore_eos": True}
        assert (await http.post(COMPLETIONS, json=body)).status_code == 200


@in_loop
async def test_unknown_model_is_a_404() -> None:
    house = House()
    for url, body in _bodies(model="gpt-nope"):
        error = await _refused(house, url, body, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


NESTED = b'{"messages": [{"role": "user", "content": "x"}], "metadata": {"a": %s1%s}}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}',
        b'{"prompt": "a", "metadata": {"x": 1, "x": 1}}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "metadata": {"x": 1e400}}',
        b'{"prompt": "a", "logit_bias": {"1": 1e400}}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b"\xff\xfe{\x00}\x00",
        b'{"prompt": "a",}',
        b"[" * 100_000,
        NESTED % (b"[" * 5000, b"]" * 5000),
        NESTED % (b'{"a":' * 1010, b"}" * 1010),
    ],
)
@in_loop
async def test_bad_json(body: bytes) -> None:
    error = await _refused(House(), COMPLETIONS, body)
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    "body",
    [
        rb'{"messages":[{"role":"user","content":"emoji \ud83d"}],"max_tokens":2}',
        rb'{"messages":[{"role":"user","content":"x \ude00 y"}]}',
        rb'{"messages":[{"role":"user","content":"x"}],"stop":"\udcf0"}',
        rb'{"messages":[{"role":"user","content":"x"}],"user":"\udcf0"}',
        rb'{"messages":[{"role":"user","content":"x"}],"model":"\udcf0"}',
        rb'{"messages":[{"role":"user","content":"x"}],"\ud800":1}',
        rb'{"messages":[{"role":"user","content":"x"}],"tools":[{"description":"\ud800"}]}',
    ],
)
@in_loop
async def test_lone_surrogates(body: bytes) -> None:
    """O-34."""
    await _refused(House(), CHAT, body)


@in_loop
async def test_text_that_is_odd_but_fine() -> None:
    house = House()
    async with house.http() as http:
        for content in (rb"\ud83d\ude00", rb"a\u0000b", "žluť".encode()):
            body = b'{"messages":[{"role":"user","content":"%s"}]}' % content
            assert (await http.post(CHAT, content=body)).status_code == 200


@in_loop
async def test_unknown_fields() -> None:
    fields = {"foo": 1, "x\r\ny": 2, "žluť": 3}
    async with House().http() as http:
        for url, body in _bodies(**fields):
            response = await http.post(url, json=body)
            assert response.status_code == 200
            assert response.headers["x-ropeway-ignored-fields"] == "foo, x??y, ?lu?"
    house = House(unknown_fields="reject")
    for url, body in _bodies(**fields):
        assert (await _refused(house, url, body))["param"] == "foo"
    async with House(unknown_fields="ignore").http() as http:
        for url, body in _bodies(**fields):
            assert "x-ropeway-ignored-fields" not in (await http.post(url, json=body)).headers


@in_loop
async def test_large_bodies_are_refused_while_they_come() -> None:
    house = House(max_request_bytes=2000)
    sent = 0

    async def chunks() -> Any:
        nonlocal sent
        for _ in range(1000):
            sent += 500
            yield b" " * 500

    async with house.http() as http:
        response = await http.post(CHAT, content=b" " * 2001)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        response = await http.post(CHAT, content=chunks())  # no content-length
        assert response.status_code == 413
        assert sent < 5000
        body = json.dumps({"messages": HI}).encode()
        assert (await http.post(CHAT, content=body + b" " * (2000 - len(body)))).status_code == 200


@in_loop
async def test_unknown_routes_and_methods() -> None:
    async with House().http() as http:
        response = await http.get("/v1/nothing")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
        response = await http.get(CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
        assert response.headers["allow"] == "POST"
        assert (await http.post("/v1/chat/completions/", json={})).status_code == 404


@in_loop
async def test_the_openapi_document_names_the_bodies() -> None:
    async with House().http() as http:
        document = (await http.get("/openapi.json")).json()
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    schemas = document["components"]["schemas"]
    assert {"messages", "temperature", "top_k"} <= set(schemas["ChatRequest"]["properties"])
    assert "prompt" in schemas["CompletionRequest"]["required"]
    text = json.dumps(document)
    for name in text.split('"#/components/schemas/')[1:]:
        assert name.split('"')[0] in schemas
