"""The whole HTTP front end over a scripted engine, in one event loop. Called by: test_http_*.py, test_metrics.py."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from small_tokenizers import write_folder

from fakes import FakeEngineClient, Script
from ropeway.config import build_config
from ropeway.metrics import Metrics
from ropeway.protocol import AddRequest, EngineReady
from ropeway.server.app import create_app
from ropeway.server.tokenizer import Tokenizer

# Refuses two messages in a row by one role, so that a template's own error can be seen.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first and message.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if tools %}tools: {{ tools | length }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_MODEL_LEN = 200
TEXT = " The quick brown fox"
HI = [{"role": "user", "content": "Hi"}]


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine function."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

    return run


@cache
def chat_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write_folder("byte_level", Path(folder), chat_template=CHAT_TEMPLATE))


def ids(text: str) -> list[int]:
    return chat_tokenizer().encode(text)


EOS = chat_tokenizer().eos_token_ids[0]
VOCAB_SIZE = chat_tokenizer().vocab_size
READY = EngineReady(
    max_model_len=MAX_MODEL_LEN,
    vocab_size=VOCAB_SIZE,
    num_blocks=100,
    block_size=16,
    dtype="float32",
    device="cpu",
    architecture="LlamaForCausalLM",
    hidden_size=4,
    startup_seconds={"load": 0.25},
)


def says(text: str = TEXT, **more: Any) -> Callable[[AddRequest], Script]:
    """A script: the text, then the end token."""
    return lambda request: Script([*ids(text), EOS], **more)


class House:
    """An app with what it stands on."""

    def __init__(
        self,
        script: Callable[[AddRequest], Script] | None = None,
        *,
        started: bool = True,
        model_folder: Path | None = None,
        tokenizer: Tokenizer | None = None,
        ready: EngineReady = READY,
        **flags: Any,
    ) -> None:
        self.config = build_config({"served_model_name": ["tiny", "org/alias"], **flags})
        self.metrics = Metrics("tiny", self.config)
        self.client = FakeEngineClient(script or says(), ready=ready, on_step=self.metrics.on_step)
        self.app = create_app(
            self.config,
            self.client,
            tokenizer or chat_tokenizer(),
            self.metrics,
            ready=ready if started else None,
            model_folder=model_folder,
        )
        self.lifecycle = self.app.state.lifecycle

    def http(self, root_path: str = "", **headers: str) -> httpx.AsyncClient:
        """In-process requests: no sockets. Bodies come whole, so use serving() for streams that are watched."""
        transport = httpx.ASGITransport(self.app, root_path=root_path)
        return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """A real server on a free port; yields its URL."""

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Any:
                yield

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            server = Server(uvicorn.Config(self.app, lifespan="off", log_config=None, ws="none", http="httptools"))
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.001)
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await task

    async def quiet(self) -> None:
        """Until nothing is in flight any more."""
        assert await self.lifecycle.wait_idle(10)
        assert not self.client.live


def events(body: str) -> list[Any]:
    """The stream's events; "[DONE]" stays a string. Comments are left out, anything else that is odd fails."""
    assert body.endswith("\n\n")
    result: list[Any] = []
    for block in body[:-2].split("\n\n"):
        if block.startswith(":"):
            assert "data:" not in block
            continue
        assert block.startswith("data: ")
        assert "\n" not in block
        data = block.removeprefix("data: ")
        result.append(data if data == "[DONE]" else json.loads(data))
    return result


def stream_text(stream: Sequence[Any], index: int = 0) -> str:
    """Of one choice of a chat or completion stream."""
    text = ""
    for value in stream:
        for choice in value["choices"] if isinstance(value, dict) else ():
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")
