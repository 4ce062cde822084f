"""/v1/embeddings over a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from typing import Any

import openai
import pytest
from http_harness import MAX_MODEL_LEN, VOCAB_SIZE, House, ids, in_loop, until

from fakes import Script
from ropeway.protocol import AddRequest
from ropeway.server.openai.embeddings import normalised

URL = "/v1/embeddings"
STATE = [3.0, 0.0, -4.0, 12.0]
UNIT = [3 / 13, 0.0, -4 / 13, 12 / 13]


def script(request: AddRequest) -> Script:
    return Script([], embedding=STATE)


@in_loop
async def test_four_forms_of_input() -> None:
    house = House(script)
    hello, fox = ids("Hello"), ids("fox trot")
    async with house.http() as http:
        for value, expected in (
            ("Hello", [hello]),
            (hello, [hello]),
            (["Hello", "fox trot"], [hello, fox]),
            ([hello, fox], [hello, fox]),
        ):
            house.client.added.clear()
            answer = (await http.post(URL, json={"model": "org/alias", "input": value})).json()
            assert [request.prompt_token_ids for request in house.client.added] == expected
            assert {request.sampling.max_tokens for request in house.client.added} == {0}
            assert {request.sampling.pooling for request in house.client.added} == {"mean"}
            assert (answer["object"], answer["model"]) == ("list", "tiny")
            assert [item["index"] for item in answer["data"]] == list(range(len(expected)))
            for item in answer["data"]:
                assert item["object"] == "embedding"
                assert item["embedding"] == pytest.approx(UNIT)
            length = sum(map(len, expected))
            assert answer["usage"] == {
                "prompt_tokens": length,
                "total_tokens": length,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
    await house.quiet()


@in_loop
async def test_fields_change_what_they_should() -> None:
    house = House(script)
    async with house.http() as http:

        async def vector(**fields: Any) -> Any:
            response = await http.post(URL, json={"input": "Hello there", **fields})
            assert response.status_code == 200, response.text
            return response.json()["data"][0]["embedding"]

        assert await vector(dimensions=2) == [1.0, 0.0]
        assert await vector(dimensions=3) == pytest.approx([0.6, 0.0, -0.8])
        assert await vector(dimensions=4) == pytest.approx(UNIT)
        encoded = base64.b64decode(await vector(encoding_format="base64"))
        assert struct.unpack("<4f", encoded) == pytest.approx(UNIT)
        await vector(pooling="last", user="me", cache_salt="s")
        request = house.client.added[-1]
        assert (request.sampling.pooling, request.tenant, request.cache_salt) == ("last", "me", "s")
        await vector(truncate_prompt_tokens=1)
        assert house.client.added[-1].prompt_token_ids == ids("Hello there")[-1:]
        await vector(input=[5] * 1000, truncate_prompt_tokens=-1)
        assert house.client.added[-1].prompt_token_ids == [5] * MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [VOCAB_SIZE]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": None}, "input"),
        ({"input": [5] * (MAX_MODEL_LEN + 1)}, "input"),
        ({"input": ["a"] * 9}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 5}, "dimensions"),
        ({"dimensions": 2.0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"user": 5}, "user"),
    ],
)
@in_loop
async def test_bad_fields(fields: dict[str, Any], param: str) -> None:
    house = House(script, max_num_queued_reqs=8)
    async with house.http() as http:
        response = await http.post(URL, json={"input": "Hello", **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert house.client.added == []


@in_loop
async def test_unknown_model() -> None:
    async with House(script).http() as http:
        response = await http.post(URL, json={"input": "Hello", "model": "nix"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@in_loop
async def test_the_openai_client_reads_them() -> None:
    house = House(script)
    async with house.serving() as url:
        client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        answer = await client.embeddings.create(model="tiny", input=["Hello", "fox"])  # as base64, unless told
        assert [item.embedding for item in answer.data] == [pytest.approx(UNIT)] * 2
        plain = await client.embeddings.create(model="tiny", input="Hello", encoding_format="float", dimensions=2)
        assert plain.data[0].embedding == [1.0, 0.0]
        assert plain.usage.prompt_tokens == len(ids("Hello"))
        await client.close()
    await house.quiet()


@in_loop
async def test_a_client_that_leaves_ends_all_of_its_inputs() -> None:
    gate = asyncio.Event()
    house = House(lambda request: Script([], embedding=STATE, waits={0: gate}))
    async with house.serving() as url:
        client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        asking = asyncio.create_task(client.embeddings.create(model="tiny", input=["a", "b", "c"]))
        await until(lambda: len(house.client.live) == 3)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await house.quiet()
        await client.close()
    assert len(house.client.aborted) == 3


@in_loop
async def test_a_cancelled_request_has_no_embeddings() -> None:
    gate = asyncio.Event()
    house = House(lambda request: Script([], embedding=STATE, waits={0: gate}))
    async with house.http() as http:
        asking = asyncio.create_task(http.post(URL, json={"input": "a"}))
        await until(lambda: bool(house.client.live))
        await house.client.abort_all()
        response = await asking
    assert (response.status_code, response.json()["error"]["code"]) == (503, "aborted")
    await house.quiet()


def test_normalised() -> None:
    assert normalised([0.0, 0.0]) == [0.0, 0.0]
    assert math.hypot(*normalised([1e-30, 2e-30])) == pytest.approx(1.0)


@in_loop
async def test_states_that_are_not_numbers_are_an_error() -> None:
    house = House(lambda request: Script([], embedding=[1.0, math.nan]))
    async with house.http() as http:
        response = await http.post(URL, json={"input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "generation_failed")
