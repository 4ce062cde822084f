"""What one token costs the client of `ropeway bench serve`: its CPU time per event, beside that of a bare socket.

A server process streams constant events to all clients in steps, as an engine would; the client's CPU time over the
run, the kernel's included, is divided by the events. The bare client only counts bytes: the floor of any client.

    .venv/bin/python benchmarks/bench_client.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from multiprocessing.synchronize import Event
from statistics import median

import uvloop

from ropeway.bench.client import HttpClient

FRAME = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1790000000,'
    b'"model":"SmolLM2-135M-Instruct","choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}],'
    b'"usage":null}\n\n'
)
END = FRAME.replace(b'"finish_reason":null', b'"finish_reason":"length"') + b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def serve(listener: socket.socket, num_tokens: int, step_seconds: float, stop: Event) -> None:
    """One frame for every open stream each step."""
    frame, end = chunk(FRAME), chunk(END) + b"0\r\n\r\n"
    streams: dict[asyncio.StreamWriter, int] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            if (await reader.readline()) == b"\r\n":  # the body has no line
                writer.write(HEAD)
                streams[writer] = num_tokens

    async def run() -> None:
        server = await asyncio.start_server(answer, sock=listener)
        while not stop.is_set():
            await asyncio.sleep(step_seconds)
            for writer, left in list(streams.items()):
                writer.write(frame if left > 1 else end)
                streams[writer] = left - 1
                if left == 1:
                    del streams[writer]
        server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def stream_all(port: int, num_streams: int, num_tokens: int) -> None:
    client = HttpClient(f"http://127.0.0.1:{port}")
    outcomes = await asyncio.gather(*(client.stream("/v1/completions", b"{}") for _ in range(num_streams)))
    assert not any(outcome.error for outcome in outcomes), outcomes[0].error
    assert all(len(outcome.token_times) == num_tokens for outcome in outcomes)
    client.close()


class Bare(asyncio.Protocol):
    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self.done = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left == 0:
            self.done.set_result(None)


async def stream_bare(port: int, num_streams: int, num_tokens: int) -> None:
    num_bytes = len(HEAD) + (num_tokens - 1) * len(chunk(FRAME)) + len(chunk(END) + b"0\r\n\r\n")
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Bare(num_bytes), "127.0.0.1", port) for _ in range(num_streams)]
    for transport, _ in made:
        transport.write(b"POST / HTTP/1.1\r\n\r\n")
    await asyncio.gather(*(protocol.done for _, protocol in made))
    for transport, _ in made:
        transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=5.0)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        server = context.Process(target=serve, args=(listener, arguments.tokens, arguments.step_ms / 1000, stop))
        server.start()
        try:
            for num_streams in arguments.streams:
                costs: dict[str, list[float]] = {"client": [], "bare": []}
                for _ in range(arguments.repeats):
                    for name, work in (("client", stream_all), ("bare", stream_bare)):
                        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                            began = time.process_time()
                            runner.run(work(port, num_streams, arguments.tokens))
                            spent = time.process_time() - began
                        costs[name].append(spent / (num_streams * arguments.tokens) * 1e6)
                found = {f"{name}_us_per_token": round(median(values), 1) for name, values in costs.items()}
                print(json.dumps({"streams": num_streams} | found), flush=True)
        finally:
            stop.set()
            server.join(10)


if __name__ == "__main__":
    main()
