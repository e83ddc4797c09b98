"""Batch norm in a pipeline: normalise by the micro-batch, track the mini-batch (GPipe, §2.2).

The paper's one exception to "the gradients are those of the mini-batch": in training each micro-batch
is normalised by its own mean and variance. The moving averages kept for evaluation are those of the
whole mini-batch, as if it had come in one piece.
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def tracking_layers(modules: list[nn.Module]) -> list[_BatchNorm]:
    """The batch-norm layers that one forward pass in the present mode would update."""
    return [
        module
        for module in modules
        if isinstance(module, _BatchNorm)
        and module.training
        and module.track_running_stats
        and module.running_mean is not None
    ]


class MiniBatchStatistics:
    """Mean and variance of one batch-norm layer's input, over a mini-batch that comes in parts."""

    def __init__(self, layer: _BatchNorm):
        self.layer = layer
        self.buffers = dict(layer._buffers)
        self.moments: list[_Moments] = []  # one for each time the model calls the layer
        self._call: int | None = None

    @contextmanager
    def apart(self):
        """In this block the layer normalises only: its running statistics are out of its reach.

        Otherwise each micro-batch would move them, a recomputation would move them again, and the
        change in place between forward and backward would trip autograd's version check.
        """
        hook = self.layer.register_forward_pre_hook(self._gather)
        found = self.layer._buffers.copy()
        self.layer._buffers.update(dict.fromkeys(("running_mean", "running_var", "num_batches_tracked")))
        try:
            yield
        finally:
            self.layer._buffers.update(found)
            hook.remove()

    @contextmanager
    def gathering(self):
        """The first pass of one micro-batch: what the layer is given counts (a recomputation does not)."""
        self._call = 0
        try:
            yield
        finally:
            self._call = None

    def _gather(self, layer, arguments) -> None:
        if self._call is None:
            return
        if self._call == len(self.moments):
            self.moments.append(_Moments())
        self.moments[self._call].add(arguments[0])
        self._call += 1

    @torch.no_grad()
    def commit(self) -> None:
        """Moves the running statistics by the whole mini-batch, once a call, as the plain layer does."""
        steps = self.buffers["num_batches_tracked"]
        for moments in self.moments:
            if steps is not None:
                steps.add_(1)
            momentum = self.layer.momentum
            if momentum is None:  # a plain average over all mini-batches so far
                momentum = 1.0 / float(steps)
            for name, new in (("running_mean", moments.mean), ("running_var", moments.unbiased_variance())):
                running = self.buffers[name]
                running.lerp_(new.to(running.dtype), momentum)
        self.moments = []


class _Moments:
    """Count, mean and squared deviations a channel, joined part by part (Chan, Golub and LeVeque, 1979).

    Sums of x and x² would lose the digits that their difference needs.
    """

    def __init__(self):
        self.count = 0

    @torch.no_grad()
    def add(self, x: torch.Tensor) -> None:  # (n_m, C, …)
        x = x if x.dtype == torch.float64 else x.float()
        axes = [axis for axis in range(x.dim()) if axis != 1]
        variance, mean = torch.var_mean(x, axes, correction=0)  # (C,), (C,)
        count = x.numel() // x.shape[1]
        if self.count == 0:
            self.count, self.mean, self.squares = count, mean, variance * count
            return
        total, shift = self.count + count, mean - self.mean
        self.squares = self.squares + variance * count + shift**2 * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.count = total

    def unbiased_variance(self) -> torch.Tensor:
        return self.squares / max(self.count - 1, 1)
