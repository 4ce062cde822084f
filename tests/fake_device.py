"""A device that computes late: queues run when they must, in an order that the events allow and nobody expects.

It runs the real worker code on CPU tensors. Every torch operation given to it between `launching` and its end becomes an
operation of the compute queue: its result has a shape at once and poison for values, until the operation is executed.
What a GPU would do in silence raises here:

* Race: two operations on the same memory, one of them a write, that no event orders; memory that was rewritten or freed
  while a copy of it was under way; a result read before it arrived
* StaleGraph: a captured step that reads a staging buffer, or memory that is not there any more

Whether two operations are ordered is worked out from the events alone (vector clocks), so a missing one is found in
whatever order the queues happen to run. Running them late besides shows that values are right.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from ropeway.worker.device import Replay
from ropeway.worker.staging import Download, Downloads, Queue, Uploads

QUEUES: tuple[Queue, ...] = ("upload", "compute", "download")
Order = Literal["late", "early", "uploads first", "compute first", "random"]
ORDERS: tuple[Order, ...] = ("late", "early", "uploads first", "compute first", "random")
POISON_BYTE = 0xA5


class Race(AssertionError):  # noqa: N818
    """Two uses of the same memory that nothing orders."""


class StaleGraph(AssertionError):  # noqa: N818
    """A captured step that reads what will not be there, or will not be the same, when it is replayed."""


@dataclass
class FakeEvent:
    queue: Queue
    number: int  # operations of the queue that come before it
    clock: list[int]


@dataclass
class Operation:
    name: str
    run: Callable[[], None]
    reads: list[int] = field(default_factory=list)  # storages
    writes: list[int] = field(default_factory=list)
    event: FakeEvent | None = None  # to wait for, before anything behind it in this queue


@dataclass
class _Use:
    queue: Queue
    tick: int  # the queue's own clock
    name: str


@dataclass
class _Memory:
    """What is known of one storage. The weak reference keeps its identity from being used again."""

    alive: StorageWeakRef
    kind: str = "memory"  # pinned | staging
    written: _Use | None = None
    read: dict[Queue, _Use] = field(default_factory=dict)


def key_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class FakeQueues:
    """staging.Queues, and the machine that executes them."""

    def __init__(self, order: Order = "late", seed: int = 0) -> None:
        self.order = order
        self.random = random.Random(seed)
        self.num_waits_for_all = 0  # how often something asked for a value and so waited for the compute queue
        self.num_executed = 0
        self._pending: dict[Queue, deque[Operation]] = {queue: deque() for queue in QUEUES}
        self._given: dict[Queue, int] = dict.fromkeys(QUEUES, 0)
        self._done: dict[Queue, int] = dict.fromkeys(QUEUES, 0)
        self._clocks: dict[Queue, list[int]] = {queue: [0] * len(QUEUES) for queue in QUEUES}
        self._host = [0] * len(QUEUES)
        self._memory: dict[int, _Memory] = {}

    # --- the protocol -------------------------------------------------------------------------------------------------

    def pinned(self, size: int) -> Tensor:
        with _disable_current_modes():
            tensor = torch.full((size,), POISON_BYTE, dtype=torch.uint8)
        self.memory_of(tensor).kind = "pinned"
        return tensor

    def memory(self, size: int) -> Tensor:
        with _disable_current_modes():
            tensor = torch.full((size,), POISON_BYTE, dtype=torch.uint8)
        memory = self.memory_of(tensor)
        memory.kind = "staging"
        # An earlier owner's work, which the compute queue was given, may still use these bytes.
        self.give("compute", Operation("an earlier owner", lambda: None, writes=[key_of(tensor)]))
        return tensor

    def copy(self, target: Tensor, source: Tensor, queue: Queue) -> None:
        assert target.shape == source.shape
        assert target.dtype == source.dtype
        assert target.is_contiguous()
        assert source.is_contiguous()
        assert target.numel() > 0
        places = [(self.memory_of(tensor), _bytes_of(tensor)) for tensor in (target, source)]
        pinned_source = self.memory_of(source).kind == "pinned"
        before = places[1][1].copy() if pinned_source else None

        def run() -> None:
            for memory, _ in places:
                if memory.alive.expired():
                    raise Race(f"memory was freed before the {queue} that uses it was done")
            if before is not None and not np.array_equal(before, places[1][1]):
                raise Race("a pinned buffer was rewritten while its upload was under way")
            places[0][1][:] = places[1][1]

        self.give(queue, Operation(queue, run, reads=[key_of(source)], writes=[key_of(target)]))

    def record(self, queue: Queue) -> FakeEvent:
        _merge(self._clocks[queue], self._host)
        return FakeEvent(queue, self._given[queue], list(self._clocks[queue]))

    def wait(self, queue: Queue, event: FakeEvent) -> None:
        _merge(self._clocks[queue], event.clock)
        self.give(queue, Operation("wait", lambda: None, event=event))

    def wait_on_host(self, event: FakeEvent) -> None:
        _merge(self._host, event.clock)
        if self.order == "random":
            while self._done[event.queue] < event.number and self._run_some(1):
                pass
        self._complete(event)

    # --- what torch gives it ------------------------------------------------------------------------------------------

    def wait_for_compute(self) -> None:
        self.num_waits_for_all += 1
        self.wait_on_host(self.record("compute"))

    def check_on_host(self, tensor: Tensor) -> None:
        """The host reads or writes it now."""
        written = self.memory_of(tensor).written
        if written is not None and written.tick > self._host[QUEUES.index(written.queue)]:
            raise Race(f"the host uses memory before the {written.name} into it was done")

    def memory_of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._memory:
            self._memory[key] = _Memory(StorageWeakRef(storage))
        return self._memory[key]

    # --- execution ----------------------------------------------------------------------------------------------------

    def give(self, queue: Queue, operation: Operation) -> None:
        index, clock = QUEUES.index(queue), self._clocks[queue]
        _merge(clock, self._host)
        clock[index] += 1
        self._check(queue, operation, clock)
        self._pending[queue].append(operation)
        self._given[queue] += 1
        if self.order == "early":
            self._run_all(QUEUES)
        elif self.order == "uploads first":
            self._run_all(("upload",))
        elif self.order == "compute first":
            self._run_all(("compute",))
        elif self.order == "random" and self.random.random() < 0.3:
            self._run_some(self.random.randrange(6))

    def _check(self, queue: Queue, operation: Operation, clock: list[int]) -> None:
        use = _Use(queue, clock[QUEUES.index(queue)], operation.name)

        def ordered(earlier: _Use) -> None:
            if earlier.tick > clock[QUEUES.index(earlier.queue)]:
                raise Race(f"{operation.name} on the {queue} queue does not wait for {earlier.name} on {earlier.queue}")

        for key in operation.reads:
            if (memory := self._memory.get(key)) is not None and memory.written is not None:
                ordered(memory.written)
        for key in operation.writes:
            if (memory := self._memory.get(key)) is not None:
                for earlier in [*([memory.written] if memory.written else []), *memory.read.values()]:
                    ordered(earlier)
        for key in operation.reads:
            if key in self._memory:
                self._memory[key].read[queue] = use
        for key in operation.writes:
            if key in self._memory:
                self._memory[key].written = use
                self._memory[key].read.clear()

    def _runnable(self, queue: Queue) -> bool:
        if not self._pending[queue]:
            return False
        event = self._pending[queue][0].event
        return event is None or self._done[event.queue] >= event.number

    def _execute(self, queue: Queue) -> None:
        operation = self._pending[queue].popleft()
        self._done[queue] += 1
        self.num_executed += 1
        with _disable_current_modes(), torch.inference_mode():
            operation.run()

    def _complete(self, event: FakeEvent) -> None:
        """What the event needs and nothing else."""
        while self._done[event.queue] < event.number:
            head = self._pending[event.queue][0].event
            if head is not None:
                self._complete(head)
            self._execute(event.queue)

    def _run_all(self, queues: Sequence[Queue]) -> None:
        while any(self._runnable(queue) for queue in queues):
            for queue in queues:
                while self._runnable(queue):
                    self._execute(queue)

    def _run_some(self, count: int) -> bool:
        ran = False
        for _ in range(count):
            queues = [queue for queue in QUEUES if self._runnable(queue)]
            if not queues:
                break
            self._execute(self.random.choice(queues))
            ran = True
        return ran


class FakeDevice:
    """worker.device.Device, with the real staging on fake queues."""

    name = "fake"
    runs_ahead = True
    native = None

    def __init__(self, order: Order = "late", seed: int = 0, queues: FakeQueues | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.queues = queues or FakeQueues(order, seed)
        self.uploads, self.downloads = Uploads(self.queues), Downloads(self.queues)
        self.num_captures = self.num_replays = 0
        self._recording: _Recording | None = None

    def prepare(self, num_threads: int) -> None:
        pass

    def computes_natively(self, dtype: torch.dtype) -> bool:
        return True

    def step_tokens(self, num_parameters: int) -> int:
        return 64

    def kv_budget(self, utilization: float, *, mapped_bytes: int = 0, activation_bytes: int = 0) -> int:
        return 2**22

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return self.uploads.upload(arrays)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return self.downloads.download(tensors)

    def end_step(self) -> None:
        self.uploads.end_step()

    def launching(self) -> TorchDispatchMode:
        """``with device.launching():`` torch operations are the device's."""
        return _Launching(self)

    # --- graphs -------------------------------------------------------------------------------------------------------

    def capture(self, run: Callable[[], Tensor]) -> Replay:
        assert self._recording is None
        self.num_captures += 1
        self._recording = recording = _Recording(self.queues)
        try:
            output = run()
        finally:
            self._recording = None

        def replay() -> Tensor:
            self.num_replays += 1
            recording.check()
            for operation in recording.operations:
                self.queues.give("compute", operation)
            return output

        return replay

    def run_operation(self, name: str, function: Any, args: Any, kwargs: Any, written: list[Tensor], out: Any) -> None:
        """function(*args, **kwargs) into the memory of ``out``, when its turn comes."""
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        outputs = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        recording = self._recording
        if recording is not None:
            recording.own(outputs)
            args, kwargs = tree_map(recording.address, (args, kwargs))
        else:
            for tensor in (*inputs, *outputs):
                self.queues.memory_of(tensor)

        def run() -> None:
            result = function(*args, **kwargs)
            for target, value in zip(
                outputs, [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)], strict=True
            ):
                target.copy_(value)

        def run_in_place() -> None:
            function(*args, **kwargs)

        operation = Operation(
            name,
            run if outputs else run_in_place,
            reads=[key_of(x) for x in inputs],
            writes=[key_of(x) for x in (*written, *outputs)],
        )
        if recording is not None:
            recording.operations.append(operation)
        else:
            self.queues.give("compute", operation)


class _Recording:
    """Operations as a graph has them: with addresses. What they read of the world outside is not kept alive."""

    def __init__(self, queues: FakeQueues) -> None:
        self.operations: list[Operation] = []
        self._queues = queues
        self._own: dict[int, Tensor] = {}
        self._outside: dict[int, _Memory] = {}

    def own(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._queues.memory_of(tensor)
            self._own[key_of(tensor)] = tensor

    def address(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or key_of(value) in self._own:
            return value
        memory = self._queues.memory_of(value)
        if memory.kind != "memory":
            raise StaleGraph(f"a captured step uses a {memory.kind} buffer")
        self._outside[key_of(value)] = memory
        return _unowned(value)

    def check(self) -> None:
        if any(memory.alive.expired() for memory in self._outside.values()):
            raise StaleGraph("a captured step reads memory that was freed since")


class _Launching(TorchDispatchMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        queues = self._device.queues
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view or func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.empty.memory_format):
            return func(*args, **kwargs)
        if any(queues.memory_of(x).kind == "pinned" for x in inputs):
            for tensor in inputs:
                queues.check_on_host(tensor)
            result = func(*args, **kwargs)
            for tensor in tree_flatten(result)[0]:
                if isinstance(tensor, Tensor):
                    queues.memory_of(tensor).kind = "pinned"
            return result
        if func._schema.is_mutable:
            return self._in_place(func, args, kwargs)
        try:
            shapes = func(*tree_map(_to_meta, args), **{**tree_map(_to_meta, kwargs), **_on_meta(kwargs)})
        except (NotImplementedError, RuntimeError):
            shapes = None
        if shapes is None or not any(isinstance(x, Tensor) for x in tree_flatten(shapes)[0]):
            queues.wait_for_compute()  # the result's shape, or the result itself, is a value
            return func(*args, **kwargs)
        out = tree_map(_poisoned, shapes)
        self._device.run_operation(str(func), func, args, kwargs, [], out)
        return out

    def _in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        written, returned = [], []
        for index, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name) if argument.kwarg_only or index >= len(args) else args[index]
            if argument.alias_info is not None and argument.alias_info.is_write and value is not None:
                tensors = value if isinstance(value, list | tuple) else [value]
                written += list(tensors)
                returned.append(value)
        self._device.run_operation(str(func), func, args, kwargs, written, None)
        if not func._schema.returns:
            return None
        return returned[0] if len(func._schema.returns) == 1 else tuple(returned)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if "device" in kwargs else {}


def _poisoned(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if tensor.numel():
        _bytes_of_storage(tensor)[:] = 0 if tensor.dtype == torch.bool else POISON_BYTE
    return tensor


def _bytes_of_storage(tensor: Tensor) -> np.ndarray:
    """The memory of the tensor's whole storage, not kept alive."""
    storage = tensor.untyped_storage()
    return np.ctypeslib.as_array((ctypes.c_uint8 * max(storage.nbytes(), 1)).from_address(storage.data_ptr()))


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """A contiguous tensor's memory, not kept alive."""
    begin = tensor.storage_offset() * tensor.element_size()
    return _bytes_of_storage(tensor)[begin : begin + tensor.nbytes]


def _unowned(tensor: Tensor) -> Tensor:
    """The same memory under the same shape, not kept alive."""
    if not tensor.untyped_storage().nbytes():
        return tensor
    with _disable_current_modes():
        memory = torch.from_numpy(_bytes_of_storage(tensor))
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _merge(clock: list[int], other: Sequence[int]) -> None:
    for index, value in enumerate(other):
        clock[index] = max(clock[index], value)


@contextlib.contextmanager
def without_packing() -> Iterator[None]:
    """Linears keep their plain weights, as on a GPU."""
    from ropeway.model.layers import Linear

    original = Linear.finalize
    Linear.finalize = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Linear.finalize = original  # type: ignore[method-assign]
