"""The demo model behind HTTP, as the reported faults call it: "tiny", in fp32. One server for all cases that need no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from case_client import TINY
from e2e_server import Server, running


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [*TINY, "--num-gpu-blocks-override", "1000", "--keepalive-interval", "0.3", "--max-num-seqs", "16"]
    with running(flags, tmp_path_factory.mktemp("tiny")) as server:
        yield server


@pytest.fixture(scope="session")
def scarce(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same with so few KV blocks that requests are preempted: 12 of 16 tokens."""
    with running([*TINY, "--num-gpu-blocks-override", "12"], tmp_path_factory.mktemp("scarce")) as server:
        yield server
