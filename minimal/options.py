"""The benchmark's command line: every option, its default, and what is said about a value that cannot be used.

Whatever is wrong is found here, before anything is trained, and told in one line.
"""

import argparse
import importlib.util
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from micropp.partition import check_balance
from micropp.schedule import SCHEDULES

LARGEST = 1_000_000  # of any count: a slip of the finger should not ask for a terabyte


class UsageError(Exception):
    """Something on the command line cannot be used; the message is for the user, on one line."""


@dataclass(frozen=True)
class Options:
    """One run of the benchmark; the letters are the course's own (K stages, M micro-batches, N samples, L layers)."""

    partitions: int  # K
    micro_batches: int  # M, as given
    layers: int  # L
    hidden_dim: int  # D
    batch_size: int  # N
    epochs: int
    schedule: str
    balance: str | list[int] | None  # layers a stage, "parameters" or "time"; None: as equal as can be
    checkpoint: bool
    devices: list[str]  # one, or those that the stages take in turn
    data: str
    seed: int
    json: Path | None
    trace: Path | None
    plot: Path | None
    check: bool

    @property
    def effective_micro_batches(self) -> int:
        """A mini-batch has no more micro-batches than samples."""
        return min(self.micro_batches, self.batch_size)

    @property
    def stage_devices(self) -> list[torch.device]:
        return [torch.device(self.devices[k % len(self.devices)]) for k in range(self.partitions)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        argparses_own = message.startswith("unrecognized") or "expected" in message
        raise UsageError(f"{message}: see --help" if argparses_own else message)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is something to show: not of a switch, nor of a file that is not asked for."""

    def _get_help_string(self, action):
        shown = isinstance(action.default, (int, str)) and not isinstance(action.default, bool)
        return super()._get_help_string(action) if shown else action.help


def _whole(lowest: int, highest: int = LARGEST):
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no whole number: give one from {lowest} to {highest}"
            ) from None
        if not lowest <= value <= highest:
            change = "raise it" if value < lowest else "lower it"
            raise argparse.ArgumentTypeError(f"{value} is not from {lowest} to {highest}: {change}")
        return value

    return parse


def parser() -> argparse.ArgumentParser:
    result = _Parser(
        prog="train_minimal.py",
        description="Trains a deep network on hand-written digits as a pipeline, and its plain twin beside it: "
        "step times, bubble, utilisation, memory and accuracy of both.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("--partitions", type=_whole(1), default=4, metavar="K", help="stages the model is cut into")
    add("--micro-batches", type=_whole(1), default=16, metavar="M", help="micro-batches a mini-batch is split into")
    add("--layers", type=_whole(2), default=10, metavar="L", help="layers of the model: input, L-2 residual, output")
    add("--hidden-dim", type=_whole(1), default=512, metavar="D", help="features between layers")
    add("--batch-size", type=_whole(1), default=4096, metavar="N", help="samples in a mini-batch")
    add("--epochs", type=_whole(1), default=7, metavar="E", help="passes over the training data")
    add("--schedule", choices=sorted(SCHEDULES), default="gpipe", help="order of the stages' work")
    add(
        "--balance",
        metavar="B",
        default="parameters",
        help="layers a stage: counts that add up to L (3,2,2,3), percentages that add up to 100 (30,20,20,30), "
        "'equal', or the cut whose heaviest stage is lightest by 'parameters' or by measured 'time'",
    )
    add(
        "--no-checkpoint",
        dest="checkpoint",
        action="store_false",
        default=True,
        help="keep all activations instead of re-materializing them in the backward pass",
    )
    add(
        "--device",
        metavar="DEVICE",
        default="cpu",
        help="cpu, cuda (all stages on one GPU), or a list such as cuda:0,cuda:1 that the stages take in turn",
    )
    add(
        "--data",
        choices=["digits", "synthetic"],
        default="digits",
        help="UCI's hand-written digits, or random numbers for throughput alone",
    )
    add("--seed", type=_whole(0, 2**63 - 1), default=0, help="of the weights and of the order of the samples")
    add("--json", type=Path, metavar="FILE", default=None, help="write all figures there (seconds, MB of 2**20 bytes)")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        default=None,
        help="write the recorded step there, for chrome://tracing or ui.perfetto.dev (microseconds)",
    )
    add(
        "--plot",
        type=Path,
        metavar="DIR",
        default=None,
        help="draw the recorded and the replayed step there, as PNG and SVG (milliseconds)",
    )
    add(
        "--check",
        action="store_true",
        default=False,
        help="print the largest difference between the pipeline's gradients and the plain model's, in float64",
    )
    return result


def parse(argv: list[str] | None = None) -> Options:
    """The options in `argv` (by default the command line's).

    Raises:
        UsageError: a value that cannot be used. SystemExit: after --help.
    """
    values = vars(parser().parse_args(argv))
    K, L = values["partitions"], values["layers"]
    if K > L:
        raise UsageError(f"--partitions {K} needs at least {K} layers, but --layers is {L}: lower K or raise L")
    values["balance"] = _balance(values["balance"], L, K)
    values["devices"] = _devices(values.pop("device"), K)
    _check_outputs(values["json"], values["trace"], values["plot"])
    return Options(**values)


def _balance(text: str, n_layers: int, n_partitions: int) -> str | list[int] | None:
    if text == "equal":
        return None
    if text in ("parameters", "time"):
        return text
    try:
        shares = [float(entry) for entry in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--balance {text!r} is no list of numbers: give {n_partitions} layer counts or percentages with commas "
            "between them, or equal, parameters or time"
        ) from None
    if len(shares) != n_partitions:
        raise UsageError(
            f"--balance {text} is for {len(shares)} stages, but --partitions is {n_partitions}: give one entry a stage"
        )
    if not all(share > 0 and math.isfinite(share) for share in shares):
        raise UsageError(f"--balance {text} has an entry that is not above 0: a stage needs a layer, so raise it")
    total = math.fsum(shares)
    if total == n_layers and all(share.is_integer() for share in shares):
        return check_balance([int(share) for share in shares], n_layers, n_partitions)
    if not math.isclose(total, 100):
        raise UsageError(
            f"--balance {text} adds up to {total:g}: give whole layer counts that add up to --layers {n_layers}, "
            "or percentages that add up to 100"
        )
    return counts_from_percentages(shares, n_layers)


def counts_from_percentages(percentages: list[float], n_layers: int) -> list[int]:
    """Layers a stage, as near to the shares as whole layers come: one each, then one more where most is missing.

    >>> counts_from_percentages([80, 20], 10)
    [8, 2]
    """
    counts = [1] * len(percentages)
    for _ in range(n_layers - len(counts)):
        missing = [share / 100 * n_layers - count for share, count in zip(percentages, counts)]
        counts[missing.index(max(missing))] += 1
    return counts


def _devices(text: str, n_partitions: int) -> list[str]:
    names = text.split(",")
    if names == ["cpu"]:
        return names
    allowed = "cpu, cuda, or a list such as cuda:0,cuda:1"
    for name in names:
        number = name.removeprefix("cuda:")
        if name != "cuda" and not (name.startswith("cuda:") and number.isdecimal() and number.isascii()):
            raise UsageError(f"--device {text!r} is not known: give {allowed}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UsageError(f"--device {text} needs a CUDA device, and PyTorch finds none here: use --device cpu")
    names = ["cuda:0" if name == "cuda" else f"cuda:{int(name.removeprefix('cuda:'))}" for name in names]
    absent = [name for name in names if int(name.removeprefix("cuda:")) >= count]
    if absent:
        raise UsageError(f"--device {text}: no {absent[0]} here, only cuda:0 to cuda:{count - 1}: name one of those")
    if len(set(names)) < len(names):
        raise UsageError(f"--device {text} names a device twice: the stages take them in turn, so name each once")
    if n_partitions % len(names):
        raise UsageError(
            f"--device {text} has {len(names)} devices for {n_partitions} stages, which leaves them unequally loaded: "
            f"make --partitions a multiple of {len(names)}, or name fewer devices"
        )
    return names


def _check_outputs(json: Path | None, trace: Path | None, plot: Path | None) -> None:
    """Tries what will be done at the end: after a long training it would be too late to say so."""
    if json is not None and trace is not None and json.absolute() == trace.absolute():
        raise UsageError(f"--json and --trace are both {str(json)!r}: give two different files")
    for option, path in (("--json", json), ("--trace", trace)):
        if path is None:
            continue
        if path.exists() and not path.is_file():  # os.replace would put a file in a device's place
            raise UsageError(f"{option} {str(path)!r} is there, but no regular file: name a file to write")
        _try_writing(option, path, path.parent)
    if plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--plot needs matplotlib, which is not installed: pip install matplotlib, or leave it out")
        folder = plot
        while not (folder.exists() or folder.is_symlink()):
            folder = folder.parent
        _try_writing("--plot", plot, folder)


def _try_writing(option: str, path: Path, folder: Path) -> None:
    if not folder.is_dir():
        change = "is no directory: choose another" if folder.exists() else "does not exist: create it"
        raise UsageError(f"{option} {str(path)!r} cannot be written, as {str(folder)!r} {change}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"{option} {str(path)!r} cannot be written ({reason}): choose a directory you may write to"
        ) from None
