"""Schedules as data, and the micro-batches they order.

A schedule is, for every stage, the list of its actions in order. Whoever runs, simulates, draws or
checks a pipeline reads that list; nobody else knows the order. K is the number of partitions (stages),
M of micro-batches, N of samples in the mini-batch, k one stage, m one micro-batch.

In the grids a row is a stage, a column one unit of time, and a dot a stage that waits (the bubble).
Paper: Huang et al., GPipe, arXiv 1811.06965v5, §2.2 (micro-batches, pipeline) and §2.3 (bubble).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = {"F": "forward", "R": "re-materialize", "B": "backward"}


class Action(NamedTuple):
    """One thing a stage does with one micro-batch; prints and parses as it is spoken of: F0, B3, 2F0."""

    kind: str  # a key of KINDS
    microbatch: int
    stage: int | None = None  # None: the one whose list it stands in; given where a device holds several stages

    def __str__(self) -> str:
        return f"{'' if self.stage is None else self.stage}{self.kind}{self.microbatch}"

    __repr__ = __str__  # so that a printed list of actions, or pytest's diff of two, can be read

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of str(). ValueError if `text` is not [stage] + F, R or B + micro-batch."""
        match = re.fullmatch(r"([0-9]*)([FRB])([0-9]+)", text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"{text!r} is no action: write F0, R0, B0, or 2F0 for stage 2")
        stage, kind, microbatch = match.groups()
        return cls(kind, int(microbatch), int(stage) if stage else None)

    def at(self, stage: int) -> Action:
        """The same action with its stage filled in, its name among all stages: F0 in list 2 is 2F0."""
        return self if self.stage is not None else self._replace(stage=stage)


Schedule = list[list[Action]]


class ScheduleError(ValueError):
    """A schedule that cannot be run; the message names the cell, its list and its position (from 0)."""


# naive(n_partitions=3, n_microbatches=2): one stage works, the others wait
#
#     0: F0 .  .  .  .  B0 F1 .  .  .  .  B1
#     1: .  F0 .  .  B0 .  .  F1 .  .  B1 .
#     2: .  .  F0 B0 .  .  .  .  F1 B1 .  .
def naive(n_partitions: int, n_microbatches: int) -> Schedule:
    """Stop and wait: a micro-batch starts when the one before has left. Bubble 1 − 1/K, 1 live micro-batch.

    Raises TypeError for a count that is no int and ValueError for one below 1, as all schedules here do.
    """
    K, M = _counts(n_partitions, n_microbatches)
    return [[Action(kind, m) for m in range(M) for kind in "FB"] for _ in range(K)]


# gpipe(n_partitions=3, n_microbatches=3): the backward retraces the forward, last micro-batch first
#
#     0: F0 F1 F2 .  .  .  .  B2 B1 B0
#     1: .  F0 F1 F2 .  .  B2 B1 B0 .
#     2: .  .  F0 F1 F2 B2 B1 B0 .  .
def gpipe(n_partitions: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards (paper §2.2 and §2.3). Bubble (K−1)/(M+K−1), M live micro-batches."""
    K, M = _counts(n_partitions, n_microbatches)
    return [[Action("F", m) for m in range(M)] + [Action("B", m) for m in reversed(range(M))] for _ in range(K)]


# one_f_one_b(n_partitions=3, n_microbatches=3): GPipe's bubble, but a backward frees memory as soon as it can
#
#     0: F0 F1 F2 .  .  B0 .  B1 .  B2
#     1: .  F0 F1 .  B0 F2 B1 .  B2 .
#     2: .  .  F0 B0 F1 B1 F2 B2 .  .
def one_f_one_b(n_partitions: int, n_microbatches: int) -> Schedule:
    """1F1B (PipeDream-Flush): warm up, then one backward, one forward in turn. Bubble (K−1)/(M+K−1).

    K−k micro-batches are what fills the way from stage k to the end and back; one more in flight would
    gain no time. So stage k never has more than min(M, K−k) live, however large M is.
    """
    K, M = _counts(n_partitions, n_microbatches)
    schedule = []
    for k in range(K):
        warmup = min(M, K - k)
        actions = [Action("F", m) for m in range(warmup)]
        for m in range(M):
            actions.append(Action("B", m))
            if warmup + m < M:
                actions.append(Action("F", warmup + m))
        schedule.append(actions)
    return schedule


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}


# rematerialized(gpipe(n_partitions=3, n_microbatches=2)): stages 0 and 1 do R1 where they would have waited
#
#     0: F0 F1 R1 .  .  .  .  B1 R0 B0
#     1: .  F0 F1 R1 .  .  B1 R0 B0 .
#     2: .  .  F0 F1 R1 B1 R0 B0 .  .
def rematerialized(schedule: Schedule) -> Schedule:
    """A copy with R m right before every B m (any R already there is dropped).

    R m needs nothing but the input that its own stage kept, so a stage does it while the gradient is
    still on its way: this is how recomputation fills part of the bubble (paper §2.3).
    """
    return [
        [
            step
            for action in actions
            if action.kind != "R"
            for step in ([action._replace(kind="R"), action] if action.kind == "B" else [action])
        ]
        for actions in schedule
    ]


def needs(action: Action, n_partitions: int) -> Action | None:
    """What must be done before `action` can begin, or None; both name their stage, as `Action.at` gives it.

    Validator, simulator and runners all ask here. The stage's own earlier work needs no mention: its
    list is in order. (B m also needs its own F m, but B m of the next stage cannot come before that.)
    """
    kind, m, k = action
    if kind == "F":
        return Action("F", m, k - 1) if k > 0 else None  # stage 0 reads the mini-batch
    if kind == "B" and k < n_partitions - 1:
        return Action("B", m, k + 1)
    return Action("F", m, k)  # R: the kept input; B of the last stage: the loss


def walk(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Every (list index, action) in an order that can be run. ScheduleError where all stages wait for each other."""
    K = 1 + max(action.at(i).stage for i, actions in enumerate(schedule) for action in actions)
    done: set[Action] = set()
    position = [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for i, actions in enumerate(schedule):
            while position[i] < len(actions):
                action = actions[position[i]]
                need = needs(action.at(i), K)
                if need is not None and need not in done:
                    break
                yield i, action
                done.add(action.at(i))
                position[i] += 1
                moved = True
    stuck = [
        f"stage {cell.stage} stands at {cell} (list {i}, position {p}) and waits for {needs(cell, K)}"
        for i, (p, actions) in enumerate(zip(position, schedule))
        for cell in [action.at(i) for action in actions[p : p + 1]]  # none where the list is done
    ]
    if stuck:
        raise ScheduleError(f"deadlock: {'; '.join(stuck)}; reorder these lists so that one of them can go on")


def validate(schedule: Schedule) -> None:
    """Check that every stage does F and B of every micro-batch once, in an order that can be run.

    Raises ScheduleError that names the first wrong cell: not an action, doubled, missing, a micro-batch or
    stage that does not exist, B before F, R not between F and B, or stages that wait for each other.
    """
    if not schedule or not all(schedule):
        raise ScheduleError(f"a schedule needs a non-empty list of actions for every stage, got {schedule!r}")
    where: dict[Action, tuple[int, int]] = {}  # cell, stage filled in -> (list, position)
    home: dict[int, int] = {}  # stage -> list
    for i, actions in enumerate(schedule):
        for p, action in enumerate(actions):
            if not isinstance(action, Action) or action.kind not in KINDS:
                raise ScheduleError(f"list {i}, position {p}: {action!r} is no action known here, write F0, R0 or B0")
            cell = action.at(i)
            if not all(type(n) is int and n >= 0 for n in cell[1:]):
                raise ScheduleError(f"list {i}, position {p}: {cell} needs a whole micro-batch and stage from 0 up")
            if home.setdefault(cell.stage, i) != i:
                raise ScheduleError(f"list {i}, position {p}: {cell} belongs in list {home[cell.stage]}")
            if cell in where:
                raise ScheduleError(f"list {i}, position {p}: {cell} is doubled, see position {where[cell][1]}")
            where[cell] = i, p

    def wrong(cell: Action, why: str) -> ScheduleError:
        i, p = where[cell]
        return ScheduleError(f"list {i}, position {p}: {cell} {why}")

    K = 1 + max(home)
    # M is what most stages and kinds count: then one wrong cell is outvoted, and named instead of its neighbours.
    counts = list(Counter((cell.stage, cell.kind) for cell in where if cell.kind != "R").values())
    M = max(counts, key=lambda n: (counts.count(n), n), default=0)
    for cell in where:
        if cell.microbatch >= M:
            raise wrong(cell, f"is unknown: going by most stages there are {M} micro-batches, counted from 0")
    for f in [Action("F", m, k) for k in range(K) for m in range(M)]:
        r, b = f._replace(kind="R"), f._replace(kind="B")
        for cell in (f, b):
            if cell not in where:
                raise ScheduleError(f"{cell} is missing: each of {K} stages does F and B of each of {M} micro-batches")
        if where[b] < where[f]:
            raise wrong(b, f"comes before its own {f} (position {where[f][1]}): move it behind")
        if r in where and not where[f] < where[r] < where[b]:
            raise wrong(r, f"must stand between {f} (position {where[f][1]}) and {b} (position {where[b][1]})")
    for _ in walk(schedule):
        pass


def split(batch: Tensor | tuple[Tensor, ...], n_microbatches: int) -> list:
    """Cut a mini-batch of N samples, a tensor (N, …) or a tuple of such, into M micro-batches (paper §2.2).

    Exactly M parts (N/M, …) of the batch's own kind, in order, sizes differing by at most one, the larger
    first; views of the same storage, attached to autograd. (torch.chunk may return fewer: 5 in 4 gives 3.)
    ValueError for M < 1 or M > N, a tensor without a batch dimension, or a tuple whose members differ in N;
    TypeError for anything that is no tensor or tuple of tensors.
    """
    M = positive_count("n_microbatches", n_microbatches)
    members = _members(batch, "a mini-batch")
    if any(t.dim() == 0 for t in members):
        raise ValueError("a tensor with 0 dimensions has no samples to split: dimension 0 must be the batch")
    sizes = [len(t) for t in members]
    if len(set(sizes)) > 1:
        raise ValueError(f"the tensors of one mini-batch must have the same size in dimension 0, got {sizes}")
    if sizes[0] == 0:
        raise ValueError("this mini-batch has 0 samples: give it at least one a micro-batch")
    if M > sizes[0]:
        raise ValueError(
            f"{M} micro-batches need at least {M} samples, but this mini-batch has {sizes[0]}: lower n_microbatches"
        )
    parts = [torch.tensor_split(t, M) for t in members]
    return list(parts[0]) if isinstance(batch, Tensor) else list(zip(*parts))


def merge(microbatches: Sequence[Tensor | tuple[Tensor, ...]]) -> Tensor | tuple[Tensor, ...]:
    """The inverse of `split`: parts (n_m, …) become one (N, …), or one tuple of such; gradients flow.

    A single part comes back as it is, not copied. ValueError if there is no part, if parts are of different
    kinds or lengths or have no dimension to join along; TypeError if one is no tensor or tuple of tensors.
    """
    if isinstance(microbatches, Tensor):
        raise TypeError("merge takes a list of micro-batches, got one tensor: put it in a list")
    if len(microbatches) == 0:
        raise ValueError("merge needs at least one micro-batch, got an empty list")
    parts = [_members(part, f"micro-batch {m}") for m, part in enumerate(microbatches)]
    kinds = ["a tensor" if isinstance(part, Tensor) else f"a tuple of {len(part)}" for part in microbatches]
    for m, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(f"micro-batches must be alike, but 0 is {kinds[0]} and {m} is {kind}")
    if len(parts) == 1:
        return microbatches[0]
    if any(t.dim() == 0 for part in parts for t in part):
        raise ValueError("a tensor with 0 dimensions cannot be merged: dimension 0 must be the batch")
    merged = tuple(torch.cat(tensors) for tensors in zip(*parts))
    return merged[0] if isinstance(microbatches[0], Tensor) else merged


def _members(value: Tensor | tuple[Tensor, ...], name: str) -> tuple[Tensor, ...]:
    members = (value,) if isinstance(value, Tensor) else value
    if not isinstance(members, tuple) or not members or not all(isinstance(t, Tensor) for t in members):
        given = f"({', '.join(type(t).__name__ for t in value)})" if isinstance(value, tuple) else type(value).__name__
        raise TypeError(f"{name} must be a tensor or a tuple of tensors, got {given}")
    return members


def _counts(n_partitions: int, n_microbatches: int) -> tuple[int, int]:
    return positive_count("n_partitions", n_partitions), positive_count("n_microbatches", n_microbatches)


def positive_count(name: str, value: int) -> int:
    """`value`, if it is a count from 1 up. TypeError for anything but an int (bool included), ValueError below 1."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int from 1 up, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}: raise it")
    return int(value)
