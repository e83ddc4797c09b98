"""What is timed: the models, one training step of each variant, and variants side by side.

A machine that others use too is fast now and slow a second later. So the variants take turns, A B C A B C …, each
round gives one ratio, and what is reported is the median of those: what disturbs a round disturbs both sides of it.
"""

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Protocol

import torch
from torch import Tensor, nn


class WrongGradients(Exception):
    """A variant computes something else than the plain model: its time would mean nothing."""


class Variant(Protocol):
    """One way to do the same training step."""

    def step(self) -> float:
        """One step, in seconds: forward, loss, backward. Old gradients are dropped before the clock starts."""

    def gradients(self) -> list[Tensor]:
        """What the last step found: for each parameter in order, then for the input if it wants one."""


class Local:
    """A module in this process: the plain model, GPipe or torchgpipe around a copy of it.

    Args:
        module: takes `batch`, (N, …); nobody else's weights.
        loss_fn: loss_fn(output) → scalar.
    """

    def __init__(self, module: nn.Module, batch: Tensor, loss_fn: Callable[[Tensor], Tensor]):
        self.module, self.loss_fn = module, loss_fn
        self.batch = batch.detach().requires_grad_(batch.requires_grad)  # a leaf of this variant's own

    def step(self) -> float:
        self.module.zero_grad(set_to_none=True)
        self.batch.grad = None
        started = time.perf_counter()
        self.loss_fn(self.module(self.batch)).backward()
        return time.perf_counter() - started

    def gradients(self) -> list[Tensor]:
        leaves = [*self.module.parameters(), *([self.batch] if self.batch.requires_grad else [])]
        return [leaf.grad for leaf in leaves]


def linear_stack(n_blocks: int, width: int, seed: int = 0) -> nn.Sequential:
    """n_blocks × (Linear + ReLU), all of one width: (N, width) → (N, width).

    Weights drawn so that values keep their size from layer to layer (He et al.): with the default ones a gradient
    is 10⁻¹⁶ of itself after 40 layers, and comparing such gradients would prove little.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(n_blocks):
        linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)


def random_batch(*size: int, seed: int = 1) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def mean_squared_error(target: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda output: nn.functional.mse_loss(output, target)


class Sleep(nn.Module):
    """A stage with no work of its own: what a step takes beyond the sleeps is the pipeline's doing."""

    def __init__(self, forward_s: float, backward_s: float):
        super().__init__()
        self.seconds = forward_s, backward_s

    def forward(self, value: Tensor) -> Tensor:
        return _Sleep.apply(value, *self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient, None, None


def check_gradients(variants: Mapping[str, Variant], tolerance: float = 1e-3) -> None:
    """One step of each variant; every gradient must be that of the first one, the plain model.

    Compared leaf by leaf: the largest |Δ| over the plain gradient's largest entry. In float32 a batch cut into
    micro-batches differs by 10⁻⁶ to 10⁻⁵, a ReLU that tips at 0 included; a lost or doubled micro-batch by far more.

    Raises:
        WrongGradients: names the variant, the leaf and the difference.
    """
    expected = None
    for name, variant in variants.items():
        variant.step()
        found = variant.gradients()
        if expected is None:
            expected = found
            if any(g is None or not g.abs().max() > 0 for g in expected):
                raise WrongGradients(f"{name}: a gradient is missing or zero, so comparing with it proves nothing")
        if len(found) != len(expected):
            raise WrongGradients(f"{name}: {len(found)} gradients, the plain model has {len(expected)}")
        for i, (mine, plain) in enumerate(zip(found, expected)):
            if mine is None or mine.shape != plain.shape:
                given = "none" if mine is None else tuple(mine.shape)
                raise WrongGradients(f"{name}: gradient {i} is {given}, the plain model's is {tuple(plain.shape)}")
            difference = float((mine - plain).abs().max() / plain.abs().max())
            if not difference <= tolerance:  # written so that NaN fails
                raise WrongGradients(
                    f"{name}: gradient {i} is off by {difference:.1e} of the plain model's (allowed: {tolerance:.0e})"
                )


def interleaved(variants: Mapping[str, Variant], rounds: int) -> dict[str, list[float]]:
    """Seconds a step, round by round, the variants in turn; `check_gradients` has run, and warmed them up once."""
    times = {name: [] for name in variants}
    for i in range(rounds + 1):
        for name, variant in variants.items():
            gc.collect()  # or one variant would pay for the garbage of the one before it
            seconds = variant.step()
            if i > 0:  # the first round is a second warm-up: allocator and threads now know all sizes
                times[name].append(seconds)
    return times


def ratios(over: Sequence[float], under: Sequence[float], scale: float = 1.0) -> list[float]:
    """One ratio a round."""
    return [scale * a / b for a, b in zip(over, under)]


def spread(values: Sequence[float]) -> list[float]:
    """First and third quartile: how far the rounds agree."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return [first, third]


def milliseconds(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: 1e3 * median(values) for name, values in times.items()}


class Others:
    """How many cores everybody else on this machine keeps busy (Linux; elsewhere it cannot be told).

    Where they take a core that a stage needs, a pipeline looks as if it did not overlap, whatever its code does.
    """

    def __init__(self):
        self._since, self._last = self._now(), None

    def cores(self) -> float | None:
        """Since the last call; within a fifth of a second of it, the same answer again."""
        now = self._now()
        if now is not None and now[0] - self._since[0] > 0.2:
            wall, busy, own = (b - a for a, b in zip(self._since, now))
            self._since, self._last = now, max(0.0, (busy - own) / wall)
        return self._last

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        try:
            with open("/proc/stat") as file:
                user, nice, system, _, _, irq, soft_irq, steal = map(int, file.readline().split()[1:9])
        except (OSError, ValueError):
            return None
        busy = (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, sum(os.times()[:4])  # the first four: ours, and our ended processes'
