"""benchmarks/compare.py: its short form runs, whole; a wrong result or a missing rival is never timed."""

import copy
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import compare, figures, rivals
from benchmarks.workloads import Local, WrongGradients, check_gradients, interleaved, linear_stack, random_batch, ratios

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    "overlap M=2",
    "torchgpipe M=2",
    "distributed M=2",
    "overlap M=2 remat",
    "torchgpipe M=2 remat",
    "memory-bound",
    "memory-bound remat",
    "sleep",
    "sleep torchgpipe",
    "cell",
    "transparent",
    "memory",
]
NEEDS_TORCHGPIPE = {name for name in ROWS if "torchgpipe" in name or "memory-bound" in name}


def run(*arguments, before="", timeout=60):
    """compare.py as a program of its own, after the statements `before`; in its own process group, to find leftovers."""
    start = [str(ROOT / "benchmarks" / "compare.py")]
    if before:
        start = [
            "-c",
            f"{before}; import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
            *start,
        ]
    process = subprocess.Popen(
        [sys.executable, *start, *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=ROOT.parent,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    return process, out, err


def left_over(group: int) -> list[str]:
    """What still runs of a process group. multiprocessing's own tracker ends a moment after its parent: it gets 5 s."""
    deadline = time.monotonic() + 5
    while (there := _running(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return there


def _running(group: int) -> list[str]:
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,stat=,args="], text=True, capture_output=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    return [" ".join(row) for row in rows if row[0] == str(group) and not row[1].startswith("Z")]


def test_short_form(tmp_path):
    process, out, err = run("--quick", "--json", str(tmp_path / "report.json"))
    assert process.returncode == 0, err
    assert left_over(process.pid) == []
    assert "short form, not comparable" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["environment"]["short_form"] is True
    assert report["environment"]["torch"] == torch.__version__
    assert [row["name"] for row in report["rows"]] == ROWS
    missing, unwrapped = rivals.torchgpipe_missing(), " ".join(out.split())
    for row in report["rows"]:
        assert row["direction"] in (">=", "<=") and row["met"] is None
        if missing and row["name"] in NEEDS_TORCHGPIPE:
            assert row["measured"] is None and row["skipped"] in unwrapped
        else:
            assert row["skipped"] is None and row["measured"] > 0, row
            low, high = row["detail"].get("middle_half", [1, 1])
            assert 0 < low <= high


def test_a_missing_torchgpipe_is_said():
    process, out, err = run(
        "--quick",
        "--only",
        "torchgpipe,memory-bound,sleep",
        "--rounds",
        "1",
        before="import sys; sys.modules['torchgpipe'] = None",
    )
    assert process.returncode == 0, err
    assert out.count("skipped: torchgpipe is not installed") == 1
    assert "pip install torchgpipe" in " ".join(out.split())
    assert "NOT met" not in out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--only", "overlap,sleeep"], "'sleeep'"),
        (["--only", ","], "choose from overlap"),
        (["--rounds", "0"], "from 1 up"),
        (["--rounds", "many"], "'many'"),
        (["--json", str(ROOT / "no such folder" / "report.json")], "existing folder"),
        (["--fast"], "--fast"),
    ],
)
def test_bad_options_are_one_line(arguments, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        compare.main(arguments)
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and captured.out == ""
    assert len(captured.err.splitlines()) == 1 and says in captured.err


def doubled(gradient):
    return 2 * gradient


def test_wrong_gradients_stop_the_benchmark(monkeypatch, capsys):
    def wrong(model, **arguments):
        around = copy.deepcopy(model)
        around[2].weight.register_hook(doubled)
        return around

    monkeypatch.setattr(figures, "_around", wrong)
    threads = torch.get_num_threads()
    assert compare.main(["--quick", "--only", "transparent"]) == 1
    captured = capsys.readouterr()
    assert "GPipe K=1: gradient 2 is off by 1.0e+00" in captured.err and captured.out == ""
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    "spoil, says", [(lambda g: g * float("nan"), "off by nan"), (lambda g: g + 0.1 * g.abs().max(), "off by 1.0e-01")]
)
def test_every_gradient_is_compared(spoil, says):
    model, batch = linear_stack(2, 4), random_batch(8, 4)
    variants = {"plain": Local(model, batch, torch.sum), "good": Local(copy.deepcopy(model), batch, torch.sum)}
    check_gradients(variants)
    variants["good"].module[2].bias.register_hook(spoil)
    with pytest.raises(WrongGradients, match=f"good: gradient 3 is {says}"):
        check_gradients(variants)


def test_a_zero_gradient_proves_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    nn.init.constant_(model[0].bias, -100.0)
    with pytest.raises(WrongGradients, match="missing or zero"):
        check_gradients({"plain": Local(model, random_batch(8, 4), torch.sum)})


def test_variants_take_turns():
    order = []

    class Fake:
        def __init__(self, name, seconds):
            self.name, self.seconds = name, iter(seconds)

        def step(self):
            order.append(self.name)
            return next(self.seconds)

    times = interleaved({"a": Fake("a", [9, 2, 6]), "b": Fake("b", [9, 1, 2])}, rounds=2)
    assert "".join(order) == "ababab"
    assert times == {"a": [2, 6], "b": [1, 2]}  # the first turn is a warm-up
    assert ratios(times["a"], times["b"]) == [2, 3]


def data_that_cannot_be_made():
    raise OSError("no data today")


def data():
    return random_batch(4, 4), random_batch(4, 4, seed=2)


def two_blocks():
    return linear_stack(2, 4)


@pytest.mark.skipif(bool(rivals.distributed_missing()), reason="needs torch.distributed over gloo")
def test_a_rank_that_fails_or_dies_is_reported_and_reaped():
    with pytest.raises(rivals.RivalFailed, match="no data today"):
        with rivals.DistributedGPipe(2, 2, two_blocks, data_that_cannot_be_made) as pipeline:
            pipeline.step()
    with pytest.raises(rivals.RivalFailed, match="rank [01]"):
        with rivals.DistributedGPipe(2, 2, two_blocks, data) as pipeline:
            assert pipeline.step() > 0
            pipeline._processes[1].kill()
            pipeline.step()
    assert not multiprocessing.active_children()
