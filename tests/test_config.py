"""Where settings come from, in which order, and how bad ones are refused."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any, Literal

import pytest

from ropeway.config import SECTIONS, Config, ServerConfig, build_config, parse_size
from ropeway.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("16k", 16_000),
        ("1.5k", 1500),
        ("2m", 2_000_000),
        ("2M", 2 * 2**20),
        ("4G", 4 * 2**30),
        ("4GiB", 4 * 2**30),
        ("4GB", 4 * 2**30),
        (" 512MiB ", 512 * 2**20),
        ("auto", -1),
        ("-1", -1),
        ("1e3", 1000),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "k", "many", "1.5", "1x", "1kk", "1 2", "nan", "inf", "-inf", "1e400"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_size(text)
    with pytest.raises(ConfigError, match="--max-model-len"):
        build_config({"max_model_len": text})


def test_defaults_are_valid() -> None:
    assert build_config({}) == Config()


def test_each_source_wins_over_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "ropeway.toml"
    file.write_text("max-num-seqs = 10\nport = 1\nhost = 'file'\nblock_size = 32\n[server]\nmax_logprobs = 7\n")
    environ = {"ROPEWAY_PORT": "2", "ROPEWAY_HOST": "environment", "ROPEWAY_HOME": "not a setting"}
    config = build_config({"host": "flag", "port": None}, environ, file)
    assert config.cache.block_size == 32
    assert config.scheduler.max_num_seqs == 10
    assert config.server.max_logprobs == 7
    assert config.server.port == 2
    assert config.server.host == "flag"


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("yes", True), ("0", False), ("off", False)])
def test_booleans_from_text(text: str, value: bool) -> None:
    assert build_config({}, {"ROPEWAY_ENABLE_PREFIX_CACHING": text}).cache.enable_prefix_caching is value


def test_lists_from_text_and_toml(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('api_key = ["a", "b"]\nserved_model_name = "one"')
    config = build_config({}, {"ROPEWAY_ALLOWED_ORIGINS": "x,y"}, file)
    assert config.server.api_key == ("a", "b")
    assert config.model.served_model_name == ("one",)
    assert config.server.allowed_origins == ("x", "y")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": "http"}, ["--port", "http"]),
        ({"port": 65536}, ["--port", "65536", "65535"]),
        ({"port": 80.5}, ["--port"]),
        ({"port": True}, ["--port"]),
        ({"gpu_memory_utilization": "nan"}, ["--gpu-memory-utilization", "nan"]),
        ({"gpu_memory_utilization": 1.5}, ["--gpu-memory-utilization"]),
        ({"dtype": "int8"}, ["--dtype", "int8", "bfloat16"]),
        ({"enable_prefix_caching": "perhaps"}, ["--enable-prefix-caching", "perhaps"]),
        ({"enable_chunked_prefill": False}, ["--no-enable-chunked-prefill"]),
        ({"max_num_seqs": 4096, "max_num_batched_tokens": 2048}, ["--max-num-batched-tokens", "2048", "4096"]),
        ({"ssl_keyfile": "key"}, ["--ssl-keyfile", "--ssl-certfile"]),
        ({"tensor_parallel_size": 2}, ["--tensor-parallel-size"]),
        ({"keepalive_interval": 0}, ["--keepalive-interval"]),
        ({"no_such_thing": 1}, ["no_such_thing"]),
    ],
)
def test_bad_values_name_their_flag_on_one_line(flags: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(flags)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("port = ", ["c.toml"]), ("prot = 1", ["prot"]), ("[sever]\nport = 1", ["sever"]), ("port = [1]", ["--port"])],
)
def test_bad_files(text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        build_config({}, {}, tmp_path / "c.toml")
    for word in words:
        assert word in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        build_config({}, {}, tmp_path / "nowhere.toml")


def test_names_are_unique_and_every_field_has_help() -> None:
    seen: set[str] = set()
    for section in SECTIONS.values():
        for field in dataclasses.fields(section):
            assert field.name not in seen, "a flag must say where it goes"
            seen.add(field.name)
            assert field.metadata["help"].endswith(".")
            hint = typing.get_type_hints(section)[field.name]
            assert hint in (int, float, str, bool) or typing.get_origin(hint) in (Literal, tuple)


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerConfig().port = 1  # type: ignore[misc]
