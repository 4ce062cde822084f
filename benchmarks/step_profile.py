"""Where the time of a decode step goes: in this process by kernel, and through HTTP as a whole.

    python benchmarks/step_profile.py                       # the demo model, 1 and 32 rows
    python benchmarks/step_profile.py MODEL --rows 1 --dtype bfloat16

In this process linears (the head's too) and attention are the work; what is left of a step is overhead: norms and other
small kernels, torch and Python, sampling, scheduling. Through HTTP, the time between two
streamed tokens of one client minus the same work gives all the overhead there is, pipe and front end included. Both
alternate, so that the machine's slow moments fall on both.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from stub import write_result

from ropeway.config import build_config
from ropeway.engine.core import EngineCore, build_core
from ropeway.hub import resolve_model
from ropeway.protocol import AddRequest, SamplingParams
from ropeway.worker.executor import LocalExecutor
from ropeway_kernels.cpu.stack import stack_seconds

PARTS = ("linear", "attention", "rope_kv", "norm", "gate")
request_ids = count()


class Stopwatch:
    """Seconds by kind of kernel: those inside the layers as the library counts them, and the head."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self._head = 0.0
        linear = native.linear

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = linear(*arguments, **options)
            self._head += time.perf_counter() - began
            return result

        native.linear = timed

    def read(self) -> dict[str, float]:
        seconds = stack_seconds(self._native)
        seconds["linear"] += self._head
        return seconds


def decode(engine: EngineCore, watch: Stopwatch, rows: int, context: int, steps: int) -> dict[str, float]:
    """Milliseconds per step by part; medians over pure decode steps of ``rows`` rows."""
    source = random.Random(rows)
    for _ in range(rows):
        prompt = [source.randrange(1000, 40000) for _ in range(context)]
        sampling = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
        engine.handle(AddRequest(next(request_ids), prompt, sampling, time.monotonic()))
    samples: list[dict[str, float]] = []
    while not engine.idle:
        before = watch.read()
        began = time.perf_counter()
        outputs = engine.step()
        total = time.perf_counter() - began
        if outputs is None or outputs.stats.num_new_prefill_tokens or outputs.stats.num_new_decode_tokens != rows:
            continue
        after = watch.read()
        sample = {name: after[name] - before[name] for name in PARTS}
        sample["engine"] = outputs.stats.schedule_seconds + outputs.stats.update_seconds
        sample["torch and Python"] = total - sum(sample.values())
        sample["step"] = total
        samples.append(sample)
    return {name: statistics.median(sample[name] for sample in samples) * 1e3 for name in samples[0]}


class Server:
    def __init__(self, model: Path, dtype: str) -> None:
        command = [sys.executable, "-m", "ropeway", "serve", str(model), "--dtype", dtype, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "http://" in line:
                self.port = int(line.split("http://", 1)[1].split()[0].rstrip("/").rsplit(":", 1)[1])
                break
        else:
            raise SystemExit("the server did not start")

    def intervals(self, context: int, steps: int) -> list[float]:
        """Seconds between the tokens that one client is sent."""
        source = random.Random(time.time_ns())
        body = {
            "prompt": [source.randrange(1000, 40000) for _ in range(context)],
            "max_tokens": steps + 1,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"HTTP {response.status}: {response.read().decode()}")
        stamps = []
        while line := response.readline():
            if line.startswith(b"data: {"):
                stamps.append(time.perf_counter())
        connection.close()
        return [after - before for before, after in itertools.pairwise(stamps[1:])]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = resolve_model(options.model)
    config = build_config({"dtype": options.dtype, "device": "cpu", "enable_prefix_caching": False})
    executor = LocalExecutor(config, folder)
    engine, _ = build_core(config, executor, time.perf_counter)
    runner: Any = executor._runner
    if runner._device.native is None:
        raise SystemExit("there are no native kernels to time")
    watch = Stopwatch(runner._device.native)
    report: dict[str, Any] = {"model": folder.name, "dtype": options.dtype, "context": options.context, "rows": {}}
    server = Server(folder, options.dtype)
    try:
        for rows in map(int, options.rows.split(",")):
            rounds, intervals = [], []
            for _ in range(options.rounds):
                rounds.append(decode(engine, watch, rows, options.context, options.steps))
                if rows == 1:
                    intervals.append(statistics.median(server.intervals(options.context, options.steps)) * 1e3)
            parts = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
            step = parts["step"]
            print(f"\n{rows} rows, context {options.context} and up: {step:.2f} ms per step in this process")
            for name in (*PARTS, "engine", "torch and Python"):
                print(f"  {name:17} {parts[name]:8.3f} ms  {parts[name] / step:6.1%}")
            overhead = [1 - (r["linear"] + r["attention"]) / r["step"] for r in rounds]
            print(f"  outside linears and attention: {_spread(overhead)}")
            entry: dict[str, Any] = {"parts_ms": parts, "overhead": overhead}
            if intervals:
                whole = [
                    1 - (r["linear"] + r["attention"]) / interval for r, interval in zip(rounds, intervals, strict=True)
                ]
                print(f"  through HTTP: {statistics.median(intervals):.2f} ms per token; outside them {_spread(whole)}")
                entry |= {"http_ms": intervals, "http_overhead": whole}
            report["rows"][rows] = entry
    finally:
        server.stop()
        engine.close()
    write_result(options.output, "step_profile", report)


def _spread(shares: list[float]) -> str:
    return f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"


if __name__ == "__main__":
    main()
