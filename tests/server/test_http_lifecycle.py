"""Who may come in and when: keys, bounds, draining, an engine that starts or dies; ids, logs and headers around it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from http_harness import EOS, HI, READY, TEXT, House, events, ids, in_loop, says, until

from fakes import FakeEngineClient, Script
from ropeway.config import ServerConfig
from ropeway.engine.client import EngineHealth, EngineState, TokenDelta
from ropeway.errors import RequestError
from ropeway.protocol import AddRequest, FinishReason
from ropeway.server.admission import Admission
from ropeway.server.auth import Keys
from ropeway.server.health import DEAD_AFTER, STALE_AFTER, Lifecycle, Phase

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY = {"messages": HI}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


# Keys


@in_loop
async def test_keys_deny_by_default() -> None:
    house = House(api_key=["first", "sécond"])
    async with house.http() as http:
        for path in ("/live", "/ready", "/health", "/metrics"):
            assert (await http.get(path)).status_code == 200
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/version"),
            ("GET", "/load"),
            ("GET", "/openapi.json"),
            ("GET", "/nothing"),
            ("POST", "/drain"),
            ("POST", "/undrain"),
            ("POST", "/reset_prefix_cache"),
            ("POST", "/tokenize"),
            ("POST", CHAT),
        ):
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "first"},
                {"authorization": "Basic first"},
                {"authorization": "Bearer "},
                {"x-api-key": "firs"},
            ):
                response = await http.request(method, path, headers=headers, json=BODY if method == "POST" else None)
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
                assert "first" not in response.text
        for headers in (
            {"authorization": "Bearer first"},
            {"authorization": "bearer  first"},
            {"x-api-key": "first"},
            {"authorization": "Bearer sécond".encode()},
        ):
            assert (await http.post(CHAT, headers=headers, json=BODY)).status_code == 200
    assert not house.lifecycle.is_draining
    assert [request.tenant for request in house.client.added] == ["key-0", "key-0", "key-0", "key-1"]


def test_without_keys_everybody_is_nobody() -> None:
    assert Keys(()).check(CHAT, []) == ""
    with pytest.raises(RequestError):
        Keys(("k",)).check("/metrics/", [])


@in_loop
async def test_a_wrong_key_costs_no_body() -> None:
    house = House(api_key=["k"])
    read = 0

    async def chunks() -> Any:
        nonlocal read
        read += 1
        yield b"x"

    async with house.http() as http:
        assert (await http.post(CHAT, content=chunks())).status_code == 401
    assert read == 0


# Bounds


@in_loop
async def test_over_the_bound_is_a_429_with_retry_after() -> None:
    gate = asyncio.Event()
    house = House(says(waits={1: gate}), max_num_queued_reqs=3)
    async with house.http() as http:
        running = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": ["a", "b"]}))
        await until(lambda: len(house.client.live) == 2)
        assert (await http.get("/load")).json() == {"server_load": 1}
        for body in ({**BODY, "n": 2}, {**BODY, "n": 2, "stream": True}):
            response = await http.post(CHAT, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert int(response.headers["retry-after"]) >= 1
        response = await http.post(CHAT, json={**BODY, "n": 4})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")  # would never fit
        one = asyncio.create_task(http.post(CHAT, json=BODY))  # one more is fine
        await until(lambda: len(house.client.live) == 3)
        gate.set()
        assert (await running).status_code == 200
        assert (await one).status_code == 200
        assert (await http.post(CHAT, json={**BODY, "n": 3})).status_code == 200
    await house.quiet()
    assert house.app.state.service.admission.num_sequences == 0
    assert house.app.state.service.admission.num_prompt_tokens == 0


@in_loop
async def test_bound_on_prompt_tokens() -> None:
    gate = asyncio.Event()
    house = House(says(waits={1: gate}), max_num_queued_tokens="100")
    async with house.http() as http:
        running = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": [5] * 60, "n": 3}))  # shared: 60 tokens
        await until(lambda: len(house.client.live) == 3)
        response = await http.post(COMPLETIONS, json={"prompt": [5] * 41})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "token_queue_full")
        response = await http.post(COMPLETIONS, json={"prompt": [5] * 101})
        assert response.status_code == 400
        gate.set()
        assert (await running).status_code == 200
        assert (await http.post(COMPLETIONS, json={"prompt": [5] * 100})).status_code == 200


@in_loop
async def test_retry_after_follows_the_measured_rate() -> None:
    clock = Clock()
    lifecycle = Lifecycle(clock=clock)
    lifecycle.mark_ready()
    config = ServerConfig(max_num_queued_reqs=1000)
    admission = Admission(config, lifecycle, lambda: EngineHealth(EngineState.ALIVE), clock)
    permits = [admission.admit(1, 10) for _ in range(1000)]
    assert admission.retry_after() == 5  # nothing is known yet
    for permit in permits[:100]:
        clock.now += 0.25
        permit.release()
        permit.release()  # counts once
    assert admission.num_sequences == 900
    assert admission.retry_after() == 23  # 4 a second: a tenth of 900 takes 22.5 s
    clock.now += 10_000
    assert admission.retry_after() == 60
    for permit in permits[100:]:
        permit.release()
    clock.now += 10_000  # idle time does not count against the rate
    permit = admission.admit(100, 10)
    assert admission.retry_after() == 5
    clock.now += 1
    permit.release()
    assert admission.retry_after() == 1
    assert lifecycle.in_flight == 0


# Draining


@in_loop
async def test_draining_refuses_new_requests_and_finishes_running_ones() -> None:
    gate = asyncio.Event()
    house = House(says(waits={2: gate}))
    async with house.http() as http:
        running = asyncio.create_task(http.post(CHAT, json={**BODY, "stream": True}))
        await until(lambda: len(house.client.live) == 1)
        assert (await http.post("/drain")).json() == {"status": "draining", "requests_in_flight": 1}
        assert (await http.post("/drain")).status_code == 200
        for path in ("/ready", "/health"):
            response = await http.get(path)
            assert (response.status_code, response.json()["reason"]) == (503, "draining")
            assert (await http.head(path)).status_code == 503
        assert (await http.get("/live")).status_code == 200
        for stream in (True, False):
            response = await http.post(CHAT, json={**BODY, "stream": stream})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
            assert response.headers["connection"] == "close"
            assert int(response.headers["retry-after"]) >= 1
        assert not await house.lifecycle.wait_idle(0.01)
        gate.set()
        assert await house.lifecycle.wait_idle(5)
        assert events((await running).text)[-1] == "[DONE]"
        assert (await http.post("/undrain")).json()["status"] == "ready"
        assert (await http.get("/health")).status_code == 200
        assert (await http.post(CHAT, json=BODY)).status_code == 200


def test_the_notice_and_the_order_of_phases() -> None:
    clock = Clock()
    lifecycle = Lifecycle(drain_notice=5, clock=clock)
    alive = EngineHealth(EngineState.ALIVE)
    lifecycle.undrain()
    lifecycle.begin_drain()
    lifecycle.mark_ready()  # the engine came up after the signal: that must not end the drain
    assert lifecycle.phase is Phase.DRAINING
    lifecycle.undrain()
    assert lifecycle.accepting
    assert lifecycle.ready_problem(alive) is None
    lifecycle.begin_drain()
    assert lifecycle.ready_problem(alive) == "draining"
    assert lifecycle.accepting  # balancers look only every few seconds
    clock.now += 4
    lifecycle.begin_drain()
    clock.now += 1
    assert not lifecycle.accepting
    lifecycle.stop()
    lifecycle.undrain()
    lifecycle.begin_drain()
    assert lifecycle.phase is Phase.STOPPED
    assert not lifecycle.accepting


@in_loop
async def test_aborted_at_the_end_of_a_drain() -> None:
    house = House(says(waits={3: asyncio.Event()}))
    async with house.http() as http:
        whole = asyncio.create_task(http.post(CHAT, json=BODY))
        stream = asyncio.create_task(http.post(CHAT, json={**BODY, "stream": True}))
        await until(lambda: len(house.client.live) == 2)
        await until(lambda: house.metrics._itl._sum > 0)
        await house.client.abort_all()
        assert (await whole).json()["choices"][0]["finish_reason"] == "abort"
        *chunks, done = events((await stream).text)
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    assert done == "[DONE]"
    await house.quiet()


# The engine starts, hangs, dies


@in_loop
async def test_before_the_engine_has_started() -> None:
    house = House(started=False)
    async with house.http() as http:
        assert (await http.get("/live")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
        response = await http.get("/ready")
        assert (response.status_code, response.json()["reason"]) == (503, "starting")
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("POST", "/reset_prefix_cache")):
            response = await http.request(method, path, json=BODY)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "starting")
            assert "retry-after" in response.headers
        house.app.state.service.mark_ready(house.client.ready)
        assert (await http.get("/ready")).status_code == 200
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        assert (await http.post("/reset_prefix_cache")).status_code == 200
    assert house.client.num_prefix_resets == 1


@in_loop
async def test_the_engine_dies_under_its_requests() -> None:
    house = House(says(waits={3: asyncio.Event()}))
    async with house.http() as http:
        whole = asyncio.create_task(http.post(CHAT, json={**BODY, "n": 2}))
        stream = asyncio.create_task(http.post(CHAT, json={**BODY, "n": 2, "stream": True}))
        await until(lambda: len(house.client.live) == 4)
        await until(lambda: house.metrics._itl._sum > 0)
        house.client.die()
        response = await whole
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_dead")
        assert "SIGKILL" not in response.text
        last = events((await stream).text)[-1]  # in-band, and no [DONE]
        assert last["error"]["code"] == "engine_dead"
        assert (await http.get("/health")).status_code == 503
        response = await http.post(CHAT, json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
        await house.quiet()
        house.client.restart()
        house.client.script = says()
        assert (await http.get("/health")).status_code == 200
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        await asyncio.sleep(0.11)  # the page is cached for 0.1 s
        assert "\nropeway_engine_restarts_total 1.0\n" in (await http.get("/metrics")).text


def test_liveness_is_patient_with_a_restart_and_not_with_a_corpse() -> None:
    clock = Clock()
    lifecycle = Lifecycle(clock=clock)
    lifecycle.mark_ready()
    alive, dead = EngineHealth(EngineState.ALIVE), EngineHealth(EngineState.DEAD, reason="boom")
    starting = EngineHealth(EngineState.STARTING)
    assert lifecycle.live_problem(dead) is None
    assert "boom" in (lifecycle.ready_problem(dead) or "")
    clock.now += DEAD_AFTER - 1
    assert lifecycle.live_problem(alive) is None
    assert lifecycle.live_problem(dead) is None
    clock.now += DEAD_AFTER / 2
    assert lifecycle.live_problem(starting) is None  # an attempt that fails does not start the clock anew
    assert "starting" in (lifecycle.ready_problem(starting) or "")
    clock.now += DEAD_AFTER / 2
    assert "boom" in (lifecycle.live_problem(dead) or "")
    assert lifecycle.live_problem(EngineHealth(EngineState.ALIVE, heartbeat_age=STALE_AFTER - 1)) is None
    stale = EngineHealth(EngineState.ALIVE, heartbeat_age=STALE_AFTER + 1)
    assert "not reported" in (lifecycle.live_problem(stale) or "")
    assert "not reported" in (lifecycle.ready_problem(stale) or "")


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_one_sequence_fails_alone(stream: bool) -> None:
    """Its siblings of the same request end with it; the next request is not touched."""
    count = 0

    def script(request: AddRequest) -> Script:
        nonlocal count
        count += 1
        return Script([*ids(TEXT), EOS], error_after=2 if count == 2 else None, waits={} if count == 2 else waits)

    waits = {6: asyncio.Event()}
    house = House(script)
    async with house.http() as http:
        response = await http.post(CHAT, json={**BODY, "n": 3, "stream": stream})
        if stream:
            assert response.status_code == 200
            *chunks, error = events(response.text)
            assert chunks
        else:
            assert response.status_code == 500
            error = response.json()
        assert error["error"]["code"] == "generation_failed"
        assert "not numbers" in error["error"]["message"]
        await house.quiet()
        assert len(house.client.aborted) == 2
        waits.clear()
        assert (await http.post(CHAT, json=BODY)).status_code == 200


# Around a request


@in_loop
async def test_request_ids() -> None:
    house = House()
    async with house.http() as http:
        response = await http.post(CHAT, json=BODY, headers={"x-request-id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1"
        assert response.json()["id"] == "chatcmpl-abc-1"
        response = await http.post(CHAT, json={**BODY, "request_id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"] == "chatcmpl-mine"
        first, second = [(await http.post(CHAT, json=BODY)).headers["x-request-id"] for _ in range(2)]
        assert first != second
        for bad in ("a b", "x" * 129, "é".encode(), ""):
            response = await http.post(CHAT, json={}, headers={"x-request-id": bad})
            assert response.status_code == 400
            assert len(response.headers["x-request-id"]) == 32  # one of ours instead
        assert (await http.get("/health", headers={"x-request-id": "h"})).headers["x-request-id"] == "h"


@in_loop
async def test_a_bug_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def script(request: AddRequest) -> Script:
        raise KeyError("secret detail")

    house = House(script)
    async with house.http() as http:
        response = await http.post(CHAT, json=BODY, headers={"x-request-id": "r1"})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        stream = await http.post(CHAT, json={**BODY, "stream": True})
        assert events(stream.text)[-1]["error"]["code"] == "internal_error"
        assert "secret" not in response.text + stream.text
    assert "request r1 failed" in caplog.text
    await house.quiet()


@in_loop
async def test_access_log_has_counts_and_no_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ropeway.access")
    house = House(enable_log_requests=True, api_key=["topsecret"])
    async with house.http(authorization="Bearer topsecret") as http:
        body = {"messages": [{"role": "user", "content": "private words"}], "user": "somebody"}
        await http.post(CHAT, json=body, headers={"x-request-id": "r1"})
        await http.post(CHAT, json={**body, "temperature": 9})
        await http.get("/health")
    lines = [record.getMessage() for record in caplog.records if record.name == "ropeway.access"]
    assert len(lines) == 2
    prompt = len(house.client.added[0].prompt_token_ids)
    assert lines[0].startswith("request=r1 key=key-0 status=200 ")
    assert f"prompt_tokens={prompt} cached_tokens=0 completion_tokens={len(ids(TEXT)) + 1}" in lines[0]
    assert "status=400" in lines[1]
    for word in ("private", "somebody", "topsecret", "quick"):
        assert word not in caplog.text


@in_loop
async def test_timing_headers_on_request() -> None:
    for flag in (True, False):
        async with House(timing_headers=flag).http() as http:
            headers = (await http.post(CHAT, json=BODY)).headers
        for name in ("queue", "prefill", "decode"):
            assert (f"x-ropeway-{name}-seconds" in headers) == flag
        if flag:
            assert headers["x-ropeway-queue-seconds"] == "0.001000"  # what the script says
            assert float(headers["x-ropeway-decode-seconds"]) > 0


@in_loop
async def test_cors_only_when_allowed() -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with House(allowed_origins=["https://a.example"], api_key=["k"]).http() as http:
        response = await http.options(CHAT, headers=preflight)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        response = await http.options(CHAT, headers={**preflight, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in response.headers
    async with House().http() as http:
        assert "access-control-allow-origin" not in (await http.post(CHAT, json=BODY, headers=preflight)).headers


@in_loop
async def test_a_path_prefix_does_not_move_the_public_routes() -> None:
    async with House(api_key=["k"]).http(root_path="/llm") as http:
        assert (await http.get("/llm/health")).status_code == 200
        assert (await http.get("/llm/v1/models")).status_code == 401
        assert (await http.get("/llm/v1/models", headers={"x-api-key": "k"})).status_code == 200


def test_the_fake_follows_the_protocol() -> None:
    from ropeway.engine.client import EngineClient

    client: EngineClient = FakeEngineClient(says(), ready=House().client.ready)
    assert client.health.state is EngineState.ALIVE


# Cancel by id


@in_loop
async def test_a_request_is_cancelled_by_its_caller_alone() -> None:
    house = House(says(waits={3: asyncio.Event()}), api_key=["a", "b"])
    mine, yours = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
    async with house.http() as http:
        whole = asyncio.create_task(http.post(CHAT, json={**BODY, "n": 2}, headers={**mine, "x-request-id": "whole"}))
        stream = asyncio.create_task(http.post(CHAT, json={**BODY, "stream": True, "request_id": "s"}, headers=mine))
        await until(lambda: len(house.client.live) == 3)
        await until(lambda: house.metrics._itl._sum > 0)
        for id in ("chatcmpl-whole", "whole"):
            status = (await http.get(f"/v1/requests/{id}", headers=mine)).json()
            assert (status["id"], status["status"], status["choices"]) == ("chatcmpl-whole", "generating", 2)
            assert status["usage"]["completion_tokens"] == 6
        for id, headers in (("whole", yours), ("nothing", mine)):
            for method, path in (("GET", f"/v1/requests/{id}"), ("POST", f"/v1/requests/{id}/cancel")):
                response = await http.request(method, path, headers=headers)
                assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")
        assert len(house.client.live) == 3
        for id in ("whole", "s"):
            assert (await http.post(f"/v1/requests/{id}/cancel", headers=mine)).json()["status"] == "cancelled"
        choices = (await whole).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
        assert choices[0]["message"]["content"]
        *chunks, done = events((await stream).text)
        assert (chunks[-1]["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
        assert (await http.get("/v1/requests/s", headers=mine)).status_code == 404
    await house.quiet()


# Limits of time and priorities


class LateClient(FakeEngineClient):
    """An engine that ends every request for the given reason after so many tokens."""

    def _next(self, request: AddRequest, script: Script, position: int) -> TokenDelta:
        if position == self.num_tokens:
            return TokenDelta([], self.reason)
        return super()._next(request, script, position)

    num_tokens = 0
    reason = FinishReason.DEADLINE


@in_loop
async def test_what_a_client_hears_of_a_limit_of_time() -> None:
    house = House()
    late = LateClient(says(), ready=READY)
    house.app.state.service.client = house.client = late
    async with house.http() as http:
        for reason, status, code in (
            (FinishReason.DEADLINE, 408, "deadline_exceeded"),
            (FinishReason.QUEUE_TIMEOUT, 429, "queue_timeout"),
        ):
            late.reason = reason
            response = await http.post(CHAT, json=BODY)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
            last = events((await http.post(CHAT, json={**BODY, "stream": True})).text)[-1]
            assert last["error"]["code"] == code
        late.reason, late.num_tokens = FinishReason.DEADLINE, 3
        choice = (await http.post(CHAT, json=BODY)).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
        assert choice["message"]["content"]
        page = (await http.get("/metrics")).text
    assert '\nropeway_deadline_misses_total{limit="deadline"} 3.0\n' in page
    assert '\nropeway_deadline_misses_total{limit="queue_timeout"} 2.0\n' in page


@in_loop
async def test_limits_of_time_reach_the_engine_from_body_or_header() -> None:
    house = House()
    async with house.http() as http:
        body = {**BODY, "deadline_ms": 5000, "queue_timeout_ms": 250.5}
        headers = {"x-deadline-ms": "7000", "x-queue-timeout-ms": "100"}
        for change, extra, deadline, queue in (
            (body, {}, 5.0, 0.2505),
            (BODY, headers, 7.0, 0.1),
            (body, headers, 5.0, 0.2505),  # the body goes before
            (BODY, {}, None, None),
        ):
            assert (await http.post(CHAT, json=change, headers=extra)).status_code == 200
            added = house.client.added[-1]
            for limit, seconds in ((added.deadline, deadline), (added.queue_deadline, queue)):
                assert (limit is None) == (seconds is None)
                if limit is not None:
                    assert limit - added.arrival_time == pytest.approx(seconds)
        for header in ("-1", "x", "1e9", "nan", ""):
            response = await http.post(CHAT, json=BODY, headers={"x-deadline-ms": header})
            assert response.status_code == 400, header
        response = await http.post(CHAT, json={**BODY, "deadline_ms": 0})
        assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert len(house.client.added) == 4


@in_loop
async def test_priority_needs_its_policy() -> None:
    async with House().http() as http:
        response = await http.post(CHAT, json={**BODY, "priority": -3})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
        assert (await http.post(CHAT, json={**BODY, "priority": 0})).status_code == 200
    house = House(scheduling_policy="priority")
    async with house.http() as http:
        assert (await http.post(CHAT, json={**BODY, "priority": -3})).status_code == 200
    assert house.client.added[0].priority == -3
