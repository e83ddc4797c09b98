"""Random pipelines against the plain model: whatever the awkward cases of the other tests do not combine.

Dropout is compared under a mask that is fixed by the sample, since a pipeline draws other numbers than the
plain model; that its own draws come back in a recomputation is shown in test_gpipe_exactness.py.
"""

import copy
import random

import pytest
import torch
from torch import nn

from implementation import GPipe
from micropp.schedule import SCHEDULES
from tests.oracle import compare_gradients, squares

CASES = 240


class Pair(nn.Module):
    """A layer between tuples: (x, y) → (tanh(Ax) + y, Bx)."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pair):
        x, y = pair
        return torch.tanh(self.a(x)) + y, self.b(x)


class Both(nn.Module):
    """The layer inside on both members of a tuple."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, pair):
        return tuple(self.inner(x) for x in pair)


class SampleDropout(nn.Module):
    """Drops by a mask that depends on each sample's own values, so that any split drops the same."""

    def forward(self, x):
        keep = torch.frac(x.detach() * 997).abs() > 0.3
        return x * keep / 0.7 if self.training else x


def random_case(seed: int):
    choose = random.Random(seed)
    L, width = choose.randint(1, 12), choose.randint(1, 9)
    K, M, N = choose.randint(1, L), choose.randint(1, 9), choose.randint(1, 13)
    tuples = choose.random() < 0.3
    norm = choose.random() < 0.3
    torch.manual_seed(seed)
    layers = []
    for _ in range(L):
        kind = choose.choice(["linear", "linear", "act", "dropout", "pair" if tuples else "linear"])
        if kind == "pair":
            layers.append(Pair(width))
            continue
        layer = {
            "linear": lambda: nn.Linear(width, width, bias=choose.random() < 0.8),
            "act": lambda: choose.choice([nn.Tanh(), nn.GELU(), nn.ReLU(), nn.Identity()]),
            "dropout": SampleDropout,
        }[kind]()
        layers.append(Both(layer) if tuples else layer)
    if norm:
        layers[choose.randrange(L)] = Both(Norm(width)) if tuples else Norm(width)
    for layer in layers:
        layer.requires_grad_(choose.random() < 0.85)
    if choose.random() < 0.2 and not tuples:
        layers[choose.randrange(L)] = layers[choose.randrange(L)]  # the same layer twice
    model = nn.Sequential(*layers).double()
    model.train(choose.random() < 0.9)
    batch = tuple(torch.randn(N, width, dtype=torch.float64) for _ in range(2 if tuples else 1))
    wants = choose.random() < 0.6
    batch = tuple(x.requires_grad_(wants) for x in batch)
    cuts = sorted(choose.sample(range(1, L), K - 1))
    balance = [b - a for a, b in zip([0, *cuts], [*cuts, L])] if choose.random() < 0.5 else None
    schedule = choose.choice([None, *SCHEDULES]) if not tuples else None
    return model, batch if tuples else batch[0], K, M, choose.random() < 0.6, balance, schedule


class Norm(nn.Module):
    """Batch norm for its statistics alone, which are the mini-batch's however it is split. What it normalises
    differs from split to split, and so is compared elsewhere (test_gpipe_exactness.py)."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        statistics = self.norm(torch.stack([x, -x], dim=2))  # two values a channel, even for one sample
        return x * self.scale + 0 * statistics.sum()


def run(model, batch, schedule, pipeline=None):
    batch = (
        tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in batch)
        if isinstance(batch, tuple)
        else (batch.detach().clone().requires_grad_(batch.requires_grad))
    )
    inputs = batch if isinstance(batch, tuple) else (batch,)
    if schedule is None:
        output = (pipeline or model)(batch)
        loss = squares(output)
    else:
        target = torch.linspace(-1, 1, batch.numel(), dtype=torch.float64).view_as(batch)
        if pipeline is None:
            output = model(batch)
            loss = nn.functional.mse_loss(output, target)
        else:
            output, loss = None, pipeline.loss(nn.functional.mse_loss, batch, target, SCHEDULES[schedule])
    if loss.requires_grad:
        loss.backward()
    return output, loss.detach(), [x.grad for x in inputs]


@pytest.mark.parametrize("seed", range(CASES))
def test_a_random_pipeline_is_the_plain_model(seed):
    model, batch, K, M, use_checkpoint, balance, schedule = random_case(seed)
    plain = copy.deepcopy(model)
    pipeline = GPipe(model, K, M, use_checkpoint, balance=balance)
    expected = run(plain, batch, schedule)
    found = run(model, batch, schedule, pipeline)
    if schedule is None:
        torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-12)
    for a, b in zip(found[2], expected[2], strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    compare_gradients(plain, model)
    for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda m: f"{name}: {m}")


def test_the_sweep_sweeps():
    cases = [random_case(seed) for seed in range(CASES)]
    assert sum(isinstance(batch, tuple) for _, batch, *_ in cases) > 30
    assert sum(any(isinstance(m, Norm) for m in model.modules()) for model, *_ in cases) > 30
    assert sum(any(isinstance(m, SampleDropout) for m in model.modules()) for model, *_ in cases) > 30
    assert sum(any(not p.requires_grad for p in model.parameters()) for model, *_ in cases) > 30
    assert {schedule for *_, schedule in cases} == {None, *SCHEDULES}
    assert sum(len(batch[0] if isinstance(batch, tuple) else batch) < M for _, batch, _, M, *_ in cases) > 20
    assert sum(gradient_is_there(*case[:2]) for case in cases) > 200


def gradient_is_there(model, batch):
    run(model, batch, None)
    return any(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())
