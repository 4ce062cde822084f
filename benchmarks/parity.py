"""Does a request's text depend on who else is in the batch? 64 requests alone, then together under hard settings.

    python benchmarks/parity.py                 # the full check, about half an hour on two cores
    python benchmarks/parity.py --requests 8 --max-prompt 200 --max-output 40

Starts `ropeway serve` on the demo model in float32 itself. Prompts have 1 to --max-prompt tokens, outputs 1 to
--max-output. A text may differ only from a near tie on: a step where the two best tokens' raw log-probabilities are
less than 1e-3 apart. Each such case is shown. Exit status 1 if any text differs otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from stub import write_result

WORDS = [
    "the",
    "river",
    "carried",
    "a",
    "small",
    "boat",
    "past",
    "the",
    "old",
    "mill",
    "where",
    "children",
    "counted",
    "stones",
    "and",
    "a",
    "teacher",
    "wrote",
    "letters",
    "about",
    "winter",
    "bread",
    "music",
    "engines",
    "gardens",
    "light",
    "machines",
    "and",
    "long",
    "roads",
    "that",
    "lead",
    "to",
    "quiet",
    "towns",
    "near",
    "the",
    "sea",
]
NEAR_TIE = 1e-3


@dataclass
class Case:
    prompt: list[int]
    max_tokens: int


@dataclass
class Answer:
    tokens: list[int]
    gaps: list[float]  # between the two best raw log-probabilities, per step


@contextlib.contextmanager
def server(flags: list[str]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ropeway", "serve", "--dtype", "float32", "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def ask(client: httpx.AsyncClient, case: Case) -> Answer:
    body = {
        "prompt": case.prompt,
        "max_tokens": case.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
    }
    response = await client.post("/v1/completions", json=body)
    if response.status_code != 200:
        raise SystemExit(f"{response.status_code}: {response.text}")
    choice = response.json()["choices"][0]
    gaps = []
    for top in choice["logprobs"]["top_logprobs"]:
        best = sorted(top.values(), reverse=True)
        gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)
    return Answer(choice["token_ids"], gaps)


async def ask_all(url: str, cases: list[Case], concurrency: int) -> list[Answer]:
    limit = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(
        base_url=url, timeout=httpx.Timeout(3600), limits=httpx.Limits(max_connections=200)
    ) as client:

        async def one(case: Case) -> Answer:
            async with limit:
                return await ask(client, case)

        return await asyncio.gather(*(one(case) for case in cases))


def metric(url: str, name: str) -> float:
    page = httpx.get(f"{url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", page, re.MULTILINE))


def make_cases(url: str, args: argparse.Namespace) -> list[Case]:
    source = random.Random(args.seed)
    cases = []
    for index in range(args.requests):
        length = 1 if index == 0 else args.max_prompt if index == 1 else source.randint(1, args.max_prompt)
        output = 1 if index == 2 else args.max_output if index == 3 else source.randint(1, args.max_output)
        text = " ".join(source.choices(WORDS, k=2 * length + 8))
        tokens = httpx.post(f"{url}/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]
        cases.append(Case(tokens[:length], output))
    return cases


def compare(name: str, alone: list[Answer], together: list[Answer]) -> tuple[int, int, int]:
    """Returns how many are equal, how many part at a near tie, how many differ."""
    equal = near = wrong = 0
    for index, (a, b) in enumerate(zip(alone, together, strict=True)):
        if a.tokens == b.tokens:
            equal += 1
            continue
        step = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), -1)
        gap = a.gaps[step] if step >= 0 else float("inf")
        verdict = "near tie" if gap < NEAR_TIE else "DIFFERS"
        near += gap < NEAR_TIE
        wrong += gap >= NEAR_TIE
        print(
            f"  {name}: request {index} parts at token {step} of {len(a.tokens)}, gap {gap:.2e}: {verdict}", flush=True
        )
    return equal, near, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="texts alone against texts in a batch")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-prompt", type=int, default=1500)
    parser.add_argument("--max-output", type=int, default=300)
    parser.add_argument(
        "--small-pool", type=int, default=0, help="KV blocks of the scarce run; 0 takes a quarter of the need"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    longest = args.max_prompt + args.max_output
    with server([]) as url:
        cases = make_cases(url, args)
        began = time.monotonic()
        alone = asyncio.run(ask_all(url, cases, 1))
        print(f"alone: {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        answers = {"together": asyncio.run(ask_all(url, cases, len(cases)))}
        seconds = {"together": time.monotonic() - began}
        preempted = {"together": metric(url, "vllm:num_preemptions_total")}
    need = sum(len(case.prompt) + case.max_tokens for case in cases) // 16
    pool = args.small_pool or max(longest // 16 + 2, need // 4)
    runs = {
        f"pool of {pool} blocks": ["--num-gpu-blocks-override", str(pool)],
        "chunk 64": ["--max-num-batched-tokens", "64", "--max-num-seqs", "64"],
        "no prefix caching": ["--no-enable-prefix-caching"],
    }
    for name, flags in runs.items():
        with server(flags) as url:
            began = time.monotonic()
            answers[name] = asyncio.run(ask_all(url, cases, len(cases)))
            seconds[name] = time.monotonic() - began
            preempted[name] = metric(url, "vllm:num_preemptions_total")
    result: dict[str, Any] = {}
    failed = 0
    for name, together in answers.items():
        equal, near, wrong = compare(name, alone, together)
        failed += wrong
        result[name] = {"equal": equal, "near_ties": near, "different": wrong, "preemptions": preempted[name]}
        print(
            f"{name:24} equal {equal:3}  near ties {near:2}  different {wrong:2}  "
            f"preemptions {preempted[name]:4.0f}  {seconds[name]:6.0f} s",
            flush=True,
        )
    write_result(args.out, "parity", {"requests": len(cases), "runs": result})
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
