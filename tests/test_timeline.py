"""Timelines: what the simulation gives is checked against theory, hand-drawn grids and an independent oracle."""

import json
import random
import threading
from fractions import Fraction
from types import SimpleNamespace

import pytest

from micropp.schedule import SCHEDULES, Action, ScheduleError, gpipe, naive, one_f_one_b, rematerialized, validate
from micropp.timeline import Span, Timeline, calculate_bubble_overhead, replay, simulate, to_chrome_trace
from tests.oracle import random_schedule

SIZES = [(K, M) for K in range(1, 7) for M in range(1, 10)]

GRIDS = {
    ("gpipe", 3, 3): """
        0: F0 F1 F2 .  .  .  .  B2 B1 B0
        1: .  F0 F1 F2 .  .  B2 B1 B0 .
        2: .  .  F0 F1 F2 B2 B1 B0 .  .""",
    ("1f1b", 3, 3): """
        0: F0 F1 F2 .  .  B0 .  B1 .  B2
        1: .  F0 F1 .  B0 F2 B1 .  B2 .
        2: .  .  F0 B0 F1 B1 F2 B2 .  .""",
    ("1f1b", 4, 2): """
        0: F0 F1 .  .  .  .  .  B0 .  B1
        1: .  F0 F1 .  .  .  B0 .  B1 .
        2: .  .  F0 F1 .  B0 .  B1 .  .
        3: .  .  .  F0 B0 F1 B1 .  .  .""",
    ("naive", 3, 2): """
        0: F0 .  .  .  .  B0 F1 .  .  .  .  B1
        1: .  F0 .  .  B0 .  .  F1 .  .  B1 .
        2: .  .  F0 B0 .  .  .  .  F1 B1 .  .""",
}


def lines(text):
    return [line.strip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("name, K, M", GRIDS)
def test_grids(name, K, M):
    assert simulate(SCHEDULES[name](K, M)).grid().splitlines() == lines(GRIDS[name, K, M])


def test_grid_of_longer_actions_and_many_microbatches():
    assert simulate(gpipe(2, 1), forward=[1, 2], backward=3, transfer=1).grid().splitlines() == [
        "0: F0 .  .  .  .  .  .  .  B0 -  -",
        "1: .  .  F0 -  B0 -  -  .  .  .  .",
    ]
    wide = simulate(gpipe(11, 11)).grid().splitlines()
    assert wide[0].startswith(" 0: F0  F1  F2 ") and wide[10].startswith("10: .   .   . ")


def test_grid_is_relative_to_the_first_start_and_takes_only_whole_units():
    late = Timeline(2, [(0, Action("F", 0), 100, 101), (1, Action("F", 0), 101.0, 102.0)])
    assert late.grid() == "0: F0 .\n1: .  F0" and late.makespan == 2
    late.add(1, Action("F", 1), 102, 102.5)
    with pytest.raises(ValueError, match=r"F1 on stage 1 lasts from 2 to 2\.5"):
        late.grid()


# --- theory


@pytest.mark.parametrize("K, M", SIZES)
def test_bubbles_are_exactly_the_papers(K, M):
    theory = (K - 1) / (M + K - 1)
    assert calculate_bubble_overhead(K, M) == theory
    for make in (gpipe, one_f_one_b):
        timeline = simulate(make(K, M))
        assert timeline.makespan == 2 * (M + K - 1) and timeline.simulated
        assert timeline.bubble() == theory
        assert timeline.busy() == [2 * M] * K
        assert timeline.utilisation() == [2 * M / (2 * (M + K - 1))] * K
        assert timeline.speedup() == 2 * M * K / (2 * (M + K - 1))
        assert simulate(make(K, M), forward=1, backward=2).bubble() == theory  # whatever a backward costs
        assert simulate(make(K, M), forward=7, backward=3).bubble() == theory
    assert simulate(gpipe(K, M)).live() == [M] * K
    assert simulate(one_f_one_b(K, M)).live() == [min(M, K - k) for k in range(K)]
    stop_and_wait = simulate(naive(K, M))
    assert stop_and_wait.bubble() == (K - 1) / K and stop_and_wait.speedup() == 1
    assert stop_and_wait.live() == [1] * K


@pytest.mark.parametrize("K, M", [(4, 0), (0, 4)])
def test_calculate_bubble_overhead_refuses(K, M):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        calculate_bubble_overhead(K, M)


def test_fractions_stay_exact():
    timeline = simulate(gpipe(3, 5), forward=Fraction(1, 3), backward=Fraction(2, 7))
    assert timeline.bubble() == Fraction(2, 7) and isinstance(timeline.bubble(), Fraction)
    assert timeline.makespan == 7 * (Fraction(1, 3) + Fraction(2, 7))


@pytest.mark.parametrize("K, M", [(K, M) for K, M in SIZES if K > 1])
def test_rematerialization_fills_the_bubble(K, M):
    """Folded into B, the first gradient waits for a recomputation on each stage; done early, on the last stage only."""
    folded = simulate(gpipe(K, M), forward=1, backward=2)
    early = simulate(rematerialized(gpipe(K, M)))
    assert sum(early.busy()) == sum(folded.busy())
    assert early.makespan == 3 * M + 2 * (K - 1) < folded.makespan == 3 * (M + K - 1)
    assert early.bubble() == 2 * (K - 1) / (3 * M + 2 * (K - 1)) < folded.bubble()
    assert simulate(rematerialized(gpipe(K, M)), recompute=0).makespan == simulate(gpipe(K, M)).makespan


def test_unequal_stages_by_hand():
    timeline = simulate(gpipe(2, 2), forward=[1, 2], backward=[1, 2])
    assert timeline.grid().splitlines() == ["0: F0 F1 .  .  .  .  .  B1 .  B0", "1: .  F0 -  F1 -  B1 -  B0 -  ."]
    assert timeline.busy() == [4, 8] and timeline.bubble() == 8 / 20 and timeline.speedup() == 12 / 10
    assert simulate(gpipe(2, 2), forward=[[1, 1], [2, 2]], backward=[1, [2, 2]]).spans == timeline.spans


def test_transfer_keeps_nobody_busy():
    timeline = simulate(gpipe(3, 1), transfer=3)
    assert timeline.makespan == 6 + 4 * 3 and timeline.busy() == [2, 2, 2]
    assert simulate(gpipe(1, 4), transfer=3).makespan == 8


# --- an oracle of its own: relax all starts until nothing moves


def oracle(schedule, cost, transfer):
    """{(kind, m, k): (start, end)}: the longest way to each action, its rules written down here afresh."""
    cells = [[(a.kind, a.microbatch, k) for a in row] for k, row in enumerate(schedule)]
    start = {cell: 0 for row in cells for cell in row}
    after = [(a, b, 0) for row in cells for a, b in zip(row, row[1:])]
    for kind, m, k in start:
        if kind == "F" and k + 1 < len(schedule):
            after.append((("F", m, k), ("F", m, k + 1), transfer))
        if kind == "B" and k > 0:
            after.append((("B", m, k), ("B", m, k - 1), transfer))
    moved = True
    while moved:
        moved = False
        for a, b, wait in after:
            if start[b] < start[a] + cost[a] + wait:
                start[b] = start[a] + cost[a] + wait
                moved = True
    return {cell: (begin, begin + cost[cell]) for cell, begin in start.items()}


def live_by_sampling(timeline, K):
    """At every moment that something starts, count who has begun and is not done."""
    moments = {span.start for span in timeline.spans}
    ends = {(s.stage, s.action.microbatch): s.end for s in timeline.spans if s.action.kind == "B"}
    begun = {(s.stage, s.action.microbatch): s.start for s in timeline.spans if s.action.kind == "F"}
    return [max(sum(c[0] == k and begun[c] <= t < ends[c] for c in begun) for t in moments) for k in range(K)]


def test_simulation_against_the_oracle():
    rng = random.Random(0)
    for trial in range(300):
        K, M = rng.randint(1, 5), rng.randint(1, 5)
        makers = [SCHEDULES[name] for name in sorted(SCHEDULES)]
        schedule = random_schedule(rng, K, M) if trial % 2 else rematerialized(rng.choice(makers)(K, M))
        cost = {(kind, m, k): rng.randint(1, 9) for kind in "FRB" for m in range(M) for k in range(K)}
        table = {kind: [[cost[kind, m, k] for m in range(M)] for k in range(K)] for kind in "FRB"}
        transfer = rng.choice([0, 0, 2])
        timeline = simulate(schedule, table["F"], table["B"], table["R"], transfer)
        got = {(s.action.kind, s.action.microbatch, s.stage): (s.start, s.end) for s in timeline.spans}
        assert got == oracle(schedule, cost, transfer)
        assert timeline.order() == schedule
        assert timeline.live() == live_by_sampling(timeline, K)
        assert timeline.busy() == [sum(e - s for (_, _, k), (s, e) in got.items() if k == stage) for stage in range(K)]
        shuffled = Timeline(K, rng.sample(timeline.spans, len(timeline.spans)))
        assert (shuffled.order(), shuffled.bubble(), shuffled.live()) == (schedule, timeline.bubble(), timeline.live())


@pytest.mark.parametrize("K, v, M", [(2, 2, 4), (3, 2, 6), (4, 3, 8)])
def test_interleaved_stages_of_torchs_table(K, v, M):
    """Several stages a device, from torch's own table: bubble (K−1)/(vM+K−1), less than that of plain 1F1B."""
    reason = "takes the interleaved table from torch's own schedules"
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules", reason=reason)
    # The number of rounds is M/K, so that K micro-batches make one.
    attributes = SimpleNamespace(n_local_stages=v, pp_group_size=K, microbatches_per_round=K, _n_microbatches=M)
    operations = pipelining.ScheduleInterleaved1F1B._calculate_single_rank_operations
    schedule = [[Action.parse(str(a)) for a in operations(attributes, rank) if a] for rank in range(K)]
    assert {action.stage for action in schedule[0]} == set(range(0, v * K, K))
    validate(schedule)
    timeline = simulate(schedule)
    assert timeline.n_stages == K and timeline.order() == schedule
    assert timeline.bubble() == (K - 1) / (v * M + K - 1) < calculate_bubble_overhead(K, M)
    costs = list(range(1, v * K + 1))  # one a stage, of which device k holds k, k+K, …
    assert simulate(schedule, forward=costs).busy() == [M * (sum(costs[k::K]) + v) for k in range(K)]


# --- costs that make no sense, timelines that are odd


@pytest.mark.parametrize(
    "costs, error, message",
    [
        ({"forward": [1, 1]}, ValueError, "forward has 2 entries for 3 stages"),
        ({"backward": [1, 1, [1, 1, 1]]}, ValueError, r"backward\[2\] has 3 entries for 2 micro-batches"),
        ({"recompute": [[1, 1]] * 4}, ValueError, "recompute has 4 entries"),
        ({"forward": -1}, ValueError, r"forward\[0\] must be finite and not below 0, got -1"),
        ({"backward": [1, 1, [1, -0.5]]}, ValueError, r"backward\[2\] .* got -0\.5"),
        ({"transfer": -2}, ValueError, "transfer must be"),
        ({"transfer": float("nan")}, ValueError, "transfer must be"),
        ({"forward": float("inf")}, ValueError, "finite"),
        ({"forward": "123"}, TypeError, "forward must be"),
        ({"forward": [1, None, 1]}, TypeError, r"forward\[1\] must be"),
        ({"transfer": [1, 1]}, TypeError, "transfer"),
    ],
)
def test_simulate_refuses_costs(costs, error, message):
    with pytest.raises(error, match=message):
        simulate(gpipe(3, 2), **costs)


def test_simulate_refuses_a_schedule_that_cannot_run():
    with pytest.raises(ScheduleError, match="0B0 comes before"):
        simulate([[Action("B", 0), Action("F", 0)]])


def test_empty_timeline_is_all_zero():
    empty = Timeline(2)
    assert (empty.makespan, empty.bubble(), empty.speedup()) == (0, 0, 0)
    assert empty.busy() == empty.utilisation() == empty.live() == [0, 0]
    assert empty.order() == [[], []] and empty.grid() == "0:\n1:" and not empty.simulated
    assert simulate(gpipe(2, 2), forward=0, backward=0).bubble() == 0


def test_zero_cost_forwards_still_count_as_live():
    assert simulate(gpipe(2, 3), forward=0).live() == [3, 3]
    assert simulate(naive(2, 3), backward=0).live() == [1, 1]
    assert simulate(one_f_one_b(3, 4), forward=0, backward=0).live() == [3, 2, 1]


def test_overlapping_spans_are_counted_once():
    """A recorded B may have its R inside it."""
    timeline = Timeline(
        1, [(0, Action("F", 0), 1.0, 2.0), (0, Action("B", 0), 2.0, 5.0), (0, Action("R", 0), 2.0, 3.0)]
    )
    assert timeline.busy() == [4.0] and timeline.bubble() == 0 and timeline.utilisation() == [1.0]


def test_live_counts_a_microbatch_until_its_backward_ends():
    timeline = Timeline(1, [(0, Action("F", 0), 0, 1), (0, Action("B", 0), 1, 3), (0, Action("F", 1), 2, 4)])
    assert timeline.live() == [2]  # both from 2 to 3
    timeline.add(0, Action("F", 2), 3, 5)
    assert timeline.live() == [2]  # 1 and 2, whose backwards never come


@pytest.mark.parametrize(
    "span, message",
    [
        ((3, Action("F", 0), 0, 1), "F0 is on stage 3, .* stages 0 to 2"),
        ((-1, Action("F", 0), 0, 1), "stage -1"),
        ((0, Action("F", 0), 2, 1), "ends at 1, before it starts at 2"),
        ((0, Action("F", 0), 0, float("nan")), "ends at nan"),
    ],
)
def test_impossible_spans(span, message):
    with pytest.raises(ValueError, match=message):
        Timeline(3, [span])
    with pytest.raises(ValueError, match="at least 1 stage"):
        Timeline(0)


def test_add_from_many_threads():
    timeline, K, M = Timeline(8), 8, 500

    def work(k):
        for m in range(M):
            timeline.add(k, Action("F", m), m, m + 1)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(K)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert timeline.order() == [[Action("F", m) for m in range(M)]] * K and timeline.busy() == [M] * K


def test_chrome_trace():
    timeline = simulate(rematerialized(gpipe(2, 2)), forward=Fraction(1, 4))
    shifted = Timeline(2, [Span(s, a, begin + 50, end + 50) for s, a, begin, end in timeline.spans])
    trace = to_chrome_trace(shifted)
    assert trace == json.loads(json.dumps(to_chrome_trace(timeline)))
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] == "ms"
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {0: "stage 0", 1: "stage 1"}
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(timeline.spans) == 12
    assert spans[0] == {
        "name": "F0",
        "cat": "forward",
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 250000.0,
        "args": {"stage": 0, "microbatch": 0},
    }
    assert max(e["ts"] + e["dur"] for e in spans) == float(timeline.makespan) * 1e6
    assert {e["cat"] for e in spans} == {"forward", "re-materialize", "backward"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_replay_gives_what_simulating_with_the_recorded_durations_gives(name):
    rng = random.Random(0)
    costs = {kind: [[rng.randint(1, 9) for _ in range(5)] for _ in range(3)] for kind in ("forward", "backward")}
    recompute = [[rng.randint(1, 9) for _ in range(5)] for _ in range(3)]
    recorded = simulate(rematerialized(naive(3, 5)), **costs, recompute=recompute)
    schedule = SCHEDULES[name](3, 5)
    for wanted in (schedule, rematerialized(schedule)):
        expected = simulate(wanted, **costs, recompute=recompute)
        assert recorded.makespan >= expected.makespan > 0
        replayed = replay(recorded, wanted)
        assert replayed.spans == expected.spans and replayed.simulated


def test_replay_takes_the_median_of_a_cell_and_names_one_that_was_not_recorded():
    recorded = Timeline(1, [(0, Action("F", 0), t, t + took) for t, took in ((0, 1), (10, 2), (20, 9))])
    recorded.add(0, Action("B", 0), 40, 44)
    assert replay(recorded, gpipe(1, 1)).makespan == 2 + 4
    with pytest.raises(ValueError, match="has 0R0, but no such cell was recorded"):
        replay(recorded, rematerialized(gpipe(1, 1)))
