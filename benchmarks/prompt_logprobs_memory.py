"""Memory of a long prompt with `prompt_logprobs`, over all processes of a server, as HTTP clients cause it.

    python benchmarks/prompt_logprobs_memory.py                   # the demo model, 4000 tokens, 20 alternatives
    python benchmarks/prompt_logprobs_memory.py --tokens 1000 --top 5 --output memory.json

Resident memory is summed over the server's processes, a hundred times a second. "Idle" is the server before its first
request. The KV pool has room for one prompt, so that what a first, plain request leaves behind (KV blocks are memory from
their first use on) does not grow with the rounds. Exit status 0 if the peak stays within LIMIT_MB above idle, and the
last round leaves no more than the first one did, within SLACK_MB.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from stub import write_result

LIMIT_MB = 300
SLACK_MB = 50
MB = 2**20


class Memory:
    """The resident memory of a process and its children, watched from a thread."""

    def __init__(self, pid: int) -> None:
        self._parent = psutil.Process(pid)
        self._stop = threading.Event()
        self.peak = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def now(self) -> float:
        """MB"""
        total = 0
        for process in [self._parent, *self._parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / MB

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self.now())

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def post(port: int, body: dict[str, Any]) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    if response.status != 200:
        raise SystemExit(f"HTTP {response.status}: {data[:500]!r}")
    return data


def serve(model: str, num_tokens: int) -> tuple[subprocess.Popen[str], int]:
    """A server with a KV pool of so many tokens that answers, and its port."""
    arguments = [*([model] if model else []), "--num-gpu-blocks-override", str(num_tokens // 16 + 2)]
    command = [sys.executable, "-m", "ropeway", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "http://" in line:
            return process, int(line.split("http://", 1)[1].split()[0].rstrip("/").rsplit(":", 1)[1])
    raise SystemExit("the server did not start")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    source = random.Random(0)
    prompts = [[source.randrange(1000, 40000) for _ in range(options.tokens)] for _ in range(options.rounds)]
    process, port = serve(options.model, options.tokens)
    memory = Memory(process.pid)
    rounds = []
    try:
        time.sleep(1.0)
        idle = memory.now()
        for number, prompt in enumerate(prompts):
            top = options.top if number else None
            memory.peak = 0.0
            began = time.perf_counter()
            data = post(port, {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top})
            seconds = time.perf_counter() - began
            if top is not None:
                entries = json.loads(data)["choices"][0]["prompt_logprobs"]
                assert len(entries) == options.tokens
                assert all(top <= len(entry) <= top + 1 for entry in entries[1:])
            time.sleep(0.5)
            figures = {
                "prompt_logprobs": top,
                "peak_above_idle_mb": round(memory.peak - idle, 1),
                "left_above_idle_mb": round(memory.now() - idle, 1),
                "answer_mb": round(len(data) / MB, 2),
                "seconds": round(seconds, 2),
            }
            rounds.append(figures)
            print(json.dumps(figures), flush=True)
    finally:
        memory.close()
        process.terminate()
        process.wait(60)
    peak = max(figures["peak_above_idle_mb"] for figures in rounds)
    grown = rounds[-1]["left_above_idle_mb"] - rounds[1]["left_above_idle_mb"]
    result = {"idle_mb": round(idle, 1), "tokens": options.tokens, "rounds": rounds}
    write_result(options.output, "prompt_logprobs_memory", result)
    print(f"idle {idle:.0f} MB; peak {peak} MB above it (at most {LIMIT_MB}); from round to round {grown:+.1f} MB")
    return 0 if peak <= LIMIT_MB and grown <= SLACK_MB else 1


if __name__ == "__main__":
    raise SystemExit(main())
