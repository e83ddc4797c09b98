"""What is trained: a deep residual network of exactly L layers, on hand-written digits or on random numbers."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from micropp.partition import layer_parameters, layer_seconds, lightest_split
from minimal.options import Options, UsageError

DIGITS = Path(__file__).resolve().parent.parent / "data" / "digits.npz"
N_TEST = 360  # of 1,797 pictures
SPLIT_SEED = 1998  # which pictures are tested must not depend on --seed, or runs could not be compared
SYNTHETIC_BATCHES = 4  # an epoch
N_PIXELS, N_CLASSES = 64, 10
LEARNING_RATE = 1e-3


class Residual(nn.Module):
    """x + scale · silu(linear(norm(x))). The norm is a sample's own, so micro-batches change nothing.

    Smooth, so that two trainings that differ in rounding alone stay together: with ReLU, whose derivative jumps, the
    outputs of pipeline and plain twin were 0.03 apart after 24 steps, with SiLU 0.000002.
    """

    def __init__(self, width: int, scale: float):
        super().__init__()
        self.scale = scale
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, nn.functional.silu(self.linear(self.norm(x))), alpha=self.scale)  # (N/M, D)


def build_model(n_layers: int, width: int, seed: int) -> nn.Sequential:
    """L layers, each one entry of the nn.Sequential: the places where it can be cut. Float32, on the CPU."""
    torch.manual_seed(seed)
    try:
        return nn.Sequential(
            nn.Linear(N_PIXELS, width),
            *(Residual(width, scale=n_layers**-0.5) for _ in range(n_layers - 2)),  # so that depth adds up to about 1
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, N_CLASSES)),
        )
    except (RuntimeError, MemoryError):
        raise UsageError(
            f"a model with --layers {n_layers} and --hidden-dim {width} does not fit into memory: lower one of them"
        ) from None


class Data(NamedTuple):
    """Pictures (…, 64) as float32, labels (…) from 0 to 9; no test set for random numbers."""

    x: Tensor
    y: Tensor
    test_x: Tensor | None
    test_y: Tensor | None


def load_data(options: Options) -> Data:
    """Raises UsageError if the digits are not there, or fewer than one mini-batch."""
    if options.data == "synthetic":
        generator = torch.Generator().manual_seed(SPLIT_SEED)
        n_samples = SYNTHETIC_BATCHES * options.batch_size
        x = torch.rand(n_samples, N_PIXELS, generator=generator)
        return Data(x, torch.randint(N_CLASSES, (n_samples,), generator=generator), None, None)
    if not DIGITS.is_file():
        raise UsageError(f"--data digits needs {str(DIGITS)!r}, which is missing: put it back, or use --data synthetic")
    with np.load(DIGITS) as digits:
        images, labels = torch.from_numpy(digits["images"]).float(), torch.from_numpy(digits["labels"]).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order[:N_TEST], order[N_TEST:]
    images = (images - images[train].mean()) / images[train].std()
    x, y = shifted(images[train]).flatten(1), labels[train].repeat(9)
    if options.batch_size > len(x):
        raise UsageError(
            f"--batch-size {options.batch_size} is more than the {len(x)} training samples of --data digits: "
            "lower it, or use --data synthetic"
        )
    return Data(x, y, images[test].flatten(1), labels[test])


def shifted(images: Tensor) -> Tensor:
    """The pictures (n, 8, 8), and each moved by one pixel in the eight directions: (9n, 8, 8).

    1,437 pictures would leave a micro-batch of a few rows, too few for a matrix product to be worth a stage.
    """
    padded = nn.functional.pad(images, (1, 1, 1, 1), value=images.min().item())  # with background
    return torch.cat([padded[:, i : i + 8, j : j + 8] for i in (1, 0, 2) for j in (1, 0, 2)])


def batches(data: Data, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch in a random order; the last mini-batch may be short."""
    for chosen in torch.randperm(len(data.x), generator=generator).split(batch_size):
        yield data.x[chosen], data.y[chosen]


def n_batches(data: Data, batch_size: int) -> int:
    return -(-len(data.x) // batch_size)


def choose_balance(options: Options, model: nn.Sequential, sample: Tensor) -> list[int] | None:
    """Layers a stage; `sample` is one micro-batch (N/M, 64), for --balance time."""
    if options.balance == "parameters":
        return lightest_split(layer_parameters(model), options.partitions)
    if options.balance == "time":
        device = options.stage_devices[0]
        return lightest_split(layer_seconds(copy.deepcopy(model).to(device), sample.to(device)), options.partitions)
    return options.balance


def accuracy(model: nn.Module, data: Data, device: torch.device) -> float | None:
    """The share of test pictures that the model names right, 0 to 1."""
    if data.test_x is None:
        return None
    was_training = model.training
    model.eval()
    with torch.no_grad():
        right = model(data.test_x.to(device)).argmax(1).cpu() == data.test_y
    model.train(was_training)
    return right.float().mean().item()
