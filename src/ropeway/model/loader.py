"""Weights from files into a decoder.

Owns: reading safetensors (one file, many, with or without an index; for a GPU several tensors at a time), GGUF and dummy
weights; every check on them.
Must not know: architectures, layers' inner form, requests. Called by: worker.executor (load_model).

A decoder leaves here complete or not at all: a tensor that is missing, damaged or of the wrong shape is a ConfigError
that names it, and a tensor nobody asked for is named in the log.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ropeway.errors import ConfigError
from ropeway.model.decoder import Decoder
from ropeway.model.layers import Placement, Slots
from ropeway.model.packed_cache import PackedCache
from ropeway.model.parallel import ProcessGroup
from ropeway.model.registry import DecoderConfig
from ropeway_kernels.cpu import NativeKernels

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_DUMMY_POOL = 65521  # a prime: no width divides it, so rows of a weight do not repeat
_READERS = 4  # threads that read for a GPU: one alone gets about half of what a disk, or the page cache, can give
_AHEAD = 8  # tensors that may have been read and not been taken; bounds the memory that loading takes for itself
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def load_model(
    folder: Path,
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    seed: int,
    group: ProcessGroup,
    native: NativeKernels | None = None,
    triton: bool = False,
    cache: PackedCache | None = None,
) -> Decoder:
    """A decoder that is ready to run, with this rank's share of the weights in ``dtype`` on ``device``.

    load_format: ``auto`` takes safetensors, else GGUF; ``safetensors``; ``gguf``; ``dummy`` needs no files and is the
    same for equal ``seed``. native: kernels to run the layers on, for a CPU; triton: norms and gates by Triton. cache: where what these kernels read may be
    kept from one start to the next; dummy weights are not. Raises ConfigError naming the file or tensor.
    """
    place = Placement(dtype, device, group, native, triton)
    decoder = Decoder(config, place)
    if load_format == "dummy":
        slots = decoder.slots()
        _load(decoder, slots, _dummy_tensors(slots, seed, zero_norms=config.gemma_norms))
        return decoder
    files = _weight_files(folder, load_format)
    if native is None or cache is None:
        _load(decoder, decoder.slots(), _read_tensors(files, device))
        return decoder

    layout = f"panels of {native.panel}, {dtype}, rank {group.rank} of {group.size}"
    kept = cache.find([folder / "config.json", *files], layout)
    if kept is not None:
        try:
            decoder.adopt(kept)
            return decoder
        except ValueError as error:
            cache.reject(str(error))
            decoder = Decoder(config, place)
    _load(decoder, decoder.slots(), _read_tensors(files))
    if (state := decoder.finalized()) is not None:
        cache.offer(state)
    return decoder


def _load(decoder: Decoder, slots: Slots, tensors: Iterator[tuple[str, Tensor]]) -> None:
    _fill(slots, tensors, tied=decoder.config.tie_word_embeddings)
    slots.clear()  # they hold on to the plain weights, which finalize replaces one by one
    decoder.finalize()


def _fill(slots: Slots, tensors: Iterator[tuple[str, Tensor]], *, tied: bool) -> None:
    unexpected = []
    for name, tensor in tensors:
        slot = slots.get(_plain_name(name))
        if slot is None:
            # A stored copy of a tied head, rotary buffers of old checkpoints, and images that we do not serve.
            known = (tied and name.endswith("lm_head.weight")) or name.endswith("rotary_emb.inv_freq")
            if not known and not name.startswith(_VISION):
                unexpected.append(name)
            continue
        if tuple(tensor.shape) != slot.shape:
            raise ConfigError(
                f"tensor {name!r} has shape {list(tensor.shape)}, but config.json asks for {list(slot.shape)}"
            )
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise ConfigError(f"tensor {name!r} is of type {tensor.dtype}; quantised checkpoints are not supported")
        if slot.filled:
            raise ConfigError(f"tensor {name!r} stands in more than one file")
        slot.load(tensor)
    if unexpected:
        logger.warning("%d tensors of the checkpoint are not used: %s", len(unexpected), _some(unexpected))
    missing = [name for name, slot in slots.items() if not slot.filled]
    if missing:
        raise ConfigError(f"the checkpoint lacks {len(missing)} tensors: {_some(missing)}")


def _plain_name(name: str) -> str:
    """The language model inside a vision-language checkpoint, under the name it has alone; two generations of them."""
    name = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name)
    return name.removeprefix("language_model.")


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")


WeightFiles = dict[Path, set[str]]
"""In the order in which they are read; to each, the tensors that an index says it holds."""


def _weight_files(folder: Path, load_format: str) -> WeightFiles:
    shards = sorted(folder.glob("*.safetensors"))
    ggufs = sorted(folder.glob("*.gguf"))
    if load_format in ("auto", "safetensors") and (shards or (folder / _INDEX).exists()):
        return _safetensors_files(folder, shards)
    if load_format in ("auto", "gguf") and ggufs:
        if len(ggufs) > 1:
            raise ConfigError(f"{folder}: {len(ggufs)} .gguf files; there must be one")
        return {ggufs[0]: set()}
    wanted = {"auto": ".safetensors or .gguf", "safetensors": ".safetensors", "gguf": ".gguf"}[load_format]
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    hint = f"; {others[0]} is a pickle, which is not loaded: convert it to safetensors" if others else ""
    raise ConfigError(f"{folder}: no {wanted} file{hint}")


def _safetensors_files(folder: Path, shards: list[Path]) -> WeightFiles:
    index = folder / _INDEX
    if index.exists():
        promised: dict[str, set[str]] = {}
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            for tensor, file in weight_map.items():
                promised.setdefault(str(file), set()).add(tensor)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index}: not a usable index of shards ({error!r})") from error
        files = {folder / file: promised[file] for file in sorted(promised)}
        for shard in files:
            if shard.parent != folder or not shard.is_file():
                raise ConfigError(f"{shard}: this shard is named in {_INDEX} but is not there")
        return files
    if len(shards) > 1:
        # Some repositories hold the same weights a second time, under the training framework's names.
        shards = [shard for shard in shards if not shard.name.startswith("consolidated")]
    return {shard: set() for shard in shards}


def _read_tensors(files: WeightFiles, device: torch.device | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in the files, one at a time, in the type it is stored in; on the CPU, or, from safetensors, already on
    ``device`` if that is a GPU."""
    if device is not None and device.type != "cpu" and all(path.suffix == ".safetensors" for path in files):
        yield from _read_parallel(files, device)
        return
    for path, promised in files.items():
        if path.suffix == ".gguf":
            from ropeway.model.gguf import iter_tensors

            yield from iter_tensors(path)
        else:
            yield from _read_safetensors(path, promised)


def _read_safetensors(shard: Path, promised: set[str]) -> Iterator[tuple[str, Tensor]]:
    file, names = _open_shard(shard, "cpu", promised)
    with file:
        for name in names:
            yield name, _get_tensor(file, shard, name)


def _read_parallel(
    files: WeightFiles, device: torch.device, num_readers: int = _READERS
) -> Iterator[tuple[str, Tensor]]:
    """As `_read_safetensors` of each file in turn, but read by several threads at a time, straight to the device.

    Tensors come in the same order whichever thread is first. Readers do not share an open file, so that neither several
    shards nor the tensors of a single one wait for each other."""
    todo: list[tuple[Path, str]] = []
    for shard, promised in files.items():
        names = _open_shard(shard, "cpu", promised)[1]
        todo += [(shard, name) for name in names]
    local = threading.local()

    def read(shard: Path, name: str) -> Tensor:
        open_files: dict[Path, Any] = local.__dict__.setdefault("open_files", {})
        if shard not in open_files:
            open_files[shard] = _open_shard(shard, str(device), set())[0]
        return _get_tensor(open_files[shard], shard, name)

    pending: deque[tuple[str, Future[Tensor]]] = deque()
    with ThreadPoolExecutor(num_readers, thread_name_prefix="ropeway-load") as readers:
        try:
            for shard, name in todo:
                if len(pending) == _AHEAD:
                    first, future = pending.popleft()
                    yield first, future.result()
                pending.append((name, readers.submit(read, shard, name)))
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def _open_shard(shard: Path, device: str, promised: set[str]) -> tuple[Any, list[str]]:
    """The open file and the names of its tensors, sorted. Raises ConfigError if one that was promised is not there."""
    try:
        file: Any = safe_open(shard, framework="pt", device=device)
        names = set(file.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{shard}: damaged or incomplete ({error})") from error
    if absent := promised - names:
        raise ConfigError(f"{shard}: lacks tensors that {_INDEX} places there: {_some(list(absent))}")
    return file, sorted(names)


def _get_tensor(file: Any, shard: Path, name: str) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{shard}: damaged or incomplete ({error})") from error
    return tensor


def _dummy_tensors(slots: Slots, seed: int, *, zero_norms: bool) -> Iterator[tuple[str, Tensor]]:
    """Random weights that keep activations at a sensible scale. Drawing a number per weight would take longer than
    reading them, so each tensor is cut from one pool of normal numbers, at a place of its own."""
    pool = torch.randn(_DUMMY_POOL, generator=torch.Generator().manual_seed(seed))
    for name, slot in slots.items():
        if len(slot.shape) == 1:
            is_norm = name.endswith("norm.weight")
            tensor = torch.full(slot.shape, 1.0 if is_norm and not zero_norms else 0.0)
        else:
            rows, columns = slot.shape
            start, count = zlib.crc32(name.encode()) % _DUMMY_POOL, rows * columns
            scaled = pool * columns**-0.5
            tensor = scaled.repeat(-(-(start + count) // _DUMMY_POOL))[start : start + count].view(rows, columns)
        yield name, tensor
