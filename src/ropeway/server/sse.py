"""Server-sent events: frames, keep-alive comments, and giving up when the client is gone.

Owns: the event stream of one response and the watch for its client. Must not know: what the events say, the engine.
Called by: service (responses), chat and completions (frames).

Nothing here waits for more to send: what is written goes to the socket at once. Frames grow only while the engine is
ahead, because its client then joins the deltas that nobody has taken yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold tokens back


class ClientGone(Exception):  # noqa: N818  (an event, not an error: nobody is left to be told)
    """The client closed the connection before its answer was complete."""


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """An event with a type of its own, as the Responses and Anthropic streams have them."""
    return b"event: " + name.encode() + b"\n" + event(value)


class TextFrame:
    """An event whose only variable part is one JSON string. Everything around it is rendered once.

    This is the token path: no dict and no model is built per token.
    """

    __slots__ = ("_prefix", "_suffix")

    _MARK = "\x00text\x00"

    def __init__(self, template: Callable[[str], Any]) -> None:
        """template: makes the event's value from the text."""
        prefix, _, suffix = event(template(self._MARK)).partition(orjson.dumps(self._MARK))
        self._prefix = prefix
        self._suffix = suffix

    def render(self, text: str) -> bytes:
        return self._prefix + orjson.dumps(text) + self._suffix


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``. Raises ClientGone, with ``work`` cancelled and ended, when the client closes first."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends the headers at once, then whatever ``produce`` writes, with a comment after each silent interval.

    ``produce`` must put its own errors into the stream: the status has been sent. ``on_close`` is called exactly once,
    however the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Write], Coroutine[Any, Any, None]],
        *,
        keepalive_interval: float,
        on_close: Callable[[], None],
        headers: Mapping[str, str],
        send: Send | None = None,
    ) -> None:
        """send: a shorter way to the client once the headers are out, past layers that only look at those."""
        self.status_code = 200
        self.background = None
        self.init_headers({**HEADERS, **headers})
        self._produce = produce
        self._interval = keepalive_interval
        self._on_close = on_close
        self._send = send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(receive, self._run(self._send or send))
        except ClientGone:
            pass
        finally:
            self._on_close()

    async def _run(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        last_write = loop.time()

        def write(data: bytes) -> Awaitable[None]:  # not a coroutine of its own: this is the token path
            nonlocal last_write
            last_write = loop.time()
            return send({"type": "http.response.body", "body": data, "more_body": True})

        async def keep_alive() -> None:
            # Its own task, so that one slow engine step does not silence it.
            while True:
                await asyncio.sleep(max(0.0, last_write + self._interval - loop.time()))
                if loop.time() - last_write >= self._interval:
                    await write(KEEP_ALIVE)

        comments = asyncio.create_task(keep_alive())
        try:
            await self._produce(write)
        finally:
            comments.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
