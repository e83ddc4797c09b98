"""`python setup.py`: is this machine ready, and do the mathematics hold on it? One line a check.

With arguments this file is setuptools' own (`pip install -e .`); what it installs is in pyproject.toml.
"""

import os
import subprocess
import sys
import tempfile

GLOO = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2, timeout=timedelta(seconds=20))
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
dist.barrier()
dist.destroy_process_group()
print(total.item(), flush=True)
os._exit(0)
"""


def check_python():
    """Python 3.11 or later"""
    yield (
        sys.version_info >= (3, 11),
        f"{sys.version.split()[0]}",
        "run with a newer Python: make PYTHON=python3.12 ...",
    )


def check_packages():
    """the packages that pyproject.toml names"""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "numpy", "matplotlib", "pytest", "rich"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    good = "missing" not in found.values() and _release(found["torch"]) >= (2, 6)
    yield good, ", ".join(f"{name} {found[name]}" for name in found), "pip install -e . (torch must be 2.6 or later)"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def check_machine():
    """cores and GPUs"""
    import torch

    gpus = torch.cuda.device_count()
    yield True, f"{os.cpu_count()} cores, {torch.get_num_threads()} intra-op threads, {gpus} GPUs", ""


def check_gloo():
    """two processes add 1 and 2 over gloo"""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", GLOO, str(rank), os.path.join(folder, "store")],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=60)[0].strip() or "no answer" for rank in ranks]
        except subprocess.TimeoutExpired:
            said = ["no answer in 60 s"]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    advice = "processes cannot talk over the loopback interface: check firewall and hostname"
    yield said == ["3.0", "3.0"], ", ".join(said), advice


def check_schedules():
    """every schedule runs, for K and M up to 8"""
    from micropp.schedule import SCHEDULES, rematerialized, validate

    count = 0
    for schedule in SCHEDULES.values():
        for K in range(1, 9):
            for M in range(1, 9):
                validate(schedule(K, M))
                validate(rematerialized(schedule(K, M)))
                count += 2
    yield True, f"{count} schedules valid", ""


def check_bubble():
    """simulated GPipe and 1F1B idle for (K-1)/(M+K-1)"""
    from micropp.schedule import gpipe, one_f_one_b
    from micropp.timeline import calculate_bubble_overhead, simulate

    K, M = 4, 16
    bubbles = [simulate(schedule(K, M)).bubble() for schedule in (gpipe, one_f_one_b)]
    live = simulate(one_f_one_b(K, M)).live()
    good = bubbles == [calculate_bubble_overhead(K, M)] * 2 and live == [min(M, K - k) for k in range(K)]
    yield good, f"{bubbles[0]:.1%} at K=4, M=16", _ADVICE


def check_gradients():
    """gradients are the plain model's, in float64"""
    import copy

    import torch
    from torch import nn

    from implementation import GPipe

    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    plain = nn.Sequential(*layers).double()
    for use_checkpoint in (True, False):
        model = copy.deepcopy(plain)
        x = torch.randn(10, 16, dtype=torch.float64)  # 10 samples in 4 micro-batches
        for m in (plain, GPipe(model, 4, 4, use_checkpoint)):
            m.zero_grad()
            m(x).square().sum().backward()
        pairs = list(zip(plain.parameters(), model.parameters(), strict=True))
        largest = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
        moved = min(a.grad.abs().max().item() for a, _ in pairs)
        how = "with" if use_checkpoint else "without"
        yield largest < 1e-10 < moved, f"off by {largest:.1e} {how} re-materialization", _ADVICE


def check_memory():
    """re-materialization"""
    import torch
    from torch import nn

    from implementation import GPipe
    from micropp.memory import MemoryTracker

    L, K, M, N, D = 40, 4, 16, 1024, 32
    x = torch.randn(N, D)
    peaks = {}
    for use_checkpoint in (True, False):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.ReLU()) for _ in range(L)))
        pipeline = GPipe(model, K, M, use_checkpoint)
        with MemoryTracker(pipeline, existing=[x]) as memory:
            pipeline(x).sum().backward()
        peaks[use_checkpoint] = memory.activation_bytes / (N * D * 4)
    bound = K + L / M  # in units of one layer's output for the mini-batch
    good = peaks[True] <= 1.15 * bound and peaks[False] > L / 2
    text = f"{peaks[True]:.1f} layers' outputs at once, the paper says {bound:.1f}; without it {peaks[False]:.1f}"
    yield good, text, _ADVICE


_ADVICE = "the code and this machine do not fit together: run `make test`, and report what fails with these lines"

CHECKS = [
    check_python,
    check_packages,
    check_machine,
    check_gloo,
    check_schedules,
    check_bubble,
    check_gradients,
    check_memory,
]


def main() -> int:
    failed = 0
    for check in CHECKS:
        try:
            for good, figure, advice in check():
                failed += not good
                print(f"{'ok  ' if good else 'FAIL'}  {check.__doc__}: {figure}", flush=True)
                if not good:
                    print(f"      {advice}")
        except Exception as error:  # a check that cannot run has failed, and the others still say what they know
            failed += 1
            print(f"FAIL  {check.__doc__}: {type(error).__name__}: {error}\n      {_ADVICE}")
    print(f"{failed} of the checks failed" if failed else "all checks hold")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) == 1:
        raise SystemExit(main())
    from setuptools import setup

    setup()
