"""The OpenAPI document is valid, complete, and its examples are what the endpoints take."""

from __future__ import annotations

import jsonschema
import pytest
from http_harness import House, in_loop, says

from ropeway.server.openapi import ANSWERS, BODIES, EXAMPLES, STREAMING


@in_loop
async def test_every_route_with_a_body_says_what_it_takes_and_gives() -> None:
    document = House().app.openapi()
    without_body = {"/drain", "/undrain", "/reset_prefix_cache", "/flush_cache", "/v1/requests/{request_id}/cancel"}
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    assert posts == set(BODIES) | without_body
    assert set(EXAMPLES) == set(BODIES)
    for path in BODIES:
        operation = document["paths"][path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]
        assert ("text/event-stream" in operation["responses"]["200"]["content"]) == (path in STREAMING)
        assert ("post", path) in ANSWERS
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["summary"]
            assert "422" not in operation["responses"]


def _examples() -> list[tuple[str, str]]:
    return [(path, name) for path, examples in EXAMPLES.items() for name in examples]


@pytest.mark.parametrize(("path", "name"), _examples())
def test_examples_are_taken_and_answers_are_as_described(path: str, name: str) -> None:
    @in_loop
    async def check() -> None:
        house = House(says())
        document = house.app.openapi()
        body = EXAMPLES[path][name]
        components = {"components": document["components"]}
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.validate(body, {**schema, **components}, cls=jsonschema.Draft202012Validator)
        async with house.http() as http:
            response = await http.post(path, json=body)
            assert response.status_code == 200, response.text
            kind = response.headers["content-type"].split(";")[0]
            answer = document["paths"][path]["post"]["responses"]["200"]["content"][kind]["schema"]
            value = response.json() if kind == "application/json" else response.text
            jsonschema.validate(value, {**answer, **components}, cls=jsonschema.Draft202012Validator)

    check()


@in_loop
async def test_errors_have_the_documented_shape() -> None:
    house = House()
    document = house.app.openapi()
    schema = {"$ref": "#/components/schemas/Error", "components": document["components"]}
    async with house.http() as http:
        for path in BODIES:
            for body in (b"{", b"[]", b'{"model": "other"}', b'{"model": 5}', b""):
                response = await http.post(path, content=body)
                assert response.status_code in (400, 404), (path, body)
                jsonschema.validate(response.json(), schema, cls=jsonschema.Draft202012Validator)
        for method, path in (("GET", "/nothing"), ("GET", "/v1/completions"), ("GET", "/v1/models/other")):
            response = await http.request(method, path)
            assert response.status_code in (404, 405)
            jsonschema.validate(response.json(), schema, cls=jsonschema.Draft202012Validator)
