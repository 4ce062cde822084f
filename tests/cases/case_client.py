"""Requests of the reported faults, streamed and not, with what must hold of every stream. Called by: test_case_*.py."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
from e2e_server import Server

TINY = ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048", "--block-size", "16"]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BROWN, QUICK, HALF_EMOJI, REPO_NAME, END = 6354, 2365, 10813, 3, 2  # token ids of the demo model
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


def forced(token_id: int) -> dict[str, Any]:
    """Every step gives this token, so the text is known without trusting the model."""
    return {**GREEDY, "logit_bias": {str(token_id): 100}}


@dataclass
class Answer:
    """One choice."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)  # of a stream

    @property
    def num_tokens(self) -> int:
        return int(self.usage["completion_tokens"])


def post(server: Server, path: str, body: dict[str, Any] | bytes, **more: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, timeout=60, **more)


def ask(server: Server, path: str, *, stream: bool = False, **body: Any) -> Answer:
    """The first choice."""
    if stream:
        return read_stream(post(server, path, {**body, "stream": True, "stream_options": {"include_usage": True}}).text)
    response = post(server, path, body)
    assert response.status_code == 200, response.text
    value = response.json()
    choice = value["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(text, choice["finish_reason"], value["usage"])


def read_stream(body: str, index: int = 0) -> Answer:
    """One choice of a stream, whose form is checked for every chunk (O-02, O-03)."""
    answer = Answer()
    heads = set()
    blocks = body.removesuffix("\n\n").split("\n\n")
    assert blocks[-1] == "data: [DONE]", body[-500:]
    for block in blocks[:-1]:
        if block.startswith(":"):
            assert "data:" not in block
            continue
        chunk = json.loads(block.removeprefix("data: "))
        heads.add((chunk["id"], chunk["object"], chunk["created"], chunk["model"]))
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk["choices"]:
            assert "finish_reason" in choice
            assert choice["finish_reason"] in (None, "stop", "length", "tool_calls", "content_filter")
            if choice["index"] == index:
                assert answer.finish_reason is None, "something came after the end"
                answer.finish_reason = choice["finish_reason"]
                piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                assert isinstance(piece, str)
                answer.pieces.append(piece)
    assert len(heads) == 1
    answer.text = "".join(answer.pieces)
    return answer


def both(server: Server, path: str, **body: Any) -> Answer:
    """The answer, the same with and without streaming."""
    whole, streamed = ask(server, path, **body), ask(server, path, stream=True, **body)
    assert (streamed.text, streamed.finish_reason) == (whole.text, whole.finish_reason)
    assert streamed.num_tokens == whole.num_tokens
    return whole


def alive(server: Server) -> None:
    assert server.get("/health")[0] == 200
    assert ask(server, COMPLETIONS, **GREEDY, prompt="The capital of France is", max_tokens=3).text == " Paris.\n"
