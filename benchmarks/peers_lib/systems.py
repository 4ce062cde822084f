"""The systems that are compared: how each is started at its best settings, loaded, paused and stopped.

Owns: processes. Knows nothing of rounds, ratios or tables. Called by: benchmarks/peers.py.

All systems of a round stay loaded, and all but the one being measured are stopped by SIGSTOP: a thread that spins while
it waits then costs the others nothing, and the systems can take turns level by level.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from peers_lib.client import MODEL_NAME, LoadError, Timing, run_level
from peers_lib.environments import VERSIONS, Environments

READY_PROMPT = list(range(100, 116))
READY_SECONDS = 900.0  # a first start may compile for minutes
LEVEL_SECONDS = 900.0
STOP_SECONDS = 15.0
SETTLE_SECONDS = 120.0  # a large model's packed weights take a minute to write
NAMES = ("ropeway", "vllm", "llama.cpp", "openvino", "transformers")


class PeerError(RuntimeError):
    """A system did not start, or died: one line with the last words of its log."""


@dataclass(frozen=True)
class Job:
    """What all systems are measured on."""

    model: Path  # Hugging Face folder
    input_len: int
    output_len: int
    max_concurrency: int
    ropeway_args: tuple[str, ...] = ()

    @property
    def context(self) -> int:
        """Tokens that one request may take, with a little room."""
        return self.input_len + self.output_len + 64


def build(name: str, job: Job, environments: Environments) -> System:
    """Sets up what the system needs (slow the first time) and says how it is run. Raises SetupError, ValueError."""
    return {
        "ropeway": _ropeway,
        "vllm": _vllm,
        "llama.cpp": _llama_cpp,
        "openvino": _openvino,
        "transformers": _transformers,
    }[name](job, environments)


class System:
    """One process, with its children in one session. start() may be called again after stop()."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        settings: Mapping[str, Any],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.settings = dict(settings)
        self._command = list(command)
        self._log = log
        self._env = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Returns the seconds from the process's start to its first token. Raises PeerError."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._complete_command(),
                stdin=subprocess.PIPE,
                stdout=self._stdout(log),
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        return self._first_token(began) - began

    def settle(self) -> None:
        """Waits until the processes have nothing more to do, such as to write what makes the next start fast; at most
        SETTLE_SECONDS, as some never rest."""
        assert self._process is not None
        spent = -1.0
        for _ in range(int(SETTLE_SECONDS / 5)):
            now = sum(map(_cpu_seconds, _session_members(self._process.pid)))
            if 0 <= now - spent < 0.1:
                return
            spent = now
            time.sleep(5)

    def level(self, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int) -> list[Timing]:
        """All prompts from `concurrency` closed-loop clients. Raises PeerError."""
        raise NotImplementedError

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Asks, waits, then kills the whole session. Safe to call at any time."""
        process = self._process
        if process is None:
            return
        self.resume()
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None

    def _complete_command(self) -> list[str]:
        return self._command

    def _stdout(self, log: IO[bytes]) -> Any:
        return log

    def _first_token(self, began: float) -> float:
        raise NotImplementedError

    def _check_alive(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is None:
            raise PeerError(f"{self.name} is not running")
        if process.poll() is not None:
            raise self._failure(f"exit status {process.returncode}")
        return process

    def _failure(self, what: str) -> PeerError:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower()] or lines or ["its log is empty"]
        return PeerError(f"{what}; {telling[-1][:200]} (log: {self._log})")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        for pid in _session_members(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class HttpSystem(System):
    """A server that speaks /v1/completions on a port given to it by the option --port."""

    _port = 0

    def level(self, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int) -> list[Timing]:
        try:
            return run_level(self._port, prompts, output_tokens, concurrency, LEVEL_SECONDS)
        except (OSError, TimeoutError, LoadError) as error:
            self._check_alive()
            raise self._failure(f"{type(error).__name__}: {error}") from error

    def _complete_command(self) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        return [*self._command, "--host", "127.0.0.1", "--port", str(self._port)]

    def _first_token(self, began: float) -> float:
        while time.perf_counter() - began < READY_SECONDS:
            self._check_alive()
            if self._listens():
                try:
                    return run_level(self._port, [READY_PROMPT], 1, 1, READY_SECONDS)[0].first_token
                except OSError:
                    pass
                except LoadError as error:
                    if error.status not in (0, 503):  # those say: not ready yet
                        raise self._failure(str(error)) from error
            time.sleep(0.02)
        raise self._failure(f"not ready after {READY_SECONDS:.0f} s")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0


class PipeSystem(System):
    """A library in a process of its own, driven by one of the runners here: a line of JSON in, a line of JSON out."""

    def level(self, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int) -> list[Timing]:
        process = self._check_alive()
        assert process.stdin is not None
        work = {
            "prompts": [list(prompt) for prompt in prompts],
            "output_tokens": output_tokens,
            "concurrency": concurrency,
        }
        try:
            process.stdin.write(json.dumps(work).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            process.wait(STOP_SECONDS)
            self._check_alive()
            raise
        timings = [
            Timing(sent, first, last, int(number))
            for sent, first, last, number in self._answer(LEVEL_SECONDS)["timings"]
        ]
        if len(timings) != len(prompts) or any(timing.output_tokens != output_tokens for timing in timings):
            counts = sorted({timing.output_tokens for timing in timings})
            raise self._failure(
                f"{len(timings)} answers of {counts} tokens where {len(prompts)} of {output_tokens} were due"
            )
        return timings

    def _stdout(self, log: IO[bytes]) -> Any:
        return subprocess.PIPE

    def _first_token(self, began: float) -> float:
        self._answer(READY_SECONDS)
        return time.perf_counter()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            raise self._failure(f"no answer within {timeout_s:.0f} s")
        line = process.stdout.readline()
        if not line:
            process.wait(STOP_SECONDS)
            self._check_alive()
        answer: dict[str, Any] = json.loads(line)
        return answer


def _session_members(session: int) -> list[int]:
    """Every process of the session: children that made a process group of their own, too."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            if int(fields[3]) == session:
                members.append(int(entry.name))
    return members


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has just ended
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- the settings ---------------------------------------------------------------------------------------------------


def cores() -> int:
    """All systems inherit this process's affinity, so they share one number of cores."""
    return len(os.sched_getaffinity(0))


def has_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself. Without, each peer gets the type that was measured fastest for it."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def _ropeway(job: Job, environments: Environments) -> System:
    command = [str(Path(sys.executable).parent / "ropeway"), "serve", str(job.model), "--served-model-name", MODEL_NAME]
    options = ["--dtype", "bfloat16", "--max-model-len", str(job.context), *job.ropeway_args]
    log = environments.root / "logs" / "ropeway.log"
    return HttpSystem("ropeway", [*command, *options], log, settings={"options": options})


def _vllm(job: Job, environments: Environments) -> System:
    folder = environments.prepare("vllm")
    options = ["--dtype", "bfloat16" if has_bf16() else "float32", "--max-model-len", str(job.context)]
    options += ["--max-num-seqs", str(job.max_concurrency)]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    settings = {"version": VERSIONS["vllm"], "options": options, "env": dict(env)}
    libraries = [environments.tcmalloc(), next((folder / "venv").rglob("libiomp5.so"), None)]
    env["LD_PRELOAD"] = ":".join(str(library) for library in libraries if library)
    settings["preloaded"] = [library.name for library in libraries if library]
    command = [str(folder / "venv" / "bin" / "vllm"), "serve", str(job.model), "--served-model-name", MODEL_NAME]
    return HttpSystem("vllm", [*command, *options], environments.root / "logs" / "vllm.log", settings=settings, env=env)


def _llama_cpp(job: Job, environments: Environments) -> System:
    environments.prepare("llama.cpp")
    dtype = "bf16" if has_bf16() else "f16"
    gguf = environments.gguf(job.model, dtype) / "model.gguf"
    threads, slots = str(cores()), job.max_concurrency
    options = ["--threads", threads, "--threads-batch", threads, "--parallel", str(slots)]
    options += ["--ctx-size", str(slots * job.context)]
    command = [str(environments.llama_server()), "--model", str(gguf), "--alias", MODEL_NAME]
    settings = {"version": VERSIONS["llama.cpp"], "weights": dtype, "options": options}
    return HttpSystem(
        "llama.cpp", [*command, *options], environments.root / "logs" / "llama.cpp.log", settings=settings
    )


def _openvino(job: Job, environments: Environments) -> System:
    weights = "" if has_bf16() else "fp16"
    runner_settings = {
        "scheduler": {"cache_size": 4, "max_num_batched_tokens": 2048, "max_num_seqs": job.max_concurrency},
        "properties": {"INFERENCE_NUM_THREADS": cores()},
    }
    model = environments.openvino_ir(job.model, weights)
    settings = {"version": VERSIONS["openvino"], "weights": weights or "own", **runner_settings}
    return _runner("openvino", model, runner_settings, settings, environments)


def _transformers(job: Job, environments: Environments) -> System:
    environments.prepare("transformers")
    runner_settings = {"dtype": "bfloat16" if has_bf16() else "float32", "threads": cores()}
    settings = {"version": VERSIONS["transformers"], **runner_settings}
    return _runner("transformers", job.model, runner_settings, settings, environments)


def _runner(
    name: str, model: Path, runner_settings: dict[str, Any], settings: dict[str, Any], environments: Environments
) -> System:
    script = Path(__file__).parent / f"{name}_runner.py"
    command = [str(environments.python(name)), str(script), str(model), json.dumps(runner_settings)]
    return PipeSystem(name, command, environments.root / "logs" / f"{name}.log", settings=settings)
