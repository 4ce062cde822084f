"""Seeds one-line faults into a copy of the engine and reports which of them the engine's tests notice.

    python tests/engine/mutate.py             # all faults
    python tests/engine/mutate.py reserve     # those whose name contains a word

A test suite proves itself by failing. Exit status 0 when at most the ALLOWED_SURVIVORS below survive.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = [
    "test_block_pool.py",
    "test_kv_cache.py",
    "test_scheduler.py",
    "test_symbolic_traces.py",
    "test_hashing.py",
    "test_forks.py",
    "test_grammars.py",
]


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str


FAULTS = [
    Fault("lookup covers the last token", "engine/kv_cache.py", "(len(request.token_ids) - 1) // self.block_size", "len(request.token_ids) // self.block_size"),
    Fault("hash ignores the parent", "hashing.py", "sha256(parent + struct", "sha256(struct"),
    Fault("salt ignored", "engine/kv_cache.py", "root_hash(request.cache_salt)", 'root_hash("")'),
    Fault("prefix not referenced", "engine/kv_cache.py", "self.pool.share(prefix.block_ids)", "pass"),
    Fault("table one block short at a boundary", "engine/scheduler.py", "room = -start % block_size  #", "room = block_size - start % block_size  #"),
    Fault("commit before the block is full", "engine/kv_cache.py", "num_full = num_tokens // self.block_size", "num_full = self.blocks_for(num_tokens)"),
    Fault("release forgets the table's head", "engine/kv_cache.py", "self.pool.release(reversed(table))", "self.pool.release(reversed(table[1:]))"),
    Fault("release in head-first order", "engine/kv_cache.py", "self.pool.release(reversed(table))", "self.pool.release(table)"),
    Fault("evicted block keeps its hash", "engine/block_pool.py", "        del self.block_of[block_hash]\n", ""),
    Fault("most recently used is evicted", "engine/block_pool.py", "popitem(last=False)", "popitem(last=True)"),
    Fault("duplicate content replaces the published block", "engine/block_pool.py", "if block_hash not in self.block_of:", "if True:"),
    Fault("share leaves the block in the free list", "engine/block_pool.py", "                del self._cached[block]\n", "                pass\n"),
    Fault("null block is handed out", "engine/block_pool.py", "range(num_blocks - 1, NULL_BLOCK, -1)", "range(num_blocks - 1, NULL_BLOCK - 1, -1)"),
    Fault("reset leaves used blocks published", "engine/block_pool.py", "            self.hash_of[block] = None\n        self.block_of.clear()", "            pass\n        self.block_of.clear()"),
    Fault("preempted request keeps its progress", "engine/scheduler.py", "        request.num_computed_tokens = 0\n", ""),
    Fault("preempted request keeps the awaited token", "engine/scheduler.py", "        request.num_tokens = len(request.token_ids)\n        self.waiting.requeue", "        self.waiting.requeue"),
    Fault("preempted request goes to the back", "engine/policy.py", "self._queue.move_to_end(request.request_id, last=False)", "pass"),
    Fault("the oldest gives way", "engine/policy.py", "return len(running)\n\n    def victim(self, candidates: Sequence[Request]) -> Request:\n        return candidates[-1]", "return len(running)\n\n    def victim(self, candidates: Sequence[Request]) -> Request:\n        return candidates[0]"),
    Fault("priority ignored", "engine/policy.py", "return request.priority + request.arrival_time", "return request.arrival_time"),
    Fault("admitted at the end whatever the priority", "engine/policy.py", "return bisect.bisect(running, self._rank(request), key=self._rank)", "return len(running)"),
    Fault("a queue deadline ends running requests", "engine/scheduler.py", "reason is FinishReason.DEADLINE or request.first_scheduled is None", "True"),
    Fault("a deadline ends only waiting requests", "engine/scheduler.py", "reason is FinishReason.DEADLINE or request.first_scheduled is None", "request.first_scheduled is None"),
    Fault("admission in a step that preempted", "engine/scheduler.py", "if budget > 0 and not preempted and len(self.waiting):", "if budget > 0 and len(self.waiting):"),
    Fault("no reserve at admission", "engine/scheduler.py", "reserve=len(self.running)", "reserve=0"),
    Fault("stale result taken for a fresh one", "engine/scheduler.py", "if request.epoch != epoch or not tokens:", "if not tokens:"),
    Fault("epoch does not grow", "engine/scheduler.py", "        request.epoch += 1\n", ""),
    Fault("row never freed", "engine/scheduler.py", "        self._removed.append(request.request_id)\n", ""),
    Fault("abort of a waiting request leaves it queued", "engine/scheduler.py", "            self.waiting.remove(request)\n        request.status", "            pass\n        request.status"),
    Fault("one token too many", "engine/scheduler.py", "elif len(known) >= request.max_num_tokens:", "elif len(known) > request.max_num_tokens:"),
    Fault("stop tokens ignored", "engine/scheduler.py", "if token in request.stop_ids:", "if token in request.sampling.stop_token_ids:"),
    Fault("ignore_eos ignored", "engine/request.py", "() if sampling.ignore_eos else sampling.eos_token_ids", "sampling.eos_token_ids"),
    Fault("budget of chunks ignored", "engine/scheduler.py", "count = min(count, self._max_chunk, budget)", "count = min(count, self._max_chunk)"),
    Fault("row bound off by one", "engine/scheduler.py", "len(self.running) < self._max_num_seqs:", "len(self.running) <= self._max_num_seqs:"),
    Fault("next plan does not await the token", "engine/scheduler.py", "                if request.runs_ahead:\n                    request.num_tokens = end + 1\n                samples.append(True)", "                samples.append(True)"),
    Fault("a constrained row is planned ahead", "engine/scheduler.py", "                if request.runs_ahead:\n                    request.num_tokens = end + 1\n                samples.append(True)", "                request.num_tokens = end + 1\n                samples.append(True)"),
    Fault("a complete grammar does not end its request", "engine/scheduler.py", "elif complete and index in complete:", "elif False:"),
    Fault("an abort while compiling is forgotten", "engine/core.py", "                        self.scheduler.add(waiting)\n", "                        pass\n"),
    Fault("aborts while idle are not told", "engine/scheduler.py", "return self._take_outputs() if self._changed else None", "return None"),
    Fault("a fork's last block is not copied", "engine/scheduler.py", "if hit.tail is not None:", "if False:"),
    Fault("a fork takes over the block that its parent goes on in", "engine/kv_cache.py", "is_cut = num_tokens % self.block_size > 0", "num_full, is_cut = self.blocks_for(num_tokens), False"),
    Fault("a fork of a parent that is being computed again", "engine/forks.py", "parent.epoch == child.parent_epoch", "parent.status is RequestStatus.RUNNING"),
    Fault("forks of another salt", "engine/forks.py", "child.cache_salt == parent.cache_salt", "True"),
    Fault("forks wait for who has ended", "engine/scheduler.py", "        self._queue_forks(self.forks.pop_orphans(request))\n", ""),
    Fault("results taken in reverse", "engine/core.py", "self._in_flight.popleft()", "self._in_flight.pop()"),
]  # fmt: skip

ALLOWED_SURVIVORS = {
    "admission in a step that preempted": (
        "no trace can tell: under first come, first served the victim is next in the queue, and the blocks it would need "
        "plus the reserve are always more than it gave up; the rule is for policies that queue in another order"
    ),
}


def survives(fault: Fault) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / "src", copy / "src", ignore=ignore)
        (copy / "tests" / "engine").mkdir(parents=True)
        (copy / "kernels").mkdir()
        shutil.copy(ROOT / "pyproject.toml", copy)
        shutil.copy(ROOT / "tests" / "symbolic.py", copy / "tests")
        for name in [*TESTS, "stub_executors.py"]:
            shutil.copy(ROOT / "tests" / "engine" / name, copy / "tests" / "engine")
        target = copy / "src" / "ropeway" / fault.file
        text = target.read_text(encoding="utf-8")
        if text.count(fault.old) != 1:
            raise SystemExit(f"{fault.name}: the line to change stands {text.count(fault.old)} times in {fault.file}")
        target.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--timeout=120",
            "tests/engine",
        ]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{fault.name}: pytest broke\n{done.stdout}{done.stderr}")
        return done.returncode == 0


def main() -> int:
    wanted = [fault for fault in FAULTS if len(sys.argv) < 2 or sys.argv[1] in fault.name]
    survivors = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # each waits for a process of its own
        for fault, alive in zip(wanted, pool.map(survives, wanted), strict=True):
            if alive:
                survivors.append(fault.name)
            print(f"{'SURVIVES' if alive else 'caught':9} {fault.name} ({fault.file})", flush=True)
    print(f"{len(wanted) - len(survivors)} of {len(wanted)} faults caught")
    for name in survivors:
        print(f"  survivor: {name}: {ALLOWED_SURVIVORS.get(name, 'not explained')}")
    return 0 if set(survivors) <= set(ALLOWED_SURVIVORS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
