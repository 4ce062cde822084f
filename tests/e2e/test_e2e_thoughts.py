"""A thought's budget, kept by the engine: the demo model is told that it thinks, and would never stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from e2e_server import Server, running

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--reasoning-parser", "qwen3", "--num-gpu-blocks-override", "500", "--max-model-len", "512"]
    with running(flags, tmp_path_factory.mktemp("thinker")) as server:
        yield server


def ask(server: Server, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message and the usage; the message's thought has begun."""
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "<think>One, two,"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 48, "temperature": 0, **fields}
    status, _, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["message"], answer["usage"]


def test_a_thought_without_a_budget_goes_on(thinker: Server) -> None:
    message, usage = ask(thinker)
    assert message["content"] is None
    assert message["reasoning_content"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 48


@pytest.mark.parametrize("budget", [0, 1, 9])
def test_a_budget_ends_it(thinker: Server, budget: int) -> None:
    message, usage = ask(thinker, thinking_token_budget=budget)
    assert ("reasoning_content" in message) == (budget > 0)
    assert message["content"]
    assert "think>" not in message["content"]
    marks = 5  # tokens that the end of the thought may take
    assert budget <= usage["completion_tokens_details"]["reasoning_tokens"] <= budget + marks


def test_a_format_holds_after_the_thought_only(thinker: Server) -> None:
    message, _ = ask(thinker, thinking_token_budget=6, structured_outputs={"choice": ["three", "four"]})
    assert message["reasoning_content"]
    assert message["content"] in ("three", "four")
    tool = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {}}}}
    message, _ = ask(thinker, thinking_token_budget=6, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert message["reasoning_content"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["say"]
