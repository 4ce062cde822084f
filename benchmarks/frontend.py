"""What one core of the API process can stream: the real HTTP front end over an engine that computes nothing.

    python benchmarks/frontend.py

Two servers, both uvicorn with the settings of `ropeway serve`, measured in turn at each pace:

* ropeway: the app, the engine client, the pipe, and an engine process whose executor returns one fixed token per row and
  takes exactly one period per step.
* raw: an ASGI endpoint that sends one constant frame of the same bytes to each stream once per period. What uvicorn,
  uvloop and the kernel cost by themselves: nothing that speaks ASGI sends frames for less.

The client counts tokens and frames in the bytes and parses nothing. The figure is streamed tokens per second of the
server process's own CPU time (user and system), so neither the client nor the engine counts, while all streams run.
Frames per token says how much was joined: 1 means that each token was sent by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from stub import StubExecutor, StubHandle, write_result

from ropeway.config import Config, build_config
from ropeway.engine.process_client import ProcessEngineClient
from ropeway.engine.step import Executor, KVCapacity, ModelRunnerOutput, SchedulerOutput
from ropeway.hub import resolve_model
from ropeway.serve import Gate, listening, make_http_server, url_of

WORD = " fox"  # one token of the demo model's vocabulary; as long as FRAME_MARK, see count()
FRAME_MARK = b"ata:"
DONE = b"data: [DONE]\n\n"
MAX_TOKENS = 4000  # per stream
CLIENT_PAUSE = 0.01  # seconds between two looks at the sockets: the client must not take the core of the others
WARM_TOKENS = 8  # per stream, before the clock starts


# The servers


class PacedExecutor(StubExecutor):
    """The same token for every row. The newest request's seed is the period of a step, in microseconds."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self._period = 0.0
        self._next = 0.0

    def start(self) -> KVCapacity:
        return KVCapacity(
            num_blocks=65536,
            block_size=16,
            max_model_len=8192,
            vocab_size=49152,
            dtype="float32",
            device="stub",
            architecture="Stub",
        )

    def submit(self, plan: SchedulerOutput) -> StubHandle:
        for row in plan.added:
            self._period = row.sampling.seed * 1e-6
        now = time.perf_counter()
        if self._next > now:
            time.sleep(self._next - now)
        else:
            self._next = now
        self._next += self._period
        return StubHandle(ModelRunnerOutput(plan.step_id, [[self._token_id] if s else [] for s in plan.samples]))


def make_paced_executor(token_id: int) -> Executor:
    return PacedExecutor(token_id)


async def serve_ropeway(config: Config, listener: socket.socket) -> None:
    from ropeway.metrics import Metrics
    from ropeway.server.app import create_app
    from ropeway.server.tokenizer import Tokenizer

    folder = resolve_model("")
    tokenizer = Tokenizer.load(folder)
    (token_id,) = tokenizer.encode(WORD, add_special_tokens=False)
    metrics = Metrics("stub", config)
    client = ProcessEngineClient(config, functools.partial(make_paced_executor, token_id), metrics.on_step)
    try:
        gate = Gate()
        gate.app = create_app(config, client, tokenizer, metrics, ready=await client.start())
        await make_http_server(config.server, gate).serve(sockets=[listener])
    finally:
        await client.close()


class RawApp:
    """Constant frames at a common pace; the request's body is {"max_tokens": ..., "seed": period in microseconds}."""

    def __init__(self) -> None:
        chunk = {
            "id": "chatcmpl-" + 32 * "0",
            "object": "chat.completion.chunk",
            "created": 1700000000,
            "model": "stub",
            "choices": [{"index": 0, "delta": {"content": WORD}, "logprobs": None, "finish_reason": None}],
        }
        self._frame = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
        self._tick: asyncio.Future[None] | None = None
        self._num_streams = 0
        self._next = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        request = json.loads(body)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._num_streams += 1
        for _ in range(request["max_tokens"]):
            await self._wait(request["seed"] * 1e-6)
            await send({"type": "http.response.body", "body": self._frame, "more_body": True})
        self._num_streams -= 1
        await send({"type": "http.response.body", "body": DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait(self, period: float) -> None:
        if self._tick is None:
            loop = asyncio.get_running_loop()
            self._tick = loop.create_future()
            self._next = max(loop.time(), self._next + period)
            loop.call_at(self._next, self._fire)
        await self._tick

    def _fire(self) -> None:
        assert self._tick is not None
        self._tick.set_result(None)
        self._tick = None


async def serve_raw(config: Config, listener: socket.socket) -> None:
    gate = Gate()
    gate.app = RawApp()
    await make_http_server(config.server, gate).serve(sockets=[listener])


def serve(name: str) -> None:
    import uvloop

    config = build_config({"port": 0, "max_num_seqs": 1024, "max_num_batched_tokens": 8192, "log_level": "warning"})
    with listening(config.server) as listener:
        print(url_of(config.server, listener), flush=True)
        main = {"ropeway": serve_ropeway, "raw": serve_raw}[name]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main(config, listener))


# The client


@dataclass
class Run:
    server: str
    num_streams: int
    period_us: int  # 0: as fast as the engine goes
    num_tokens: int
    num_frames: int
    wall_seconds: float
    cpu_seconds: float

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.num_tokens / self.cpu_seconds

    @property
    def frames_per_token(self) -> float:
        return self.num_frames / self.num_tokens


class Stream:
    """One request on one socket. A pattern of four bytes cannot lie in a tail of three, so what is split between two
    reads is counted once."""

    def __init__(self, address: tuple[str, int], body: bytes) -> None:
        self.socket = socket.create_connection(address)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        self.socket.sendall(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
        self.socket.setblocking(False)
        self.num_tokens = self.num_frames = 0
        self.tail = b""
        self.start = b""

    def read(self) -> bool:
        """False at the end of the response."""
        data = self.socket.recv(262144)
        if not self.num_tokens and len(self.start) < 12:
            self.start += data[:12]
            if len(self.start) >= 12 and not self.start.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the server refused: {data[:400]!r}")
        data_with_tail = self.tail + data
        self.num_tokens += data_with_tail.count(WORD.encode())
        self.num_frames += data_with_tail.count(FRAME_MARK)
        self.tail = data_with_tail[-3:]
        return bool(data)


def measure(server: str, url: str, process: psutil.Process, num_streams: int, num_tokens: int, period_us: int) -> Run:
    """All streams at once; between the moment when each has begun and the moment when the first has all its tokens."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    request = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "seed": period_us,
    }
    body = json.dumps(request).encode()
    selector = selectors.DefaultSelector()
    streams = [Stream((host, int(port)), body) for _ in range(num_streams)]
    for stream in streams:
        selector.register(stream.socket, selectors.EVENT_READ, stream)

    def snapshot() -> tuple[int, int, float, float]:
        times = process.cpu_times()
        tokens, frames = sum(s.num_tokens for s in streams), sum(s.num_frames for s in streams)
        return tokens, frames, time.perf_counter(), times.user + times.system

    first = last = None
    warm: set[Stream] = set()
    num_open = num_streams
    deadline = time.perf_counter() + 300
    while num_open:
        if time.perf_counter() > deadline:
            raise TimeoutError("a run took more than five minutes")
        time.sleep(CLIENT_PAUSE)
        for key, _ in selector.select(10):
            stream = key.data
            if not stream.read():
                selector.unregister(stream.socket)
                stream.socket.close()
                num_open -= 1
            elif first is None and stream.num_tokens >= WARM_TOKENS:
                warm.add(stream)
                if len(warm) == num_streams:
                    first = snapshot()
            elif last is None and stream.num_tokens >= num_tokens:
                last = snapshot()
    selector.close()
    assert all(stream.num_tokens == num_tokens for stream in streams), "tokens were lost"
    assert first is not None
    assert last is not None, "the first stream ended before the last one began: give it more --seconds"
    tokens, frames, wall, cpu = (after - before for before, after in zip(first, last, strict=True))
    return Run(server, num_streams, period_us, int(tokens), int(frames), wall, cpu)


@contextlib.contextmanager
def running(name: str) -> Iterator[tuple[str, psutil.Process]]:
    """URL and process of a server that answers."""
    process = subprocess.Popen([sys.executable, __file__, "--serve", name], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        for _ in range(600):
            try:  # the socket listens from the start; what is sent waits until somebody accepts
                measure(name, url, psutil.Process(process.pid), 1, 64, 100)
                break
            except (OSError, RuntimeError):
                time.sleep(0.1)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--serve", choices=["ropeway", "raw"], help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4, help="of a run, at a pace that can be kept")
    parser.add_argument(
        "--periods", type=int, nargs="+", default=[20000, 8000, 3000, 1000, 0], help="microseconds per step"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    runs: list[Run] = []
    print(f"{'period µs':>9} {'server':>8} {'tok/s':>9} {'tok/s per CPU s':>16} {'frames/token':>13} {'CPU load':>9}")
    with running("raw") as raw, running("ropeway") as ropeway:
        for period in args.periods:
            for _ in range(args.rounds):
                for name, (url, process) in (("raw", raw), ("ropeway", ropeway)):
                    num_tokens = min(MAX_TOKENS, int(args.seconds * 1e6 / max(period, 1)))
                    runs.append(run := measure(name, url, process, args.streams, num_tokens, period))
                    print(
                        f"{period:9} {name:>8} {run.num_tokens / run.wall_seconds:9.0f} {run.tokens_per_cpu_second:16.0f}"
                        f" {run.frames_per_token:13.2f} {run.cpu_seconds / run.wall_seconds:9.2f}",
                        flush=True,
                    )
    for period in args.periods:
        rates = {
            n: [r.tokens_per_cpu_second for r in runs if (r.period_us, r.server) == (period, n)]
            for n in ("raw", "ropeway")
        }
        ratios = [a / b for a, b in zip(rates["ropeway"], rates["raw"], strict=True)]
        print(f"{period} µs: ropeway/raw {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    write_result(args.out, "frontend", {"runs": [asdict(run) for run in runs]})


if __name__ == "__main__":
    main()
