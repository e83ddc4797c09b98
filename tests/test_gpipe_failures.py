"""An exception in a stage surfaces at once, with its traceback and number, and leaves the module usable."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest
import torch
from torch import nn

from implementation import GPipe
from tests.oracle import ROOT, assert_same_gradients, mlp, squares, twins


class Fuse(nn.Module):
    """Blows at one call: in the forward, in the recomputation, or in the backward."""

    def __init__(self):
        super().__init__()
        self.blow, self.calls = None, 0

    def forward(self, x):
        self.calls += 1
        if self.blow == "forward" and self.calls == 2 or self.blow == "recompute" and torch.is_grad_enabled():
            raise KeyError("the fuse has blown")
        if self.blow == "backward" and x.requires_grad and torch.is_grad_enabled():
            x.register_hook(self.fail)
        return x * 1

    def fail(self, gradient):
        raise KeyError("the fuse has blown")


@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("position", [0, 3, 6])
@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
def test_an_exception_surfaces_with_traceback_and_stage_and_the_next_step_works(where, position, use_checkpoint):
    if where == "recompute" and not use_checkpoint:
        where = "backward"
    plain, model = twins(mlp(6))
    fuse = Fuse()
    layers = list(model)
    layers.insert(position, fuse)
    pipeline = GPipe(nn.Sequential(*layers), 7, 5, use_checkpoint)
    x = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    fuse.blow, threads_before = where, threading.active_count()
    with pytest.raises(KeyError, match="the fuse has blown") as raised:
        squares(pipeline(x)).backward()
    assert any(f"stage {position}," in note for note in raised.value.__notes__)
    assert "self.fail" in str(traceback.format_exception(raised.value)) or any(
        frame.name in ("forward", "fail") and frame.filename == __file__
        for frame in traceback.extract_tb(raised.value.__traceback__)
    )
    assert threading.active_count() == threads_before
    fuse.blow = None
    pipeline.zero_grad()
    squares(plain(x.detach())).backward()
    squares(pipeline(x)).backward()
    assert_same_gradients(plain, model)


def test_the_first_of_several_failures_is_the_one_that_is_told():
    class Late(nn.Module):
        def forward(self, x):
            time.sleep(0.05)
            raise ValueError("late")

    class Early(nn.Module):
        def forward(self, x):
            raise ValueError("early")

    with pytest.raises(ValueError, match="early"):
        GPipe(nn.Sequential(Early(), Late()), 2, 4)(torch.randn(8, 2))


def test_others_stop_soon():
    started = []

    class Slow(nn.Module):
        def forward(self, x):
            started.append(1)
            time.sleep(0.01)
            return x

    class Boom(nn.Module):
        def forward(self, x):
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        GPipe(nn.Sequential(Boom(), Slow()), 2, 200)(torch.randn(200, 2))
    assert not started
    with pytest.raises(ValueError, match="boom"):
        GPipe(nn.Sequential(nn.Identity(), Boom(), Slow(), Slow()), 4, 200)(torch.randn(200, 2))
    assert not started
    with pytest.raises(ValueError, match="boom"):  # a stage before it, with all its work at hand, stops as well
        GPipe(nn.Sequential(Slow(), Boom()), 2, 200)(torch.randn(200, 2))
    assert len(started) < 10


INTERRUPTED = """
import time, torch
from torch import nn
from implementation import GPipe

class Slow(nn.Module):
    def forward(self, x):
        print("working", flush=True)
        time.sleep(0.05)
        return x

pipeline = GPipe(nn.Sequential(*(Slow() for _ in range(3))), 3, 1000)
try:
    pipeline(torch.randn(1000, 2))
except KeyboardInterrupt:
    pipeline.n_microbatches = 1
    pipeline(torch.randn(1, 2))
    print("usable", flush=True)
"""


def test_ctrl_c_ends_a_run_and_leaves_the_module_usable():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        watchdog = threading.Timer(60, process.kill)  # readline has no timeout of its own
        watchdog.start()
        try:
            assert process.stdout.readline() == "working\n"
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=20)
        finally:
            watchdog.cancel()
            process.kill()
    assert rest.endswith("usable\n") and process.returncode == 0
