"""On the native CPU kernels a request's logits are the same bits whatever else happens: in a batch, in chunks, after a
preemption, on a prefix hit, with any number of threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ropeway.config import build_config
from ropeway.engine.core import build_core
from ropeway.engine.step import Handle, SchedulerOutput
from ropeway.protocol import AddRequest, SamplingParams
from ropeway.worker.executor import LocalExecutor
from ropeway_kernels import cpu

pytestmark = pytest.mark.skipif(cpu.load() is None, reason=cpu.why_not())

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 500,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
STEPS = 40
# Longer than one span of the attention's sums, so that the spans' borders are crossed while decoding, too.
PROMPT = [(37 * i + 11) % 499 for i in range(240)]
OTHERS = [[(53 * i + 7 * n) % 499 for i in range(1 + 29 * n % 230)] for n in range(31)]


class Recorder(LocalExecutor):
    """Keeps the logits of every sampled row under (request id, length of what is known)."""

    def start(self):
        capacity = super().start()
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        runner = self._runner
        assert runner is not None
        model = runner._model

        def recorded(*arguments):
            result = model(*arguments)
            rows = [i for i, wanted in enumerate(self.plan.samples) if wanted]
            for line, i in zip(result, rows, strict=True):
                length = self.plan.start_positions[i] + self.plan.num_tokens[i]
                self.logits[self.plan.request_ids[i], length] = line.clone()
            return result

        runner._model = recorded
        return capacity

    def submit(self, plan: SchedulerOutput) -> Handle:
        self.plan = plan
        return super().submit(plan)


def run(folder: Path, prompts: list[list[int]], *, rounds: int = 1, **settings: Any):
    """Logits of the first prompt's request in the last round, ``[STEPS, vocab]``; with preemptions and prefix hits."""
    config = build_config(
        {"device": "cpu", "load_format": "dummy", "block_size": 16, "max_num_batched_tokens": 2048} | settings
    )
    executor = Recorder(config, folder)
    core, _ = build_core(config, executor, lambda: 0.0)
    preemptions = hits = 0
    for turn in range(rounds):
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
            core.handle(AddRequest(1000 * turn + i, prompt, sampling, 0.0))
        for _ in range(3000):
            if core.idle:
                break
            outputs = core.step()
            if outputs is not None:
                assert not outputs.errors
                preemptions += outputs.stats.num_new_preemptions
                hits += outputs.stats.num_new_prefix_hits
        assert core.idle
    core.close()
    first = 1000 * (rounds - 1)
    lines = [executor.logits[first, len(prompts[0]) + step] for step in range(STEPS)]
    return torch.stack(lines), preemptions, hits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_same_bits(folder, dtype):
    alone, _, _ = run(folder, [PROMPT], dtype=dtype, enable_prefix_caching=False)
    assert alone.std() > 0.1
    assert not torch.equal(alone, run(folder, [[*PROMPT[:-1], 3]], dtype=dtype)[0]), "logits that nothing changes"

    def assert_equal(result: torch.Tensor) -> None:
        assert torch.equal(result.view(torch.int32), alone.view(torch.int32))

    assert_equal(run(folder, [PROMPT], dtype=dtype, num_threads=1)[0])
    assert_equal(run(folder, [PROMPT], dtype=dtype, max_num_batched_tokens=64, max_num_seqs=16)[0])
    assert_equal(run(folder, [PROMPT, *OTHERS], dtype=dtype)[0])
    # The one that came last is the one that gives way.
    late, preemptions, _ = run(folder, [PROMPT, *OTHERS[:8]], dtype=dtype, num_gpu_blocks_override=40)
    assert preemptions
    assert_equal(late)
    hit, _, hits = run(folder, [PROMPT, *OTHERS[:3]], dtype=dtype, rounds=2)
    assert hits
    assert_equal(hit)


def test_a_preempted_request_has_the_same_bits(folder):
    alone, _, _ = run(folder, [OTHERS[3]], enable_prefix_caching=False)
    config = build_config(
        {"device": "cpu", "load_format": "dummy", "block_size": 16, "num_gpu_blocks_override": 24, "max_num_seqs": 8}
    )
    executor = Recorder(config, folder)
    core, _ = build_core(config, executor, lambda: 0.0)
    preempted: set[int] = set()
    for i, prompt in enumerate([PROMPT, OTHERS[3]]):
        sampling = SamplingParams(max_tokens=STEPS if i else 120, temperature=0.0, ignore_eos=True)
        core.handle(AddRequest(i, prompt, sampling, 0.0))
    for _ in range(3000):
        if core.idle:
            break
        running = {request.request_id for request in core.scheduler.running}
        core.step()
        preempted |= {request.request_id for request in core.scheduler.waiting} & running
    core.close()
    assert preempted == {1}
    lines = [executor.logits[1, len(OTHERS[3]) + step] for step in range(STEPS)]
    assert torch.equal(torch.stack(lines), alone)
