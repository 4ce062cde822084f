"""What one core of the API process can stream: the real HTTP front end over an engine that computes nothing.

    python benchmarks/frontend.py

Three servers, measured in turn at each pace:

* ropeway: the app, the engine client, the pipe, and an engine process whose executor returns one fixed token per row and
  takes exactly one period per step.
* raw: uvicorn as in `ropeway serve`, with an ASGI endpoint that sends one constant frame to each stream once per period.
  What uvicorn, uvloop and the kernel cost by themselves: with one frame per token, nothing that speaks ASGI costs less.
* vllm, where `peers.py` has set it up: its own API and engine processes over the same kind of executor (vllm_stub.py).

The client counts tokens and frames in the bytes and parses nothing. The figure is streamed tokens per second of the
server process's own CPU time (user and system), so neither the client nor the engine counts, while all streams run.
Frames per token says how much was joined: 1 means that each token was sent by itself, as long as the server keeps up.
The shortest period asks for more than that: it shows what a core can do when it is always late.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import threading
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
from ropeway.hub import home, resolve_model
from ropeway.serve import Gate, listening, make_http_server, url_of

WORD = " fox"  # one token of the demo model's vocabulary; as long as FRAME_MARK, see count()
FRAME_MARK = b"ata:"
DONE = b"data: [DONE]\n\n"
# Tokens per stream, at least and at most. The first stream must still be running when the last one begins, and a server
# that cannot keep up must come to an end.
TOKENS = {"raw": (400, 2000), "ropeway": (400, 8000), "vllm": (1000, 1000)}
START_SECONDS = 300
PEERS_VLLM = home() / "peers" / "vllm" / "venv" / "bin" / "vllm"
VLLM_FLAGS = [
    "--load-format=dummy", "--hf-overrides", '{"num_hidden_layers": 1}', "--enforce-eager", "--max-model-len=8192",
    "--max-num-seqs=1024", "--max-num-batched-tokens=8192", "--no-async-scheduling", "--disable-log-stats",
    "--disable-uvicorn-access-log", "--distributed-executor-backend=vllm_stub.PacedExecutor",
]  # fmt: skip
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(__file__).parent),
}  # fmt: skip
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


def stub_token() -> int:
    """The id of WORD."""
    from ropeway.server.tokenizer import Tokenizer

    (token_id,) = Tokenizer.load(resolve_model("")).encode(WORD, add_special_tokens=False)
    return token_id


async def serve_ropeway(config: Config, listener: socket.socket) -> None:
    from ropeway.metrics import Metrics
    from ropeway.server.app import create_app
    from ropeway.server.tokenizer import Tokenizer

    folder = resolve_model("")
    tokenizer = Tokenizer.load(folder)
    metrics = Metrics("stub", config)
    client = ProcessEngineClient(config, functools.partial(make_paced_executor, stub_token()), metrics.on_step)
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
    period_us: int
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
    if first is None or last is None or last[3] == first[3]:
        raise RuntimeError("the first stream ended before the last one began: give it more --seconds")
    tokens, frames, wall, cpu = (after - before for before, after in zip(first, last, strict=True))
    return Run(server, num_streams, period_us, int(tokens), int(frames), wall, cpu)


@contextlib.contextmanager
def running(name: str, vllm: Path) -> Iterator[tuple[str, psutil.Process]]:
    """URL and API process of a server that answers."""
    env = None
    if name == "vllm":
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [str(vllm), "serve", str(resolve_model("")), "--host", "127.0.0.1", "--port", str(port), *VLLM_FLAGS]
        env = {**os.environ, **VLLM_ENVIRONMENT, "STUB_TOKEN": str(stub_token())}
    else:
        command = [sys.executable, __file__, "--serve", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{port}" if name == "vllm" else process.stdout.readline().strip()
        threading.Thread(target=process.stdout.read, daemon=True).start()  # or it would block one day
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                measure(name, url, psutil.Process(process.pid), 1, 64, 2000)
                break
            except (OSError, RuntimeError):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--serve", choices=["ropeway", "raw"], help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4, help="of a run, at a pace that can be kept")
    parser.add_argument(
        "--periods", type=int, nargs="+", default=[20000, 8000, 3000, 1000], help="microseconds per step"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", type=Path, default=PEERS_VLLM, help="vLLM's command; without it, it is left out")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    names = ["raw", "ropeway", *(["vllm"] if args.vllm.exists() else [])]
    runs: list[Run] = []
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(running(name, args.vllm)) for name in names}
        print(
            f"{'period us':>9} {'server':>8} {'tok/s':>9} {'tok/s per CPU s':>16} {'frames/token':>13} {'CPU load':>9}"
        )
        for period in args.periods:
            for _ in range(args.rounds):
                for name, (url, process) in servers.items():
                    least, most = TOKENS[name]
                    num_tokens = min(most, max(least, int(args.seconds * 1e6 / period)))
                    runs.append(run := measure(name, url, process, args.streams, num_tokens, period))
                    print(
                        f"{period:9} {name:>8} {run.num_tokens / run.wall_seconds:9.0f} "
                        f"{run.tokens_per_cpu_second:16.0f} {run.frames_per_token:13.2f} "
                        f"{run.cpu_seconds / run.wall_seconds:9.2f}",
                        flush=True,
                    )
    print("\ntokens per CPU second of ropeway over the other's: median (min to max)")
    for period in args.periods:
        rates = {n: [r.tokens_per_cpu_second for r in runs if (r.period_us, r.server) == (period, n)] for n in names}
        shown = []
        for other in names:
            if other != "ropeway":
                ratios = [ours / theirs for ours, theirs in zip(rates["ropeway"], rates[other], strict=True)]
                shown.append(f"{other} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print(f"{period:6} us: {', '.join(shown)}")
    write_result(args.out, "frontend", {"runs": [asdict(run) for run in runs]})


if __name__ == "__main__":
    main()
