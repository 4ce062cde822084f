"""Devices as the container grants them, types, and the size of the KV cache."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from ropeway.config import CacheConfig
from ropeway.errors import ConfigError
from ropeway.model.registry import parse_config
from ropeway.worker import device as device_module
from ropeway.worker.device import (
    CpuDevice,
    available_memory,
    choose_dtype,
    cuda_step_tokens,
    make_device,
    usable_cores,
)
from ropeway.worker.memory import activation_bytes, clip_to_pool, num_kv_blocks, resolve_max_model_len

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_usable_cores(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(device_module.os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert usable_cores(write(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 10 * GIB),
        ({"memory.max": "max", "memory.current": "5"}, 10 * GIB),
        ({"memory.max": str(4 * GIB), "memory.current": str(3 * GIB)}, GIB),
        (
            {
                "memory.max": str(4 * GIB),
                "memory.current": str(3 * GIB),
                "memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        ({"memory.max": str(GIB), "memory.current": str(2 * GIB)}, 0),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "9"}, 10 * GIB),
        ({"memory/memory.limit_in_bytes": str(3 * GIB), "memory/memory.usage_in_bytes": str(GIB)}, 2 * GIB),
    ],
)
def test_available_memory(tmp_path, files, available):
    meminfo = write(tmp_path / "proc", {"meminfo": f"MemTotal: 99 kB\nMemAvailable:  {10 * 2**20} kB\n"}) / "meminfo"
    assert available_memory(write(tmp_path / "cgroup", files), meminfo) == available


def test_this_machine_has_cores_and_memory():
    assert usable_cores() >= 1
    assert available_memory() > 2**20
    assert 0 < CpuDevice().kv_budget(0.9) <= 4 * GIB


def test_auto_takes_the_checkpoints_type_only_where_it_is_native():
    class Native(CpuDevice):
        def computes_natively(self, dtype):
            return True

    class Plain(CpuDevice):
        def computes_natively(self, dtype):
            return dtype == torch.float32

    assert choose_dtype("auto", "bfloat16", Native()) == torch.bfloat16
    assert choose_dtype("auto", "bfloat16", Plain()) == torch.float32
    assert choose_dtype("auto", "float16", Plain()) == torch.float32
    assert choose_dtype("auto", None, Native()) == torch.float32
    assert choose_dtype("bfloat16", "float32", Plain()) == torch.bfloat16
    assert CpuDevice().computes_natively(torch.float32)


def test_devices_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert make_device("auto").name == "cpu"
    assert make_device("cpu").torch_device == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device cuda"):
        make_device("cuda")


def test_upload_keeps_types_shapes_and_values():
    arrays = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
        "b": np.array([2**40], dtype=np.int64),
        "c": np.array([[0.5]], dtype=np.float32),
        "d": np.zeros((0, 4), dtype=np.int64),
    }
    for name, tensor in CpuDevice().upload(arrays).items():
        assert np.array_equal(tensor.numpy(), arrays[name])
        assert tensor.numpy().dtype == arrays[name].dtype


@pytest.mark.parametrize(("asked", "result"), [(0, 4096), (-1, 4096), (100, 100), (4096, 4096)])
def test_max_model_len(asked, result):
    assert resolve_max_model_len(asked, 4096) == result


def test_max_model_len_above_the_models_is_refused():
    with pytest.raises(ConfigError, match=r"--max-model-len 5000 .* 4096"):
        resolve_max_model_len(5000, 4096)


def blocks(budget: int = 0, **cache) -> int:
    return num_kv_blocks(
        CacheConfig(block_size=16, **cache), block_bytes=1000, budget=budget, max_num_seqs=8, max_model_len=100
    )


def test_kv_blocks():
    assert blocks(num_gpu_blocks_override=12) == 13  # and the null block
    assert blocks(kv_cache_memory_bytes=10_999) == 10
    assert blocks(budget=10_999) == 10
    assert blocks(budget=10**9) == 8 * 7 + 1  # no more than could ever be used


@pytest.mark.parametrize("arguments", [{"budget": 1999}, {"budget": -5}, {"kv_cache_memory_bytes": 1500}])
def test_too_little_memory_is_a_clear_error(arguments):
    with pytest.raises(ConfigError, match=r"at least two blocks of 1,000 bytes"):
        blocks(**arguments)


def test_clip_to_pool_warns_once_and_only_when_it_clips(caplog):
    with caplog.at_level(logging.WARNING):
        assert clip_to_pool(100, 101, 16) == 100
        assert not caplog.records
        assert clip_to_pool(1000, 11, 16) == 160
    assert len(caplog.records) == 1


QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def test_activations_are_worked_out_from_the_models_shape():
    config = parse_config(QWEN3_06B)

    def peak(**changes) -> int:
        return activation_bytes(config, **{"itemsize": 2, "step_tokens": 8192, "max_num_seqs": 256, **changes})

    constant = peak(step_tokens=0, max_num_seqs=0)
    assert 2**28 <= constant <= 2**29
    # By hand: logits of 256 rows in bf16 and three times in float32, and a quarter more.
    assert peak() == constant + int(1.25 * 256 * 151936 * 14)
    assert peak(captured_rows=256) == peak() + 256 * 151936 * 6
    # Few rows: 8,192 tokens of residual, in and out (1,024 each), gate and up and their product, and angles.
    assert peak(max_num_seqs=8) == constant + int(1.25 * 8192 * (2 * (3 * 1024 + 3 * 3072) + 4 * 3 * 128))
    assert peak(max_num_seqs=8, step_tokens=16384) - constant == 2 * (peak(max_num_seqs=8) - constant)


def test_a_gpus_step_is_short_for_large_models_and_long_for_small_ones():
    assert cuda_step_tokens(600_000_000) == 8192
    assert cuda_step_tokens(3_000_000_000) == 3072
    assert cuda_step_tokens(70_000_000_000) == cuda_step_tokens(8_000_000_000) == 2048
    assert cuda_step_tokens(0) == 8192
