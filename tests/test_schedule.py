"""Schedules as data: their order, the validator that names the wrong cell, splitting and merging.

Every schedule is also compared with torch.distributed.pipelining's, both with its tables and with the
order in which its control flow calls a stage.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from micropp.schedule import (
    SCHEDULES,
    Action,
    ScheduleError,
    gpipe,
    merge,
    naive,
    needs,
    one_f_one_b,
    rematerialized,
    split,
    validate,
    walk,
)
from tests.oracle import random_schedule

SIZES = [(K, M) for K in range(1, 7) for M in range(1, 10)]


def read(text):
    """A schedule from one line of actions a stage."""
    return [[Action.parse(word) for word in line.split()] for line in text.strip().splitlines()]


# --- actions


@pytest.mark.parametrize(
    "text, action",
    [
        ("F0", Action("F", 0)),
        ("B3", Action("B", 3)),
        ("R12", Action("R", 12)),
        ("2F0", Action("F", 0, 2)),
        ("10B11", Action("B", 11, 10)),
        ("0F0", Action("F", 0, 0)),
    ],
)
def test_action_prints_and_parses(text, action):
    assert str(action) == repr(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize("text", ["", "F", "0", "f0", "W0", "F-1", "F0 ", "F0F1", "2 F0", "F1.5", "F²", None, 3])
def test_nonsense_is_no_action(text):
    with pytest.raises(ValueError, match="is no action") as error:
        Action.parse(text)
    assert repr(text) in str(error.value) and "\n" not in str(error.value)


def test_at_fills_in_the_stage_once():
    assert Action("F", 1).at(2) == Action("F", 1, 2)
    assert Action("F", 1, 0).at(2) == Action("F", 1, 0)


# --- the schedules


GOLDEN = {
    ("naive", 2, 3): "F0 B0 F1 B1 F2 B2\nF0 B0 F1 B1 F2 B2",
    ("gpipe", 3, 3): "F0 F1 F2 B2 B1 B0\n" * 3,
    ("gpipe", 1, 2): "F0 F1 B1 B0",
    ("1f1b", 3, 3): "F0 F1 F2 B0 B1 B2\nF0 F1 B0 F2 B1 B2\nF0 B0 F1 B1 F2 B2",
    ("1f1b", 3, 5): "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4\nF0 F1 B0 F2 B1 F3 B2 F4 B3 B4\nF0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ("1f1b", 4, 2): "F0 F1 B0 B1\nF0 F1 B0 B1\nF0 F1 B0 B1\nF0 B0 F1 B1",
}


@pytest.mark.parametrize("name, K, M", GOLDEN)
def test_golden(name, K, M):
    assert SCHEDULES[name](K, M) == read(GOLDEN[name, K, M])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("K, M", SIZES)
def test_every_schedule_is_complete_and_valid(name, K, M):
    schedule = SCHEDULES[name](K, M)
    assert len({id(actions) for actions in schedule}) == K  # lists of their own: editing one leaves the others
    for actions in schedule:
        assert sorted(actions) == sorted([Action(kind, m) for kind in "FB" for m in range(M)])
    validate(schedule)
    validate(rematerialized(schedule))
    assert schedule == SCHEDULES[name](K, M)  # the original is left as it was


@pytest.mark.parametrize("K, M", SIZES)
def test_live_microbatches_by_counting(K, M):
    def peak(actions):
        live = [0]
        for action in actions:
            live.append(live[-1] + (1 if action.kind == "F" else -1))
        return max(live)

    assert [peak(actions) for actions in naive(K, M)] == [1] * K
    assert [peak(actions) for actions in gpipe(K, M)] == [M] * K
    assert [peak(actions) for actions in one_f_one_b(K, M)] == [min(M, K - k) for k in range(K)]


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(
    "counts, error, named",
    [
        ((0, 4), ValueError, "n_partitions"),
        ((-1, 4), ValueError, "n_partitions"),
        ((2, 0), ValueError, "n_microbatches"),
        ((2.0, 4), TypeError, "n_partitions"),
        ((2, "4"), TypeError, "n_microbatches"),
        ((True, 4), TypeError, "n_partitions"),
        ((2, True), TypeError, "n_microbatches"),
        ((2, None), TypeError, "n_microbatches"),
    ],
)
def test_wrong_counts_are_named(make, counts, error, named):
    with pytest.raises(error, match=f"{named} must be .*got {counts[named == 'n_microbatches']!r}"):
        make(*counts)


def test_rematerialized():
    assert rematerialized(read("F0 F1 B1 B0\n0F0 F1 0B1 B0")) == read("F0 F1 R1 B1 R0 B0\n0F0 F1 0R1 0B1 R0 B0")
    once = rematerialized(one_f_one_b(3, 4))
    assert rematerialized(once) == once != one_f_one_b(3, 4)


def test_needs():
    def text(cell):
        need = needs(Action.parse(cell), 3)
        return need if need is None else str(need)

    assert {cell: text(cell) for cell in ("0F1", "1F1", "2F1", "2B1", "1B1", "0B1", "0R1", "2R1")} == {
        "0F1": None,
        "1F1": "0F1",
        "2F1": "1F1",
        "2B1": "2F1",
        "1B1": "2B1",
        "0B1": "1B1",
        "0R1": "0F1",
        "2R1": "2F1",
    }


# --- the validator: one break each, and the cell that its message must name


GOOD = rematerialized(one_f_one_b(3, 3))  # stage 1: F0 F1 R0 B0 F2 R1 B1 R2 B2


def broken(change):
    schedule = [list(actions) for actions in GOOD]
    change(schedule)
    assert repr(schedule) != repr(GOOD)  # not ==, to which False is 0 and a plain tuple an Action
    return schedule


def move(actions, old, new):
    actions.insert(new, actions.pop(old))


@pytest.mark.parametrize(
    "change, parts",
    [
        (lambda s: s[1].remove(Action("F", 2)), ["1F2 is missing"]),
        (lambda s: s[1].remove(Action("B", 2)), ["1B2 is missing"]),
        (lambda s: s[2].remove(Action("B", 0)), ["2B0 is missing"]),
        (lambda s: s[1].append(Action("F", 1)), ["list 1, position 9: 1F1 is doubled", "position 1"]),
        (lambda s: s[0].insert(4, Action("R", 0)), ["list 0, position 4: 0R0 is doubled", "position 3"]),
        (lambda s: s[1].__setitem__(4, Action("F", 7)), ["list 1, position 4: 1F7 is unknown", "3 micro-batches"]),
        (lambda s: s[1].append(Action("F", 3)), ["list 1, position 9: 1F3 is unknown", "3 micro-batches"]),
        (lambda s: s[1].__setitem__(0, Action("F", -1)), ["list 1, position 0: 1F-1", "whole micro-batch"]),
        (lambda s: s[1].__setitem__(0, Action("F", 0.0)), ["list 1, position 0: 1F0.0", "whole micro-batch"]),
        (lambda s: s[0].__setitem__(0, Action("F", False)), ["list 0, position 0: 0FFalse", "whole micro-batch"]),
        (lambda s: s[2].__setitem__(3, Action("W", 1)), ["list 2, position 3: W1", "no action"]),
        (lambda s: s[2].__setitem__(3, "F1"), ["list 2, position 3: 'F1'", "no action"]),
        (lambda s: s[2].__setitem__(3, ("F", 1, None)), ["list 2, position 3: ('F', 1, None)", "no action"]),
        (lambda s: s[0].__setitem__(0, Action("F", 0, 2)), ["list 2, position 0: 2F0 belongs in list 0"]),
        (lambda s: s[2].__setitem__(0, Action("F", 0, 1)), ["list 2, position 0: 1F0 belongs in list 1"]),
        (lambda s: s[0].__setitem__(0, Action("F", 0, -2)), ["list 0, position 0: -2F0", "stage from 0 up"]),
        (lambda s: move(s[1], 3, 0), ["list 1, position 0: 1B0 comes before its own 1F0 (position 1)"]),
        (
            lambda s: move(s[1], 2, 0),
            ["list 1, position 0: 1R0 must stand between 1F0 (position 1) and 1B0 (position 3)"],
        ),
        (lambda s: move(s[1], 2, 3), ["list 1, position 3: 1R0 must stand between", "1B0 (position 2)"]),
        (lambda s: s[1].clear(), ["non-empty"]),
        (lambda s: s.clear(), ["non-empty", "[]"]),
        # stage 0 wants B0 before it hands on F1, the last stage wants F1 before it hands back B0
        (
            lambda s: (move(s[0], 1, 4), move(s[0], 1, 4), move(s[2], 3, 1)),
            [
                "deadlock",
                "stage 0 stands at 0B0 (list 0, position 2) and waits for 1B0",
                "stage 1 stands at 1F1 (list 1, position 1) and waits for 0F1",
                "stage 2 stands at 2F1 (list 2, position 1) and waits for 1F1",
            ],
        ),
    ],
)
def test_validator_names_the_wrong_cell(change, parts):
    validate(GOOD)
    with pytest.raises(ScheduleError) as error:
        validate(broken(change))
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_stages_with_different_microbatches():
    with pytest.raises(ScheduleError, match="1F2 is missing"):
        validate([gpipe(2, 3)[0], gpipe(2, 2)[1]])
    with pytest.raises(ScheduleError, match="1F0 is missing"):
        validate(read("0F0 2F0 2B0 0B0"))  # nobody holds stage 1
    with pytest.raises(ScheduleError, match="0F1 is missing"):
        validate(read("F0 F2 B2 B1 B0"))  # one stage, 2 forwards, 3 backwards: more is meant


def test_crossed_orders_are_only_wrong_if_they_cannot_run():
    validate(read("F0 F1 B0 B1\nF0 F1 B0 B1\nF1 F0 B1 B0"))  # stage 1 has both micro-batches out: no circle
    with pytest.raises(ScheduleError, match="deadlock: .*stage 2 stands at 2F1 .*position 0. and waits for 1F1"):
        validate(read("F0 F1 B0 B1\nF0 B0 F1 B1\nF1 B1 F0 B0"))


def can_run(schedule, K, M):
    """The judge: right cells, and no circle of 'comes before' edges, by peeling off what has no predecessor."""
    cells = [[(a.kind, a.microbatch, k) for a in actions] for k, actions in enumerate(schedule)]
    for k in range(K):
        wanted = {(kind, m, k) for kind in "FB" for m in range(M)}
        extra = {("R", m, k) for m in range(M)}
        if len(set(cells[k])) < len(cells[k]) or not wanted <= set(cells[k]) <= wanted | extra:
            return False
    every = {cell for row in cells for cell in row}
    edges = {pair for row in cells for pair in zip(row, row[1:])}
    for kind, m, k in every:
        edges |= {
            "F": {(("F", m, k), ("F", m, k + 1))},
            "R": {(("F", m, k), ("R", m, k)), (("R", m, k), ("B", m, k))},
            "B": {(("F", m, k), ("B", m, k)), (("B", m, k), ("B", m, k - 1))},
        }[kind]
    edges = {(a, b) for a, b in edges if a in every and b in every}
    while every:
        free = every - {b for _, b in edges}
        if not free:
            return False
        every -= free
        edges = {(a, b) for a, b in edges if a not in free}
    return True


def test_random_mutations():
    rng = random.Random(0)
    verdicts = {True: 0, False: 0}
    for _ in range(1500):
        K, M = rng.randint(1, 4), rng.randint(1, 4)
        schedule = random_schedule(rng, K, M)
        validate(schedule)
        assert sorted(walk(schedule)) == sorted((i, action) for i, row in enumerate(schedule) for action in row)
        row = rng.choice(schedule)
        p, q = rng.randrange(len(row)), rng.randrange(len(row))
        match rng.choice(["swap", "swap", "move", "drop", "double", "microbatch", "kind"]):
            case "swap":
                row[p], row[q] = row[q], row[p]
            case "move":
                move(row, p, q)
            case "drop":
                row.pop(p)
            case "double":
                row.insert(p, row[q])
            case "microbatch":
                row[p] = row[p]._replace(microbatch=rng.randrange(-1, M + 1))
            case "kind":
                row[p] = row[p]._replace(kind=rng.choice("FRB"))
        good = can_run(schedule, K, M)
        verdicts[good] += 1
        if good:
            validate(schedule)
        else:
            with pytest.raises(ScheduleError):
                validate(schedule)
    assert min(verdicts.values()) > 200, verdicts


# --- torch.distributed.pipelining


@pytest.fixture
def pipelining():
    return pytest.importorskip("torch.distributed.pipelining.schedules", reason="compares with torch's own schedules")


def torch_schedule(cls, K, M, rank=0):
    """An instance without a process group: only what the order depends on."""
    schedule = cls.__new__(cls)
    schedule._num_stages, schedule._n_microbatches, schedule.scale_grads = K, M, True
    schedule._stage = SimpleNamespace(stage_index=rank)
    return schedule


def torch_table(cls, K, M):
    """torch's table as ours: without waiting and gradient reduction, which are no work on a micro-batch."""
    table = torch_schedule(cls, K, M)._get_pipeline_order()
    return [
        [
            Action(a.computation_type.value, a.microbatch_index)
            for a in table[k]
            if a and a.computation_type.value in "FB"
        ]
        for k in range(K)
    ]


def torch_run(cls, K, M, rank):
    """The order in which torch's control flow calls a stage (written apart from its tables)."""
    schedule, calls = torch_schedule(cls, K, M, rank), []
    stage = schedule._stage
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        setattr(stage, name, lambda m: [])
    stage.forward_one_chunk = lambda m, *_, **__: calls.append(Action("F", m))
    stage.backward_one_chunk = lambda m, *_, **__: calls.append(Action("B", m))
    stage.perform_reduce_grad = lambda *_: None
    schedule._check_inputs = lambda *_: ([()] * M, [{}] * M)
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        setattr(schedule, name, lambda *_, **__: None)
    schedule._step_microbatches()
    return calls


def backward_reversed(schedule):
    return [[a for a in row if a.kind == "F"] + [a for a in row if a.kind == "B"][::-1] for row in schedule]


@pytest.mark.parametrize("K", range(1, 6))
@pytest.mark.parametrize("M", range(1, 9))
def test_gpipe_is_torchs_but_for_the_order_of_backward(pipelining, K, M):
    """torch runs the backwards in increasing order, we retrace the forward; all else is the same."""
    table = torch_table(pipelining.ScheduleGPipe, K, M)
    assert table == [torch_run(pipelining.ScheduleGPipe, K, M, k) for k in range(K)]
    assert gpipe(K, M) == backward_reversed(table)
    assert (gpipe(K, M) == table) == (M == 1)


@pytest.mark.parametrize("K, M", [(K, M) for K in range(1, 6) for M in range(1, 9)])
def test_one_f_one_b_is_what_torch_runs(pipelining, K, M):
    assert one_f_one_b(K, M) == [torch_run(pipelining.Schedule1F1B, K, M, k) for k in range(K)]


@pytest.mark.parametrize("K, M", [(K, M) for K in range(1, 6) for M in range(K, 9)])
def test_one_f_one_b_against_torchs_table(pipelining, K, M):
    """For M ≥ K, as torch asks, the table is ours, but for one slip that torch's own control flow does not share:

    it numbers the last rank's forwards from F1 to FM. Were that mended upstream, `first` would be 0.
    """
    table = torch_table(pipelining.Schedule1F1B, K, M)
    first = table[-1][0].microbatch
    assert first in (0, 1)
    table[-1] = [a._replace(microbatch=a.microbatch - first) if a.kind == "F" else a for a in table[-1]]
    assert one_f_one_b(K, M) == table
    if K == 1:
        assert naive(1, M) == table  # one stage that stops and waits: the only table torch has for it


@pytest.mark.parametrize("K", range(1, 6))
def test_naive_is_gpipe_with_one_microbatch(pipelining, K):
    """torch has no stop-and-wait schedule for M > 1; with M = 1 all its schedules are one."""
    assert naive(K, 1) == torch_table(pipelining.ScheduleGPipe, K, 1) == gpipe(K, 1) == one_f_one_b(K, 1)


# --- split and merge


@pytest.mark.parametrize(
    "N, M, sizes", [(5, 4, [2, 1, 1, 1]), (10, 4, [3, 3, 2, 2]), (7, 7, [1] * 7), (6, 1, [6]), (8, 4, [2] * 4)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_split_and_merge(N, M, sizes, dtype):
    x = (torch.arange(N * 3).reshape(N, 3) % 5).to(dtype)
    parts = split(x, M)
    assert type(parts) is list and [len(p) for p in parts] == sizes
    assert all(p.dtype == dtype and p.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for p in parts)
    assert torch.equal(merge(parts), x) and (merge(parts) is parts[0]) == (M == 1)


def test_tuples_stay_tuples():
    x, ids = torch.randn(10, 3), torch.arange(10)
    parts = split((x, ids), 4)
    assert [type(part) for part in parts] == [tuple] * 4
    assert [tuple(map(len, part)) for part in parts] == [(3, 3), (3, 3), (2, 2), (2, 2)]
    back = merge(parts)
    assert type(back) is tuple and torch.equal(back[0], x) and torch.equal(back[1], ids)
    assert isinstance(merge(split((x,), 4)), tuple)  # one member is not none


def test_gradients_flow_through_split_and_merge():
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.arange(1.0, 11.0, dtype=torch.float64).reshape(5, 2)
    (merge([part * (m + 1) for m, part in enumerate(split(x, 4))]) * weight).sum().backward()
    factor = torch.tensor([1.0, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)[:, None]
    assert torch.equal(x.grad, weight * factor)


@pytest.mark.parametrize(
    "batch, M, error, message",
    [
        (
            torch.zeros(4, 2),
            6,
            ValueError,
            "6 micro-batches need at least 6 samples, but .* has 4: lower n_microbatches",
        ),
        (torch.zeros(0, 2), 1, ValueError, "0 samples"),
        (torch.zeros(4), 0, ValueError, "at least 1, got 0"),
        (torch.zeros(4), True, TypeError, "n_microbatches"),
        (torch.zeros(4), 2.0, TypeError, "n_microbatches"),
        ((torch.zeros(4), torch.zeros(5)), 2, ValueError, r"\[4, 5\]"),
        (torch.tensor(1.0), 1, ValueError, "0 dimensions"),
        ((torch.zeros(4), torch.tensor(1.0)), 2, ValueError, "0 dimensions"),
        ([torch.zeros(4)], 2, TypeError, "got list"),
        ((torch.zeros(4), "x"), 2, TypeError, r"got \(Tensor, str\)"),
        ((), 1, TypeError, r"got \(\)"),
        (None, 1, TypeError, "NoneType"),
    ],
)
def test_split_refuses(batch, M, error, message):
    with pytest.raises(error, match=message):
        split(batch, M)


@pytest.mark.parametrize(
    "parts, error, message",
    [
        ([], ValueError, "empty"),
        ([torch.zeros(2), (torch.zeros(2),)], ValueError, "0 is a tensor and 1 is a tuple of 1"),
        ([(torch.zeros(2),), (torch.zeros(2), torch.zeros(2))], ValueError, "1 is a tuple of 2"),
        ([torch.tensor(1.0), torch.tensor(2.0)], ValueError, "0 dimensions"),
        (torch.zeros(2), TypeError, "got one tensor"),
        ([torch.zeros(2), None], TypeError, "micro-batch 1 must be"),
        ([[torch.zeros(2)]], TypeError, "micro-batch 0 must be"),
    ],
)
def test_merge_refuses(parts, error, message):
    with pytest.raises(error, match=message):
        merge(parts)
