"""benchmarks/gpu/check.py without a GPU: its correctness sections on tiny shapes, and the pure parts of the others."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"


def load(name: str) -> ModuleType:
    """A module of that folder that no kernel is imported by: this process's Triton is left as it is."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_correctness_section_passes_in_the_interpreter(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "check.py"), "--device", "cpu", "--quick", "--out", str(tmp_path)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "check.json").read_text())
    sections = {section["section"]: section for section in report["sections"]}
    assert list(sections) == ["kernels", "golden", "nano", "determinism"]
    for section in sections.values():
        assert section["passed"]
        assert section["findings"]
    kernels = " ".join(finding["name"] for finding in sections["kernels"]["findings"])
    for kernel in ("attention", "rope_kv_write", "rms_norm", "gated", "copy_blocks", "greedy", "penalties", "ranks"):
        assert kernel in kernels
    assert "ALL GOOD" in done.stdout


def test_a_row_that_is_wrong_or_not_written_is_seen() -> None:
    harness = load("harness")
    reference = torch.randn(50, 4, 64, dtype=torch.float64)
    out = reference.to(torch.bfloat16)
    good = harness.row_error(out, reference)
    assert 0 < good < 2**-8
    out[17, 2] *= 1.05
    assert harness.row_error(out, reference) == pytest.approx(0.05, rel=0.1)
    unwritten = harness.poisoned(50, 4, 64, dtype=torch.bfloat16, device=out.device)
    unwritten[:49] = reference[:49].to(torch.bfloat16)
    assert harness.at_most("name", harness.row_error(unwritten, reference), 0.1).passed is False


def test_the_nano_workload_has_its_published_roofline() -> None:
    engine_runs = load("engine_runs")
    jobs = engine_runs.nano_jobs()
    assert len(jobs) == 256
    assert {len(job.prompt) for job in jobs} <= set(range(100, 1025))
    assert min(job.output_len for job in jobs) >= 100
    # 42.6K tok/s at an H200's datasheet bandwidth.
    assert engine_runs.decode_roofline(engine_runs.QWEN3_06B, jobs, 4.8e12) == pytest.approx(42_600, rel=0.01)


def test_the_roofline_of_one_request_by_hand() -> None:
    engine_runs = load("engine_runs")
    model = {
        "hidden_size": 2,
        "head_dim": 3,
        "num_hidden_layers": 5,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "intermediate_size": 11,
        "vocab_size": 13,
    }
    weights = 2 * (5 * (2 * 3 * (7 + 7 + 1 + 1) + 3 * 2 * 11) + 2 * 13 * 2)
    token = 2 * 2 * 5 * 1 * 3
    read = 2 * weights + token * (4 + 1) + token * (4 + 2)  # the prompt's step gives the first of three tokens
    jobs = [engine_runs.Job([0] * 4, 3)]
    assert engine_runs.decode_roofline(model, jobs, 1e6) == pytest.approx(3 * 1e6 / read)


def test_busy_time_and_gaps_of_overlapping_work() -> None:
    engine_runs = load("engine_runs")
    spans = [(0.0, 1.0), (5.0, 6.0), (0.5, 2.0), (2.0, 3.0), (5.2, 5.4)]
    assert engine_runs.busy_and_gaps(spans) == (pytest.approx(4.0), [pytest.approx(2.0)])
