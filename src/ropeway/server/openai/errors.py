"""Every error in the one shape that OpenAI clients parse: ``{"error": {message, type, param, code}}``.

Owns: that shape, and reading JSON strictly. Must not know: endpoints. Called by: app (handlers, middleware), service.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.responses import Response

from ropeway.errors import RequestError


def error_body(error: RequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> Response:
    return json_response(error_body(error), status=error.status, headers=error.headers)


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status_code=status, headers=headers, media_type="application/json")


def internal_error() -> RequestError:
    """What a client is told of a bug: nothing. The log has the rest."""
    return RequestError("Internal server error.", status=500, type="server_error", code="internal_error")


def deadline_exceeded() -> RequestError:
    """Not a 5xx: a balancer takes those for a replica's fault, and this is the client's own limit."""
    return RequestError(
        "The request's deadline_ms passed before its first token.",
        status=408,
        type="timeout_error",
        code="deadline_exceeded",
        headers={"x-should-retry": "false"},  # OpenAI's and Anthropic's clients would
    )


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object, read strictly. Raises RequestError(400) for what lenient parsers let through: invalid UTF-8, lone
    surrogates, NaN, numbers that overflow to infinity, deep nesting, and keys given twice."""
    try:
        value = orjson.loads(body)
        json.loads(body, object_pairs_hook=_reject_duplicates)
    except RecursionError:
        raise RequestError("The request body is nested too deeply.", code="invalid_json") from None
    except ValueError as error:
        raise RequestError(f"The request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("The request body must be a JSON object.", code="invalid_json")
    return value


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("an object has the same key twice")


def invalid_fields(error: ValidationError) -> RequestError:
    """The first offending field of a pydantic error, in the words of an API and without the client's input."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    field = errors[0]["loc"][:1]
    same_field = [entry for entry in errors if entry["loc"][:1] == field]
    param = _path(same_field[0]["loc"]) if len(same_field) == 1 else _path(field)
    if same_field[0]["type"] == "missing":
        return RequestError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    reasons = dict.fromkeys(entry["msg"][0].lower() + entry["msg"][1:] for entry in same_field)  # one per union member
    return RequestError(f"Invalid value for '{param}': {', or '.join(reasons)}.", param=param, code="invalid_value")


def refused_grammar(error: Exception, param: str) -> RequestError:
    """param: the field that the grammar comes from."""
    return RequestError(f"Invalid value for '{param}': {error}.", param=param, code="invalid_grammar")


def _path(loc: Sequence[str | int]) -> str:
    """``("messages", 0, "role")`` to ``messages[0].role``."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
