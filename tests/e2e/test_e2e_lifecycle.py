"""Start, death of the engine, drain and refusal to start, with real processes and real signals."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from conftest import DUMMY
from e2e_server import ENDLESS, MODEL, Server, end, free_port, running, wait_until, write_tiny_model


def long_stream(server: Server, max_tokens: int = 8000) -> Any:
    """A stream that has begun."""
    stream = server.client().completions.create(model=MODEL, prompt="go", max_tokens=max_tokens, stream=True, **ENDLESS)
    next(stream)
    return stream


def works(server: Server) -> bool:
    answer = server.client().completions.create(model=MODEL, prompt="go", max_tokens=3, **ENDLESS)
    return answer.usage is not None and answer.usage.completion_tokens == 3


def test_port_answers_while_the_model_loads(tiny_flags: list[str], tmp_path: Path) -> None:
    port = free_port()
    server = Server([*tiny_flags, "--port", str(port)], tmp_path, f"http://127.0.0.1:{port}")
    try:
        seen: list[tuple[int, int]] = []

        def serves() -> bool:
            assert server.process.poll() is None
            health, live = server.get("/health")[0], server.get("/live")[0]
            seen.append((health, live))
            if health == 503:
                status, headers, body = server.post("/v1/completions", {"model": MODEL, "prompt": "a"})
                assert status == 200 or (status == 503 and "retry-after" in headers and body["error"]["message"])
            return health == 200

        wait_until(serves, "the server serves")
        assert (503, 200) in seen, "it loaded without being reachable"
        assert {health for health, _ in seen} <= {0, 503, 200}
        assert works(server)
    finally:
        end(server)


def test_behind_a_proxy_that_strips_a_prefix(tiny_flags: list[str], tmp_path: Path) -> None:
    with running([*tiny_flags, "--root-path", "/llm"], tmp_path) as server:
        assert server.get("/ready")[0] == server.get("/live")[0] == 200
        assert server.client().models.list().data[0].id == MODEL
        assert "'/llm/openapi.json'" in server.get("/docs")[1]  # what the browser asks for carries the prefix
        assert json.loads(server.get("/openapi.json")[1])["servers"] == [{"url": "/llm"}]


def test_killed_engine_fails_its_streams_and_is_replaced(own_server: Server) -> None:
    server = own_server
    first = server.engine()
    assert first is not None
    before = server.metrics()
    stream = long_stream(server)
    seen_down = threading.Event()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            if server.get("/health")[0] == 503:
                seen_down.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        first.send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "engine_dead"
        wait_until(seen_down.is_set, "/health says 503")
        wait_until(lambda: server.get("/health")[0] == 200, "/health says 200 again")
    finally:
        done.set()
        watcher.join()
    assert works(server)
    second = server.engine()
    assert second is not None
    assert second.pid != first.pid
    server.wait_at_base()
    after = server.metrics()
    assert after["ropeway_engine_restarts_total"] == 1
    assert all(after[name] >= value for name, value in before.items() if name.endswith("_total"))


def test_sigterm_lets_a_running_stream_finish(own_server: Server) -> None:
    server = own_server
    stream = long_stream(server, 600)
    engine = server.engine()
    server.signal(signal.SIGTERM)
    wait_until(lambda: server.get("/health")[0] != 200, "/health says 503")
    with contextlib.suppress(openai.APIConnectionError):  # the stream may have come to its end meanwhile
        with pytest.raises(openai.InternalServerError) as caught:
            works(server)
        assert caught.value.status_code == 503
    chunks = list(stream)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert server.wait_exit() == 0
    assert engine is not None
    assert not engine.is_running()


def test_sigterm_ends_what_does_not_finish_in_time(tiny_flags: list[str], tmp_path: Path) -> None:
    server = Server([*tiny_flags, "--port", "0", "--shutdown-timeout", "0.2"], tmp_path)
    try:
        server.wait_serving()
        stream = long_stream(server)
        server.signal(signal.SIGINT)
        chunks = list(stream)
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["abort"]
        assert server.wait_exit() == 0
    finally:
        end(server)


def test_second_signal_ends_at_once(own_server: Server) -> None:
    server = own_server
    engine = server.engine()
    stream = long_stream(server, 16000)
    server.signal(signal.SIGTERM)
    wait_until(lambda: server.get("/health")[0] == 503, "/health says 503")
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 1
    with pytest.raises(openai.APIError):
        list(stream)
    assert engine is not None
    wait_until(lambda: not engine.is_running(), "the engine follows")


def test_sigterm_while_loading(tiny_flags: list[str], tmp_path: Path) -> None:
    server = Server([*tiny_flags, "--port", "0"], tmp_path)
    try:
        engine: psutil.Process = wait_until(server.engine, "an engine process")
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert not engine.is_running()
        assert "URL" not in server.out.read_text()
    finally:
        end(server)


def refusal(arguments: list[str], logs: Path) -> tuple[int, str]:
    """(exit code, standard error) of a server that must not start; /health is never 200 meanwhile."""
    port = free_port()
    server = Server(["--port", str(port), *arguments], logs, f"http://127.0.0.1:{port}")
    try:

        def ended() -> bool:
            assert server.get("/health")[0] in (0, 503)
            return server.process.poll() is not None

        wait_until(ended, "the server gives up")
        assert server.out.read_text() == ""
        return server.process.returncode, server.err.read_text()
    finally:
        end(server)


def check_refusal(arguments: list[str], logs: Path, *words: str) -> None:
    code, err = refusal(arguments, logs)
    assert code == 2
    assert len(err.splitlines()) == 1, err
    assert err.startswith("ropeway: error: ")
    for word in words:
        assert word in err


def test_missing_model(tmp_path: Path) -> None:
    check_refusal([str(tmp_path / "nowhere")], tmp_path, "nowhere")
    file = tmp_path / "model.bin"
    file.write_text("")
    check_refusal([str(file)], tmp_path, "model.bin", ".gguf")


def test_taken_port(tiny_flags: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        server = Server([*tiny_flags, "--port", port], tmp_path)
        assert server.wait_exit() == 2
        assert server.err.read_text().startswith(f"ropeway: error: cannot listen on 127.0.0.1:{port}")


def test_missing_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (write_tiny_model(model) / "tokenizer.json").unlink()
    check_refusal([str(model), *DUMMY], tmp_path, "tokenizer.json")


def test_missing_weights(tmp_path: Path) -> None:
    """An index that names a shard which an interrupted download did not bring."""
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_model(model)
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model-00002-of-00003.safetensors"}})
    )
    check_refusal([str(model), "--device", "cpu"], tmp_path, "model-00002-of-00003.safetensors")


def test_unknown_architecture(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((write_tiny_model(model) / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["UnheardOfModel"]}))
    check_refusal([str(model), *DUMMY], tmp_path, "UnheardOfModel")
