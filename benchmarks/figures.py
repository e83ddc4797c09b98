"""The figures: what each one runs, what it is a ratio of, and what it must reach.

A figure is a function that yields rows. K partitions, M micro-batches, N samples, L layers, as everywhere.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import nn

from benchmarks import rivals
from benchmarks.workloads import (
    Local,
    Sleep,
    Variant,
    check_gradients,
    interleaved,
    linear_stack,
    mean_squared_error,
    milliseconds,
    random_batch,
    ratios,
    spread,
)
from implementation import GPipe
from micropp.memory import MemoryTracker

PLAIN, ONE_STAGE, OURS, TORCHGPIPE, DISTRIBUTED = "plain", "GPipe K=1", "GPipe", "torchgpipe", "ScheduleGPipe"


@dataclass
class Row:
    """One line of the report."""

    name: str  # unique; starts with the name of its figure
    what: str
    target: float | None  # None: shown beside another row, nothing to reach
    direction: str  # ">=" or "<=": on which side of the target it must be
    measured: float | None = None
    skipped: str | None = None  # why nothing was measured
    detail: dict = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.measured is None or self.target is None:
            return None
        return self.measured >= self.target if self.direction == ">=" else self.measured <= self.target


@dataclass(frozen=True)
class Form:
    """How large everything is. The short form only shows that all of it runs."""

    rounds: int
    wanted: frozenset[str]
    short: bool = False

    def pick(self, full, short):
        return short if self.short else full


def _around(model: nn.Sequential, **arguments) -> GPipe:
    return GPipe(deepcopy(model), **arguments)


def _torchgpipe(model: nn.Sequential, **arguments) -> nn.Module:
    return rivals.torchgpipe_around(deepcopy(model), **arguments)


def _timed(variants: dict[str, Variant], form: Form) -> dict[str, list[float]]:
    check_gradients(variants)
    return interleaved(variants, form.rounds)


def _ratio_row(row: Row, times: dict[str, list[float]], over: str, under: str, scale: float = 1.0, **detail) -> Row:
    """Fills in the median over the rounds of scale × over / under."""
    values = ratios(times[over], times[under], scale)
    row.measured = median(values)
    row.detail = {"middle_half": spread(values), "milliseconds": milliseconds(times), **detail}
    return row


def _compute(form: Form) -> Iterator[Row]:
    """overlap, torchgpipe, distributed: three questions to the same steps, so that they are run only once."""
    n_blocks, width, N, K = form.pick((16, 512, 4096), (4, 16, 32)) + (2,)
    make_model = partial(linear_stack, n_blocks, width)
    model, (batch, target) = make_model(), _regression_data(N, width)
    for M in form.pick((8, 16), (2,)):
        for use_checkpoint in (False, True):
            rows = _compute_rows(form, M, K, use_checkpoint)
            if not rows:
                continue
            loss_fn = mean_squared_error(target)
            with ExitStack() as stack:
                modules = {PLAIN: deepcopy(model)}
                arguments = {"n_microbatches": M, "use_checkpoint": use_checkpoint}
                if "overlap" in rows:
                    modules[ONE_STAGE] = _around(model, n_partitions=1, **arguments)
                modules[OURS] = _around(model, n_partitions=K, **arguments)
                if "torchgpipe" in rows and not rows["torchgpipe"].skipped:
                    modules[TORCHGPIPE] = _torchgpipe(model, n_partitions=K, **arguments)
                variants: dict[str, Variant] = {name: Local(module, batch, loss_fn) for name, module in modules.items()}
                if "distributed" in rows and not rows["distributed"].skipped:
                    make_data = partial(_regression_data, N, width)
                    variants[DISTRIBUTED] = stack.enter_context(rivals.DistributedGPipe(K, M, make_model, make_data))
                times = _timed(variants, form)
            if "overlap" in rows:
                ideal = K * M / (M + K - 1)
                row = _ratio_row(rows["overlap"], times, ONE_STAGE, OURS, 1 / ideal, ideal_speedup=ideal)
                row.detail["speedup"] = row.measured * ideal
            for name, rival in (("torchgpipe", TORCHGPIPE), ("distributed", DISTRIBUTED)):
                if rival in times:
                    _ratio_row(rows[name], times, rival, OURS)
            yield from rows.values()


def _compute_rows(form: Form, M: int, K: int, use_checkpoint: bool) -> dict[str, Row]:
    case = f"M={M}" + (" remat" if use_checkpoint else "")
    rows = {
        "overlap": Row(f"overlap {case}", f"speed-up, K={K} over 1 stage, share of {K}M/(M+{K - 1})", 0.95, ">="),
        "torchgpipe": Row(f"torchgpipe {case}", "torchgpipe's step over ours", 1.7, ">="),
    }
    rows["torchgpipe"].skipped = rivals.torchgpipe_missing()
    if not use_checkpoint:
        rows["distributed"] = Row(f"distributed {case}", "ScheduleGPipe's step over ours", 1.0, ">=")
        rows["distributed"].skipped = rivals.distributed_missing()
    return {name: row for name, row in rows.items() if name in form.wanted}


def _regression_data(n_samples: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_batch(n_samples, width, seed=1), random_batch(n_samples, width, seed=2)


def _memory_bound(form: Form) -> Iterator[Row]:
    """Few samples on large weights: a step mostly moves weights and their gradients through memory."""
    n_blocks, width, N, K, M = form.pick((40, 1024, 128, 2, 8), (4, 16, 8, 2, 2))
    model, (batch, target) = linear_stack(n_blocks, width), _regression_data(N, width)
    for use_checkpoint in (False, True):
        row = Row("memory-bound" + (" remat" if use_checkpoint else ""), "torchgpipe's step over ours", 1.3, ">=")
        row.skipped = rivals.torchgpipe_missing()
        if not row.skipped:
            arguments = {"n_partitions": K, "n_microbatches": M, "use_checkpoint": use_checkpoint}
            modules = {
                PLAIN: deepcopy(model),
                OURS: _around(model, **arguments),
                TORCHGPIPE: _torchgpipe(model, **arguments),
            }
            loss_fn = mean_squared_error(target)
            times = _timed({name: Local(module, batch, loss_fn) for name, module in modules.items()}, form)
            _ratio_row(row, times, TORCHGPIPE, OURS)
        yield row


def _sleep(form: Form) -> Iterator[Row]:
    """Stages that only sleep: no core is ever short, so what is left is how well the schedule is kept."""
    (K, M), (forward_s, backward_s) = form.pick((4, 16), (2, 3)), form.pick((0.010, 0.020), (0.001, 0.002))
    model = nn.Sequential(*(Sleep(forward_s, backward_s) for _ in range(K)))
    batch = random_batch(M, 1).requires_grad_()
    arguments = {"n_partitions": K, "n_microbatches": M, "use_checkpoint": False}
    modules = {PLAIN: deepcopy(model), OURS: _around(model, **arguments)}
    missing = rivals.torchgpipe_missing()
    if not missing:
        modules[TORCHGPIPE] = _torchgpipe(model, **arguments)
    times = _timed({name: Local(module, batch, torch.sum) for name, module in modules.items()}, form)
    ideal = (M + K - 1) * (forward_s + backward_s)
    detail = {"milliseconds": milliseconds(times), "ideal_milliseconds": 1e3 * ideal}
    values = [seconds / ideal for seconds in times[OURS]]
    what = f"step over (M+K-1) x {1e3 * (forward_s + backward_s):.0f} ms, K={K}, M={M}"
    yield Row("sleep", what, 1.03, "<=", median(values), detail={"middle_half": spread(values), **detail})
    row = Row("sleep torchgpipe", "the same, torchgpipe's", None, "<=", skipped=missing, detail=detail)
    if not missing:
        row.measured = median(times[TORCHGPIPE]) / ideal
    yield row


def _cell(form: Form) -> Iterator[Row]:
    """Stages that do next to nothing: what is left is what handling a micro-batch costs."""
    K, M, width = form.pick((4, 64, 8), (2, 4, 8))
    model = nn.Sequential(*(nn.ReLU() for _ in range(K)))  # one operator forward, one backward, no parameters
    batch = random_batch(M, width).requires_grad_()
    modules = {PLAIN: deepcopy(model), OURS: _around(model, n_partitions=K, n_microbatches=M, use_checkpoint=False)}
    times = _timed({name: Local(module, batch, torch.sum) for name, module in modules.items()}, form)
    n_cells = 2 * K * M
    values = [1e6 * seconds / n_cells for seconds in times[OURS]]
    what = f"us a cell (forward and backward count), K={K}, M={M}"
    detail = {"middle_half": spread(values), "milliseconds": milliseconds(times), "cells": n_cells}
    yield Row("cell", what, 60.0, "<=", median(values), detail=detail)


def _transparent(form: Form) -> Iterator[Row]:
    """One stage, one micro-batch: the plain model's own work, and whatever GPipe adds to it."""
    n_blocks, width, N = form.pick((16, 512, 4096), (4, 16, 32))
    model, (batch, target) = linear_stack(n_blocks, width), _regression_data(N, width)
    modules = {
        PLAIN: deepcopy(model),
        ONE_STAGE: _around(model, n_partitions=1, n_microbatches=1, use_checkpoint=False),
    }
    loss_fn = mean_squared_error(target)
    times = _timed({name: Local(module, batch, loss_fn) for name, module in modules.items()}, form)
    row = Row("transparent", "GPipe K=1, M=1 over the plain model", 1.03, "<=")
    yield _ratio_row(row, times, ONE_STAGE, PLAIN)


def _memory(form: Form) -> Iterator[Row]:
    """Peak activation memory with re-materialization over the paper's K·N + L·N/M (§2.3, O(N + (L/K)·(N/M)) a stage).

    Counted: every tensor that the step makes, on every thread, at the moment when most bytes are alive: the
    mini-batch itself (stage 0's kept input), the other stages' kept inputs, what recomputation builds, gradients on
    their way, the output, the loss. Not counted: parameters, and the gradients that they hold at the end. The unit
    is one layer's output for one sample; a layer is Linear + ReLU. N is so much larger than the width that weight
    gradients on their way to their sum (width² each) hide nothing.
    """
    n_blocks, width, N, K, M = form.pick((40, 64, 4096, 4, 16), (8, 8, 64, 2, 4))
    model, source = linear_stack(n_blocks, width), random_batch(N, width)
    ours, plain = _around(model, n_partitions=K, n_microbatches=M), deepcopy(model)
    check_gradients({PLAIN: Local(plain, source, torch.sum), OURS: Local(ours, source, torch.sum)})
    unit = width * source.element_size()

    def peak(module: nn.Module) -> float:
        module.zero_grad(set_to_none=True)
        with MemoryTracker(module, existing=[source]) as memory:
            batch = source.clone()
            module(batch).sum().backward()
            del batch
        return memory.activation_bytes / unit

    expected = K * N + n_blocks * N / M
    values = [peak(ours) / expected for _ in range(form.rounds)]
    detail = {
        "middle_half": spread(values),
        "largest": max(values),
        "expected_units": expected,
        "plain_units": peak(plain),
        "unit_bytes": unit,
        "counted": "all tensors made in the step, mini-batch included, but parameters' gradients",
    }
    what = f"peak activations over KN + LN/M, L={n_blocks}, K={K}, M={M}"
    yield Row("memory", what, 1.15, "<=", median(values), detail=detail)


# The figures by the names that --only takes, in the order in which they are run; some share their steps.
FIGURES: dict[str, Callable[[Form], Iterator[Row]]] = {
    "overlap": _compute,
    "torchgpipe": _compute,
    "distributed": _compute,
    "memory-bound": _memory_bound,
    "sleep": _sleep,
    "cell": _cell,
    "transparent": _transparent,
    "memory": _memory,
}


def measure(form: Form) -> Iterator[Row]:
    """Every wanted figure's rows, as they come."""
    for figure in dict.fromkeys(function for name, function in FIGURES.items() if name in form.wanted):
        yield from figure(form)
