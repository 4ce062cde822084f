"""A real `ropeway serve` process, and a tiny model with random weights for it to load in no time."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import tokenizers
from prometheus_client.parser import text_string_to_metric_families

from ropeway.hub import home

DEADLINE = 60.0
MODEL = "tiny"
# Greedy, and never the end of sequence: as many tokens as are asked for.
ENDLESS: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain: {what}")
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def write_tiny_model(folder: Path) -> Path:
    """Everything but weights, which `--load-format dummy` makes up. One token per byte, so ASCII text is as many tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_vocabulary(), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 257,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    return folder


def byte_vocabulary() -> dict[str, int]:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert len(letters) == 256
    return {letter: index for index, letter in enumerate(letters)}


class Server:
    """A running server process. ``url`` is known once it has reported that it serves."""

    def __init__(self, arguments: list[str], logs: Path, url: str = "") -> None:
        self.out, self.err = logs / "out.txt", logs / "err.txt"
        self.url = url
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ROPEWAY_")}
        folders = [Path(argument).resolve() for argument in arguments if Path(argument).is_dir()]
        own = any(not folder.is_relative_to(home().resolve()) for folder in folders)
        # What a test's own model leaves there would push the user's packed weights out.
        environ["ROPEWAY_HOME"] = str(logs / "home" if own else home())
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ropeway", "serve", *arguments], stdout=out, stderr=err, env=environ
            )

    def wait_serving(self) -> None:
        def url() -> str:
            assert self.process.poll() is None, f"the server ended: {self.err.read_text()}"
            return next((line.split()[1] for line in self.out.read_text().splitlines() if "URL" in line), "")

        self.url = wait_until(url, "the report of a server that serves")

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0, timeout=DEADLINE)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=DEADLINE)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=DEADLINE)

    def get(self, path: str) -> tuple[int, str]:
        """(status, body); status 0 when nobody listens."""
        try:
            with contextlib.closing(self.connect()) as connection:
                connection.request("GET", path)
                response = connection.getresponse()
                return response.status, response.read().decode()
        except OSError:
            return 0, ""

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, json.loads(response.read())

    def metrics(self) -> dict[str, float]:
        """Sample name -> value, summed over labels."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def wait_metrics(self, condition: Callable[[dict[str, float]], bool], what: str) -> None:
        wait_until(lambda: condition(self.metrics()), what, 20)

    def wait_at_base(self) -> None:
        """Nothing runs, nothing waits, no block is used; without any further request."""
        self.wait_metrics(at_base, "running, waiting and used blocks at zero")

    def engine(self) -> psutil.Process | None:
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == "ropeway-engine" and child.status() != psutil.STATUS_ZOMBIE:
                    return child
        return None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_exit(self) -> int:
        return self.process.wait(DEADLINE)


def at_base(metrics: dict[str, float]) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(metrics[name] == 0 for name in names)


@contextlib.contextmanager
def running(arguments: list[str], logs: Path) -> Iterator[Server]:
    """A server that serves; whatever happens, it and its engine are gone afterwards."""
    server = Server(["--port", "0", *arguments], logs)
    try:
        server.wait_serving()
        yield server
    finally:
        end(server)


def end(server: Server) -> None:
    family = [server.process]
    with contextlib.suppress(psutil.NoSuchProcess):
        family += psutil.Process(server.process.pid).children(recursive=True)
    server.process.terminate()
    try:
        server.process.wait(10)
    except subprocess.TimeoutExpired:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.process.wait(10)
        raise
    gone = [process for process in family[1:] if isinstance(process, psutil.Process)]
    wait_until(lambda: not any(process.is_running() for process in gone), "the server's processes are gone", 10)
