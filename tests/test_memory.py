"""Peak memory: to the byte against cases worked out by hand, and against the operating system's own count."""

import os
import queue
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _pop_mode, _push_mode

from micropp.memory import MB, MemoryTracker, get_peak_memory

N, D, L = 64, 24, 5  # one activation outweighs one layer's parameters
ACTIVATION = 4 * N * D  # bytes of one (N, D) float32 tensor
PARAMETERS = 4 * (D * D + D)  # bytes of one Linear
SCALAR = 4


def chain(dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(L) for layer in (nn.Linear(D, D, dtype=dtype), nn.ReLU())])


def on_worker(job, memory, tasks: queue.Queue) -> None:
    """Hands `job` to a worker thread that carries the tracker, and waits for it."""
    done = threading.Event()
    tasks.put((job, memory, done))
    assert done.wait(30), "the worker thread did not finish its job"


@pytest.fixture
def tasks():
    """The queue of a worker thread that outlives each tracker."""
    waiting: queue.Queue = queue.Queue()

    def work():
        while (task := waiting.get()) is not None:
            job, memory, done = task
            _push_mode(memory)
            try:
                job()
            finally:
                _pop_mode()
                del job, memory, task
                done.set()

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    yield waiting
    waiting.put(None)
    worker.join(30)
    assert not worker.is_alive()


def test_without_a_graph_two_activations_are_alive_at_once():
    model, x = chain(), torch.randn(N, D)
    with MemoryTracker(model, existing=[x]) as memory, torch.no_grad():
        model(x)
    assert memory.activation_bytes == 2 * ACTIVATION
    assert memory.peak_bytes == L * PARAMETERS + ACTIVATION + 2 * ACTIVATION
    assert memory.activation_mb == 2 * ACTIVATION / 2**20 and memory.peak_mb == memory.peak_bytes / 2**20


def test_with_a_graph_every_relu_output_is_retained():
    model, x = chain(), torch.randn(N, D)
    with MemoryTracker(model, existing=[x]) as memory:
        y = model(x)
    assert y.shape == (N, D)
    assert memory.activation_bytes == (L + 1) * ACTIVATION  # each ReLU's output and the last Linear's
    assert memory.peak_bytes == L * PARAMETERS + ACTIVATION + (L + 1) * ACTIVATION


@pytest.mark.parametrize("dtype, size", [(torch.float32, 1), (torch.float64, 2)])
def test_gradients_are_no_activations(dtype, size):
    model, x = chain(dtype), torch.randn(N, D, dtype=dtype)
    base = size * (L * PARAMETERS + ACTIVATION)
    with MemoryTracker(model, existing=[x]) as memory:
        model(x).sum().backward()
    # Most activations: the last ReLU's backward, whose output and gradient stand beside the others, the loss and its 1.
    assert memory.activation_bytes == size * ((L + 1) * ACTIVATION + 2 * SCALAR)
    # Most bytes: the last Linear's backward, with both its gradients, and L - 1 outputs kept for the layers before.
    assert memory.peak_bytes == base + size * ((L + 1) * ACTIVATION + PARAMETERS + 2 * SCALAR)


def test_gradients_count_in_the_peak_once_they_weigh_more():
    model, x = chain(), torch.randn(1, D)
    with MemoryTracker(model, existing=[x]) as memory:
        model(x).sum().backward()
    # At the first Linear all gradients exist; its output's gradient, the loss and its 1 are left of the rest.
    assert memory.peak_bytes == 2 * L * PARAMETERS + 4 * D + 4 * D + 2 * SCALAR
    assert memory.activation_bytes == (L + 1) * 4 * D + 2 * SCALAR


def test_gradients_that_were_there_before_are_base():
    model, x = chain(), torch.randn(N, D)
    model(x).sum().backward()
    with MemoryTracker(model, existing=[x]) as memory, torch.no_grad():
        model(x)
    assert memory.peak_bytes == 2 * L * PARAMETERS + 3 * ACTIVATION
    assert memory.activation_bytes == 2 * ACTIVATION


def test_base_that_is_freed_makes_room():
    model, x = chain(), torch.randn(N, D)
    model(x).sum().backward()
    with MemoryTracker(model, existing=[x]) as memory:
        model.zero_grad(set_to_none=True)
        made = torch.empty(L * PARAMETERS // 2, dtype=torch.uint8)
    assert memory.activation_bytes == len(made)
    assert memory.peak_bytes == 2 * L * PARAMETERS + ACTIVATION


def test_optimizer_state_is_no_activation_if_the_optimizer_is_named():
    def bytes_of_a_step(name_it):
        model, x = chain(), torch.randn(N, D)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        model(x).sum().backward()
        with MemoryTracker(model, optimizer=optimizer if name_it else None) as memory:
            optimizer.step()
        return memory.activation_bytes, memory.peak_bytes

    assert bytes_of_a_step(True) == (0, 3 * L * PARAMETERS)
    assert bytes_of_a_step(False) == (L * PARAMETERS, 3 * L * PARAMETERS)


def test_views_count_once_and_unnamed_inputs_are_base():
    model, x = chain(), torch.randn(N, D)
    with MemoryTracker(model) as memory, torch.no_grad():
        parts = [part.reshape(-1, D) for part in x.tensor_split(3)]
        assert sum(map(len, parts)) == N
    assert memory.activation_bytes == 0
    assert memory.peak_bytes == L * PARAMETERS + ACTIVATION


def test_tensors_made_from_python_numbers_and_grown_by_out_count():
    with MemoryTracker() as memory:
        numbers = torch.tensor([1.0] * 100)
    assert (memory.peak_bytes, memory.activation_bytes) == (400, 400) and numbers.sum() == 100
    a = torch.ones(10, 10)
    with MemoryTracker(existing=[a]) as memory:
        torch.mm(a, a, out=torch.empty(0))
    assert (memory.peak_bytes, memory.activation_bytes) == (800, 400)


def test_the_same_bytes_twice_with_the_same_tracker():
    model, x = chain(), torch.randn(N, D)
    memory, figures = MemoryTracker(model, existing=[x]), []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with memory:
            model(x).sum().backward()
        figures.append((memory.peak_bytes, memory.activation_bytes))
    assert figures[0] == figures[1] and figures[0][1] > 0


def test_figures_are_refused_before_the_block_has_ended():
    memory = MemoryTracker()
    with pytest.raises(RuntimeError, match="after the with block"):
        memory.peak_bytes
    for _ in range(2):  # nor does a second block show the first one's
        with memory, pytest.raises(RuntimeError, match="after the with block"):
            memory.activation_mb
        assert memory.activation_mb == 0


def test_a_tracker_that_is_done_holds_on_to_nothing_and_watches_no_more():
    model, x = chain(), torch.randn(N, D)
    with MemoryTracker(model, existing=[x]) as memory:
        y = model(x)
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in (y, model[0].weight)]
    assert all(weakref.getweakrefcount(storage()) == 1 for storage in storages)
    n_events = len(memory._log)
    del y
    assert storages[0]() is None and len(memory._log) == n_events


def test_forward_and_backward_on_a_worker_thread(tasks):
    model, x = chain(), torch.randn(N, D)
    kept = {}

    def forward():
        kept["loss"] = model(x).sum()

    def backward():
        kept.pop("loss").backward()

    with MemoryTracker(model, existing=[x]) as memory:
        on_worker(forward, memory, tasks)
        on_worker(backward, memory, tasks)
    assert memory.activation_bytes == (L + 1) * ACTIVATION + 2 * SCALAR
    assert all(parameter.grad.abs().sum() > 0 for parameter in list(model.parameters())[-2:])


def test_made_on_one_thread_and_freed_on_another(tasks):
    kept = []
    with MemoryTracker() as memory:
        for _ in range(10):
            on_worker(lambda: kept.append(torch.empty(1000, dtype=torch.uint8)), memory, tasks)
            kept.clear()
        here = torch.empty(500, dtype=torch.uint8)
    assert (memory.peak_bytes, memory.activation_bytes) == (1000, 1000) and len(here) == 500


def test_many_threads_at_once_lose_no_byte():
    n_threads, n_rounds = 8, 100
    barrier = threading.Barrier(n_threads)
    failures = []
    shared = [torch.ones(10, dtype=torch.uint8) for _ in range(n_rounds)]

    def work():
        _push_mode(memory)
        try:
            for old in shared:
                barrier.wait(30)
                old.view(2, 5) + 1  # all meet the same unknown storage at once
            kept = torch.empty(100, dtype=torch.uint8)
            barrier.wait(30)
            assert len(kept) == 100
        except Exception as error:
            failures.append(error)
        finally:
            _pop_mode()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        with MemoryTracker() as memory:
            threads = [threading.Thread(target=work) for _ in range(n_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            everything_freed = torch.empty(50_000, dtype=torch.uint8)
    finally:
        sys.setswitchinterval(interval)
    assert not failures and len(everything_freed) == 50_000
    assert (memory.peak_bytes, memory.activation_bytes) == (51_000, 50_000)


def test_frees_between_two_threads_do_not_confuse_addresses():
    """The allocator hands an address out again at once: each new storage must be a new one to the tracker."""
    with MemoryTracker() as memory:
        for n_bytes in range(1, 2000):
            torch.empty(n_bytes, dtype=torch.uint8)
        last = torch.empty(5000, dtype=torch.uint8)
    assert (memory.peak_bytes, memory.activation_bytes) == (5000, 5000) and len(last) == 5000


CROSS_CHECK = """
import sys, torch
from torch import nn
from micropp.memory import MB, MemoryTracker, get_peak_memory
torch.set_num_threads(1)
model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.ReLU())])
x = torch.randn(4096, 512)
for _ in range(2):                                              # the first pass loads code and starts threads
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()
model.zero_grad(set_to_none=True)
get_peak_memory()                                               # restarts the mark
before = get_peak_memory()
model(x).sum().backward()
resident = get_peak_memory() - before
model.zero_grad(set_to_none=True)
with MemoryTracker(model, existing=[x]) as memory:
    model(x).sum().backward()
base = sum(p.nbytes for p in model.parameters()) + x.nbytes
print(resident, memory.peak_mb - base / MB)
"""


def run_python(program: str) -> list[float]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return [float(word) for word in result.stdout.split()]


def can_restart_the_mark() -> bool:
    """Whether the system lets a process restart its own peak; opening the file changes nothing."""
    try:
        with open("/proc/self/clear_refs", "w"), open("/proc/self/status") as status:
            return "VmHWM" in status.read()
    except OSError:
        return False


needs_restart = pytest.mark.skipif(
    not can_restart_the_mark(), reason="needs Linux with a writable /proc/self/clear_refs"
)


@needs_restart
def test_the_operating_system_agrees():
    resident, tracked = run_python(CROSS_CHECK)
    assert tracked > 100
    assert resident == pytest.approx(tracked, rel=0.03)


@needs_restart
def test_get_peak_memory_sees_what_is_already_freed_and_forgets_it():
    program = """
import torch
from micropp.memory import get_peak_memory
get_peak_memory()
before = get_peak_memory()
big = torch.ones(200 * 2**20, dtype=torch.uint8)
del big
print(before, get_peak_memory(), get_peak_memory())
"""
    before, with_tensor, after = run_python(program)
    assert 195 < with_tensor - before < 215
    assert abs(after - before) < 10


@needs_restart
def test_get_peak_memory_forgets_small_tensors_that_the_c_library_keeps():
    program = """
import torch
from micropp.memory import get_peak_memory
get_peak_memory()
before = get_peak_memory()
small = [torch.ones(32 * 2**10, dtype=torch.uint8) for _ in range(3200)]
del small[:-1]
print(before, get_peak_memory(), get_peak_memory())
"""
    before, with_tensors, after = run_python(program)
    assert 95 < with_tensors - before < 115
    assert abs(after - before) < 10


def test_get_peak_memory_is_a_number_even_where_nothing_in_proc_can_be_opened(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # the CPU's figure is meant
    assert get_peak_memory() > 1

    def refuse(*_, **__):
        raise PermissionError("read-only container")

    monkeypatch.setattr("builtins.open", refuse)
    peaks = [get_peak_memory(), get_peak_memory()]
    monkeypatch.undo()
    assert all(10 < peak < 2**20 for peak in peaks)  # MB: neither bytes nor KiB
    assert MB == 2**20
