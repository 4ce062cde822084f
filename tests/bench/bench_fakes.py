"""A scripted HTTP server and a small tokenizer for the tests of the benchmark client. Called by: test_bench_*.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ropeway.server.tokenizer import Tokenizer

MODEL = "tiny"
NUM_WORDS = 1500


@cache
def tokenizer_folder() -> Path:
    """A byte-level BPE that has learnt many whole words, so that prompts of words can be made."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, 4)) for _ in range(NUM_WORDS)]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" " + " ".join(words)] * 2, trainer)
    folder = Path(tempfile.mkdtemp(prefix="bench-tokenizer-"))
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    return folder


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(tokenizer_folder())


# Answers


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def completion_events(
    texts: Sequence[str], usage: tuple[int, int] | None = None, reason: str = "length"
) -> list[bytes]:
    """One event for each text, the last with the reason; usage (prompt, completion) in its own, and the end."""
    events = [
        event({"choices": [{"index": 0, "text": text, "finish_reason": reason if index == len(texts) - 1 else None}]})
        for index, text in enumerate(texts)
    ]
    return [*events, *usage_events(usage), event(b"[DONE]")]


def chat_events(texts: Sequence[str], usage: tuple[int, int] | None = None) -> list[bytes]:
    """The role first, the reason last, as servers of chats do."""

    def chunk(delta: Any, reason: str | None = None) -> bytes:
        return event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    return [
        chunk({"role": "assistant", "content": ""}),
        *(chunk({"content": text}) for text in texts),
        chunk({}, "stop"),
        *usage_events(usage),
        event(b"[DONE]"),
    ]


def usage_events(usage: tuple[int, int] | None) -> list[bytes]:
    if usage is None:
        return []
    return [event({"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}})]


def chunked(events: Sequence[bytes], headers: str = "") -> list[bytes]:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{headers}Transfer-Encoding: chunked\r\n\r\n"
    return [head.encode(), *(b"%x\r\n%b\r\n" % (len(data), data) for data in events), b"0\r\n\r\n"]


def plain(status: str, body: bytes, headers: str = "") -> list[bytes]:
    return [f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body]


def json_answer(value: Any, status: str = "200 OK") -> list[bytes]:
    return plain(status, json.dumps(value).encode(), "Content-Type: application/json\r\n")


MODELS = json_answer({"data": [{"id": MODEL, "root": str(tokenizer_folder())}]})
CLOSE = b""  # among the parts of an answer: close the connection here


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int  # which one it came on, counted from 0


@dataclass
class FakeServer:
    """Answers each request with the parts that ``script(request)`` returns, in a thread of its own.

    A part is bytes, sent as they are, or a number of seconds to wait.
    """

    script: Callable[[Request], Sequence[bytes | float]]
    requests: list[Request] = field(default_factory=list)
    num_connections: int = 0
    num_left: int = 0  # connections that the client closed while it was answered
    num_answering: int = 0
    most_answering: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeServer]:
        loop = asyncio.new_event_loop()
        started = threading.Event()
        stop = asyncio.Event()

        async def main() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            await stop.wait()
            server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
        thread.start()
        assert started.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)
            loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self.num_connections
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.splitlines()
                method, path, _ = first.split(" ")
                headers = dict(line.split(": ", 1) for line in lines if line)
                body = await reader.readexactly(int(headers.get("Content-Length", "0")))
                request = Request(method, path, headers, json.loads(body) if body else None, connection)
                self.requests.append(request)
                self.num_answering += 1
                self.most_answering = max(self.most_answering, self.num_answering)
                try:
                    if not await self._answer(reader, writer, self.script(request)):
                        return
                finally:
                    self.num_answering -= 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parts: Sequence[bytes | float]
    ) -> bool:
        """Whether the connection goes on."""
        for part in parts:
            if part == CLOSE:
                return False
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
                continue
            await asyncio.sleep(part)
            if reader.at_eof():
                self.num_left += 1
                return False
        return True


def openai_server(answer: Callable[[Request], Sequence[bytes | float]], models: Sequence[bytes] = MODELS) -> FakeServer:
    """GET /v1/models and whatever the answer is to anything else."""
    return FakeServer(lambda request: models if request.path.endswith("/models") else answer(request))
