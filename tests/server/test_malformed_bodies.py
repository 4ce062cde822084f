"""Bodies that are no request at all: every route that reads one refuses them alike, and goes on."""

from __future__ import annotations

import json

import pytest
from http_harness import HI, House, in_loop, says

from ropeway.server.openapi import BODIES

WHOLE = json.dumps({"messages": HI, "prompt": "Hi", "input": "Hi", "tokens": [1], "max_tokens": 2}).encode()


def with_field(text: bytes) -> bytes:
    """The whole body with one more field, given as raw JSON."""
    return WHOLE[:-1] + b', "x": ' + text + b"}"


MALFORMED = {
    "nothing": b"",
    "cut": WHOLE[:-1],
    "cut in a text": WHOLE[: WHOLE.index(b"Hi") + 1],
    "more behind it": WHOLE + b"{}",
    "a list": b"[1]",
    "a number": b"7",
    "null": b"null",
    "a lone surrogate": with_field(rb'"\ud83d"'),
    "a lone low surrogate": with_field(rb'{"\ude00": 1}'),
    "invalid UTF-8": with_field(b'"\xff"'),
    "a number beyond every float": with_field(b"1e309"),
    "NaN": with_field(b"NaN"),
    "minus infinity": with_field(b"-Infinity"),
    "deep lists": with_field(b"[" * 100_000 + b"]" * 100_000),
    "deep objects": with_field(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "the same key twice": with_field(b'1, "x": 2'),
    "a byte order mark of UTF-16": WHOLE.decode().encode("utf-16"),
    "form data": b"prompt=Hi&max_tokens=2",
}


@pytest.mark.parametrize("path", BODIES)
def test_malformed_bodies_are_refused(path: str) -> None:
    @in_loop
    async def check() -> None:
        house = House(says(), max_request_bytes="1MiB")
        async with house.http() as http:
            for name, body in MALFORMED.items():
                response = await http.post(path, content=body)
                assert response.status_code == 400, name
                error = response.json()["error"]
                assert error["type"] == "invalid_request_error", name
                assert error["code"] == "invalid_json", name
                assert error["message"], name
            response = await http.post(path, content=b'{"prompt":"' + b"x" * 2**21)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
            assert (await http.get("/health")).status_code == 200
        assert not house.client.added

    check()


@pytest.mark.parametrize("path", BODIES)
def test_fields_of_the_wrong_type_are_named(path: str) -> None:
    @in_loop
    async def check() -> None:
        house = House(says())
        async with house.http() as http:
            for name in BODIES[path].model_fields:
                wrong = 5.5 if name not in ("temperature", "top_p", "min_p", "repetition_penalty") else "hot"
                if name in ("presence_penalty", "frequency_penalty", "queue_timeout_ms", "deadline_ms"):
                    wrong = [1]
                body = {key: value for key, value in json.loads(WHOLE).items() if key in BODIES[path].model_fields}
                response = await http.post(path, json={**body, name: wrong})
                assert response.status_code == 400, name
                param = response.json()["error"]["param"]
                assert param is not None, name
                assert param.split("[")[0].split(".")[0] == name, response.text
        assert not house.client.added

    check()
