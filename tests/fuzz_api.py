"""Requests made from the OpenAPI document, right ones and wrong ones, against a running server.

    python tests/fuzz_api.py http://127.0.0.1:8000 --requests 3000

Whatever is sent, the status is below 500, every error has the one shape, and the server still answers. Prints how many requests got which status, per operation. Called by: test_fuzz.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

# These change the state of the server for the requests after them.
LEFT_OUT = {("POST", "/drain"), ("POST", "/undrain")}
REQUIRED = {"messages", "prompt", "input", "max_tokens", "tokens"}
HELLO = [{"role": "user", "content": "Hello"}]


def fuzz(url: str, num_requests: int, *, max_tokens: int | None = None) -> dict[str, Counter[int]]:
    """Statuses per operation. max_tokens: put into generating bodies without one, so that answers stay short.
    Raises AssertionError with the request that broke a rule."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [
        operation for operation in _operations(schema) if (operation.method.upper(), operation.path) not in LEFT_OUT
    ]
    bodies = [operation for operation in operations if operation.body]
    others = [operation for operation in operations if not operation.body]
    share = max(1, (num_requests - 4 * len(others)) // (2 * len(bodies)))
    statuses: dict[str, Counter[int]] = {}
    with httpx.Client(base_url=url, timeout=60) as http:
        for operation in operations:
            counter = statuses.setdefault(f"{operation.method.upper()} {operation.path}", Counter())
            for mode in (
                (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if operation.body else (GenerationMode.POSITIVE,)
            ):
                _fuzz_operation(http, operation, mode, share if operation.body else 4, max_tokens, counter)
            assert http.get("/health").status_code == 200, f"dead after {operation.label}"
    return statuses


def _operations(schema: Any) -> Iterator[Any]:
    for result in schema.get_all_operations():
        yield result.ok()


def _fuzz_operation(
    http: httpx.Client,
    operation: Any,
    mode: GenerationMode,
    num_requests: int,
    max_tokens: int | None,
    counter: Counter[int],
) -> None:
    @settings(
        max_examples=num_requests,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), choice=st.randoms(use_true_random=False))
    def send(case: Any, choice: random.Random) -> None:
        if isinstance(case.body, dict):
            case.body = copy.deepcopy(case.body)  # a strategy may give out the same object again
            if mode is GenerationMode.POSITIVE:
                _thin_out(case.body, choice)
            if max_tokens is not None:
                _shorten(case.body, max_tokens)
        response = case.call(base_url=str(http.base_url).rstrip("/"), timeout=60)
        counter[response.status_code] += 1
        told = f"{operation.label} {str(case.body)[:2000]} -> {response.status_code} {response.text[:500]}"
        if response.status_code >= 400:
            error = response.json()["error"]
            assert {"message", "type", "param", "code"} <= error.keys(), told
        assert response.status_code < 500, told

    send()


def _thin_out(body: dict[str, Any], choice: random.Random) -> None:
    """Keep what is required, often, and a few of the other fields: of thirty random ones, one is always wrong."""
    optional = [name for name in body if name not in REQUIRED]
    for name in set(optional) - set(choice.sample(optional, min(len(optional), choice.randint(0, 4)))):
        del body[name]
    body.pop("model", None)
    if choice.random() < 0.7:
        for name, value in (("messages", HELLO), ("prompt", "Hello"), ("input", "Hello")):
            if name in body:
                body[name] = value


def _shorten(body: dict[str, Any], max_tokens: int) -> None:
    """Generated numbers may ask for a whole context of tokens, a hundred times over."""
    if "input" in body:
        body.setdefault("max_output_tokens", max_tokens)
    elif "messages" in body or "prompt" in body:
        body.setdefault("max_tokens", max_tokens)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"):
        value = body.get(name)
        if type(value) is int and value > max_tokens:
            body[name] = max_tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--max-tokens", type=int, default=8)
    arguments = parser.parse_args()
    total: Counter[int] = Counter()
    for name, counter in fuzz(arguments.url, arguments.requests, max_tokens=arguments.max_tokens).items():
        print(f"{name:45} {dict(sorted(counter.items()))}")
        total += counter
    print(f"{total.total()} requests: {dict(sorted(total.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
