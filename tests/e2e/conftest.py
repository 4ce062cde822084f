"""Servers that tests share, because each takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_server import MODEL, Server, running, write_tiny_model

DUMMY = ["--load-format", "dummy", "--device", "cpu", "--served-model-name", MODEL, "--num-threads", "1"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_flags(tiny_model: Path) -> list[str]:
    """What serves the tiny model; add more."""
    return [str(tiny_model), *DUMMY, "--num-gpu-blocks-override", "4096"]


@pytest.fixture(scope="session")
def server(tiny_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """At most 4 requests run and 64 tokens are computed at a time, so that there are queues and long prefills."""
    logs = tmp_path_factory.mktemp("logs")
    with running([*tiny_flags, "--max-num-seqs", "4", "--max-num-batched-tokens", "64"], logs) as server:
        yield server


@pytest.fixture
def own_server(tiny_flags: list[str], tmp_path: Path) -> Iterator[Server]:
    """For tests that break it."""
    with running(tiny_flags, tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As a newcomer starts it: no model named, no flags."""
    with running([], tmp_path_factory.mktemp("demo")) as server:
        yield server
