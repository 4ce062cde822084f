"""Reported faults of kind 14: start-up. What exactly is named of which damage is in tests/model/test_model_loader.py, the
rope kinds against the reference in tests/model/test_model_rotary.py, both spellings in tests/golden/; drains and signals
are in tests/e2e/test_e2e_lifecycle.py. Here real processes start on damaged folders."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_server import Server, end, free_port, running, wait_until, write_tiny_model
from safetensors.torch import load_file, save_file

from tiny_models import edit_config, save_checkpoint, tiny

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLAGS = ["--device", "cpu", "--num-threads", "1", "--served-model-name", "tiny", "--num-gpu-blocks-override", "64"]
ASK = {"model": "tiny", "prompt": "The capital of France is", "max_tokens": 10, "temperature": 0, "ignore_eos": True}


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A tiny Llama with a tokenizer of bytes, which can be served."""
    folder.mkdir()
    write_tiny_model(folder)
    (folder / "config.json").unlink()
    shard_size = changes.pop("max_shard_size", "1GB")
    config = tiny("LlamaForCausalLM", vocab_size=258, eos_token_id=257, **changes)
    save_checkpoint(folder, config, max_shard_size=shard_size)
    return folder


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def refusal(folder: Path, logs: Path) -> str:
    """The one line of a server that must not start; /health is never 200 meanwhile."""
    port = free_port()
    server = Server(["--port", str(port), str(folder), *FLAGS], logs, f"http://127.0.0.1:{port}")
    try:

        def ended() -> bool:
            assert server.get("/health")[0] in (0, 503)
            return server.process.poll() is not None

        wait_until(ended, "the server gives up", 30)
        assert server.process.returncode != 0
        lines = server.err.read_text().splitlines()
        assert len(lines) == 1, lines
        return lines[0]
    finally:
        end(server)


def drop_shard(folder: Path) -> str:
    second_shard(folder).unlink()
    return "model-00002"


def cut_shard(folder: Path) -> str:
    shard = second_shard(folder)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    return shard.name


def promise_too_much(folder: Path) -> str:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = second_shard(folder).name
    if "model.norm.weight" in load_file(second_shard(folder)):
        index["weight_map"]["model.norm.weight"] = sorted(folder.glob("*.safetensors"))[0].name
    (folder / INDEX).write_text(json.dumps(index))
    return "model.norm.weight"


def drop_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return "tokenizer.json"


def change_vocabulary(folder: Path) -> str:
    edit_config(folder, vocab_size=300)
    return "258"


@pytest.mark.parametrize("damage", [drop_shard, cut_shard, promise_too_much, drop_tokenizer, change_vocabulary])
def test_o46_a_damaged_folder_is_named(damage: Callable[[Path], str], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    assert damage(folder) in refusal(folder, tmp_path)


def test_o46_shards_without_an_index_load_and_a_taken_port_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", max_shard_size="40KB")
    (folder / INDEX).unlink()
    with running([str(folder), *FLAGS], tmp_path) as server:
        assert server.post("/v1/completions", ASK)[0] == 200
        taken = server.url.rsplit(":", 1)[1]
        other = Server(["--port", taken, str(folder), *FLAGS], tmp_path)
        try:
            assert other.wait_exit() != 0
            assert taken in other.err.read_text()
        finally:
            end(other)
    with socket.create_server(("127.0.0.1", int(taken))):
        pass  # and it is free again


def answer(folder: Path, logs: Path) -> str:
    with running([str(folder), *FLAGS, "--dtype", "float32"], logs) as server:
        text: str = server.post("/v1/completions", ASK)[2]["choices"][0]["text"]
        return text


def test_o47_both_places_of_the_rope_settings(tmp_path: Path) -> None:
    rope = {"rope_theta": 200.0, "rope_type": "default"}  # far from any default
    folder = checkpoint(tmp_path / "model", rope_parameters=rope)
    new = answer(folder, tmp_path)
    edit_config(folder, drop=("rope_parameters",), rope_theta=200.0, rope_scaling=None)
    assert answer(folder, tmp_path) == new
    edit_config(folder, rope_theta=10_000.0)
    assert answer(folder, tmp_path) != new  # so it does make a difference
    edit_config(folder, rope_scaling={"rope_type": "unheard", "factor": 2.0})
    assert "unheard" in refusal(folder, tmp_path)


def test_o48_tied_heads_in_every_form(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", tie_word_embeddings=True)
    tied = answer(folder, tmp_path)
    tensors = load_file(folder / FILE)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, folder / FILE, {"format": "pt"})
    assert answer(folder, tmp_path) == tied  # a second copy of the same
    other = torch.flip(embedding, (0,)).contiguous()
    save_file({**tensors, "lm_head.weight": other}, folder / FILE, {"format": "pt"})
    edit_config(folder, tie_word_embeddings=False)
    assert answer(folder, tmp_path) != tied
    save_file(tensors, folder / FILE, {"format": "pt"})
    assert "lm_head.weight" in refusal(folder, tmp_path)
