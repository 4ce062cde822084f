"""Packed weights on disk: what a first start made of the weight files, mapped into memory by the next one.

Owns: one folder (`$ROPEWAY_HOME/packed`): a file per model and layout, and the index of content digests beside them.
Must not know: layers, architectures, how weights are packed. Called by: model.loader (find, offer), worker.executor
(write_in_background).

A file's name is a hash of content and layout: the SHA-256 of config.json and of every weight file, and the caller's
description of the form that the weights were brought into. Reading gigabytes in order to hash them would cost what the
cache saves, so the index remembers each file's digest with its size, times and inode, as git's does, and `find` trusts
it: a file whose status is not in the index is a miss, whatever it holds. Hashing and writing come later, in a thread of
the lowest priority, after the server is ready. So the first start is no slower, and nothing here ever ends a start:
whatever goes wrong is one warning and costs the next start a second.

A file is in the safetensors format. It is written under another name, synchronised and renamed, under a lock that all
servers on the folder share. The KEEP files used last stay, the others are deleted when one is added.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropeway import __version__

logger = logging.getLogger(__name__)

FORMAT = 1  # raise it when the layers' finalized state or the kernels' packed layout changes
KEEP = 8
_INDEX = "index.json"
_SUFFIX = ".safetensors"
_PAGE = 4096  # where the tensors begin: packed weights, whose sizes are multiples of 64 bytes, stay aligned to those
_SETTLED_NS = 2 * 10**9  # coarsest clock of a file system: a file changed later than this may change again unseen
_POPULATE_READ = 22  # MADV_POPULATE_READ, which the mmap module does not name
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Status = list[int]  # size, mtime_ns, ctime_ns, inode: equal as long as nobody wrote to the file

Index = dict[str, Any]  # path of a weight file -> {"status": Status, "sha256": digest}


class PackedCache:
    """The folder, and the one model that this process loads."""

    def __init__(self, folder: Path) -> None:
        self.mapped_bytes = 0  # memory that holds weights although the system counts it as free for others
        self._folder = folder
        self._layout = ""
        self._files: dict[Path, Status] = {}
        self._found_ns = 0  # when that was their status
        self._damaged = False
        self._state: Mapping[str, Tensor] | None = None

    def find(self, files: Sequence[Path], layout: str) -> dict[str, Tensor] | None:
        """The state that was kept for a model of these files in this layout, ready in memory and read-only; or None.

        Reads no weight file. ``layout`` must say all that decides the state besides the files' content.
        """
        self._layout = f"{FORMAT} {__version__} {layout}"
        self._found_ns = time.time_ns()
        try:
            self._files = {path: _status(path) for path in map(Path.resolve, files)}
            index = self._read_index()
            digests = [_known_digest(index, path, status) for path, status in self._files.items()]
            if None in digests or not (place := self._place(digests)).exists():
                return None
            try:
                state, self.mapped_bytes = _map(place)
            except ValueError as error:
                logger.warning("%s is damaged (%s); it is made anew", place, error)
                self._damaged = True
                return None
            with contextlib.suppress(OSError):
                os.utime(place)  # the time of its last use
            return state
        except OSError as error:
            logger.warning("packed weights in %s cannot be read: %s", self._folder, error)
            return None

    def reject(self, reason: str) -> None:
        """What `find` returned cannot be used."""
        logger.warning("packed weights in %s do not fit this model (%s); they are made anew", self._folder, reason)
        self._damaged, self.mapped_bytes = True, 0

    def offer(self, state: Mapping[str, Tensor]) -> None:
        """After `find` returned None: what to write for the next start. The tensors must not change any more."""
        self._state = state

    def write_in_background(self) -> threading.Thread | None:
        """Call when the server is ready. It may be cut off at any moment."""
        if self._state is None:
            return None

        def work() -> None:
            with contextlib.suppress(OSError, AttributeError):  # on Linux this is the thread's own priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            self.write()

        thread = threading.Thread(target=work, name="packed-cache", daemon=True)
        thread.start()
        return thread

    def write(self) -> None:
        """Hash the files as far as needed and keep what was offered, unless there is such a file."""
        if self._state is None:
            return
        state, self._state = self._state, None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(self._folder / ".lock"):
                self._write(state)
        except OSError as error:
            logger.warning(
                "packed weights are not kept in %s: %s; each start packs them anew",
                self._folder,
                error.strerror or error,
            )

    def _write(self, state: Mapping[str, Tensor]) -> None:
        if any(self._found_ns - max(mtime, ctime) < _SETTLED_NS for _, mtime, ctime, _ in self._files.values()):
            logger.info("the weight files are too new to be told from a later version; a later start keeps them packed")
            return
        index = self._read_index()
        digests = []
        for path, status in self._files.items():
            digest = _known_digest(index, path, status)
            if digest is None:
                with path.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                index[str(path)] = {"status": status, "sha256": digest}
            if _status(path) != status:
                return  # not what was loaded
            digests.append(digest)
        place = self._place(digests)
        for leftover in self._folder.glob("*.tmp"):  # of a process that ended while it wrote: the lock is ours
            leftover.unlink()
        if self._damaged or not place.exists():
            size = sum(tensor.nbytes for tensor in state.values())
            if shutil.disk_usage(self._folder).free < 2 * size:
                raise OSError(f"{size / 1e9:.1f} GB would take more than half of the disk's free room")
            with _replacing(place) as temporary:
                _save(temporary, state, self._layout)
            logger.info("packed weights kept in %s (%.1f GB)", place, size / 1e9)
        used = sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in used[KEEP:]:
            old.unlink()
        with _replacing(self._folder / _INDEX) as temporary:
            temporary.write_text(json.dumps({path: record for path, record in index.items() if Path(path).exists()}))

    def _place(self, digests: Sequence[str | None]) -> Path:
        key = hashlib.sha256(json.dumps([self._layout, *digests]).encode()).hexdigest()
        return self._folder / f"{key[:40]}{_SUFFIX}"

    def _read_index(self) -> Index:
        try:
            index = json.loads((self._folder / _INDEX).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return index if isinstance(index, dict) else {}


def _status(path: Path) -> Status:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _known_digest(index: Index, path: Path, status: Status) -> str | None:
    record = index.get(str(path))
    return record.get("sha256") if isinstance(record, dict) and record.get("status") == status else None


def _save(path: Path, state: Mapping[str, Tensor], layout: str) -> None:
    """Largest first, so that what is odd in size comes last."""
    ordered = sorted(state.items(), key=lambda item: -item[1].nbytes)
    header: dict[str, object] = {"__metadata__": {"layout": layout}}  # for people
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = text.ljust(math.ceil((8 + len(text)) / _PAGE) * _PAGE - 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def _map(path: Path) -> tuple[dict[str, Tensor], int]:
    """The tensors of a file that `_save` wrote, and their bytes. Raises ValueError if it is not whole."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + length > size:
            raise ValueError("it ends within its header")
        header = json.loads(stream.read(length))
        try:
            header.pop("__metadata__")
            end = 8 + length + max(entry["data_offsets"][1] for entry in header.values())
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"its header is unreadable: {error!r}") from error
        if end != size:
            raise ValueError(f"it has {size} bytes instead of {end}")
        memory = mmap.mmap(stream.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    # The first step reads every byte. In one go, and in large pages where the file system has them, this takes
    # milliseconds if the file is in memory, where page faults take a tenth of a second per gigabyte and more.
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _POPULATE_READ):
        if advice is not None:
            with contextlib.suppress(OSError):  # a kernel that does not know it
                memory.madvise(advice)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch: "the buffer is not writable"
        whole = torch.frombuffer(memory, dtype=torch.uint8)[8 + length :]
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    try:
        tensors = {
            name: whole[slice(*entry["data_offsets"])].view(dtypes[entry["dtype"]]).view(entry["shape"])
            for name, entry in header.items()
        }
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"its header is unreadable: {error!r}") from error
    return tensors, size


@contextmanager
def _replacing(place: Path) -> Iterator[Path]:
    """A file to write, which becomes ``place`` at once and whole."""
    temporary = place.with_name(f"{place.name}.tmp")
    try:
        yield temporary
        temporary.rename(place)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits. The system drops the lock by itself when its holder dies."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


__all__ = ["KEEP", "PackedCache"]
