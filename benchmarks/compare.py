"""Side by side, in one run: the plain model, GPipe, torchgpipe and torch.distributed.pipelining.

    python benchmarks/compare.py                      all figures, some minutes on two cores
    python benchmarks/compare.py --only sleep,cell    some of them
    python benchmarks/compare.py --json FILE          and as data
    python benchmarks/compare.py --quick              does it all run? (tiny sizes: its figures compare nothing)

One thread a stage, so that what is gained is the pipeline's gain. Look at ratios only: a step's milliseconds are this
machine's, at this hour. Exit status 0 whether targets are met or not, 1 if something computed wrong gradients or did not
run, 2 for options that make no sense.
"""

import argparse
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

if __package__ in (None, ""):  # run as a file: Python then looks for modules in benchmarks/, not beside it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import FIGURES, Form, Row, measure
from benchmarks.rivals import RivalFailed
from benchmarks.workloads import Others, WrongGradients

SHORT_FORM = "short form, not comparable"
QUIET = 0.1  # cores that others may use before a figure is called disturbed


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"compare.py: {message}\n")  # one line, without the usage in front of it


def _names(text: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in FIGURES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"no figure called {(unknown or [text])[0]!r}: choose from {', '.join(FIGURES)}"
        )
    return frozenset(names)


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of rounds from 1 up is needed, got {text!r}")
    return int(text)


def _writable(text: str) -> Path:
    path = Path(text)
    if text == "-":
        return path
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in an existing folder: name one")
    return path


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"tiny sizes, 2 rounds: {SHORT_FORM}")
    parser.add_argument("--only", type=_names, metavar="NAME[,NAME]", help=", ".join(FIGURES))
    parser.add_argument("--rounds", type=_rounds, metavar="N", help="turns of each variant (default 9; --quick: 2)")
    parser.add_argument("--json", type=_writable, metavar="FILE", help="write what was measured there; - prints it")
    return parser.parse_args(arguments)


def _cores() -> int:
    """Cores that this process may use, which in a container are not all that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def environment(form: Form) -> dict:
    try:
        torchgpipe = version("torchgpipe")
    except PackageNotFoundError:
        torchgpipe = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchgpipe": torchgpipe,
        "system": platform.platform(),
        "cores": _cores(),
        "threads_per_stage": 1,
        "load_before": _load(),
        "rounds": form.rounds,
        "short_form": form.short,
    }


def as_data(rows: list[Row], around: dict) -> dict:
    """What --json writes."""
    return {
        "environment": around,
        "rows": [
            {
                "name": row.name,
                "what": row.what,
                "measured": row.measured,
                "target": row.target,
                "direction": row.direction,
                "met": None if around["short_form"] else row.met,
                "skipped": row.skipped,
                "detail": row.detail,
            }
            for row in rows
        ],
    }


def _verdict(row: Row, short: bool) -> str:
    if row.skipped:
        return "skipped"
    if short or row.met is None:
        return "-"
    return "met" if row.met else "NOT met"


def tables(rows: list[Row], short: bool) -> list[Table]:
    """The figures, and under them the step times that they come from."""
    figures = Table(title=SHORT_FORM if short else None, title_justify="left")
    for heading, justify in (("figure", "left"), ("what", "left"), ("got", "right"), ("must", "right"), ("", "left")):
        figures.add_column(heading, justify=justify, no_wrap=heading != "what")
    for row in rows:
        got = "" if row.measured is None else f"{row.measured:.3g}"
        must = "" if row.target is None else f"{row.direction} {row.target:g}"
        figures.add_row(row.name, row.what, got, must, _verdict(row, short))
    times = {}
    for row in rows:  # rows of the same steps share one line
        if "milliseconds" in row.detail:
            key = tuple(row.detail["milliseconds"].items())
            times.setdefault(key, row)
    columns = list(dict.fromkeys(name for key in times for name, _ in key))
    steps = Table(title="median step, ms (this machine, this hour)", title_justify="left")
    steps.add_column("steps of", no_wrap=True)
    for column in columns:
        steps.add_column(column, justify="right")
    for key, row in times.items():
        found = dict(key)
        steps.add_row(row.name, *(f"{found[column]:.4g}" if column in found else "" for column in columns))
    return [figures, steps] if times else [figures]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    form = Form(options.rounds or (2 if options.quick else 9), options.only or frozenset(FIGURES), options.quick)
    console = Console(width=80)
    around, rows = environment(form), []
    if around["cores"] < 2 and not form.short:
        console.print("only one core here: stages that compute cannot overlap, so most targets are out of reach")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    others = Others()
    try:
        for row in measure(form):
            row.detail["others_cores"] = others.cores()
            rows.append(row)
            print(f"{row.name} ...", end=" ", file=sys.stderr, flush=True)
    except (WrongGradients, RivalFailed) as error:
        print(f"\ncompare.py stops, its figures would mean nothing: {error}", file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(threads)
    print(file=sys.stderr)
    around["load_after"] = _load()
    for table in tables(rows, form.short):
        console.print(table)
    disturbed = [row for row in rows if (row.detail["others_cores"] or 0) > QUIET and not row.skipped]
    if disturbed and not form.short:
        most = max(row.detail["others_cores"] for row in disturbed)
        console.print(
            f"disturbed, others used up to {most:.1f} of {around['cores']} cores: "
            f"{', '.join(row.name for row in disturbed)}. Run these again when the machine is quiet.",
            highlight=False,
        )
    for reason in dict.fromkeys(row.skipped for row in rows if row.skipped):
        console.print(f"skipped: {reason}", markup=False, highlight=False)
    if options.json:
        text = json.dumps(as_data(rows, around), indent=2) + "\n"
        if str(options.json) == "-":
            print(text)
            return 0
        try:
            options.json.write_text(text)
        except OSError as error:
            print(f"compare.py: {options.json} was not written ({error.strerror}): name another file", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
