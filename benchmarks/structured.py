"""Structured output on a running server: does it hold, what does it cost, whom does it disturb.

    python benchmarks/structured.py [--url http://127.0.0.1:8000] conformance throughput hostile masks

Without --url, `ropeway serve` with the demo model is started for it.

* conformance: schemas of many families (schemas.py), one answer each at temperature 1, 32 at once. Every answer that
  ends by "stop" must parse and validate with jsonschema.
* masks: replays those answers token by token in this process: µs to compute a mask and to take a token, on one core.
* throughput: rounds of 32 free requests and rounds of 32 structured ones in turn, all of the same number of tokens.
* hostile: 16 streams run, while grammars come that would compile for a quarter of a minute, overflow the compiler's stack
  or are too complex to run. How long until each is refused, and the streams' longest pause meanwhile, against the
  longest without them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psutil
from schemas import Schema, make_schemas
from stub import write_result

MAX_TOKENS = 300
AT_ONCE = 32
CHECKER = jsonschema.Draft202012Validator
PROMPTS = [
    "Invent an example.",
    "Describe a person.",
    "Give me some data about a product.",
    "Answer in JSON: what is a fox?",
]
CHAIN = "".join(f"r{i}: r{i + 1} | r{i + 1} r{i + 1}\n" for i in range(5000))
HOSTILE: dict[str, dict[str, Any]] = {
    "schema, slow": {"guided_json": {"type": "integer", "multipleOf": 999983}},
    "schema, large": {"guided_json": {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {"type": "integer"}}} for c in "ab"]} for i in range(14)]}},
    "regex": {"guided_regex": "|".join(f".*{chr(97 + i)}.*{chr(98 + i)}" for i in range(24))},
    "grammar, deep": {"guided_grammar": f'start: r0\n{CHAIN}r5000: "a"\n'},
}  # fmt: skip


async def ask(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post("/v1/chat/completions", json=fields)
    return {"status": response.status_code, **response.json()}


# Conformance


def judge(schema: Schema, choice: dict[str, Any]) -> str:
    """ "valid", "cut" (by max_tokens) or what is wrong."""
    if choice["finish_reason"] == "length":
        return "cut"
    if choice["finish_reason"] != "stop":
        return f"ended by {choice['finish_reason']}"
    try:
        value = json.loads(choice["message"]["content"])
        CHECKER(schema, format_checker=CHECKER.FORMAT_CHECKER).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"invalid: {str(error).splitlines()[0]}"
    return "valid"


async def conformance(
    http: httpx.AsyncClient, per_family: int
) -> tuple[dict[str, Any], list[tuple[Schema, list[int]]]]:
    schemas = list({json.dumps(schema): (family, schema) for family, schema in make_schemas(per_family)}.values())
    gate = asyncio.Semaphore(AT_ONCE)
    answers: list[tuple[Schema, list[int]]] = []
    verdicts: dict[str, Counter[str]] = {}
    wrong: list[str] = []

    async def run(number: int, family: str, schema: Schema) -> None:
        async with gate:
            answer = await ask(
                http,
                messages=[{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}],
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": family, "strict": True, "schema": schema},
                },
                temperature=1.0,
                seed=number,
                max_tokens=MAX_TOKENS,
                return_token_ids=True,
            )
        if answer["status"] == 200:
            choice = answer["choices"][0]
            verdict = judge(schema, choice)
            answers.append((schema, choice["token_ids"]))
        else:
            verdict = f"refused: {answer['error']['message']}"
        verdicts.setdefault(family, Counter())[verdict.partition(":")[0]] += 1
        if verdict not in ("valid", "cut"):
            wrong.append(f"{family}: {verdict}: {json.dumps(schema)}: {answer}")

    await asyncio.gather(*(run(number, *item) for number, item in enumerate(schemas)))
    total: Counter[str] = sum(verdicts.values(), Counter())
    for family, counts in verdicts.items():
        print(f"  {family:<20}", ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    for line in wrong:
        print("  WRONG", line)
    print(f"  {len(schemas)} different schemas: {dict(total)}")
    return {"schemas": len(schemas), "verdicts": dict(total), "wrong": wrong}, answers


# The cost of a mask


def masks(answers: list[tuple[Schema, list[int]]]) -> dict[str, Any]:
    import numpy as np

    from ropeway.constraint import compile_grammar, make_tokenizer
    from ropeway.hub import resolve_model
    from ropeway.server.grammar import grammar, json_rule
    from ropeway.vocabulary import Vocabulary

    vocabulary = Vocabulary.load(resolve_model(""))
    tokenizer = make_tokenizer(
        vocabulary.all_token_bytes(),
        sorted(vocabulary.special_ids),
        vocabulary.eos_token_ids,
        num_ids=vocabulary.size,
        encode=lambda text: vocabulary.backend.encode(text, add_special_tokens=False).ids,
    )
    bits = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    compiling, first, later, taking = [], [], [], []
    for schema, tokens in answers:
        began = time.perf_counter()
        matcher = compile_grammar(tokenizer, grammar(json_rule(schema)))
        compiling.append(time.perf_counter() - began)
        for position, token in enumerate(tokens):
            began = time.perf_counter()
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            computed = time.perf_counter()
            assert matcher.consume_token(token)
            taking.append(time.perf_counter() - computed)
            (later if position else first).append(computed - began)
    result = {
        name: {
            "count": len(seconds),
            "mean_us": round(1e6 * statistics.mean(seconds), 1),
            "median_us": round(1e6 * statistics.median(seconds), 1),
            "p99_us": round(1e6 * statistics.quantiles(seconds, n=100)[98], 1),
            "max_us": round(1e6 * max(seconds), 1),
        }
        for name, seconds in (("compile", compiling), ("first mask", first), ("mask", later), ("take a token", taking))
    }
    for name, figures in result.items():
        print(f"  {name:<13}", figures)
    return result


# Throughput

ROWS: Schema = {
    "type": "array", "minItems": 100, "items": {
        "type": "object", "required": ["id", "name", "price", "tags"], "additionalProperties": False,
        "properties": {
            "id": {"type": "integer", "minimum": 1}, "name": {"type": "string", "maxLength": 24},
            "price": {"type": "number", "minimum": 0}, "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["new", "old", "big", "small"]}},
        },
    },
}  # fmt: skip


def cpu_seconds() -> float:
    """Of the server and its processes, if it is ours: what others do on the machine is not in it."""
    processes = psutil.Process().children(recursive=True)
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def throughput(http: httpx.AsyncClient, rounds: int, num_tokens: int) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {"free": {"ignore_eos": True}, "structured": {"guided_json": ROWS}}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    work: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(-1, rounds):
        for kind, fields in kinds.items():
            began, cpu = time.perf_counter(), cpu_seconds()
            answers = await asyncio.gather(
                *(
                    ask(
                        http,
                        messages=[{"role": "user", "content": f"List products of shop {number}/{i} with prices."}],
                        temperature=1.0,
                        seed=i,
                        max_tokens=num_tokens,
                        **fields,
                    )
                    for i in range(AT_ONCE)
                )
            )
            seconds = time.perf_counter() - began
            tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
            assert tokens == AT_ONCE * num_tokens, "an answer ended early"
            if number >= 0:  # the first round warms up
                rates[kind].append(tokens / seconds)
                work[kind].append(1e3 * (cpu_seconds() - cpu) / tokens)
                print(
                    f"  round {number} {kind:<11} {rates[kind][-1]:7.1f} tokens/s {work[kind][-1]:6.2f} ms of CPU per token"
                )
    ratios = [one / other for one, other in zip(rates["structured"], rates["free"], strict=True)]
    result = {"tokens_per_second": rates, "ratio_median": statistics.median(ratios), "cpu_ms_per_token": work}
    print(f"  structured against free, tokens per second: median of {rounds} rounds {result['ratio_median']:.3f}")
    if all(map(sum, work.values())):
        result["cpu_ratio"] = statistics.median(work["free"]) / statistics.median(work["structured"])
        print(f"  structured against free, tokens per CPU second: {result['cpu_ratio']:.3f}")
    return result


# Hostile grammars


async def hostile(http: httpx.AsyncClient, streams: int) -> dict[str, Any]:
    gaps: list[tuple[float, float]] = []  # (when, seconds since the token before)
    running = asyncio.Event()
    started = 0

    async def stream(number: int) -> None:
        nonlocal started
        body = {
            "messages": [{"role": "user", "content": f"Tell a long story, number {number}."}],
            "stream": True, "max_tokens": 4000, "ignore_eos": True, "seed": number,
        }  # fmt: skip
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            last = 0.0
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last:
                        gaps.append((now, now - last))
                    else:
                        started += 1
                        if started == streams:
                            running.set()
                    last = now

    tasks = [asyncio.create_task(stream(number)) for number in range(streams)]
    await running.wait()
    await asyncio.sleep(1)
    refusals: dict[str, list[float]] = {name: [] for name in HOSTILE}

    async def attack(name: str, number: int) -> None:
        fields = json.loads(json.dumps(HOSTILE[name]).replace("999983", str(999983 - 2 * number)))  # no cached verdict
        if "guided_regex" in fields:
            fields["guided_regex"] += f"|{number}"
        if "guided_grammar" in fields:
            fields["guided_grammar"] += f"// {number}\n"
        if "guided_json" in fields:
            fields["guided_json"]["title"] = str(number)
        began = time.perf_counter()
        answer = await ask(http, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, **fields)
        assert answer["status"] == 400, answer
        refusals[name].append(time.perf_counter() - began)

    async def window(seconds: float) -> list[float]:
        """The pauses that end within the time from now on."""
        begin = time.perf_counter()
        await asyncio.sleep(seconds)
        return [gap for when, gap in gaps if when >= begin]

    calm: list[float] = []
    under_attack: list[float] = []
    await attack("regex", -1)  # the process that compiles is there from now on
    for number in range(3):
        calm += await window(4)
        began = time.perf_counter()
        for name in HOSTILE:
            await attack(name, 2 * number)
        await asyncio.gather(attack("schema, slow", 2 * number + 1), attack("regex", 2 * number + 1))
        under_attack += [gap for when, gap in gaps if when >= began]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    result = {
        "refused_after_seconds": {name: [round(value, 3) for value in values] for name, values in refusals.items()},
        "itl_ms": {
            name: {
                "median": round(1e3 * statistics.median(values), 1),
                "p99": round(1e3 * statistics.quantiles(values, n=100)[98], 1),
                "max": round(1e3 * max(values), 1),
            }
            for name, values in (("calm", calm), ("under attack", under_attack))
        },
    }
    for name, values in result["refused_after_seconds"].items():
        print(f"  {name:<14} refused after {values} s")
    for name, figures in result["itl_ms"].items():
        print(f"  ITL in ms, {name:<13} {figures}")
    return result


# Running


@contextlib.contextmanager
def server(url: str) -> Iterator[str]:
    """The URL of one that runs, or that of one of our own."""
    if url:
        yield url
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "ropeway",
        "serve",
        f"--port={port}",
        "--host=127.0.0.1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="conformance, masks, throughput, hostile; all without any")
    parser.add_argument("--url", default="")
    parser.add_argument("--per-family", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-tokens", type=int, default=96, help="per request of the throughput part")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = options.parts or ["conformance", "masks", "throughput", "hostile"]
    results: dict[str, Any] = {}
    answers: list[tuple[Schema, list[int]]] = []
    limits = httpx.Limits(max_connections=None)
    with server(options.url) as url:
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            if "conformance" in parts or "masks" in parts:
                print("conformance")
                results["conformance"], answers = await conformance(http, options.per_family)
            if "throughput" in parts:
                print("throughput")
                results["throughput"] = await throughput(http, options.rounds, options.num_tokens)
            if "hostile" in parts:
                print("hostile")
                results["hostile"] = await hostile(http, options.streams)
    if "masks" in parts:
        print("masks")
        results["masks"] = masks(answers)
    write_result(options.json, "structured", results)
    if results.get("conformance", {}).get("wrong"):
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main())
