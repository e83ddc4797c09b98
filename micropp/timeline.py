"""What happened when: simulated from costs, or recorded from a run.

A Timeline is rows of (stage, action, start, end), the same type in both cases, so that bubble, speed-up
and live activations of theory and measurement come from the same code. The unit of time is whatever the
costs are in; recorded times are seconds. With whole numbers or fractions.Fraction nothing is rounded
before the last division. K is the number of rows (stages, or devices), M of micro-batches.
Paper: Huang et al., GPipe, arXiv 1811.06965v5, §2.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from statistics import median
from typing import NamedTuple

from micropp.schedule import KINDS, Action, Schedule, needs, positive_count, validate, walk


class Span(NamedTuple):
    """One action on one row, from start to end."""

    stage: int  # the row: the stage, or the device where one device holds several stages
    action: Action
    start: Real
    end: Real


class Timeline:
    """Rows of (stage, action, start, end) on K stages; `add` may be called from many threads at once.

    An empty timeline is no error: its makespan, bubble, speed-up, busy times and live counts are 0.
    Where spans of one stage overlap, as recorded ones may, time is counted once.
    """

    def __init__(self, n_stages: int, spans: Iterable[Span | tuple] = (), simulated: bool = False):
        """`spans`: any (stage, action, start, end). ValueError for n_stages < 1 or a span as in `add`."""
        if n_stages < 1:
            raise ValueError(f"a timeline needs at least 1 stage, got {n_stages}")
        self.n_stages = n_stages
        self.simulated = simulated
        self.spans: list[Span] = []
        for span in spans:
            self.add(*span)

    def add(self, stage: int, action: Action, start: Real, end: Real) -> None:
        """Append one span. ValueError for a stage that does not exist or an end before its start."""
        if not 0 <= stage < self.n_stages:
            raise ValueError(f"{action} is on stage {stage}, but this timeline has stages 0 to {self.n_stages - 1}")
        if not start <= end:
            raise ValueError(f"{action} on stage {stage} ends at {end}, before it starts at {start}")
        self.spans.append(Span(stage, action, start, end))  # list.append is atomic: no lock needed

    @property
    def start(self) -> Real:
        """When the first span begins; 0 if there is none."""
        return min((span.start for span in self.spans), default=0)

    @property
    def makespan(self) -> Real:
        """From the first start to the last end, over all stages."""
        return max((span.end for span in self.spans), default=0) - self.start

    def rows(self) -> list[list[Span]]:
        """The spans of each stage by their start; equal starts stay in the order in which they were added."""
        rows: list[list[Span]] = [[] for _ in range(self.n_stages)]
        for span in sorted(self.spans, key=lambda span: span.start):
            rows[span.stage].append(span)
        return rows

    def order(self) -> Schedule:
        """What each stage did, in order: comparable to the schedule it was to follow."""
        return [[span.action for span in row] for row in self.rows()]

    def busy(self) -> list[Real]:
        """For each stage, how long it worked."""
        totals = []
        for row in self.rows():
            total, reached = 0, self.start
            for span in row:
                total += max(span.end, reached) - max(span.start, reached)
                reached = max(span.end, reached)
            totals.append(total)
        return totals

    def utilisation(self) -> list[Real]:
        """For each stage, the share of the makespan in which it worked, 0 to 1."""
        return [_share(busy, self.makespan) for busy in self.busy()]

    def bubble(self) -> Real:
        """The share of the K stages' time, K × makespan, that they spent waiting, 0 to 1 (paper §2.3)."""
        total = self.n_stages * self.makespan
        return _share(total - sum(self.busy()), total)

    def speedup(self) -> Real:
        """All work put end to end, over the makespan: how many stages worked on average."""
        return _share(sum(self.busy()), self.makespan)

    def live(self) -> list[int]:
        """For each stage, the peak of micro-batches whose forward has begun and whose backward has not ended."""
        peaks = []
        for row in self.rows():
            open_until: dict[tuple, Real] = {}  # (stage, micro-batch) -> end of its backward
            peak = 0
            for span in row:
                cell = span.action.stage, span.action.microbatch
                if span.action.kind == "F":
                    open_until = {other: end for other, end in open_until.items() if end > span.start}
                    open_until[cell] = math.inf
                    peak = max(peak, len(open_until))
                elif span.action.kind == "B" and cell in open_until:
                    open_until[cell] = span.end
            peaks.append(peak)
        return peaks

    def grid(self) -> str:
        """A picture in text, one row a stage and one column a unit of time: `.` waits, `-` is still at it.

            0: F0 F1 F2 .  .  .  .  B2 B1 B0

        ValueError for a span that does not start and end on a whole unit after the first start.
        """
        lines = [["."] * math.ceil(self.makespan) for _ in range(self.n_stages)]
        for stage, action, start, end in self.spans:
            begin, stop = start - self.start, end - self.start
            if begin % 1 or stop % 1:
                raise ValueError(
                    f"a grid draws whole units of time, but {action} on stage {stage} lasts from {begin} to {stop}: "
                    "scale the costs, or draw it with visualization.py"
                )
            begin, stop = int(begin), int(stop)
            lines[stage][begin:stop] = ([str(action)] + ["-"] * (stop - begin))[: stop - begin]
        width = max((len(cell) for line in lines for cell in line), default=0)
        label = len(str(self.n_stages - 1))
        return "\n".join(
            f"{k:>{label}}: {' '.join(cell.ljust(width) for cell in line)}".rstrip() for k, line in enumerate(lines)
        )


Cost = Real | Sequence[Real] | Sequence[Sequence[Real]]


def simulate(
    schedule: Schedule, forward: Cost = 1, backward: Cost = 1, recompute: Cost | None = None, transfer: Real = 0
) -> Timeline:
    """Run a schedule on paper: each action starts once its stage is free and what it needs has arrived.

    A cost is one number, one a stage (K of them), or one a cell (K sequences of M). `recompute` is that of
    an R action, None meaning the forward's. `transfer` is the time from one device to another, both ways;
    it keeps neither of them busy.
    Raises ScheduleError for a schedule that cannot be run, ValueError for costs of the wrong number or
    below 0, TypeError for costs that are no numbers.
    """
    validate(schedule)
    cells = [action.at(i) for i, actions in enumerate(schedule) for action in actions]
    K, M = 1 + max(cell.stage for cell in cells), 1 + max(cell.microbatch for cell in cells)
    costs = {
        "F": _cost_table("forward", forward, K, M),
        "B": _cost_table("backward", backward, K, M),
        "R": _cost_table("recompute", forward if recompute is None else recompute, K, M),
    }
    _check_cost("transfer", transfer)
    timeline = Timeline(len(schedule), simulated=True)
    done: dict[Action, tuple[int, Real]] = {}  # cell -> (row, end)
    free = [0] * len(schedule)
    for i, action in walk(schedule):
        cell = action.at(i)
        start = free[i]
        need = needs(cell, K)
        if need is not None:
            row, end = done[need]
            start = max(start, end if row == i else end + transfer)
        end = start + costs[cell.kind][cell.stage][cell.microbatch]
        timeline.add(i, action, start, end)
        done[cell], free[i] = (i, end), end
    return timeline


def replay(recorded: Timeline, schedule: Schedule) -> Timeline:
    """Run a schedule on paper with the durations of recorded cells: what it would take if no stage had to share.

    Record the cells where nothing competes with them, stop-and-wait (`naive`) say. A cell that was recorded more than
    once counts with its median. Only cells take time here; handing over between them is free.
    Raises ScheduleError for a schedule that cannot be run, ValueError for a cell that was not recorded.
    """
    validate(schedule)
    durations: dict[Action, list[Real]] = {}
    for stage, action, start, end in recorded.spans:
        durations.setdefault(action.at(stage), []).append(end - start)
    cells = {action.at(i) for i, actions in enumerate(schedule) for action in actions}
    missing = min(cells - durations.keys(), default=None)
    if missing is not None:
        raise ValueError(f"the schedule has {missing}, but no such cell was recorded: record a run that does all of it")
    K, M = 1 + max(cell.stage for cell in cells), 1 + max(cell.microbatch for cell in cells)
    costs = {
        kind: [[median(durations.get(Action(kind, m, k), [0])) for m in range(M)] for k in range(K)] for kind in KINDS
    }
    return simulate(schedule, forward=costs["F"], backward=costs["B"], recompute=costs["R"])


def calculate_bubble_overhead(k_partitions: int, m_microbatches: int) -> float:
    """GPipe's bubble, (K−1)/(M+K−1): the idle share of the *total* time, as `Timeline.bubble` measures it.

    Beware: others divide the same idle time by the *ideal* time, the one without bubble, and write (K−1)/M.
    With K=4, M=4 that is 75 % instead of 42.9 %. Both suppose equal stages, and nothing to send or recompute.
    Raises ValueError for a count below 1, TypeError for one that is no int. Paper §2.3.
    """
    K, M = positive_count("k_partitions", k_partitions), positive_count("m_microbatches", m_microbatches)
    return (K - 1) / (M + K - 1)


def to_chrome_trace(timeline: Timeline) -> dict:
    """The timeline as a Chrome trace, for json.dump and then chrome://tracing or ui.perfetto.dev; a row a stage.

    Its times are microseconds from the first start; the timeline's unit is taken to be a second.
    """
    events: list[dict] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": k, "args": {"name": f"stage {k}"}}
        for k in range(timeline.n_stages)
    ]
    for stage, action, start, end in timeline.spans:
        events.append(
            {
                "name": str(action),
                "cat": KINDS.get(action.kind, action.kind),
                "ph": "X",
                "pid": 0,
                "tid": stage,
                "ts": float(start - timeline.start) * 1e6,
                "dur": float(end - start) * 1e6,
                "args": {"stage": action.at(stage).stage, "microbatch": action.microbatch},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _share(part: Real, whole: Real) -> Real:
    return part / whole if whole else 0


def _cost_table(name: str, given: Cost, K: int, M: int) -> list[list[Real]]:
    """`given`, spread out to K lists of M numbers."""
    if isinstance(given, Real):
        given = [given] * K
    if not hasattr(given, "__len__") or isinstance(given, (str, dict)):
        raise TypeError(f"{name} must be a number, {K} numbers, or {K} lists of {M}, got {given!r}")
    if len(given) != K:
        raise ValueError(f"{name} has {len(given)} entries for {K} stages: give one number, or one entry a stage")
    table = []
    for k, entry in enumerate(given):
        row = [entry] * M if isinstance(entry, Real) or not hasattr(entry, "__len__") else list(entry)
        if len(row) != M:
            raise ValueError(f"{name}[{k}] has {len(row)} entries for {M} micro-batches: give one number, or {M}")
        for cost in row:
            _check_cost(f"{name}[{k}]", cost)
        table.append(row)
    return table


def _check_cost(name: str, cost: Real) -> None:
    if not isinstance(cost, Real):
        raise TypeError(f"{name} must be made of numbers, got {cost!r}")
    if not 0 <= cost < math.inf:
        raise ValueError(f"{name} must be finite and not below 0, got {cost}")
