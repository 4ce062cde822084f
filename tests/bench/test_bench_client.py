"""The benchmark's HTTP client: events and their times, every way in which a request can fail, connections."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import orjson
import pytest
from bench_fakes import (
    CLOSE,
    FakeServer,
    chat_events,
    chunked,
    completion_events,
    event,
    json_answer,
    plain,
)

import ropeway.bench.client
from ropeway.bench.client import EventStream, HttpClient
from ropeway.bench.report import RequestOutcome
from ropeway.errors import ConfigError

TEXTS = [" The", " qu", "ick", " fox", ' "é😀\n\n"']
GOOD = chunked(completion_events(TEXTS, usage=(7, 5)))


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20))

    return run


def fed(pieces: Sequence[tuple[bytes, float]], status: int = 200) -> RequestOutcome:
    outcome = RequestOutcome(start=10.0)
    stream = EventStream(outcome)
    stream.status = status
    for data, now in pieces:
        stream.feed(data, now)
    stream.finish()
    return outcome


# Events


def test_every_text_has_its_time() -> None:
    events = completion_events(["a", "b", "c"], usage=(3, 4))
    outcome = fed([(data, 11.0 + index) for index, data in enumerate(events)])
    assert outcome == RequestOutcome(
        prompt_len=3, output_len=4, start=10.0, token_times=[11.0, 12.0, 13.0], text="abc", error=""
    )


def test_events_may_be_cut_anywhere() -> None:
    body = b": comment\n\n" + b"".join(completion_events(TEXTS, usage=(7, 5)))
    ends = [body.find(data) + len(data) for data in completion_events(TEXTS)[:-1]]
    for cut in range(len(body) + 1):
        outcome = fed([(body[:cut], 1.0), (body[cut:], 2.0)])
        assert (outcome.text, outcome.error, outcome.output_len, outcome.prompt_len) == ("".join(TEXTS), "", 5, 7)
        assert outcome.token_times == [1.0 if end <= cut else 2.0 for end in ends]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_lines_may_end_in_both_characters(cut: int) -> None:
    body = b"".join(completion_events(["a", "b"], usage=(1, 2))).replace(b"\n", b"\r\n")
    pieces = [(body[at : at + cut], float(at)) for at in range(0, len(body), cut)]
    assert (fed(pieces).text, fed(pieces).output_len) == ("ab", 2)


def test_other_lines_of_an_event_are_passed_over() -> None:
    first, *rest = completion_events(["a", "b"])
    outcome = fed([(b"event: message\nid: 5\n" + first + b"".join(rest), 1.0)])
    assert (outcome.text, outcome.error) == ("ab", "")


def test_role_and_reason_of_a_chat_are_no_tokens() -> None:
    events = chat_events(["Hi", " you"], usage=(5, 2))
    outcome = fed([(data, float(index)) for index, data in enumerate(events)])
    assert (outcome.token_times, outcome.text) == ([1.0, 2.0], "Hi you")


def test_reasoning_counts_as_output() -> None:
    events = [event({"choices": [{"delta": {name: "x"}}]}) for name in ("reasoning", "reasoning_content", "content")]
    assert fed([(b"".join(events) + event(b"[DONE]"), 1.0)]).text == "xxx"


def test_a_token_without_text_is_a_token() -> None:
    events = completion_events(["a", "", "b"])
    assert len(fed([(b"".join(events), 1.0)]).token_times) == 3


@pytest.mark.parametrize("make", [completion_events, chat_events])
def test_events_alike_are_parsed_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    class Spy:
        dumps = staticmethod(orjson.dumps)

        @staticmethod
        def loads(data: bytes) -> Any:
            parsed.append(data)
            return orjson.loads(data)

    monkeypatch.setattr(ropeway.bench.client, "orjson", Spy)
    texts = [" word", ' "quoted"', "\n\\ and é😀", "text", "", "x" * 300, " word", "content", "end"]
    for text in texts:
        events = make([text, *texts], usage=(3, 10))
        outcome = fed([(data, float(index)) for index, data in enumerate(events)])
        assert (outcome.text, outcome.output_len) == (text + "".join(texts), 10)
        first = 0 if make is completion_events else 1
        assert outcome.token_times == [float(first + index) for index in range(10)]
    parsed.clear()
    events = make([" word"] * 50, usage=(3, 50))
    assert len(fed([(b"".join(events), 1.0)]).token_times) == 50
    assert len(parsed) <= 4  # the first, role, reason and usage


def test_what_only_looks_alike_is_parsed() -> None:
    """A second string between the learnt ends; a changed field; a reason."""

    def one(text: str, reason: str | None = None, **more: Any) -> bytes:
        return event({"id": 1, "choices": [{"text": text, **more, "finish_reason": reason}]})

    events = [one("a"), one("b", note="c"), one("d"), one("e", "stop"), event(b"[DONE]")]
    outcome = fed([(data, float(index)) for index, data in enumerate(events)])
    assert (outcome.text, outcome.token_times, outcome.error) == ("abde", [0.0, 1.0, 2.0, 3.0], "")


def test_an_answer_without_any_text_has_the_time_of_its_end() -> None:
    events = completion_events([""], usage=(3, 1))
    outcome = fed([(events[0], 4.0), (b"".join(events[1:]), 5.0)])
    assert (outcome.token_times, outcome.error, outcome.output_len) == ([4.0], "", 1)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (event({"error": {"message": "out of memory", "code": 500}}), "error event: out of memory"),
        (event({"error": "no"}), "error event: no"),
        (b"".join(completion_events(["a"])[:-1]).replace(b'"length"', b"null"), "the stream ended before the answer"),
        (event(b"[DONE]"), "the answer is empty"),
        (event(b"{not json"), "an event is not what the API promises"),
        (
            b"".join(completion_events(["a", "b", "c"])).replace(b'"b"', b'"\\x"'),
            "an event is not what the API promises",
        ),
        (event(b"[1]"), "an event is not what the API promises"),
        (b"", "the stream ended before the answer"),
    ],
)
def test_streams_that_fail(body: bytes, error: str) -> None:
    assert fed([(body, 1.0)]).error.startswith(error)


def test_an_error_after_some_tokens_fails_the_request() -> None:
    good = completion_events(["a", "b"])
    assert (
        fed([(good[0] + event({"error": {"message": "gone"}}) + good[1] + good[2], 1.0)]).error == "error event: gone"
    )


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"error": {"message": "too\\nlong"}}', "HTTP 400: too long"),
        (b'{"detail": "not found"}', "HTTP 400: not found"),
        (b"<html>\n\n<p>Bad</p></html>", "HTTP 400: <html> <p>Bad</p></html>"),
        (b"", "HTTP 400: "),
        (b"x" * 1000, "HTTP 400: " + "x" * 197 + "..."),
    ],
)
def test_answers_with_an_error_status(body: bytes, error: str) -> None:
    assert fed([(body[:5], 1.0), (body[5:], 2.0)], status=400).error == error


# Over sockets


@in_loop
async def test_a_completion_over_http() -> None:
    with FakeServer(lambda request: GOOD).running() as server:
        client = HttpClient(server.url + "/", {"X-Key": "value"})
        outcome = await client.stream("/v1/completions", b'{"prompt": [1]}')
        client.close()
    assert (outcome.text, outcome.error, outcome.output_len, outcome.prompt_len) == ("".join(TEXTS), "", 5, 7)
    assert outcome.start < outcome.token_times[0]
    (request,) = server.requests
    assert (request.method, request.path, request.body) == ("POST", "/v1/completions", {"prompt": [1]})
    assert request.headers["Host"] == f"127.0.0.1:{server.port}"
    assert request.headers["X-Key"] == "value"


@in_loop
async def test_times_are_those_of_the_bytes_receipt() -> None:
    """On a clock that the server sets before each event: it waits until the client has read it."""

    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()

    def answer(request: Any) -> Any:
        for index, part in enumerate(chunked(completion_events(["a", "b", "c"], usage=(1, 3)))):
            clock.now = 100.0 + index
            yield part
            yield 0.05

    with FakeServer(answer).running() as server:
        outcome = await HttpClient(server.url, clock=clock).stream("/", b"{}")
    assert (outcome.start, outcome.token_times) == (0.0, [101.0, 102.0, 103.0])
    assert (outcome.ttft, outcome.latency, outcome.tpot, outcome.itls) == (101.0, 103.0, 1.0, [1.0, 1.0])


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        (plain("429 Too Many Requests", b'{"error": {"message": "busy"}}'), "HTTP 429: busy"),
        ([CLOSE], "the server closed the connection without an answer"),
        ([*GOOD[:3], CLOSE], "the server closed the connection in the middle of the answer"),
        ([b"nonsense\r\n\r\n"], "the answer is not HTTP"),
        (chunked(completion_events(TEXTS)[:2]), "the stream ended before the answer did"),
    ],
)
def test_failures_over_http(parts: list[bytes], error: str) -> None:
    @in_loop
    async def run() -> None:
        with FakeServer(lambda request: parts).running() as server:
            outcome = await HttpClient(server.url).stream("/v1/completions", b"{}")
        assert outcome.error.startswith(error)

    run()


@in_loop
async def test_nobody_listens() -> None:
    with socket.socket() as taken:  # bound, so that nobody else takes the port; not listening
        taken.bind(("127.0.0.1", 0))
        client = HttpClient(f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert (await client.stream("/", b"{}")).error == "connection refused"
        with pytest.raises(ConnectionRefusedError):
            await client.get("/")


@in_loop
async def test_an_answer_may_end_with_its_connection() -> None:
    parts = [b"HTTP/1.0 200 OK\r\n\r\n", *completion_events(["a", "b"]), CLOSE]
    with FakeServer(lambda request: parts).running() as server:
        client = HttpClient(server.url)
        assert [(await client.stream("/", b"{}")).text for _ in range(2)] == ["ab", "ab"]
    assert server.num_connections == 2


@in_loop
async def test_connections_are_used_again() -> None:
    with FakeServer(lambda request: [0.02, *GOOD]).running() as server:
        client = HttpClient(server.url)
        for _ in range(3):
            assert not (await client.stream("/", b"{}")).error
        assert server.num_connections == 1
        both = await asyncio.gather(*(client.stream("/", b"{}") for _ in range(2)))
        assert [outcome.error for outcome in both] == ["", ""]
        assert server.num_connections == 2
        client.close()


@in_loop
async def test_a_failed_answer_leaves_the_connection_usable() -> None:
    parts = plain("503 Service Unavailable", b"{}")
    with FakeServer(lambda request: parts if len(server.requests) == 1 else GOOD).running() as server:
        client = HttpClient(server.url)
        errors = [(await client.stream("/", b"{}")).error for _ in range(2)]
    assert (errors, server.num_connections) == (["HTTP 503: {}", ""], 1)


@pytest.mark.parametrize("says_so", [True, False])
def test_connections_that_the_server_closes_are_not_used_again(says_so: bool) -> None:
    """Whether it announces that or just does it, which the client may only see when it has sent the next request."""
    answer = chunked(completion_events(["a"]), "Connection: close\r\n" if says_so else "")

    @in_loop
    async def run() -> None:
        with FakeServer(lambda request: [*answer, CLOSE]).running() as server:
            client = HttpClient(server.url)
            outcomes = [await client.stream("/", b"{}") for _ in range(20)]
        assert [outcome.error for outcome in outcomes] == [""] * 20
        assert server.num_connections == len(server.requests) == 20

    run()


@in_loop
async def test_a_request_that_is_given_up_leaves_no_connection() -> None:
    with FakeServer(lambda request: [*GOOD[:3], *([0.01] * 500)]).running() as server:
        client = HttpClient(server.url)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.stream("/", b"{}"), 0.1)
        for _ in range(300):
            if server.num_left:
                break
            await asyncio.sleep(0.01)
        assert server.num_left == 1


@in_loop
async def test_the_url_may_have_a_path_and_a_login() -> None:
    with FakeServer(lambda request: json_answer({})).running() as server:
        status, body = await HttpClient(f"http://me:p%40ss@127.0.0.1:{server.port}/deep/").get("/v1/models")
    assert (status, body) == (200, b"{}")
    assert server.requests[0].path == "/deep/v1/models"
    assert server.requests[0].headers["Authorization"] == "Basic bWU6cEBzcw=="
    assert server.requests[0].headers["Host"] == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_what_is_not_a_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        HttpClient(url)


def test_headers_cannot_smuggle_lines() -> None:
    with pytest.raises(ConfigError, match="header"):
        HttpClient("http://host", {"X": "a\r\nHost: other"})
