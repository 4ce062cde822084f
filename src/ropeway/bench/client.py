"""A light HTTP client for streamed completions: what it takes per token is taken from the server it measures.

Owns: connections, HTTP/1.1, the event stream, the time stamps. Must not know: datasets, rates, statistics.
Called by: bench.serve.

Bytes are stamped when the event loop hands them over, before anything is parsed. An event costs about twice the CPU time
of a bare socket that only counts its bytes (benchmarks/bench_client.py).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast
from urllib.parse import unquote, urlsplit

import httptools
import orjson

from ropeway.bench.report import RequestOutcome
from ropeway.errors import ConfigError

Clock = Callable[[], float]

REQUEST_SECONDS = 6 * 3600.0  # nothing legitimate takes longer
CONNECT_SECONDS = 60.0
MAX_ERROR_BODY = 4096
MAX_ERROR_TEXT = 200
DONE = b"[DONE]"
BAD_EVENT = "an event is not what the API promises"


class HttpClient:
    """Connections to one server, kept and used again. Every request has a connection for itself while it runs."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        *,
        insecure: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        """base_url: http or https, with a path or without. insecure: certificates are not checked. Raises
        ConfigError."""
        self.clock = clock
        self.base_url = base_url.rstrip("/")
        try:
            url = urlsplit(self.base_url)
            self._port = url.port or (443 if url.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"{base_url} is not a URL: {error}") from None
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"{base_url} is not an http:// or https:// URL")
        self._host = url.hostname
        self._path = url.path
        self._tls = _tls(insecure) if url.scheme == "https" else None
        fields = {"Host": url.netloc.rpartition("@")[2], "User-Agent": "ropeway-bench", "Accept": "*/*"}
        if url.username is not None:
            login = f"{unquote(url.username)}:{unquote(url.password or '')}"
            fields["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        fields |= headers or {}
        for name, value in fields.items():
            if not name or any(character in name + value for character in "\r\n\0"):
                raise ConfigError(f"the header {name!r} cannot be sent")
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises OSError."""
        body = _Body()
        async with asyncio.timeout(CONNECT_SECONDS):
            await self._exchange(self._head("GET", path), body)
        return body.status, body.data

    async def stream(self, path: str, body: bytes) -> RequestOutcome:
        """Sends a completion or chat request and follows its events. What goes wrong is in the outcome's `error`.

        The outcome's lengths are the server's count, 0 where it sends none.
        """
        request = self._head("POST", path, f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n") + body
        outcome = RequestOutcome()
        events = EventStream(outcome)
        outcome.start = self.clock()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await self._exchange(request, events)
        except TimeoutError:
            outcome.error = "timed out"
        except OSError as error:
            outcome.error = describe(error)
        else:
            events.finish()
        return outcome

    def _head(self, method: str, path: str, more: str = "") -> bytes:
        return f"{method} {self._path}{path} HTTP/1.1\r\n{self._fields}{more}\r\n".encode("utf-8", "surrogateescape")

    async def _exchange(self, request: bytes, receiver: Receiver) -> None:
        """Returns when the whole answer has gone to the receiver. Raises OSError."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                try:
                    return await self._exchange_on(connection, request, receiver)
                except _StaleConnectionError:  # closed while it was idle, by all appearances: send it on another
                    continue
        return await self._exchange_on(await self._connect(), request, receiver)

    async def _exchange_on(self, connection: _Connection, request: bytes, receiver: Receiver) -> None:
        try:
            await connection.exchange(request, receiver)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self.clock), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise ConnectionError("no connection within the time") from None
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class Receiver(Protocol):
    """Takes one answer. The status is set before the first piece of the body comes."""

    status: int

    def feed(self, data: bytes, now: float) -> None: ...


class _Body:
    status = 0
    data = b""

    def feed(self, data: bytes, now: float) -> None:
        self.data += data


class _StaleConnectionError(ConnectionError):
    """A kept connection ended before any byte of the answer."""


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection with at most one exchange on it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: Receiver = _Body()
        self._answer: asyncio.Future[None] | None = None
        self._now = 0.0
        self._has_answer_begun = False
        self._ends_with_connection = False  # the answer has no length, as in HTTP/1.0
        self._is_used = False
        self.is_open = False

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        if self._transport is None or not self.is_open:
            raise ConnectionError("the server closed the connection without an answer")
        self._receiver = receiver
        self._has_answer_begun = False
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._answer

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        self.is_open = True
        if (connection := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        self._has_answer_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close()
            self._fail(ConnectionError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._receiver.status and self._ends_with_connection and error is None:
            self._succeed()
        elif self._has_answer_begun:
            self._fail(ConnectionError("the server closed the connection in the middle of the answer"))
        elif self._is_used:
            self._fail(_StaleConnectionError("the server closed a connection that was to be used again"))
        else:
            self._fail(ConnectionError("the server closed the connection without an answer"))

    def _succeed(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # httptools

    def on_message_begin(self) -> None:
        self._ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._receiver.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._receiver.feed(body, self._now)

    def on_message_complete(self) -> None:
        self._is_used = True
        if not self._parser.should_keep_alive():
            self.close()
        self._succeed()


class EventStream:
    """Server-sent events of one completion, taken apart as their bytes come, and written into an outcome.

    The events of one answer differ in little but their text. What stands around it is learnt from one that was parsed;
    those that match are not parsed, and their texts are unescaped only at the end.
    """

    def __init__(self, outcome: RequestOutcome) -> None:
        self.status = 0
        self._outcome = outcome
        self._rest = b""  # an event whose end has not come; the whole body of an error
        self._texts: list[str | bytes] = []  # bytes: still as escaped in JSON
        self._before = b""  # of the text in the events of this stream, with its quotation marks; empty: not learnt
        self._after = b""
        self._end_time = 0.0  # of the event with the reason why the answer ended; 0: it has not come
        self._error = ""
        self._is_done = False

    def feed(self, data: bytes, now: float) -> None:
        if self._rest:
            data = self._rest + data
        if self.status != 200:
            self._rest = data
            return
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                self._take(event[5:].strip(), now)
            else:
                for line in event.split(b"\n"):  # comments, event names, ids: only data counts
                    if line.startswith(b"data:"):
                        self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        if self._before and data.startswith(self._before) and data.endswith(self._after):
            escaped = data[len(self._before) : -len(self._after)]
            if escaped and b'"' not in escaped:  # else it may be more than one string, or one with an escaped quote
                self._texts.append(escaped)
                self._outcome.token_times.append(now)
                return
        if data == DONE:
            self._is_done = True
            return
        try:
            value = orjson.loads(data)
            choices = value.get("choices") or ()
            for choice in choices:
                text = self._take_choice(choice, now)
                if text and len(choices) == 1 and not (value.get("usage") or value.get("error")):
                    self._learn(data, text)
            if usage := value.get("usage"):
                self._outcome.output_len = usage.get("completion_tokens") or 0
                self._outcome.prompt_len = usage.get("prompt_tokens") or 0
            if error := value.get("error"):
                self._error = f"error event: {_message(error)}"
        except (ValueError, AttributeError, TypeError):
            self._error = BAD_EVENT

    def _take_choice(self, choice: dict[str, Any], now: float) -> str:
        """The text, if the event is nothing but a token."""
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text")
            is_opening = False
        else:
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            is_opening = delta.get("role") is not None
        has_ended = choice.get("finish_reason") is not None
        if text:
            self._texts.append(text)
        # The role that opens a chat answer and the reason at the end are no tokens. An empty text in between is one:
        # half a character, or a special token.
        if text or not (is_opening or has_ended):
            self._outcome.token_times.append(now)
        if has_ended:
            self._end_time = now
        return text if text and not has_ended else ""

    def _learn(self, data: bytes, text: str) -> None:
        escaped = orjson.dumps(text)
        if data.count(escaped) == 1:
            before, _, after = data.partition(escaped)
            self._before, self._after = before + b'"', b'"' + after

    def finish(self) -> None:
        """The response is complete."""
        outcome = self._outcome
        try:
            outcome.text = "".join(text if isinstance(text, str) else _unescape(text) for text in self._texts)
        except ValueError:
            self._error = self._error or BAD_EVENT
        if self.status != 200:
            outcome.error = f"HTTP {self.status}: {_error_text(self._rest)}"
        elif self._error:
            outcome.error = self._error
        elif not self._end_time and not self._is_done:
            outcome.error = "the stream ended before the answer did"
        elif not outcome.token_times and not self._end_time:
            outcome.error = "the answer is empty"
        elif not outcome.token_times:
            outcome.token_times.append(self._end_time)  # all it had was tokens without text


def _unescape(text: bytes) -> str:
    """Of the inside of a JSON string. Raises ValueError."""
    return str(orjson.loads(b'"' + text + b'"')) if b"\\" in text else text.decode()


def _error_text(body: bytes) -> str:
    try:
        value = orjson.loads(body)
        return _message(value.get("error") or value.get("detail") or value)
    except (ValueError, AttributeError):
        return _short(body[:MAX_ERROR_BODY].decode("utf-8", "replace"))


def _message(error: Any) -> str:
    """Of an OpenAI error object, whatever it is in the end."""
    return _short(str(error.get("message", error) if isinstance(error, dict) else error))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_TEXT else line[: MAX_ERROR_TEXT - 3] + "..."


def describe(error: OSError) -> str:
    """One line that is the same for the same kind of failure."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return f"unknown host: {error.strerror}"
    return _short(str(error.strerror or error)) or type(error).__name__


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
