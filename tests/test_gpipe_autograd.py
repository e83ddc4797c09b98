"""To autograd a pipeline is a module like any other: grad(), hooks, second backward, autocast, threads, DDP."""

import contextvars
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from implementation import GPipe
from tests.oracle import ROOT, assert_same_gradients, mlp, squares, twins

BOTH = pytest.mark.parametrize("use_checkpoint", [True, False])


def batch(N=7, width=5):
    return torch.randn(N, width, dtype=torch.float64)


@BOTH
def test_autograd_grad_leaves_grad_alone(use_checkpoint):
    plain, model = twins(mlp(6))
    x = batch().requires_grad_()
    expected = torch.autograd.grad(squares(plain(x)), [x, *plain.parameters()])
    found = torch.autograd.grad(squares(GPipe(model, 3, 4, use_checkpoint)(x)), [x, *model.parameters()])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters()) and x.grad is None


@BOTH
def test_gradients_add_up_over_mini_batches(use_checkpoint):
    plain, model = twins(mlp(6))
    pipeline = GPipe(model, 3, 4, use_checkpoint)
    for x in (batch(7), batch(2), batch(9)):
        squares(plain(x)).backward()
        squares(pipeline(x)).backward()
    assert_same_gradients(plain, model)


@BOTH
def test_two_mini_batches_under_way_at_once(use_checkpoint):
    plain, model = twins(mlp(6))
    pipeline, a, b = GPipe(model, 3, 4, use_checkpoint), batch(7), batch(5)
    for m in (plain, pipeline):
        first, second = m(a), m(b)
        (squares(second) + squares(first)).backward()
    assert_same_gradients(plain, model)


@BOTH
def test_part_of_a_larger_graph(use_checkpoint):
    plain, model = twins(mlp(6))
    before, after = nn.Linear(5, 5).double(), nn.Linear(5, 3).double()
    x = batch()
    squares(after(plain(before(x)))).backward()
    expected = [p.grad.clone() for m in (before, after) for p in m.parameters()]
    before.zero_grad(), after.zero_grad()
    squares(after(GPipe(model, 2, 4, use_checkpoint)(before(x)))).backward()
    assert_same_gradients(plain, model)
    for parameter, gradient in zip([*before.parameters(), *after.parameters()], expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


@BOTH
def test_parameter_hooks_see_one_gradient_a_backward(use_checkpoint):
    plain, model = twins(mlp(6))
    model_hooks, plain_hooks = [], []
    for m, seen in ((plain, plain_hooks), (model, model_hooks)):
        m[2].weight.register_hook(lambda g, seen=seen: (seen.append(g.clone()), g / 2)[1])
        m[4].bias.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
    x = batch()
    squares(plain(x)).backward()
    squares(GPipe(model, 3, 4, use_checkpoint)(x)).backward()
    assert len(model_hooks) == len(plain_hooks) == 2
    assert_same_gradients(plain, model)


@BOTH
def test_module_hooks_fire_once_a_micro_batch(use_checkpoint):
    model, M = mlp(6), 4
    fired = {"pre": 0, "forward": 0, "with_kwargs": 0, "backward_pre": 0, "backward": 0}

    def count(name):
        def hook(*arguments):
            fired[name] += 1

        return hook

    model[2].register_forward_pre_hook(count("pre"))
    model[2].register_forward_hook(count("forward"))
    model[3].register_forward_hook(count("with_kwargs"), with_kwargs=True, always_call=True)
    model[2].register_full_backward_pre_hook(count("backward_pre"))
    model[2].register_full_backward_hook(count("backward"))
    squares(GPipe(model, 3, M, use_checkpoint)(batch(7))).backward()
    assert fired == dict.fromkeys(fired, M)


@BOTH
def test_hooks_that_change_something_change_it_in_the_recomputation_too(use_checkpoint):
    def in_place(module, inputs, output):
        with torch.no_grad():
            output.mul_(2)

    plain, model = twins(mlp(6))
    for m in (plain, model):
        m[1].register_forward_hook(lambda module, inputs, output: output * 3)
        m[3].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        m[4].register_forward_hook(in_place)
        nn.utils.parametrizations.weight_norm(m[2])
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(m[4])  # the old kind: a hook that sets the layer's weight
    x = batch()
    squares(plain(x)).backward()
    squares(GPipe(model, 3, 4, use_checkpoint)(x)).backward()
    assert_same_gradients(plain, model)


def test_a_hook_may_remove_itself():
    model, seen = mlp(4), []
    handle = model[1].register_forward_hook(lambda *_: (seen.append(1), handle.remove())[0])
    pipeline = GPipe(model, 2, 3)
    squares(pipeline(batch())).backward()
    assert len(seen) == 1 and not model[1]._forward_hooks


@BOTH
def test_second_backward_needs_retain_graph(use_checkpoint):
    plain, model = twins(mlp(6))
    x = batch()
    expected, loss = squares(plain(x)), squares(GPipe(model, 3, 4, use_checkpoint)(x))
    for m in (expected, loss):
        m.backward(retain_graph=True)
        m.backward(retain_graph=True)
        m.backward()
    assert_same_gradients(plain, model)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_backward_of_a_loss_inside():
    plain, model = twins(mlp(6))
    x, target = batch(), batch()
    expected = nn.functional.mse_loss(plain(x), target)
    loss = GPipe(model, 3, 4).loss(nn.functional.mse_loss, x, target)
    for m in (expected, loss):
        m.backward(retain_graph=True)
        m.backward()
    assert_same_gradients(plain, model)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_differentiating_twice_is_an_error_not_a_wrong_answer():
    x = batch().requires_grad_()
    (gradient,) = torch.autograd.grad(squares(GPipe(mlp(4), 2, 2)(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@BOTH
def test_weights_changed_between_forward_and_backward_are_noticed(use_checkpoint):
    model = mlp(6)
    loss = squares(GPipe(model, 3, 2, use_checkpoint)(batch()))
    with torch.no_grad():
        model[2].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@BOTH
def test_gradients_are_handed_over_not_copied(use_checkpoint):
    """A gradient that anybody else still refers to would be cloned on its way into .grad."""
    model = mlp(6)
    pipeline = GPipe(model, 2, 3, use_checkpoint)
    handed = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: handed.__setitem__(name, g.data_ptr()))
    squares(pipeline(batch())).backward()
    assert {name: p.grad.data_ptr() for name, p in model.named_parameters()} == handed


@BOTH
def test_autocast_reaches_the_workers_and_the_recomputation(use_checkpoint):
    torch.manual_seed(0)
    plain, model = twins(nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))))
    x, seen = torch.randn(8, 16), []
    model[3].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    results = []
    for m in (plain, GPipe(model, 3, 1, use_checkpoint)):
        with torch.autocast("cpu", torch.bfloat16):
            output = m(x)
        results.append(output)
        output.float().pow(2).sum().backward()  # outside the region, as it is usually written
    assert results[1].dtype == results[0].dtype == torch.bfloat16 and seen == [torch.bfloat16]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert_same_gradients(plain, model, tolerance=1e-6)


@BOTH
def test_backward_inside_autocast_recomputes_what_was_computed_outside(use_checkpoint):
    torch.manual_seed(0)
    plain, model = twins(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))))
    x = torch.randn(8, 16)
    for m in (plain, GPipe(model, 2, 1, use_checkpoint)):
        loss = m(x).pow(2).sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
    assert_same_gradients(plain, model, tolerance=1e-6)


def test_no_grad_and_inference_mode_reach_the_workers():
    seen = []

    class Mode(nn.Module):
        def forward(self, x):
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), threading.current_thread().name))
            return x * 1

    pipeline = GPipe(nn.Sequential(nn.Linear(3, 3), Mode(), Mode()), 3, 2)
    with torch.no_grad():
        assert not pipeline(torch.randn(4, 3)).requires_grad
    assert {mode[:2] for mode in seen} == {(False, False)} and len({mode[2] for mode in seen}) == 2
    seen.clear()
    with torch.inference_mode():
        pipeline(torch.randn(4, 3))
    assert {mode[:2] for mode in seen} == {(False, True)}


def test_context_variables_reach_the_workers():
    variable, seen = contextvars.ContextVar("variable", default="outside"), []

    class Reads(nn.Module):
        def forward(self, x):
            seen.append(variable.get())
            return x

    token = variable.set("inside")
    GPipe(nn.Sequential(Reads(), Reads(), Reads()), 3, 1)(batch())
    variable.reset(token)
    assert seen == ["inside"] * 3


@BOTH
def test_dispatch_modes_see_the_workers_operators(use_checkpoint):
    plain, model = twins(mlp(6))
    counts = []
    for m in (plain, GPipe(model, 3, 7, use_checkpoint)):
        with FlopCounterMode(display=False) as counter:
            squares(m(batch(7))).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] > 0
    extra = 3 * 2 * 7 * 5 * 5 if use_checkpoint else 0  # three Linears, once more
    assert counts[1] == counts[0] + extra


def test_intra_op_threads_are_put_back():
    found = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        inside = []

        class Threads(nn.Module):
            def forward(self, x):
                inside.append(torch.get_num_threads())
                if fail:
                    raise RuntimeError("stop")
                return x * 1

        pipeline, fail = GPipe(nn.Sequential(Threads(), Threads()), 2, 2), False
        pipeline(torch.randn(4, 3, requires_grad=True)).sum().backward()
        assert set(inside) == {2} and torch.get_num_threads() == 5
        fail = True
        with pytest.raises(RuntimeError, match="stop"):
            pipeline(torch.randn(4, 3))
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(found)


DDP = """
import copy, os, sys
from datetime import timedelta
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from implementation import GPipe
from tests.oracle import assert_same_gradients, mlp, squares

def work(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2,
                            timeout=timedelta(seconds=60))
    plain, model = mlp(6), mlp(6)
    torch.manual_seed(1)
    x = torch.randn(2, 7, 5, dtype=torch.float64)
    for _ in range(2):
        (sum(squares(plain(part)) for part in x) / 2).backward()
    pipeline = DistributedDataParallel(GPipe(model, 3, 4, use_checkpoint=bool(rank % 2 == 0)))
    for _ in range(2):
        squares(pipeline(x[rank])).backward()
    assert_same_gradients(plain, model)
    open(path + f".agrees.{rank}", "x").close()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that ends in its own time

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


def test_inside_distributed_data_parallel(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "rendezvous")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert sorted(tmp_path.glob("*.agrees.*")) == [tmp_path / f"rendezvous.agrees.{rank}" for rank in range(2)], (
        done.stderr
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@BOTH
def test_on_cuda(use_checkpoint):
    plain, model = twins(mlp(6).cuda())
    devices = [f"cuda:{k % torch.cuda.device_count()}" for k in range(3)]
    pipeline = GPipe(model, 3, 4, use_checkpoint, devices=devices)
    x = batch().cuda()
    for _ in range(3):
        squares(plain(x)).backward()
        squares(pipeline(x).to(x.device)).backward()
    for (name, a), b in zip(plain.named_parameters(), model.parameters()):
        torch.testing.assert_close(b.grad.to(a.device), a.grad, rtol=1e-9, atol=1e-9, msg=name)
