"""Reading with several threads, as for a GPU: the same tensors in the same order, and the same errors."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ropeway.errors import ConfigError
from ropeway.model import loader
from tiny_models import load, paged_answers, random_prompts, save_checkpoint, tiny

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards or more, with an index."""
    save_checkpoint(tmp_path, tiny("LlamaForCausalLM"), max_shard_size="40KB")
    return tmp_path


def read(folder: Path, num_readers: int) -> list[tuple[str, Tensor]]:
    return list(loader._read_parallel(loader._weight_files(folder, "auto"), CPU, num_readers))


@pytest.mark.parametrize("num_readers", [1, 2, 7])
def test_the_same_tensors_in_the_same_order(folder: Path, num_readers: int) -> None:
    files = loader._weight_files(folder, "auto")
    expected = list(loader._read_tensors(files, CPU))
    assert len(files) >= 3
    assert len(expected) > 3 * loader._AHEAD / 2
    got = read(folder, num_readers)
    assert [name for name, _ in got] == [name for name, _ in expected]
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(got, expected, strict=True))


def test_a_slow_reader_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    original = loader._get_tensor

    def slow(file: object, shard: Path, name: str) -> Tensor:
        threads.add(threading.current_thread().name)
        time.sleep(0.02 if "q_proj" in name else 0.001)
        return original(file, shard, name)

    expected = [name for name, _ in read(folder, 1)]
    monkeypatch.setattr(loader, "_get_tensor", slow)
    assert [name for name, _ in read(folder, 4)] == expected
    assert len(threads) == 4


def test_no_more_is_read_ahead_than_agreed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_names: list[str] = []
    original = loader._get_tensor

    def counted(file: object, shard: Path, name: str) -> Tensor:
        read_names.append(name)
        return original(file, shard, name)

    monkeypatch.setattr(loader, "_get_tensor", counted)
    taken = 0
    for _ in loader._read_parallel(loader._weight_files(folder, "auto"), CPU, 4):
        taken += 1
        assert len(read_names) <= taken + loader._AHEAD
    assert taken == len(read_names)


def test_a_decoder_from_parallel_reads_answers_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(9)
    expected = paged_answers(load(folder), prompts, 4)

    def parallel(files: loader.WeightFiles, device: torch.device | None = None) -> Iterator[tuple[str, Tensor]]:
        return loader._read_parallel(files, CPU)

    monkeypatch.setattr(loader, "_read_tensors", parallel)
    got = paged_answers(load(folder), prompts, 4)
    assert torch.equal(got[0].logits, expected[0].logits)


def test_only_a_gpu_is_read_for_by_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(loader, "_read_parallel", lambda files, device: iter(asked.append(device) or ()))
    files = loader._weight_files(folder, "auto")
    assert list(loader._read_tensors(files, CPU))
    assert asked == []
    assert list(loader._read_tensors(files, torch.device("cuda", 0))) == []
    assert asked == [torch.device("cuda", 0)]


def test_damage_is_named(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=shard.name):
        read(folder, 4)


def test_a_tensor_that_the_index_promised_is_named(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name, shard = next(iter(index["weight_map"].items()))
    save_file({"other": torch.zeros(1)}, folder / shard)
    with pytest.raises(ConfigError, match=f"{shard}.*{name}|lacks tensors"):
        read(folder, 4)


def test_a_reader_that_fails_stops_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = loader._get_tensor

    def failing(file: object, shard: Path, name: str) -> Tensor:
        if "layers.1.mlp" in name:
            raise ConfigError(f"{shard}: gone")
        return original(file, shard, name)

    monkeypatch.setattr(loader, "_get_tensor", failing)
    with pytest.raises(ConfigError, match="gone"):
        read(folder, 4)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ropeway-load")]
