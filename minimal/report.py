"""What the benchmark shows while it runs and leaves behind: progress, a table, JSON, a trace, pictures."""

import json
import math
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from micropp.timeline import Timeline, calculate_bubble_overhead, to_chrome_trace
from minimal.options import Options

NOT_MEASURED = "–"


def nothing_yet(options: Options) -> dict:
    """All groups and keys of the JSON, null where something is still to be measured."""
    K, M = options.partitions, options.effective_micro_batches
    # Stop-and-wait has one stage at work at any time; the other two schedules have GPipe's bubble.
    bubble = 1 - 1 / K if options.schedule == "naive" else calculate_bubble_overhead(K, M)
    return {
        "config": json.loads(json.dumps(asdict(options), default=str)) | {"effective_micro_batches": M},
        "environment": environment(options),
        "theory": {"bubble": bubble, "speedup": K * (1 - bubble)},
        "measured": dict.fromkeys(
            [
                "step_seconds",
                "sequential_step_seconds",
                "samples_per_second",
                "sequential_samples_per_second",
                "speedup",
                "overlap",
                "bubble",
                "utilisation",
            ]
        ),
        "replayed": dict.fromkeys(
            ["step_seconds", "samples_per_second", "bubble", "speedup", "overlap", "utilisation"]
        ),
        "memory": dict.fromkeys(
            [
                "peak_mb",
                "sequential_peak_mb",
                "activation_mb",
                "sequential_activation_mb",
                "peak_mb_with_checkpoint",
                "peak_mb_without_checkpoint",
                "activation_mb_with_checkpoint",
                "activation_mb_without_checkpoint",
            ]
        ),
        "training": {"loss": [], "sequential_loss": [], "test_accuracy": None, "sequential_test_accuracy": None},
        "check": {"max_gradient_difference": None, "max_gradient": None},
    }


def environment(options: Options) -> dict:
    threads = torch.get_num_threads()
    on_cpu = options.devices == ["cpu"]
    return {
        "device": ",".join(options.devices),
        "device_name": None if on_cpu else torch.cuda.get_device_name(options.devices[0]),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "threads_per_stage": max(1, threads // options.partitions),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


class TrainingProgress:
    """A bar where there is a terminal, else a line an epoch."""

    def __init__(self, console: Console, n_steps: int, n_epochs: int):
        self.console, self.n_epochs, self.text = console, n_epochs, ""
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            expand=True,
            auto_refresh=False,  # a thread that draws would take the interpreter's lock during a timed step
        )
        self.task = self.bar.add_task("", total=n_steps)

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self.bar.stop()

    def step(self, loss: float) -> None:
        self.bar.update(self.task, advance=1, description=f"loss {loss:.3f}{self.text}", refresh=True)

    def epoch(self, number: int, loss: float, accuracy: float | None) -> None:
        self.text = "" if accuracy is None else f", test accuracy {accuracy:.1%}"
        self.console.print(f"epoch {number}/{self.n_epochs}: loss {loss:.3f}{self.text}")


def show(console: Console, options: Options, results: dict) -> None:
    """The table, and below it what one has to know to read it."""
    measured, replayed, memory = results["measured"], results["replayed"], results["memory"]
    training, theory, here = results["training"], results["theory"], results["environment"]
    K = options.partitions
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{options.schedule}, K={K}, M={options.micro_batches}")
    for heading in ("one device\nwhole batch", "this run\nmeasured", f"replayed on {K}\nsimulated"):
        table.add_column(heading, justify="right")

    def row(name: str, shown: Callable[[object], str], *values) -> None:
        table.add_row(name, *(NOT_MEASURED if value is None else shown(value) for value in values))

    one = None if measured["sequential_step_seconds"] is None else 1.0
    row(
        "step (ms)",
        _milliseconds,
        measured["sequential_step_seconds"],
        measured["step_seconds"],
        replayed["step_seconds"],
    )
    row(
        "samples/s",
        _count,
        measured["sequential_samples_per_second"],
        measured["samples_per_second"],
        replayed["samples_per_second"],
    )
    row("speed-up", _times, one, measured["speedup"], replayed["speedup"])
    row("overlap", _times, one, measured["overlap"], replayed["overlap"])
    row("bubble, theory", _percent, None, theory["bubble"], theory["bubble"])
    row("bubble, measured", _percent, None, measured["bubble"], None)
    row("bubble, simulated", _percent, None, None, replayed["bubble"])
    row("utilisation a stage (%)", _percents, None, measured["utilisation"], replayed["utilisation"])
    for kind, name in (("peak", "peak MB"), ("activation", "activation MB")):
        row(
            f"{name}, all kept",
            _megabytes,
            memory[f"sequential_{kind}_mb"],
            memory[f"{kind}_mb_without_checkpoint"],
            None,
        )
        row(f"{name}, re-materialized", _megabytes, None, memory[f"{kind}_mb_with_checkpoint"], None)
    row("last epoch's loss", _loss, *((training[name] or [None])[-1] for name in ("sequential_loss", "loss")), None)
    row("test accuracy", _percent, training["sequential_test_accuracy"], training["test_accuracy"], None)
    console.print(table)

    check = results["check"]
    if check["max_gradient_difference"] is not None:
        console.print(
            f"Largest gradient difference from the plain model, in float64: {check['max_gradient_difference']:.2g} "
            f"(largest gradient: {check['max_gradient']:.2g})"
        )
    threads = here["threads_per_stage"]
    where = here["device"] if here["device_name"] is None else f"{here['device']} ({here['device_name']})"
    console.print(
        f"{here['cores']} cores, {threads} intra-op thread{'s' if threads > 1 else ''} a stage and for the one device; "
        f"{where}; torch {here['torch']}, Python {here['python']}. "
        f"This run {'re-materializes' if options.checkpoint else 'keeps all activations'}."
    )
    if options.devices == ["cpu"] and K > here["cores"]:
        console.print(
            f"{K} stages share {here['cores']} cores: the replayed column shows what {K} devices would do. "
            "A stage that waits for a core counts as at work in the measured column."
        )
    if options.effective_micro_batches < options.micro_batches:
        console.print(
            f"A mini-batch of {options.batch_size} makes {options.effective_micro_batches} micro-batches, "
            f"not {options.micro_batches}."
        )
    console.print(
        "Replayed: this schedule with the cells' times, each measured alone; passing on is free. "
        "Overlap: those times together, over the step's: how many cells were at work at once. "
        "Theory: equal stages, and nothing to recompute."
    )


def write(options: Options, results: dict, recorded: Timeline | None, replayed: Timeline | None) -> list[Path]:
    """The files that were asked for, each there as a whole or not at all; returns those that were written."""
    written = []
    if options.json is not None:
        written.append(_write_whole(options.json, json.dumps(_finite(results), indent=2, allow_nan=False) + "\n"))
    if options.trace is not None and recorded is not None:
        written.append(_write_whole(options.trace, json.dumps(to_chrome_trace(recorded)) + "\n"))
    if options.plot is not None and recorded is not None:
        from visualization import plot_timeline  # here, as matplotlib takes long to import

        options.plot.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.plot, prefix=".") as folder:
            for name, timeline in (("recorded", recorded), ("replayed", replayed)):
                if timeline is not None:
                    for path in plot_timeline(timeline, Path(folder, name)):
                        written.append(path.replace(options.plot / path.name))
    return written


def _write_whole(path: Path, text: str) -> Path:
    target = path.resolve()  # a symbolic link stays one
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return path


def _finite(value):
    """JSON knows no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _megabytes(value: float) -> str:
    return f"{value:,.1f}"


def _times(value: float) -> str:
    return f"{value:.2f}×"


def _loss(value: float) -> str:
    return f"{value:.4f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _percents(values: list[float]) -> str:
    return " ".join(f"{value:.0%}"[:-1] for value in values)
