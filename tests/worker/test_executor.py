"""LocalExecutor: start-up facts, overlap, errors that surface, and what importing it costs."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys

import pytest
from test_runner import TINY, new_row, plan

from fake_device import FakeDevice, without_packing
from ropeway.config import CacheConfig, Config, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig
from ropeway.errors import ConfigError
from ropeway.worker.executor import LocalExecutor
from ropeway_kernels import cpu
from static_attention import StaticAttention


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def make(folder, *, overlap="auto", max_model_len=0, cache=None, **model) -> LocalExecutor:
    return LocalExecutor(
        Config(
            model=ModelConfig(load_format="dummy", max_model_len=max_model_len, **model),
            cache=cache or CacheConfig(block_size=4, num_gpu_blocks_override=50),
            scheduler=SchedulerConfig(overlap=overlap, max_num_seqs=8),
            device=DeviceConfig(device="cpu"),
        ),
        folder,
    )


def first_tokens(executor: LocalExecutor, count: int = 4) -> list[int]:
    """Greedy tokens of one prompt, each step submitted before the one before it has been read."""
    handles = [executor.submit(plan((0, 0, 3, True), added=[new_row(0, [3, 4, 5], [1, 2])]))]
    handles += [executor.submit(plan((0, position, 1, True))) for position in range(3, 2 + count)]
    handles.append(executor.submit(plan(removed=[0])))
    return [handle.result().token_ids[0][0] for handle in handles[:-1]]


def test_start_reports_what_it_found(folder):
    executor = make(folder)
    capacity = executor.start()
    executor.close()
    assert (capacity.num_blocks, capacity.block_size) == (51, 4)
    assert (capacity.max_model_len, capacity.vocab_size) == (128, 120)
    assert (capacity.dtype, capacity.device, capacity.architecture) == ("float32", "cpu", "LlamaForCausalLM")
    assert capacity.overlap is False
    assert set(capacity.startup_seconds) == {"import", "load", "kv", "warmup"}
    assert all(seconds >= 0 for seconds in capacity.startup_seconds.values())


def test_the_log_says_which_kernels_a_cpu_runs_on(folder, caplog):
    with caplog.at_level(logging.INFO):
        make(folder).start()
    native = cpu.load()
    if native is None:
        assert "No native CPU kernels" in caplog.text
    else:
        assert f"kernels for {native.isa}; int8 dot products: {', '.join(native.features) or 'none'}" in caplog.text


def test_overlap_gives_the_same_tokens(folder):
    tokens = {}
    for overlap in ("on", "off"):
        executor = make(folder, overlap=overlap)
        assert executor.start().overlap is (overlap == "on")
        tokens[overlap] = first_tokens(executor)
        executor.close()
        executor.close()
    assert tokens["on"] == tokens["off"]
    assert len(tokens["on"]) == 4


def test_warm_up_leaves_no_trace(folder):
    executor = make(folder)
    executor.start()
    assert executor._runner.rows.index == {}
    assert first_tokens(executor) == first_tokens(executor)
    executor.close()


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_what_a_step_raises_comes_out_of_its_handle(folder, overlap):
    executor = make(folder, overlap=overlap)
    executor.start()
    handle = executor.submit(plan((404, 0, 1, True)))  # a request that has no row
    with pytest.raises(KeyError):
        handle.result()
    executor.close()


def test_pool_smaller_than_the_model_clips_max_model_len(folder):
    executor = make(folder, cache=CacheConfig(block_size=4, num_gpu_blocks_override=3))
    assert executor.start().max_model_len == 12
    executor.close()


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4])
def test_the_smallest_pools_start(folder, blocks, block_size):
    executor = make(folder, cache=CacheConfig(block_size=block_size, num_gpu_blocks_override=blocks))
    assert executor.start().max_model_len == blocks * block_size
    executor.close()


def test_half_types_run(folder):
    for dtype in ("bfloat16", "float16"):
        executor = make(folder, dtype=dtype)
        assert executor.start().dtype == dtype
        assert len(first_tokens(executor)) == 4
        executor.close()


def test_what_cannot_start_says_why(folder):
    with pytest.raises(ConfigError, match=r"--max-model-len 500"):
        make(folder, max_model_len=500).start()
    with pytest.raises(ConfigError, match="at least two blocks"):
        make(folder, cache=CacheConfig(block_size=4, kv_cache_memory_bytes=100)).start()
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        LocalExecutor(Config(parallel=ParallelConfig(tensor_parallel_size=2)), folder).start()
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        make(folder).start()
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        make(folder).start()


@pytest.mark.parametrize(
    ("section", "settings", "words"),
    [
        ("cache", {"kv_cache_dtype": "fp8", "block_size": 4}, "--kv-cache-dtype fp8: needs a GPU"),
        ("device", {"attention_backend": "flashinfer", "device": "cpu"}, "--attention-backend flashinfer: needs a GPU"),
    ],
)
def test_what_needs_a_gpu_is_refused_before_anything_is_loaded(folder, monkeypatch, section, settings, words):
    monkeypatch.setattr("ropeway.model.loader.load_model", lambda *_, **__: pytest.fail("loaded"))
    parts = {"cache": CacheConfig, "device": DeviceConfig}[section](**settings)
    config = Config(**{"model": ModelConfig(load_format="dummy"), "device": DeviceConfig(device="cpu"), section: parts})
    with pytest.raises(ConfigError, match=words):
        LocalExecutor(config, folder).start()


@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_a_device_that_runs_ahead_is_given_steps_without_a_thread(folder, monkeypatch, overlap):
    """With and without overlap; only what the engine does while a step runs differs."""
    expected = first_tokens_of(make(folder))
    device = FakeDevice("late")
    monkeypatch.setattr("ropeway.worker.device.make_device", lambda name: device)
    monkeypatch.setattr(
        "ropeway.worker.backends.make_backend", lambda name, device, size, *rest: StaticAttention(device, size)
    )
    with without_packing(), device.launching():
        executor = make(folder, overlap=overlap)
        capacity = executor.start()
        assert capacity.overlap is (overlap == "auto")
        assert capacity.step_tokens == 64
        assert executor._thread is None
        before = device.queues.num_executed
        handle = executor.submit(plan((0, 0, 3, True), added=[new_row(0, [3, 4, 5], [1, 2])]))
        assert device.queues.num_executed == before
        assert len(handle.result().token_ids[0]) == 1
        executor.submit(plan(removed=[0]))
        assert first_tokens(executor) == expected
        with pytest.raises(KeyError):
            executor.submit(plan((404, 0, 1, True))).result()
        executor.close()


def first_tokens_of(executor: LocalExecutor) -> list[int]:
    executor.start()
    tokens = first_tokens(executor)
    executor.close()
    return tokens


def test_an_executor_can_be_sent_to_its_process(folder):
    executor = pickle.loads(pickle.dumps(make(folder)))
    assert executor.start().num_blocks == 51
    executor.close()


def test_importing_the_executor_does_not_import_torch():
    code = "import sys, ropeway.worker.executor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
