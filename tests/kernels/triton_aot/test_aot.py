"""Every kernel in every tuned configuration compiles, spills nothing and fits the chip.

Each variant for one of sm_80, sm_90 and sm_100 in turn, which is under two minutes on two cores; all of them for all
three is `python -m ropeway_kernels.aot`, some minutes more.

Compiled in processes of their own, because tests beside this one put this process's Triton into its interpreter. What
was compiled is kept in pytest's cache folder, by the source of each kernel: a second run compiles only what changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ropeway_kernels import aot
from ropeway_kernels.aot import ARCHS, MODULES, SHARED_LIMIT, Outcome, Resources, Variant, parse_usage

pytest.importorskip("triton", reason="triton is not installed")

KERNELS = Path(aot.__file__).parents[1]
FAULTY = Path(__file__).with_name("faulty_kernels.py")


def run(cache: Path, code: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": f"{KERNELS}{os.pathsep}{FAULTY.parent}", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=570, check=False)


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = getattr(request.config, "cache", None)  # absent under -p no:cacheprovider
    return Path(kept.mkdir("triton_aot")) if kept is not None else tmp_path_factory.mktemp("triton_aot")


@pytest.fixture(scope="module")
def outcomes(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of the command as a user runs it."""
    result = tmp_path_factory.mktemp("aot") / "outcomes.json"
    done = run(
        cache, f"from ropeway_kernels.aot import main; raise SystemExit(main(['--sample', '--json', {str(result)!r}]))"
    )
    assert result.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(result.read_text())
    assert (done.returncode == 0) == (not any(outcome["faults"] for outcome in found))
    print(done.stdout[done.stdout.index("\n\n") :])  # the summary, shown with a failure
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("module", MODULES)
def test_every_variant_compiles_without_spills_and_fits(module: str, outcomes: list[dict[str, Any]]) -> None:
    mine = [outcome for outcome in outcomes if outcome["module"] == module]
    assert {outcome["arch"] for outcome in mine} == set(ARCHS)
    faults = [
        f"{outcome['variant']} on sm_{outcome['arch']}: {fault}" for outcome in mine for fault in outcome["faults"]
    ]
    assert faults == []
    for outcome in mine:
        assert 8 <= outcome["resources"]["registers"] <= 255
        assert outcome["resources"]["cubin"] > 0


# --- the check sees what it should -----------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_kernel_that_spills_or_is_too_large_or_does_not_compile_is_seen(cache: Path) -> None:
    code = (
        "import json; from dataclasses import asdict; import faulty_kernels; from ropeway_kernels import aot\n"
        "out = {}\n"
        "for variant in faulty_kernels.variants():\n"
        "    outcome = aot.Outcome('faulty', variant.name, 80)\n"
        "    try:\n"
        "        outcome.resources = aot.compile_variant(variant, 80)\n"
        "    except Exception as error:\n"
        "        outcome.error = type(error).__name__\n"
        "    outcome.judge()\n"
        "    out[variant.name] = asdict(outcome)\n"
        "print('RESULT', json.dumps(out))\n"
    )
    done = run(cache, code)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.rpartition("RESULT ")[2])
    assert found["sound"]["faults"] == []
    assert found["sound"]["resources"]["registers"] > 0
    assert "spills" in found["spills"]["faults"][0]
    assert found["large"]["resources"]["shared"] > SHARED_LIMIT[80]
    assert "shared memory" in found["large"]["faults"][0]
    assert found["unknown argument"]["error"] == "ValueError"
    assert found["broken"]["error"] == "CompilationError"


def test_usage_is_read() -> None:
    line = "REG:40 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:572 TEXTURE:0"
    assert parse_usage(f"Resource usage:\n Common:\n  GLOBAL:0\n Function f:\n  {line}\n") == (40, 16, 1024)
    with pytest.raises(ValueError, match="2 kernels"):
        parse_usage(f"{line}\n{line}\n")


def test_judgement() -> None:
    def faults(**changes: int) -> list[str]:
        taken = {"registers": 40, "spills": 0, "shared": SHARED_LIMIT[80], "ptx": 1, "cubin": 1} | changes
        outcome = Outcome("module", "variant", 80, Resources(**taken))
        outcome.judge()
        return outcome.faults

    assert faults() == []
    assert len(faults(shared=SHARED_LIMIT[80] + 1)) == 1
    assert len(faults(spills=4)) == 1


def test_fp8_runs_only_where_the_type_is_known() -> None:
    fp8 = Variant("v", None, {"kv": "*fp8e4nv"}, {})
    assert [fp8.runs_on(arch) for arch in ARCHS] == [False, True, True]
    tuned = Variant("v", None, {"kv": "*bf16"}, {}, archs=(90,))
    assert [tuned.runs_on(arch) for arch in ARCHS] == [False, True, False]
