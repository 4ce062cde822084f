"""The load: closed-loop clients that stream completions over HTTP and cost the server under test as little as they can.

Owns: the wire. Knows nothing of which system answers. Called by: systems.py.

The client shares the cores with the server, so while a level runs it only keeps raw bytes and the time they came. Frames
are counted and decoded after the last request of the level has ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

MODEL_NAME = "bench"


class LoadError(RuntimeError):
    """A request was refused, cut short or answered with another number of tokens than asked for.

    status: of the HTTP answer, 0 where there was none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Timing:
    """One request. Seconds on one clock; the same for systems that run in-process."""

    sent: float
    first_token: float
    last_token: float
    output_tokens: int


@dataclass
class _Reply(asyncio.Protocol):
    """The bytes of one response and when they came, until the server closes the connection."""

    request: bytes
    done: asyncio.Future[None]
    sent: float = 0.0
    pieces: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.sent = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            if exc is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(exc)


def run_level(
    port: int,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    concurrency: int,
    timeout_s: float,
) -> list[Timing]:
    """`concurrency` clients, each sending its next prompt when its last answer is complete, until all prompts are sent.

    Every server is told to answer to MODEL_NAME. Raises LoadError, OSError, TimeoutError.
    """
    requests = [_request(port, prompt, output_tokens) for prompt in prompts]

    async def level() -> list[_Reply]:
        queue = iter(requests)
        replies: list[_Reply] = []

        async def client() -> None:
            loop = asyncio.get_running_loop()
            for request in queue:
                reply = _Reply(request, loop.create_future())
                replies.append(reply)
                await loop.create_connection(lambda reply=reply: reply, "127.0.0.1", port)  # type: ignore[misc]
                await reply.done

        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(client() for _ in range(concurrency)))
        return replies

    return [timing(reply.sent, reply.pieces, reply.times, output_tokens) for reply in asyncio.run(level())]


def _request(port: int, prompt: Sequence[int], output_tokens: int) -> bytes:
    # One connection per request: its end is then the end of the answer, with nothing to look for while streaming.
    fields = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def timing(sent: float, pieces: Sequence[bytes], times: Sequence[float], output_tokens: int) -> Timing:
    """What one response says. pieces and times: the raw bytes, head included, and when each piece came.

    Raises LoadError where the answer is an error or does not hold exactly output_tokens.
    """
    raw = b"".join(pieces)
    line = raw.split(b"\r\n", 1)[0].decode(errors="replace")
    status = int(line.split()[1]) if line.startswith("HTTP/") else 0
    if status != 200:
        raise LoadError(f"answered {line or 'nothing'}: {raw[-300:].decode(errors='replace')}", status)
    ends: list[int] = []
    total = 0
    for piece in pieces:
        total += len(piece)
        ends.append(total)
    token_times: list[float] = []
    counted = None
    for end, frame in _frames(raw):
        if "error" in frame:
            raise LoadError(f"the stream ended in an error: {frame['error']}")
        if frame.get("choices"):
            token_times.append(times[bisect_left(ends, end)])
        if frame.get("usage"):
            counted = int(frame["usage"]["completion_tokens"])
    if counted != output_tokens or not token_times:
        raise LoadError(f"{counted} tokens came in {len(token_times)} frames where {output_tokens} were asked for")
    return Timing(sent, token_times[0], token_times[-1], output_tokens)


def _frames(raw: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each JSON frame of an event stream and the offset of its end.

    The lines of the chunked encoding stand between the frames and are passed over: servers write whole frames.
    """
    start = raw.find(b"\r\n\r\n")
    while (start := raw.find(b"data: {", start)) >= 0:
        end = raw.find(b"\n", start)
        if end < 0:
            raise LoadError("the answer ends within a frame")
        try:
            yield end, json.loads(raw[start + len(b"data: ") : end])
        except ValueError as error:
            raise LoadError(f"a frame is no JSON: {raw[start : min(end, start + 200)]!r}") from error
        start = end
