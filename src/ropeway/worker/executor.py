"""Runs plans in this process: loads the model, sizes the cache, proves that the device works, then executes.

Owns: start-up of a worker and its phase times. Must not know: scheduling, text. Called by: engine.core (start, submit,
close); built by cli in the API process, which must stay free of torch: so torch is imported in start(), never above.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ropeway.config import Config
from ropeway.engine.step import Handle, KVCapacity, ModelRunnerOutput, NewRow, SchedulerOutput
from ropeway.errors import ConfigError
from ropeway.protocol import SamplingParams

if TYPE_CHECKING:
    from ropeway.vocabulary import Vocabulary
    from ropeway.worker.constraints import Constraints, Grammars
    from ropeway.worker.runner import ModelRunner

logger = logging.getLogger(__name__)

_WARM_UP_ID = -1  # no request has a negative id


class LocalExecutor:
    """Implements engine.step.Executor with one device. Picklable until started."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        packed_folder: Path | None = None,
        *,
        tokenizer_folder: Callable[[], Path] | None = None,
    ) -> None:
        """packed_folder: where packed weights are kept from one start to the next; None keeps none. tokenizer_folder:
        asked when the first grammar comes; the model's folder otherwise."""
        self._config = config
        self._folder = model_folder
        self._packed_folder = packed_folder
        self._tokenizer_folder = tokenizer_folder
        self._grammars: Grammars | None = None
        self._constraints: Constraints | None = None
        self._runner: ModelRunner | None = None
        # With overlap on a device that does not: steps run here, in the order submitted.
        self._thread: ThreadPoolExecutor | None = None

    def start(self) -> KVCapacity:
        """Load everything and run a first step. Raises ConfigError if the configuration, the model folder or the
        machine does not allow it."""
        config = self._config
        seconds: dict[str, float] = {}
        with _phase(seconds, "import"):
            import torch

            from ropeway.model.loader import load_model
            from ropeway.model.packed_cache import PackedCache
            from ropeway.model.parallel import SINGLE
            from ropeway.model.registry import parse_config
            from ropeway.worker import memory
            from ropeway.worker.backends import choose_backend, choose_kv_dtype, make_backend
            from ropeway.worker.constraints import Constraints, Grammars
            from ropeway.worker.device import choose_dtype, make_device
            from ropeway.worker.graphs import LARGEST
            from ropeway.worker.runner import ModelRunner, allocate_kv_cache

        if config.parallel.tensor_parallel_size != 1:
            raise ConfigError("--tensor-parallel-size: more than one device is not supported yet")
        device = make_device(config.device.device)
        device.prepare(config.device.num_threads)
        packed = None if self._packed_folder is None else PackedCache(self._packed_folder)
        with _phase(seconds, "load"):
            model_config = parse_config(_read_config(self._folder), max(0, config.model.max_model_len))
            max_model_len = memory.resolve_max_model_len(
                config.model.max_model_len, model_config.max_position_embeddings
            )
            dtype = choose_dtype(config.model.dtype, model_config.torch_dtype, device)
            block_size = config.cache.block_size
            backend_name = choose_backend(config.device.attention_backend, device, block_size, model_config.head_dim)
            kv_dtype = choose_kv_dtype(config.cache.kv_cache_dtype, dtype, device, backend_name)
            backend = make_backend(backend_name, device, block_size, model_config, kv_dtype, max_model_len)
            on_triton = backend_name == "triton"
            model = load_model(
                self._folder,
                model_config,
                dtype=dtype,
                device=device.torch_device,
                load_format=config.model.load_format,
                seed=config.model.seed,
                group=SINGLE,
                native=None if on_triton else device.native,
                triton=on_triton,
                cache=packed,
            )
        with _phase(seconds, "kv"):
            graphs = device.runs_ahead and not config.device.enforce_eager
            token_elements = 2 * model_config.num_layers * model_config.num_kv_heads * model_config.head_dim
            max_num_seqs = config.scheduler.max_num_seqs
            step_tokens = device.step_tokens(sum(weight.numel() for weight in model.parameters()))
            asked = config.scheduler.max_num_batched_tokens
            activations = memory.activation_bytes(
                model_config,
                itemsize=dtype.itemsize,
                step_tokens=asked if asked > 0 else max(max_num_seqs, step_tokens),
                max_num_seqs=max_num_seqs,
                captured_rows=min(max_num_seqs, LARGEST) if graphs else 0,
            )
            num_blocks = memory.num_kv_blocks(
                config.cache,
                block_bytes=block_size * token_elements * kv_dtype.itemsize,
                budget=device.kv_budget(
                    config.cache.gpu_memory_utilization,
                    mapped_bytes=packed.mapped_bytes if packed else 0,
                    activation_bytes=activations,
                ),
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
            )
            max_model_len = memory.clip_to_pool(max_model_len, num_blocks, block_size)
            if backend_name == "cpu":
                # All that is large now runs on native kernels. torch's own threads would only spin for milliseconds
                # after each small operation that torch thinks worth sharing, on the cores that the kernels need.
                torch.set_num_threads(1)
            kv_cache = allocate_kv_cache(
                backend,
                num_blocks=num_blocks,
                num_layers=model_config.num_layers,
                block_size=block_size,
                num_kv_heads=model_config.num_kv_heads,
                head_dim=model_config.head_dim,
                dtype=kv_dtype,
                device=device.torch_device,
            )
        overlap = config.scheduler.overlap == "on" or (config.scheduler.overlap == "auto" and device.runs_ahead)
        self._grammars = Grammars(self._load_vocabulary, model_config.vocab_size)
        self._constraints = Constraints(self._grammars, model_config.vocab_size)
        self._runner = ModelRunner(
            model,
            backend,
            device,
            kv_cache,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            constraints=self._constraints,
            graphs=graphs,
        )
        if overlap and not device.runs_ahead:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ropeway-worker")
        with _phase(seconds, "warmup"):
            self._warm_up(min(block_size, max_model_len))
        if packed is not None:
            packed.write_in_background()
        capacity = KVCapacity(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            dtype=str(dtype).removeprefix("torch."),
            device=device.name,
            architecture=model_config.architecture,
            hidden_size=model_config.hidden_size,
            step_tokens=step_tokens,
            overlap=overlap,
            startup_seconds=seconds,
        )
        logger.info(
            "%s in %s on %s: %d KV blocks of %d tokens, %s",
            capacity.architecture,
            capacity.dtype,
            capacity.device,
            num_blocks - 1,
            block_size,
            ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()),
        )
        if device.native is not None:
            features = ", ".join(device.native.features) or "none"
            logger.info("native CPU kernels for %s; int8 dot products: %s", device.native.isa, features)
        return capacity

    def submit(self, plan: SchedulerOutput) -> Handle:
        """The step is under way when this returns: in the device's queues, in the thread, or done without either. What
        it raised comes out of the handle's result()."""
        assert self._runner is not None, "start() comes first"
        if self._thread is not None:
            return self._thread.submit(self._runner.execute, plan)
        try:
            return self._runner.begin(plan)
        except Exception as error:
            failed: Future[ModelRunnerOutput] = Future()
            failed.set_exception(error)
            return failed

    def compile(self, grammar: str, done: Callable[[str], None]) -> None:
        assert self._grammars is not None, "start() comes first"
        self._grammars.compile(grammar, done)

    def _load_vocabulary(self) -> Vocabulary:
        from ropeway.vocabulary import Vocabulary

        folder = self._folder if self._tokenizer_folder is None else self._tokenizer_folder()
        return Vocabulary.load(folder, self._folder)

    def close(self) -> None:
        """Wait for the step in flight and let go of the model. May be called twice."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        for part in (self._grammars, self._constraints):
            if part is not None:
                part.close()
        self._runner = self._grammars = self._constraints = None

    def _warm_up(self, num_tokens: int) -> None:
        """One prompt step and, if a block has room for it, one decode step, through the path of every request: what is
        set up at first use is set up before the first user waits for it, and a broken device shows now."""
        num_prompt = max(1, num_tokens - 1)
        new = NewRow(
            request_id=_WARM_UP_ID,
            epoch=0,
            token_ids=[0] * num_prompt,
            num_prompt_tokens=num_prompt,
            num_computed_tokens=0,
            block_ids=[1],
            sampling=SamplingParams(max_tokens=2),
        )
        for step, (start, count) in enumerate([(0, num_prompt), (num_prompt, num_tokens - num_prompt)]):
            if count:
                plan = SchedulerOutput(-1, [_WARM_UP_ID], [0], [start], [count], [True], total_tokens=count)
                plan.added = [new] if step == 0 else []
                self.submit(plan).result()
        self.submit(SchedulerOutput(-1, removed=[_WARM_UP_ID])).result()


@contextmanager
def _phase(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began


def _read_config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return config


__all__ = ["LocalExecutor"]
