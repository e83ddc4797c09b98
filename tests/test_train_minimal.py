"""The benchmark: what it measures is whole and consistent, and what it cannot run it says in one line.

No figure of time is asserted beyond its being there: this file must pass on a busy machine.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from micropp.schedule import SCHEDULES, Action, rematerialized
from micropp.timeline import Timeline
from minimal import measure, report, workload
from minimal.options import UsageError, counts_from_percentages, parse
from train_minimal import main
from visualization import draw_timeline, plot_pipeline_schedule, plot_timeline

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--layers", "4", "--hidden-dim", "8", "--epochs", "1", "--batch-size", "2000"]
SHAPE = ["--partitions", "3", "--micro-batches", "5"]


def run(tmp_path, *arguments):
    """The JSON of a run in this process."""
    path = tmp_path / "out.json"
    assert main([*TINY, *SHAPE, "--json", str(path), *arguments]) == 0
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def run_outside(*arguments, **popen):
    return subprocess.Popen(
        [sys.executable, "train_minimal.py", *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **popen,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", [[], ["--no-checkpoint"]])
def test_every_figure_is_there_and_fits_the_others(tmp_path, schedule, checkpoint):
    found = run(tmp_path, "--schedule", schedule, "--check", *checkpoint)
    assert list(found) == ["config", "environment", "theory", "measured", "replayed", "memory", "training", "check"]
    assert found["theory"]["bubble"] == (1 - 1 / 3 if schedule == "naive" else 2 / 7)
    assert found["theory"]["speedup"] == pytest.approx(1 if schedule == "naive" else 15 / 7)
    measured, replayed = found["measured"], found["replayed"]
    assert measured["speedup"] == pytest.approx(measured["sequential_step_seconds"] / measured["step_seconds"])
    assert measured["samples_per_second"] == pytest.approx(2000 / measured["step_seconds"])
    assert replayed["speedup"] == pytest.approx(measured["sequential_step_seconds"] / replayed["step_seconds"])
    alone = replayed["overlap"] * replayed["step_seconds"]
    assert measured["overlap"] == pytest.approx(alone / measured["step_seconds"]) and 0 < replayed["overlap"] <= 3
    for group in (measured, replayed):
        assert len(group["utilisation"]) == 3 and all(0 < share <= 1 for share in group["utilisation"])
        assert group["bubble"] == pytest.approx(1 - sum(group["utilisation"]) / 3)
    memory, training = found["memory"], found["training"]
    assert all(value > 0 for value in memory.values())
    assert memory["activation_mb"] == memory[f"activation_mb_{'without' if checkpoint else 'with'}_checkpoint"]
    assert memory["peak_mb"] > memory["activation_mb"]
    assert len(training["loss"]) == 1 and training["loss"] == pytest.approx(training["sequential_loss"], rel=1e-5)
    assert training["test_accuracy"] == training["sequential_test_accuracy"] > 0
    assert found["check"]["max_gradient_difference"] <= 1e-10 < 1e-6 < found["check"]["max_gradient"]
    if schedule == "naive" and checkpoint:  # with re-materialization, the stages recompute side by side
        assert replayed["bubble"] == pytest.approx(2 / 3)


def test_each_schedule_is_the_one_that_runs(tmp_path):
    for schedule in SCHEDULES:
        trace = tmp_path / f"{schedule}.json"
        run(tmp_path, "--schedule", schedule, "--trace", str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
        rows = [[e["name"] for e in sorted(events, key=lambda e: e["ts"]) if e["tid"] == k] for k in range(3)]
        assert {event["tid"] for event in events} == {0, 1, 2}
        assert rows == [[str(action) for action in row] for row in rematerialized(SCHEDULES[schedule](3, 5))]


def test_rematerialization_keeps_less_where_there_is_something_to_keep():
    found = {}
    for checkpoint in (True, False):
        twins = measure.Twins(
            workload.build_model(12, 64, 0), "gpipe", n_partitions=2, n_microbatches=8, use_checkpoint=checkpoint
        )
        optimizers = {
            "plain": torch.optim.Adam(twins.plain.parameters()),
            "pipeline": torch.optim.Adam(twins.pipeline.parameters()),
        }
        found[checkpoint] = measure.memory(twins, optimizers, torch.rand(512, 64), torch.randint(10, (512,)))
        assert twins.pipeline.use_checkpoint == checkpoint
        assert all(parameter.grad is None for parameter in (*twins.plain.parameters(), *twins.pipeline.parameters()))
    assert found[True]["activation_mb"] < 0.6 * found[False]["activation_mb"]
    assert found[False]["activation_mb"] == found[True]["activation_mb_without_checkpoint"]


def test_the_gradient_check_sees_a_wrong_gradient(monkeypatch):
    twins = measure.Twins(workload.build_model(4, 8, 0), "gpipe", n_partitions=2, n_microbatches=4)
    x, y = torch.rand(10, 64), torch.randint(10, (10,))
    assert measure.gradient_difference(twins, x, y)["max_gradient_difference"] <= 1e-10
    right = measure.Twins.pipeline_step
    for wrong in (1.001, math.nan):

        def step(self, x, y, wrong=wrong):
            loss = right(self, x, y)
            self.pipeline.get_parameter("1.linear.weight").grad.mul_(wrong)
            return loss

        monkeypatch.setattr(measure.Twins, "pipeline_step", step)
        assert not measure.gradient_difference(twins, x, y)["max_gradient_difference"] <= 1e-10


@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_the_cells_of_the_replay_were_each_alone(use_checkpoint):
    twins = measure.Twins(
        workload.build_model(6, 64, 0), "1f1b", n_partitions=3, n_microbatches=4, use_checkpoint=use_checkpoint
    )
    recordings = measure.Recordings(twins)
    for _ in range(3):
        recordings.take(torch.rand(401, 64), torch.randint(10, (401,)))
    spans = sorted(recordings._cells.spans, key=lambda span: span.start)
    assert len(spans) == 3 * 3 * 4 * (3 if use_checkpoint else 2)
    assert all(before.end <= after.start for before, after in zip(spans, spans[1:]))
    wanted = SCHEDULES["1f1b"](3, 4)
    wanted = rematerialized(wanted) if use_checkpoint else wanted
    assert recordings.replayed().order() == recordings.recorded().order() == wanted
    assert recordings.replayed().simulated and not recordings.recorded().simulated
    assert (twins.pipeline.use_checkpoint, twins.pipeline.n_microbatches) == (use_checkpoint, 4)
    assert all(parameter.grad is None for parameter in twins.pipeline.parameters())


def test_the_twins_start_equal_and_share_nothing_and_the_plain_step_puts_the_threads_back():
    twins = measure.Twins(workload.build_model(4, 8, 0), "gpipe", n_partitions=2, n_microbatches=4)
    for (name, p), (other, q) in zip(twins.plain.named_parameters(), twins.pipeline.named_parameters(), strict=True):
        assert name == other and torch.equal(p, q) and p.data_ptr() != q.data_ptr()
    before, seen = torch.get_num_threads(), []
    twins.plain[0].register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    torch.set_num_threads(4)
    try:
        twins.plain_step(torch.rand(10, 64), torch.randint(10, (10,)))
        assert seen == [2] and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_the_model_has_exactly_its_layers_and_the_test_pictures_are_not_trained_on():
    assert [len(workload.build_model(n, 8, 0)) for n in (2, 5)] == [2, 5]
    data, other_seed = (workload.load_data(parse(["--seed", seed])) for seed in ("0", "1"))
    assert data.x.shape == (9 * 1437, 64) and data.test_x.shape == (360, 64)
    assert data.x[:1437].mean().abs() < 1e-5 and (data.x[:1437].std() - 1).abs() < 1e-5
    assert torch.equal(data.test_x, other_seed.test_x)
    trained = {tuple(row) for row in data.x.tolist()}
    assert not any(tuple(row) in trained for row in data.test_x.tolist())
    first, moved = data.x[0].view(8, 8), data.x[1437].view(8, 8)
    assert torch.equal(moved[:, 1:], first[:, :-1]) and data.y[0] == data.y[1437]


def test_synthetic_data_a_short_batch_and_fewer_samples_than_microbatches(tmp_path):
    found = run(tmp_path, "--data", "synthetic", "--batch-size", "3")
    assert found["training"]["test_accuracy"] is None and found["theory"]["bubble"] == 2 / 5
    assert found["config"]["micro_batches"] == 5 and found["config"]["effective_micro_batches"] == 3
    found = run(tmp_path, "--batch-size", "6466")  # 12,933 samples: two mini-batches, and one sample
    assert found["training"]["test_accuracy"] == found["training"]["sequential_test_accuracy"]


@pytest.mark.parametrize(
    "given, counts",
    [("2,1,1", [2, 1, 1]), ("60,20,20", [2, 1, 1]), ("20,20,60", [1, 1, 2]), ("parameters", None), ("time", None)],
)
def test_balance(tmp_path, given, counts):
    found = run(tmp_path, "--balance", given, "--data", "synthetic", "--batch-size", "20")["config"]["layers_per_stage"]
    assert found == counts if counts else sum(found) == 4 and len(found) == 3


def test_percentages_become_layers():
    assert counts_from_percentages([80, 20], 10) == [8, 2]
    assert counts_from_percentages([98, 1, 1], 10) == [8, 1, 1]  # a stage needs a layer
    assert parse(["--layers", "100", "--partitions", "2", "--balance", "30,70"]).balance == [30, 70]


def test_trace_and_pictures(tmp_path, capsys):
    folder = tmp_path / "new" / "plots"
    run(tmp_path, "--trace", str(tmp_path / "trace.json"), "--plot", str(folder))
    assert sorted(path.name for path in folder.iterdir()) == [
        "recorded.png",
        "recorded.svg",
        "replayed.png",
        "replayed.svg",
    ]
    for path in folder.iterdir():
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG\r\n") if path.suffix == ".png" else b"<?xml" in start
        assert path.stat().st_size > 5000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out.json", "trace.json"]  # nothing half-written
    out = capsys.readouterr().out
    assert "\x1b" not in out and max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 80
    for word in ("one device", "measured", "simulated", "bubble, theory", "speed-up", "intra-op", "test accuracy"):
        assert word in out


def test_the_picture_says_what_it_shows(tmp_path):
    timeline = Timeline(2, [(0, Action("F", 0), 0, 2), (1, Action("F", 0), 2, 3), (1, Action("B", 0), 3, 4)])
    axes = draw_timeline(timeline).axes[0]
    assert axes.get_title(loc="left") == "Measured: 4000 ms, bubble 50.0%" and axes.get_xlabel() == "time (ms)"
    assert [text.get_text() for text in axes.texts] == ["0", "0", "0"]
    timeline.simulated = True
    assert draw_timeline(timeline, unit="ticks").axes[0].get_title(loc="left").startswith("Simulated: 4 ticks")
    assert [path.name for path in plot_timeline(Timeline(1), tmp_path / "empty.1")] == ["empty.1.png", "empty.1.svg"]


BAD = [
    (["--partitions", "5", "--layers", "4"], "--partitions 5 needs at least 5 layers"),
    (["--partitions", "0"], "0 is not from 1"),
    (["--micro-batches", "0"], "0 is not from 1"),
    (["--hidden-dim", "-8"], "-8 is not from 1"),
    (["--epochs", "many"], "'many' is no whole number"),
    (["--layers", "1e3"], "'1e3' is no whole number"),
    (["--layers", "1\n2"], "is no whole number"),
    (["--seed", "-1"], "-1 is not from 0"),
    (["--batch-size", "20000"], "20000 is more than the 12933 training samples"),
    (["--balance", "50,20,20"], "adds up to 90: give whole layer counts that add up to --layers 4, or percentages"),
    (["--balance", "50,50"], "is for 2 stages, but --partitions is 3"),
    (["--balance", "110,-5,-5"], "not above 0"),
    (["--balance", "nan,50,50"], "not above 0"),
    (["--balance", "fair"], "'fair' is no list of numbers"),
    (["--device", "tpu"], "'tpu' is not known: give cpu, cuda"),
    (["--device", "cuda:99"], "cuda:99"),
    (["--schedule", "zigzag"], "choose from"),
    (["--data", "mnist"], "choose from"),
    (["--frobnicate"], "--frobnicate: see --help"),
    (["--json", "{tmp}/none/out.json"], "does not exist: create it"),
    (["--json", "{tmp}"], "no regular file"),
    (["--trace", "/dev/null"], "no regular file"),
    (["--json", "{tmp}/same", "--trace", "{tmp}/same"], "two different files"),
    (["--json", "/proc/out.json"], "cannot be written"),
    (["--plot", "{tmp}/file/plots"], "is no directory"),
    (["--plot", "/proc/plots"], "cannot be written"),
]


@pytest.mark.parametrize("arguments, told", BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_what_cannot_be_run_is_told_in_one_line(tmp_path, capsys, arguments, told):
    (tmp_path / "file").write_text("mine")
    outputs = ["--json", str(tmp_path / "a.json"), "--trace", str(tmp_path / "b.json"), "--plot", str(tmp_path / "c")]
    assert main([*TINY, *SHAPE, *outputs, *(argument.format(tmp=tmp_path) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and told in err and "usage:" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_that_is_not_there(capsys):
    assert main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "train_minimal.py: --device cuda needs a CUDA device, and PyTorch finds none here: use --device cpu\n"
    )


def test_devices_are_taken_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = parse(["--device", "cuda:0,cuda:1", "--partitions", "4"]).stage_devices
    assert [str(device) for device in devices] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert [str(device) for device in parse(["--device", "cuda"]).stage_devices] == ["cuda:0"] * 4
    for arguments, told in (
        (["--device", "cuda:0,cuda:1", "--partitions", "3"], "2 devices for 3 stages"),
        (["--device", "cuda:2"], "no cuda:2 here, only cuda:0 to cuda:1"),
        (["--device", "cuda:1,cuda:1"], "names a device twice"),
    ):
        with pytest.raises(UsageError, match=told):
            parse(arguments)


def test_sizes_beyond_the_memory_are_no_traceback(monkeypatch, capsys):
    def too_large(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 TB")

    monkeypatch.setattr(torch.nn, "Linear", too_large)
    assert main(TINY) == 2
    assert "does not fit into memory: lower one of them" in capsys.readouterr().err


def test_json_has_no_nan():
    found = report._finite({"a": [math.nan, 1.5, {"b": -math.inf}], "c": None})
    assert found == {"a": [None, 1.5, {"b": None}], "c": None}


def test_as_a_command_from_another_directory(tmp_path):
    command = [sys.executable, str(ROOT / "train_minimal.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "" and "--micro-batches M" in done.stdout
    assert "default: 16" in re.sub(r"\s+", " ", done.stdout) and "default: None" not in done.stdout


def test_control_c_leaves_what_was_measured(tmp_path):
    path, trace = tmp_path / "out.json", tmp_path / "trace.json"
    environment = {**os.environ, "COLUMNS": "80"}
    outputs = ["--json", str(path), "--trace", str(trace)]
    process = run_outside(*TINY, *SHAPE, *outputs, "--epochs", "100000", env=environment)
    try:
        assert process.stdout.readline().startswith("epoch 1/100000: loss")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and err == "" and "Interrupted" in out and "one device" in out
    found = json.loads(path.read_text())
    assert found["measured"]["step_seconds"] > 0 and found["training"]["loss"]
    assert found["memory"]["peak_mb"] is None and found["check"]["max_gradient_difference"] is None
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.json", "trace.json"]
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_schedule_is_drawn_where_it_is_asked_for(tmp_path):
    path = plot_pipeline_schedule(n_partitions=4, n_microbatches=16, output_dir=tmp_path / "plots")
    assert path.is_file() and path.suffix == ".png" and path.with_suffix(".svg").is_file()
