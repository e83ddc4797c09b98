"""Layers → stages: where to cut a sequence of L layers into K consecutive pieces.

    costs              4  1  1  1  1  4
    equal_counts       4  1 | 1  1 | 1  4      heaviest stage 5
    lightest_split     4 | 1  1  1  1 | 4      heaviest stage 4

A pipeline moves at the pace of its heaviest stage, so that is what `lightest_split` makes as light as possible. The
paper's partitioner (GPipe, §2.2) minimises the variance of the stages' costs, which is a stand-in for the same aim.
"""

import copy
import math
import operator
import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from numbers import Rational

import torch
from torch import Tensor, nn

from micropp.schedule import positive_count


def equal_counts(n_layers: int, n_partitions: int) -> list[int]:
    """Layers a stage: K counts that add up to L and differ by at most one, the larger first.

    >>> equal_counts(10, 4)
    [3, 3, 2, 2]

    Raises ValueError for n_partitions < 1 or > n_layers.
    """
    _check_sizes(n_layers, n_partitions)
    short, n_longer = divmod(n_layers, n_partitions)
    return [short + 1] * n_longer + [short] * (n_partitions - n_longer)


def check_balance(balance: Sequence[int], n_layers: int, n_partitions: int) -> list[int]:
    """Returns `balance`, the layers a stage, as a list once it is known to be a cut of L layers into K stages.

    Raises TypeError for an entry that is not an integer; ValueError for a number of entries other than K, an entry
    below 1, or a sum other than L.
    """
    _check_sizes(n_layers, n_partitions)
    if len(balance) != n_partitions:
        raise ValueError(
            f"balance {list(balance)} is for {len(balance)} stages, but n_partitions is {n_partitions}: "
            "give one entry a stage"
        )
    counts = []
    for k, entry in enumerate(balance):
        try:
            counts.append(operator.index(entry))
        except TypeError:
            raise TypeError(
                f"balance[{k}] is {entry!r}, but a stage has a whole number of layers: give an int"
            ) from None
        if counts[k] < 1:
            raise ValueError(
                f"balance[{k}] is {entry}, but a stage needs at least 1 layer: raise it or lower n_partitions"
            )
    if sum(counts) != n_layers:
        raise ValueError(
            f"balance {counts} adds up to {sum(counts)} layers, but the model has {n_layers}: "
            "change the entries so that each layer is in one stage"
        )
    return counts


def lightest_split(costs: Sequence[float], n_partitions: int) -> list[int]:
    """Layers a stage, cut so that the heaviest of the K stages is as light as any cut can make it.

    The answer is exact, not a heuristic. Among the cuts that reach it, each stage takes about its share of what is left.
    `costs` holds one number a layer in any unit (seconds, parameters, bytes), zero included.

    Raises ValueError for a cost that is negative, infinite or NaN, and for n_partitions < 1 or > len(costs).
    """
    n_layers = len(costs)
    _check_sizes(n_layers, n_partitions)
    for layer, cost in enumerate(costs):
        if not (cost >= 0 and math.isfinite(cost)):
            raise ValueError(
                f"costs[{layer}] is {cost}, but a cost is a finite number, 0 or more: measure it again or leave it at 0"
            )

    # A float is a whole number of some 2**-n. In that unit sums do not depend on the order of additions, and bisecting
    # for the lightest limit ends at the one right integer.
    exact = [Fraction(cost) if isinstance(cost, Rational) else Fraction(float(cost)) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    before = [0]  # before[i]: cost of the layers in front of layer i
    for cost in exact:
        before.append(before[-1] + int(cost * unit))

    def furthest(start: int, limit: int) -> int:
        """The end of the longest stage that begins at `start` and weighs no more than `limit`."""
        return bisect_right(before, before[start] + limit) - 1

    def fits(limit: int) -> bool:
        """Do K stages of at most `limit` reach the end? Making each as long as it can be uses the fewest."""
        start = 0
        for _ in range(n_partitions):
            start = furthest(start, limit)
        return start == n_layers

    heaviest_layer = max(after - start for start, after in zip(before, before[1:]))
    low, limit = max(heaviest_layer, -(-before[-1] // n_partitions)), before[-1]
    while low < limit:
        middle = (low + limit) // 2
        if fits(middle):
            limit = middle
        else:
            low = middle + 1

    fewest = [0] * (n_layers + 1)  # fewest[i]: stages that the layers from i on need
    for i in reversed(range(n_layers)):
        fewest[i] = 1 + fewest[furthest(i, limit)]

    counts, start = [], 0
    for left in range(n_partitions, 0, -1):  # stages still to fill, this one included

        def off_share(end: int) -> tuple[int, int]:
            """How far the stage start…end is from a fair share, in cost, then (zero costs) in layers."""
            return (
                abs((before[end] - before[start]) * left - (before[-1] - before[start])),
                abs((end - start) * left - (n_layers - start)),
            )

        # Each later stage needs a layer, and together they must be able to hold what this one leaves.
        longest = min(furthest(start, limit), n_layers - (left - 1))
        end = min((end for end in range(longest, start, -1) if fewest[end] <= left - 1), key=off_share)
        counts.append(end - start)
        start = end
    return counts


def layer_parameters(model: nn.Sequential) -> list[int]:
    """Parameter elements a layer, as costs for `lightest_split`.

    A parameter that stands in several layers (tied weights, or one layer used twice) counts in the first of them.
    Raises TypeError if model is not an nn.Sequential.
    """
    _check_sequential(model)
    seen: set[Tensor] = set()  # tensors hash by identity
    counts = []
    for layer in model:
        new = set(layer.parameters()) - seen
        seen |= new
        counts.append(sum(parameter.numel() for parameter in new))
    return counts


def layer_seconds(model: nn.Sequential, sample: Tensor | tuple[Tensor, ...], repeats: int = 5) -> list[float]:
    """Measured seconds a layer, forward and backward: the median of `repeats` runs after one that warms up.

    `sample` is an input of the model, (N/M, ...), best of the size of one micro-batch. A layer whose input needs no
    gradient is not charged for computing one. The layers run as copies: model, gradients, buffers, training mode, sample
    and random generators stay as they are (a module hook with effects elsewhere does have them).

    Raises TypeError if model is not an nn.Sequential, ValueError for repeats < 1.
    """
    _check_sequential(model)
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}, but a median needs at least 1: raise repeats")
    medians = []
    python_state = random.getstate()  # a layer that skips itself may draw from Python's own
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())), torch.enable_grad():
            for layer in model:
                layer, seconds = copy.deepcopy(layer), []
                for _ in range(1 + repeats):
                    took, output = _run_once(layer, sample)
                    seconds.append(took)
                medians.append(statistics.median(seconds[1:]))
                sample = output
    finally:
        random.setstate(python_state)
    return medians


def _run_once(layer: nn.Module, x: Tensor | tuple[Tensor, ...]) -> tuple[float, Tensor | tuple[Tensor, ...]]:
    """Seconds of one forward and backward pass, and the output."""

    def fresh(value):
        """Out of the previous layer's graph, and a copy, so that an in-place layer spoils nothing."""
        if isinstance(value, tuple):
            return tuple(fresh(part) for part in value)
        return value.detach().requires_grad_(value.requires_grad).clone()

    layer.zero_grad(set_to_none=True)  # or each run would also add to the last one's gradient
    x = fresh(x)
    start = _now()
    y = layer(x)
    forward_took = _now() - start
    roots = [part for part in (y if isinstance(y, tuple) else (y,)) if part.requires_grad]
    gradients = [torch.ones_like(part) for part in roots]
    start = _now()
    torch.autograd.backward(roots, gradients)
    return forward_took + _now() - start, y


def _now() -> float:
    for device in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        torch.cuda.synchronize(device)  # kernels run on after the call that started them
    return time.perf_counter()


def _check_sequential(model: nn.Sequential) -> None:
    if not isinstance(model, nn.Sequential):
        raise TypeError(
            f"model is a {type(model).__name__}, but only an nn.Sequential says in which order its layers run: "
            "wrap the layers in nn.Sequential"
        )


def _check_sizes(n_layers: int, n_partitions: int) -> None:
    if positive_count("n_partitions", n_partitions) > n_layers:
        raise ValueError(
            f"{n_partitions} partitions need at least {n_partitions} layers, but the model has {n_layers}: "
            "lower n_partitions"
        )
