"""vLLM's own server over a model that computes nothing: the peer of `frontend.py`, run in vLLM's environment.

vLLM loads this through `--distributed-executor-backend vllm_stub.PacedExecutor`. Its API process, engine process and
scheduler are its own; only the model's step is replaced by the same token for every row and a fixed period.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput


class PacedExecutor(UniProcExecutor):
    """The newest request's seed is the period of a step, in microseconds. $STUB_TOKEN is the token's id."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._token = int(os.environ["STUB_TOKEN"])
        self._period = self._next = 0.0
        self._prompt_lens: dict[str, int] = {}

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        computed: dict[str, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            self._prompt_lens[new.req_id] = len(new.prompt_token_ids)
            self._period = (new.sampling_params.seed or 0) * 1e-6
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name in scheduler_output.finished_req_ids:
            self._prompt_lens.pop(name, None)
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduled:
            self._wait()
        tokens = [
            [self._token] if computed[name] + count >= self._prompt_lens[name] else []
            for name, count in scheduled.items()
        ]
        output = ModelRunnerOutput(list(scheduled), {name: row for row, name in enumerate(scheduled)}, tokens)
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def _wait(self) -> None:
        now = time.perf_counter()
        if self._next > now:
            time.sleep(self._next - now)
        else:
            self._next = now
        self._next += self._period
