"""Reported faults of kind 13: metrics. The unit level is in tests/server/test_metrics.py."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest
from case_client import BROWN, COMPLETIONS, GREEDY, TINY, forced, post
from e2e_server import Server, running
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.real_model


def test_o44_gauges_return_to_zero_when_everybody_leaves_at_once(tiny: Server) -> None:
    """Running, waiting and reading their prompts, and no request afterwards that could refresh anything."""
    gone = threading.Event()

    def stream(index: int) -> None:
        prompt = "The" if index % 2 else f"{index} " + "word " * 400
        body = {**forced(BROWN), "prompt": prompt, "max_tokens": 1500, "stream": True}
        with httpx.stream("POST", tiny.url + COMPLETIONS, json=body, timeout=60) as response:
            for _ in response.iter_bytes():
                if gone.is_set():
                    return

    clients = [threading.Thread(target=stream, args=(index,)) for index in range(24)]
    for client in clients:
        client.start()
    tiny.wait_metrics(
        lambda m: m["vllm:num_requests_running"] >= 8 and m["vllm:num_requests_waiting"] >= 1, "a full house"
    )
    gone.set()
    for client in clients:
        client.join()
    tiny.wait_at_base()


def series(server: Server) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Every series of the page, which must be a valid one."""
    page = server.get("/metrics")[1]
    helps = [line.split()[2] for line in page.splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))
    found = set()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found.add(key)
    return found


def test_o45_restarts_users_and_wrong_names(tmp_path: Path) -> None:
    flags = [*TINY, "--num-gpu-blocks-override", "100"]
    with running(flags, tmp_path) as server:
        before = series(server)
        assert server.metrics()["vllm:request_success_total"] == 0
        for index in range(30):
            body = {**GREEDY, "prompt": "Hi", "max_tokens": 1, "user": f"user {index}", "request_id": f"r{index}"}
            assert post(server, COMPLETIONS, body).status_code == 200
        for index in range(10):
            assert post(server, COMPLETIONS, {"model": f"wrong {index}", "prompt": "Hi"}).status_code == 404
        threading.Event().wait(0.2)  # the page is cached for 0.1 s
        after = series(server)
        pages = [server.metrics() for _ in range(5)]
        assert all(page["vllm:request_success_total"] == 30 for page in pages)
        refused = {key for key in after if dict(key[1]).get("cause") == "model_not_found"}
        assert {key for key in after - before if not key[0].endswith("_created")} <= refused
        assert all(dict(labels).get("model_name", "tiny") == "tiny" for _, labels in after)
    with running(flags, tmp_path) as server:
        assert server.metrics()["vllm:request_success_total"] == 0
        assert series(server) == before
