"""Configuration: frozen dataclasses, one per concern, and the one function that builds them.

Owns: every setting, its default, its help text and its validation. Must not know: what the machine or the model turn
out to be; facts found at run time are return values (EngineReady, KVCapacity) and are never written back here.
Called by: cli (builds it), then handed down read-only.

A value comes from, in rising order: the default, a TOML file (`--config`), the environment (`ROPEWAY_MAX_NUM_SEQS`),
the command line. Each field is a flag of the same name with dashes.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ropeway.errors import ConfigError


def setting(default: Any, help: str, *, flags: tuple[str, ...] = (), parse: str = "") -> Any:
    """A field with its help text. ``flags``: further spellings. ``parse='size'``: accepts 1k, 1K, 4GiB and so on."""
    return dataclasses.field(default=default, metadata={"help": help, "flags": flags, "parse": parse})


@dataclass(frozen=True)
class ModelConfig:
    model: str = setting("", "Hugging Face folder, .gguf file or hub id; without one the demo model is served.")
    served_model_name: tuple[str, ...] = setting((), "Names the API answers to; the first is reported back.")
    tokenizer: str = setting("", "Folder or hub id of the tokenizer, if it is not beside the model.")
    revision: str = setting("", "Branch, tag or commit of a hub id.")
    download_dir: str = setting("", "Where hub downloads go, instead of the Hugging Face cache.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Type of weights and activations; auto takes the checkpoint's, or float32 where a CPU lacks bf16 units."
    )
    max_model_len: int = setting(
        0,
        "Longest prompt plus output, in tokens; `auto` or -1 takes the model's own, as far as memory allows.",
        parse="size",
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = setting(
        "auto", "`dummy` fills the weights with random numbers, for measurements."
    )
    seed: int = setting(0, "Seed of dummy weights.")
    chat_template: str = setting("", "File with, or text of, a Jinja chat template that replaces the model's.")
    tool_call_parser: Literal[
        "auto", "none", "hermes", "qwen3_coder", "llama3_json", "llama4_json", "mistral", "mistral_list", "functionary",
        "pythonic", "llama4_pythonic", "gemma", "json",
    ] = setting("auto", "How the model writes tool calls; auto finds out from its chat template, none looks for none.")  # fmt: skip
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "glm45", "qwen3", "mistral", "seed_oss"] = setting(
        "auto", "How the model marks its thoughts; auto finds out from its chat template, none leaves them in the text."
    )
    generation_config: Literal["auto", "none"] = setting(
        "auto", "Whether the model's generation_config.json gives the default sampling parameters."
    )


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = setting(16, "Tokens per KV block.")
    enable_prefix_caching: bool = setting(True, "Reuse the KV of prompts that begin alike.")
    gpu_memory_utilization: float = setting(0.9, "Share of the device's memory that the server may use.")
    kv_cache_memory_bytes: int = setting(0, "Exact size of the KV cache; overrides the share.", parse="size")
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = setting(
        "auto",
        "Type of keys and values in the cache: the model's, or 8-bit floats (on a GPU), which take half the room.",
    )
    num_gpu_blocks_override: int = setting(0, "Exact number of KV blocks, for tests and measurements.")


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = setting(256, "Requests that run at the same time.")
    max_num_batched_tokens: int = setting(
        0, "Tokens computed in one step, over all requests; `auto` or 0 takes what suits the device.", parse="size"
    )
    long_prefill_token_threshold: int = setting(
        0, "Longest chunk of one prompt in a step; 0 is only bound by the budget."
    )
    enable_chunked_prefill: bool = setting(True, "Split long prompts over steps. Always on; turning it off is refused.")
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs", "Who is next: first come, first served; or the request's `priority`, lower first, with aging."
    )
    overlap: Literal["auto", "on", "off"] = setting("auto", "Plan the next step while this one runs.")


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = setting(
        1, "Devices that share one model. More than 1 is not supported yet.", flags=("-tp",)
    )


@dataclass(frozen=True)
class DeviceConfig:
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where the model runs.")
    attention_backend: Literal["auto", "cpu", "torch", "triton", "flash-attn", "flashinfer"] = setting(
        "auto",
        "Implementation of paged attention: native kernels on a CPU, Triton on a GPU; plain torch anywhere; or a library.",
    )
    enforce_eager: bool = setting(False, "Never capture decode steps as CUDA graphs.")
    num_threads: int = setting(0, "CPU threads of the model; 0 takes the cores this process may use.")


@dataclass(frozen=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = setting(8000, "Port to listen on.")
    uds: str = setting("", "Unix socket to listen on instead of host and port.")
    root_path: str = setting("", "Path prefix that a proxy strips.")
    api_key: tuple[str, ...] = setting((), "Keys that clients must send as `Authorization: Bearer`; repeatable.")
    allowed_origins: tuple[str, ...] = setting((), "Origins allowed by CORS; none by default.")
    ssl_keyfile: str = setting("", "TLS private key.")
    ssl_certfile: str = setting("", "TLS certificate chain.")
    unknown_fields: Literal["warn", "reject", "ignore"] = setting(
        "warn", "Unknown request fields: serve and name them in X-Ropeway-Ignored-Fields, answer 400, or say nothing."
    )
    max_request_bytes: int = setting(32 * 2**20, "Largest request body.", parse="size")
    max_num_queued_reqs: int = setting(2048, "Requests in flight beyond which new ones get 429.")
    max_num_queued_tokens: int = setting(
        0, "Prompt tokens in flight beyond which new ones get 429; 0 is no bound.", parse="size"
    )
    max_logprobs: int = setting(20, "Largest logprobs or top_logprobs.")
    response_role: str = setting("assistant", "Role of generated chat messages.")
    keepalive_interval: float = setting(5.0, "Seconds between SSE comments while a stream has nothing to send.")
    drain_notice: float = setting(
        0.0, "Seconds after SIGTERM in which new requests are still served, though not ready."
    )
    shutdown_timeout: float = setting(25.0, "Seconds that running requests get to finish after SIGTERM.")
    timing_headers: bool = setting(False, "Add queue, prefill and decode times to responses.")
    vllm_metrics: bool = setting(True, "Export the vllm:* metric names that existing dashboards and routers read.")
    enable_log_requests: bool = setting(False, "Log one line per request: ids and counts, never text.")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severe log line shown.")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    device: DeviceConfig = DeviceConfig()
    server: ServerConfig = ServerConfig()

    def validate(self) -> None:
        """Raises ConfigError, naming the flag, for a value that no machine or model could make valid."""
        bounds: list[tuple[str, float, float, float]] = [
            ("--block-size", self.cache.block_size, 1, 1024),
            ("--gpu-memory-utilization", self.cache.gpu_memory_utilization, 0.01, 1.0),
            ("--kv-cache-memory-bytes", self.cache.kv_cache_memory_bytes, 0, 2**60),
            ("--num-gpu-blocks-override", self.cache.num_gpu_blocks_override, 0, 2**31 - 1),
            ("--max-num-seqs", self.scheduler.max_num_seqs, 1, 65536),
            ("--max-num-batched-tokens", self.scheduler.max_num_batched_tokens, -1, 2**24),
            ("--long-prefill-token-threshold", self.scheduler.long_prefill_token_threshold, 0, 2**24),
            ("--max-model-len", self.model.max_model_len, -1, 2**31 - 1),
            ("--tensor-parallel-size", self.parallel.tensor_parallel_size, 1, 1),
            ("--num-threads", self.device.num_threads, 0, 4096),
            ("--port", self.server.port, 0, 65535),
            ("--max-request-bytes", self.server.max_request_bytes, 1024, 2**40),
            ("--max-num-queued-reqs", self.server.max_num_queued_reqs, 1, 2**31 - 1),
            ("--max-num-queued-tokens", self.server.max_num_queued_tokens, 0, 2**60),
            ("--max-logprobs", self.server.max_logprobs, 0, 1000),
            ("--keepalive-interval", self.server.keepalive_interval, 0.05, 3600),
            ("--drain-notice", self.server.drain_notice, 0, 3600),
            ("--shutdown-timeout", self.server.shutdown_timeout, 0, 86400),
        ]
        for flag, value, low, high in bounds:
            if not low <= value <= high:
                raise ConfigError(f"{flag} is {value}; it must be between {low} and {high}")
        if 0 < self.scheduler.max_num_batched_tokens < self.scheduler.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.scheduler.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.scheduler.max_num_seqs}), or running requests could not all get their token"
            )
        if not self.scheduler.enable_chunked_prefill:
            raise ConfigError("--no-enable-chunked-prefill: chunked prefill cannot be turned off")
        if bool(self.server.ssl_keyfile) != bool(self.server.ssl_certfile):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together")


SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "device": DeviceConfig,
    "server": ServerConfig,
}

_SUFFIXES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


def parse_size(text: str) -> int:
    """``16k`` is 16,000 and ``16K`` is 16,384, as in vLLM; ``4GiB`` and ``4G`` are 4 * 2**30. Raises ValueError."""
    text = text.strip()
    if text == "auto":
        return -1
    number = text.rstrip("iBbkmgKMG")
    suffix = text[len(number) :].replace("iB", "").replace("B", "").replace("b", "")
    if suffix not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a size")
    value = float(number) * _SUFFIXES[suffix]
    if not value.is_integer():
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def build_config(
    flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Config:
    """Merge defaults, file, environment and flags (None means not given), then validate. Raises ConfigError."""
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_read_file(file))
    names = {f.name for section in SECTIONS.values() for f in fields(section)}
    for name in names:
        if environ is not None and (text := environ.get(f"ROPEWAY_{name.upper()}")) is not None:
            values[name] = text
    values.update({name: value for name, value in flags.items() if value is not None})
    unknown = sorted(set(values) - names)
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}")
    parts: dict[str, Any] = {}
    for key, section in SECTIONS.items():
        hints = typing.get_type_hints(section)
        given = {f.name: _coerce(f, hints[f.name], values[f.name]) for f in fields(section) if f.name in values}
        parts[key] = section(**given)
    config = Config(**parts)
    config.validate()
    return config


def _read_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if key in SECTIONS and isinstance(value, dict):  # [server] sections are allowed, not needed
            flat.update(value)
        else:
            flat[key] = value
    return {key.replace("-", "_"): value for key, value in flat.items()}


def _coerce(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """Text from a file or the environment to the field's type; ConfigError names the flag."""
    flag = "--" + field.name.replace("_", "-")
    origin = typing.get_origin(hint)
    try:
        if origin is Literal:
            if value not in typing.get_args(hint):
                raise ValueError(f"must be one of {', '.join(typing.get_args(hint))}")
            return value
        if origin is tuple:
            parts = value.split(",") if isinstance(value, str) else list(value)
            return tuple(str(part) for part in parts)
        if field.metadata["parse"] == "size" and isinstance(value, str):
            return parse_size(value)
        if hint is bool:
            if isinstance(value, bool):
                return value
            words = {
                "1": True,
                "true": True,
                "yes": True,
                "on": True,
                "0": False,
                "false": False,
                "no": False,
                "off": False,
            }
            return words[str(value).lower()]
        if hint is int and isinstance(value, bool | float):
            raise ValueError("must be a whole number")
        if hint in (int, float, str):
            return hint(value)
        raise AssertionError(f"no rule for {hint}")
    except KeyError:
        raise ConfigError(f"{flag}: {value!r} is not a yes or a no") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{flag}: {value!r}: {error}") from None
