"""Peak memory of a step: exact to the byte from the tensors themselves, or as the process's own high-water mark.

    with MemoryTracker(model) as memory:
        loss_fn(model(x), y).backward()
    memory.peak_mb, memory.activation_mb

Weights and gradients easily hide what a pipeline saves: 60 layers of Linear(1024) at a batch of 64 are 240 MB of weights,
240 MB of gradients and 15 MB of activations. So activations are counted apart.

A MB is 2**20 bytes throughout.
"""

import ctypes
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from micropp.schedule import positive_count

MB = 2**20


class _Storage:
    """One block of memory under observation: its number in the log, its size, and the weak reference that sees it go."""

    def __init__(self, uid: int, n_bytes: int):
        self.uid, self.n_bytes, self.reference = uid, n_bytes, None


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of tensor storage alive at each moment of a `with` block, on all devices together.

    After the block:
        peak_bytes, peak_mb              the most that was alive at once, with what existed before the block
        activation_bytes, activation_mb  the most that was alive at once of what the block made, without what `model` and
                                         `optimizer` hold when it ends: parameters, buffers, gradients, optimizer state

    What existed before is the base: whatever `model` and `optimizer` hold, the tensors in `existing`, and any other
    tensor from the moment on that the block first uses it. A storage counts once, however many views it has. Not counted:
    scratch space inside a kernel, sparse tensors, and `UntypedStorage.resize_` until an operation next touches it.
    A gradient that the block both makes and drops (by zero_grad) counts as an activation.

    Operations are seen on the thread that entered the block and in its backward passes. Another thread joins by pushing
    this very object onto its own stack, torch.utils._python_dispatch._push_mode(memory), and _pop_mode() at its end; it
    may free tensors anywhere.

    Raises RuntimeError if a figure is read before the block has ended.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        existing: Iterable[Tensor] = (),
    ):
        super().__init__()
        self._model, self._optimizer, self._existing = model, optimizer, list(existing)
        self._lock = threading.Lock()
        self._peaks: tuple[int, int] | None = None

    @property
    def peak_bytes(self) -> int:
        return self._result()[0]

    @property
    def activation_bytes(self) -> int:
        return self._result()[1]

    @property
    def peak_mb(self) -> float:
        return self.peak_bytes / MB

    @property
    def activation_mb(self) -> float:
        return self.activation_bytes / MB

    def __enter__(self) -> "MemoryTracker":
        self._alive: dict[int, _Storage] = {}  # by the address of the C++ storage
        self._log: list[tuple[int, int]] = []  # (uid, bytes more or less), as it happened
        self._base: dict[int, int] = {}  # uid: bytes
        self._uids = itertools.count()
        self._peaks = None
        for tensor in itertools.chain(self._held(), self._existing):
            self._see(tensor, new=False)
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        with self._lock:
            log, alive, self._alive = list(self._log), self._alive, {}
        held = {alive[address].uid for address in map(_address, self._held()) if address in alive}
        total = peak = sum(self._base.values())
        activations = activation_peak = 0
        for uid, change in log:
            total += change
            peak = max(peak, total)
            if uid not in self._base and uid not in held:
                activations += change
                activation_peak = max(activation_peak, activations)
        for known in list(alive.values()):
            known.reference = None  # what is freed from now on is not ours to see
        self._peaks = peak, activation_peak

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # An argument not seen before is older than the block, except here: torch.tensor(...) fills its memory out of
        # sight and then hands it to this operation.
        for tensor in tree_leaves((args, kwargs)):
            self._see(tensor, new=func is torch.ops.aten.lift_fresh.default)
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            self._see(tensor, new=True)
        return outputs

    def _held(self) -> Iterator[Tensor]:
        """What model and optimizer keep beyond a step."""
        if self._model is not None:
            yield from self._model.buffers()
            for parameter in self._model.parameters():
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
        if self._optimizer is not None:
            yield from (
                value
                for state in self._optimizer.state.values()
                for value in state.values()
                if isinstance(value, Tensor)
            )

    def _see(self, tensor: object, new: bool) -> None:
        address = _address(tensor)
        if address is None:
            return
        storage = tensor.untyped_storage()
        n_bytes = storage.nbytes()
        known = self._alive.get(address)
        if known is not None and known.n_bytes == n_bytes:
            return  # the common case needs no lock
        with self._lock:
            known = self._alive.get(address)
            if known is None:
                known = self._alive[address] = _Storage(next(self._uids), n_bytes)
                known.reference = weakref.ref(storage, self._forget(address, known))
                if new:
                    self._log.append((known.uid, n_bytes))
                else:
                    self._base[known.uid] = n_bytes
            else:  # out=... or resize_ gave it another size
                self._log.append((known.uid, n_bytes - known.n_bytes))
                known.n_bytes = n_bytes

    def _forget(self, address: int, known: _Storage):
        """What to do when the storage is freed, on whichever thread that is."""
        alive, log = self._alive, self._log

        # Takes no lock: the garbage collector may run this while the same thread holds it. Removing an entry and
        # appending one are single steps, and an address is removed before the allocator can hand it out again.
        def forget(_):
            del alive[address]
            log.append((known.uid, -known.n_bytes))

        return forget

    def _result(self) -> tuple[int, int]:
        if self._peaks is None:
            raise RuntimeError(
                "the block that this MemoryTracker watches has not ended: read its figures after the with block"
            )
        return self._peaks


def _address(tensor: object) -> int | None:
    """Identifies the storage under a tensor; None if there is none that takes up memory."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    return tensor.untyped_storage()._cdata


def get_peak_memory() -> float:
    """The most memory in use, in MB, since the previous call, or since the start. Reading restarts the measurement.

    Once CUDA is in use: the peaks of its allocator, summed over devices. Otherwise the peak resident memory of the
    process: Python, libraries and all. So compare two calls, or use MemoryTracker for tensors alone. Where the system does
    not let a process restart its mark (macOS, some containers) it is always the peak since the start. Never 0.
    """
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        peak = sum(torch.cuda.max_memory_allocated(device) for device in devices)
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        if peak:
            return peak / MB
    peak = _peak_resident_bytes()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory, which would stay in the mark
    except (AttributeError, OSError, TypeError):  # another C library
        pass
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Linux: the mark starts again from what is resident now
    except OSError:
        pass
    return peak / MB


def estimate_memory_reduction(k_partitions: int, m_microbatches: int, layers: int, batch_size: int) -> float:
    """How many times less activation memory a device needs, by §2.3: N·L over N + (L/K)·(N/M).

    N·L is every layer's output for the mini-batch; N the stage inputs that re-materialization keeps, whatever M is;
    (L/K)·(N/M) one stage's layers for the micro-batch that is being recomputed. Estimated, not measured: for
    that see MemoryTracker. (Huang et al., GPipe.)

    Raises ValueError for a count below 1, TypeError for one that is no int.
    """
    K, M, L, N = k_partitions, m_microbatches, layers, batch_size
    for name, count in (("k_partitions", K), ("m_microbatches", M), ("layers", L), ("batch_size", N)):
        positive_count(name, count)
    return N * L / (N + (L / K) * (N / M))


def _peak_resident_bytes() -> int:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # here, as Windows has no such module
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
