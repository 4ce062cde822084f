"""The command line: our flags, other servers' flags, exit codes and one-line errors. Nothing is served here."""

from __future__ import annotations

import dataclasses
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ropeway.cli
import ropeway.serve
from ropeway import __version__
from ropeway.cli import IGNORED_SWITCHES, IGNORED_VALUES, NOT_SUPPORTED, adapt_arguments, main
from ropeway.config import SECTIONS, Config, ServerConfig
from ropeway.errors import ConfigError, EngineDeadError
from ropeway.protocol import EngineReady


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """The configuration that a command line would serve with."""
    seen: list[Config] = []

    def serve(config: Config) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(ropeway.serve, "serve", serve)
    for name in [name for name in os.environ if name.startswith("ROPEWAY_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Config:
        assert main(["serve", *arguments]) == 0
        return seen.pop()

    return run


Parse = Callable[..., Config]


def test_every_setting_has_a_flag(parse: Parse) -> None:
    for section, kind in SECTIONS.items():
        for field in dataclasses.fields(kind):
            if field.name == "enable_chunked_prefill" or field.name.startswith("ssl_"):
                continue  # only valid together with others; below
            flag = "--" + field.name.replace("_", "-")
            default = field.default
            value: Any = default
            arguments = [flag]
            if isinstance(default, bool):
                value = not default
                arguments = [flag if value else f"--no-{flag[2:]}"]
            elif isinstance(default, tuple):
                value = ("one", "two")
                arguments = [flag, "one", flag, "two"]
            elif "Literal" not in str(field.type) and isinstance(default, str):
                value = "text"
                arguments.append(value)
            elif isinstance(default, str):
                arguments.append(default)
            elif field.name == "max_num_batched_tokens":  # at least the rows
                value = 4096
                arguments.append("4096")
            elif field.name in ("tensor_parallel_size", "gpu_memory_utilization"):
                value = 1
                arguments.append("1")
            else:
                value = default + 1
                arguments.append(str(value))
            assert getattr(getattr(parse(*arguments), section), field.name) == value, flag


def test_defaults(parse: Parse) -> None:
    assert parse() == Config()


def test_model_by_place_and_by_flag(parse: Parse) -> None:
    assert parse("some/model").model.model == "some/model"
    assert parse("--model", "some/model").model.model == "some/model"
    assert parse("--port", "1", "some/model", "--host", "h").model.model == "some/model"
    assert main(["serve", "a", "--model", "b"]) == 2


def test_spellings_of_the_other_server(parse: Parse) -> None:
    config = parse(
        "m", "--max_model_len", "4k", "-tp", "1", "--max-num-batched-tokens=4K", "--ssl_keyfile=k", "--ssl-certfile", "c",
        "--enable-chunked-prefill", "--kv-cache-memory-bytes", "1GiB",
    )  # fmt: skip
    assert config.model.max_model_len == 4000
    assert config.scheduler.max_num_batched_tokens == 4096
    assert config.cache.kv_cache_memory_bytes == 2**30
    assert config.server.ssl_keyfile == "k"
    assert parse("--max-model-len", "auto").model.max_model_len == -1
    assert parse("--max-model-len", "-1").model.max_model_len == -1


def test_several_keys_after_one_flag(parse: Parse) -> None:
    config = parse("m", "--api-key", "a", "b", "--served-model-name", "x", "y", "--port", "1")
    assert config.server.api_key == ("a", "b")
    assert config.model.served_model_name == ("x", "y")
    assert parse("--api-key", "a", "--api-key", "b").server.api_key == ("a", "b")


def test_a_model_after_a_list_flag_is_not_taken_for_a_key(parse: Parse) -> None:
    config = parse("--api-key", "secret", "some/model")
    assert config.server.api_key == ("secret",)
    assert config.model.model == "some/model"


def test_file_and_environment(parse: Parse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("port = 1\nmax-num-seqs = 2\n")
    monkeypatch.setenv("ROPEWAY_PORT", "3")
    config = parse("--config", str(tmp_path / "c.toml"))
    assert (config.server.port, config.scheduler.max_num_seqs) == (3, 2)


def test_flags_of_the_gpu_path(parse: Parse) -> None:
    config = parse("--kv_cache_dtype", "fp8", "--enforce-eager", "--attention-backend=flash-attn", "m")
    assert (config.cache.kv_cache_dtype, config.device.enforce_eager) == ("fp8", True)
    assert config.device.attention_backend == "flash-attn"
    assert not parse("m").device.enforce_eager


def test_harmless_flags_warn_once_and_are_ignored(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse(
        "--disable-log-requests", "--swap-space", "0", "--max-num-partial-prefills=1", "--quantization", "none",
        "--use-v2-block-manager", "-pp", "1", "m",
    )  # fmt: skip
    assert config == dataclasses.replace(Config(), model=dataclasses.replace(Config().model, model="m"))
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 6
    assert all(line.startswith("ropeway: warning: --") and line.endswith(" is ignored") for line in warnings)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quantization", "awq"], ["--quantization awq", "not supported yet"]),
        (["-q", "awq"], ["--quantization awq", "not supported yet"]),
        (["--kv-cache-dtype", "fp8_e5m2"], ["--kv-cache-dtype", "fp8_e5m2", "fp8_e4m3"]),
        (["--kv-cache-dtype=int8"], ["--kv-cache-dtype", "int8", "fp8"]),
        (["--attention-backend", "xformers"], ["--attention-backend", "xformers", "flashinfer"]),
        (["--speculative-config", "{}"], ["--speculative-config", "not supported yet"]),
        (["--pipeline-parallel-size", "2"], ["--pipeline-parallel-size 2", "not supported yet"]),
        (["--swap-spaces", "0"], ["--swap-spaces"]),
        (["--max-num-sequences", "3"], ["--max-num-sequences", "--max-num-seqs"]),
        (["--gpu-memory-utilisation", "0.5"], ["--gpu-memory-utilization"]),
        (["--port"], ["--port"]),
        (["--port", "x"], ["--port", "x"]),
        (["--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
        (["a", "b"], ["b"]),
        (["--config", "nowhere.toml"], ["nowhere.toml", "No such file"]),
    ],
)
def test_refusals(arguments: list[str], words: list[str], parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("ropeway: error: ")
    for word in words:
        assert word in err


def test_the_tables_hold_no_flag_of_ours() -> None:
    ours = {"--" + field.name.replace("_", "-") for kind in SECTIONS.values() for field in dataclasses.fields(kind)}
    theirs = [IGNORED_SWITCHES, set(IGNORED_VALUES), NOT_SUPPORTED]
    assert not ours & set().union(*theirs)
    assert sum(map(len, theirs)) == len(set().union(*theirs))


def test_words_after_a_double_dash_are_left_alone() -> None:
    assert adapt_arguments(["--", "--quantization", "awq"]) == (["--", "--quantization", "awq"], [])


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("one\nline"), 2), (EngineDeadError("died"), 1), (KeyboardInterrupt(), 130)]
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(config: Config) -> int:
        raise error

    monkeypatch.setattr(ropeway.serve, "serve", serve)
    assert main(["serve"]) == code
    assert len(capsys.readouterr().err.splitlines()) <= 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["serve", "--help"], ["serve", "-h"]):
        assert main(arguments) == 0
        assert "serve" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ropeway {__version__}\n"
    assert main(["sevre"]) == 2


def test_help_tells_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for kind in SECTIONS.values():
        for field in dataclasses.fields(kind):
            assert "--" + field.name.replace("_", "-") in text
    assert "Tokens per KV block. [default: 16]" in text
    assert "--no-enable-prefix-caching" in text


def test_module_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ropeway", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"ropeway {__version__}\n"


# The listening socket


def test_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            ropeway.serve.listening(ServerConfig(port=port)),
        ):
            pass


@pytest.mark.parametrize("config", [ServerConfig(host="no such host"), ServerConfig(uds="/no/such/folder/socket")])
def test_address_that_cannot_be(config: ServerConfig) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"), ropeway.serve.listening(config):
        pass


def test_ipv6_and_free_ports() -> None:
    try:
        with ropeway.serve.listening(ServerConfig(host="::1", port=0)) as listener:
            url = ropeway.serve.url_of(ServerConfig(host="::1", port=0), listener)
            assert url == f"http://[::1]:{listener.getsockname()[1]}"
    except ConfigError:
        pytest.skip("no IPv6 on this machine")


def test_unix_socket_left_by_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    config = ServerConfig(uds=str(path))
    with ropeway.serve.listening(config) as listener:
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert ropeway.serve.url_of(config, listener) == f"unix:{path}"
        with pytest.raises(ConfigError, match="Address already in use"), ropeway.serve.listening(config):
            pass
        assert path.exists(), "a living server's socket was removed"
    assert not path.exists()


def test_a_file_in_the_place_of_the_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(ConfigError), ropeway.serve.listening(ServerConfig(uds=str(path))):
        pass
    assert path.read_text() == "precious"


def test_bad_certificate_is_one_error(tmp_path: Path) -> None:
    config = ServerConfig(ssl_keyfile=str(tmp_path / "k"), ssl_certfile=str(tmp_path / "c"))
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        ropeway.serve.make_http_server(config, ropeway.serve.Gate())


def test_report_says_what_is_served_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    ready = EngineReady(8192, 49152, 1000, 16, "float32", "cpu", "LlamaForCausalLM", startup_seconds={"load": 1.25})
    ropeway.serve.report("the-model", ready, 3.14, "http://127.0.0.1:8000")
    out = capsys.readouterr().out
    for part in (
        "the-model",
        "LlamaForCausalLM",
        "float32",
        "cpu",
        "8,192",
        "16,000",
        "3.1 s",
        "load 1.2",
        "http://127",
    ):
        assert part in out
