"""Seeds one-line faults into a copy of the GPU path and reports which of them tests on a CPU notice.

    python tests/kernels/mutate_triton.py             # all faults
    python tests/kernels/mutate_triton.py staging     # those whose name or file contains a word
    python tests/kernels/mutate_triton.py --control   # no fault: every one of the tests must pass

Kernels run in Triton's interpreter, the runner on a device that computes late. Each fault meets only the tests that
should know of it. Exit status 0 when at most the ALLOWED_SURVIVORS below survive.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2

ATTENTION = "tests/kernels/triton/test_paged_attention.py"
ELEMENTWISE = "tests/kernels/triton/"
SAMPLING = "tests/kernels/triton/test_sampling.py"
STAGING = "tests/worker/test_staging.py"
GRAPHS = "tests/worker/test_graphs.py"
AHEAD = "tests/worker/test_runner_ahead.py"


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    tests: str
    select: str = ""  # pytest's -k


FAULTS = [
    # --- kernels
    Fault("block table read one entry on", "kernels/ropeway_kernels/paged_attention.py", "block = tl.load(table_ptr + pos // BLOCK_SIZE, mask=inside, other=0)", "block = tl.load(table_ptr + (pos + 1) // BLOCK_SIZE, mask=inside, other=0)", ATTENTION, "block_sizes"),
    Fault("scale without log2(e)", "kernels/ropeway_kernels/paged_attention.py", "base, inner = (scale * _LOG2E, 0.0)", "base, inner = (scale, 0.0)", ATTENTION, "block_sizes"),
    Fault("no mask on the tail", "kernels/ropeway_kernels/paged_attention.py", "inside = (pos >= low) & (pos < high)", "inside = pos >= low", ATTENTION, "block_sizes"),
    Fault("window one short", "kernels/ropeway_kernels/paged_attention.py", "seen & (pos[None, :] > query_pos[:, None] - window)", "seen & (pos[None, :] > query_pos[:, None] - window + 1)", ATTENTION, "test_windows"),
    Fault("a full tile too many at the window's edge", "kernels/ropeway_kernels/paged_attention.py", "(edge + TILE_N - 1) // TILE_N", "edge // TILE_N", ATTENTION, "test_windows"),
    Fault("a token does not see itself", "kernels/ropeway_kernels/paged_attention.py", "seen = pos[None, :] <= query_pos[:, None]", "seen = pos[None, :] < query_pos[:, None]", ATTENTION, "block_sizes"),
    Fault("diagonal tile taken for a full one", "kernels/ropeway_kernels/paged_attention.py", "(first_pos + 1) // TILE_N", "(first_pos + TILE_N) // TILE_N", ATTENTION, "block_sizes"),
    Fault("running sum not rescaled", "kernels/ropeway_kernels/paged_attention.py", "total = total * shrink + tl.sum(p, 1)", "total = total + tl.sum(p, 1)", ATTENTION, "block_sizes"),
    Fault("merge without rescaling", "kernels/ropeway_kernels/paged_attention.py", "                    acc = acc * keep + acc_part * take", "                    acc = acc + acc_part", ATTENTION, "cut_anywhere"),
    Fault("merge leaves out the last part", "kernels/ropeway_kernels/attention_plan.py", "        counts -= first\n", "        counts -= first + (len(cut) > 1)\n", ATTENTION, "cut_anywhere or planned_once"),
    Fault("sinks without their base", "kernels/ropeway_kernels/paged_attention.py", "tl.load(sinks_ptr + heads).to(tl.float32) * 1.4426950408889634", "tl.load(sinks_ptr + heads).to(tl.float32)", ATTENTION, "sinks"),
    Fault("padding rows left as they were", "kernels/ropeway_kernels/paged_attention.py", "for idle in range(program, num_tiles, num_programs):", "for idle in range(num_tiles, num_tiles, num_programs):", ATTENTION, "padding or zeros"),
    Fault("padding slot written", "kernels/ropeway_kernels/kv_write.py", "    if slot < 0:\n        return\n", "    slot = tl.maximum(slot, 0)\n", ELEMENTWISE + "test_kv_write.py", "padding"),
    Fault("rotation the other way", "kernels/ropeway_kernels/kv_write.py", "second * c + first * s", "second * c - first * s", ELEMENTWISE + "test_kv_write.py", "pair_of_types"),
    Fault("v normed like k", "kernels/ropeway_kernels/kv_write.py", "is_k = (plane >= 0) & (plane < NUM_KV_HEADS)", "is_k = (plane >= 0) & is_head", ELEMENTWISE + "test_kv_write.py", "pair_of_types"),
    Fault("e4m3 cut off instead of rounded", "kernels/ropeway_kernels/kv_write.py", "((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20)", "(bits >> 20)", ELEMENTWISE + "test_kv_write.py", "e4m3"),
    Fault("norm of the residual before it was rounded", "kernels/ropeway_kernels/norm.py", "value = total.to(residual.dtype.element_ty)", "value = total", ELEMENTWISE + "test_norm.py", "residual"),
    Fault("eps outside the mean", "kernels/ropeway_kernels/norm.py", "/ SIZE + eps)", "/ SIZE)", ELEMENTWISE + "test_norm.py", "equals_the_reference or extreme"),
    Fault("gate without its input", "kernels/ropeway_kernels/activation.py", "(first * share * second)", "(share * second)", ELEMENTWISE + "test_activation.py", "equals_the_reference"),
    Fault("block pairs turned round", "kernels/ropeway_kernels/block_copy.py", "begin = tl.load(pairs + 2 * pair) * WORDS", "begin = tl.load(pairs + 2 * pair + 1) * WORDS", ELEMENTWISE + "test_block_copy.py"),
    Fault("second noise key dropped", "kernels/ropeway_kernels/sampling.py", "    h = h ^ second_key.to(tl.uint32, bitcast=True)\n", "", SAMPLING, "noise or plain_sampler"),
    Fault("top_p of a total without the last of top_k", "kernels/ropeway_kernels/sampling.py", "whole += (k - fewer) * _mass", "whole += (k - k) * _mass", SAMPLING, "cutoff"),
    Fault("temperature before the shift", "kernels/ropeway_kernels/sampling.py", "tl.div_rn(x - peak, temperature)", "(tl.div_rn(x, temperature) - peak)", SAMPLING, "plain_sampler"),
    Fault("rank counts equals", "kernels/ropeway_kernels/sampling.py", "(x > chosen)", "(x >= chosen)", SAMPLING, "logprobs"),
    # --- runner
    Fault("staging buffer rewritten while it is copied", "src/ropeway/worker/staging.py", "        self._queues.wait_on_host(buffer.copied)\n", "", f"{STAGING} {AHEAD}"),
    Fault("staging memory reused before its reader ended", "src/ropeway/worker/staging.py", '        self._queues.wait("upload", buffer.read)\n', "", f"{STAGING} {AHEAD}"),
    Fault("step starts before its upload is there", "src/ropeway/worker/staging.py", '        self._queues.wait("compute", buffer.copied)\n', "", f"{STAGING} {AHEAD}"),
    Fault("result freed before it was copied", "src/ropeway/worker/staging.py", "        self._tensors = tensors  #", "        self._tensors = []  #", f"{STAGING} {AHEAD}"),
    Fault("result read before it arrived", "src/ropeway/worker/staging.py", "        self._owner.queues.wait_on_host(self._done)\n", "", f"{STAGING} {AHEAD}"),
    Fault("replay with a stale plan", "src/ropeway/worker/graphs.py", "            batch.meta.plan.copy_into(state.meta.plan)\n", "            pass\n", f"{GRAPHS} {AHEAD}"),
    Fault("replay with stale lengths", "src/ropeway/worker/graphs.py", "        self._seq_lens[:size].copy_(batch.meta.seq_lens)\n", "", f"{GRAPHS} {AHEAD}"),
    Fault("capture of a pointer that does not stay", "src/ropeway/worker/graphs.py", "seq_lens=self._seq_lens[:size],", "seq_lens=meta.seq_lens,", f"{GRAPHS} {AHEAD}"),
    Fault("plan's buffers shared with the step's", "src/ropeway/worker/graphs.py", "plan=_with_own_tensors(meta.plan),", "plan=meta.plan,", f"{GRAPHS} {AHEAD}"),
]  # fmt: skip

ALLOWED_SURVIVORS: dict[str, str] = {}


def survives(fault: Fault) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        ignore = shutil.ignore_patterns("__pycache__", ".pytest_cache")
        for folder in ("src", "kernels", "tests"):
            shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / fault.file
        if fault.old:
            target.write_text(target.read_text(encoding="utf-8").replace(fault.old, fault.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=300"]
        command += fault.tests.split() + (["-k", fault.select] if fault.select else [])
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy / "src"), str(copy / "kernels")])}
        done = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{fault.name}: pytest broke\n{done.stdout}{done.stderr}")
        return done.returncode == 0


def check_anchors(faults: list[Fault]) -> None:
    """Raises SystemExit where a fault's line is not there, or not once: before anything has run."""
    for fault in faults:
        count = (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old)
        if count != 1:
            raise SystemExit(f"{fault.name}: the line to change stands {count} times in {fault.file}")


def main() -> int:
    word = "".join(sys.argv[1:2]).replace("--control", "")
    wanted = [fault for fault in FAULTS if word in f"{fault.name} {fault.file}"]
    check_anchors(wanted)
    if "--control" in sys.argv:
        selections = sorted({(fault.tests, fault.select) for fault in FAULTS})
        wanted = [Fault(f"{tests} {select}", "pyproject.toml", "", "", tests, select) for tests, select in selections]

    def judge(fault: Fault) -> bool:
        began = time.monotonic()
        alive = survives(fault)
        verdict = "SURVIVES" if alive else "caught"
        print(f"{verdict:9} {time.monotonic() - began:5.1f} s  {fault.name} ({Path(fault.file).name})", flush=True)
        return alive

    with ThreadPoolExecutor(PROCESSES) as pool:
        verdicts = list(pool.map(judge, wanted))
    if "--control" in sys.argv:
        return 0 if all(verdicts) else 1
    survivors = [fault.name for fault, alive in zip(wanted, verdicts, strict=True) if alive]
    print(f"{len(wanted) - len(survivors)} of {len(wanted)} faults caught")
    for name in survivors:
        print(f"  survivor: {name}: {ALLOWED_SURVIVORS.get(name, 'not explained')}")
    return 0 if set(survivors) <= set(ALLOWED_SURVIVORS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
