"""Random numbers that do not depend on the threads' timing, and come back when a stage is recomputed.

On a CPU all threads draw from one generator: with K stages at work, who gets which number would be a
matter of luck. So each cell (stage k, micro-batch m) draws from a generator of its own, seeded from
one number a run; the same cell, recomputed, starts again from the same seed and draws the same masks.
"""

import sys
import threading
from functools import cache
from types import CodeType

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from micropp.context import pushed

# PyTorch's own modules that draw random numbers, or may. Its others never do.
_DRAWING = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


def may_draw(modules: list[nn.Module]) -> bool:
    """Whether any of these modules may draw random numbers; a class that PyTorch does not own may."""
    return any(
        isinstance(module, _DRAWING) or not type(module).__module__.startswith("torch.nn.modules.")
        for module in modules
    )


# A draw through the shared generator (for the few operators that take no other) is one thread's at a time.
_default_generator = threading.Lock()


class Randomness:
    """The random numbers of one run: one seed, drawn from the default generator if any cell needs it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._seed = None

    def seed(self, stage: int, microbatch: int) -> int:
        """The seed of one cell."""
        with self._lock:
            # Which cell asks first is a matter of timing; what the default generator gives is not.
            if self._seed is None:
                self._seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        return (self._seed + (stage << 32) + microbatch) % 2**63

    def cell(self, stage: int, microbatch: int, recomputed: bool = False):
        """A context manager: all that is drawn in it, in this thread, comes from the cell's own generators.

        Raises, in it, RuntimeError for a draw from a generator of the layer's own if the cell is to be `recomputed`
        (who would put that one back?), and for a draw under torch.utils.checkpoint: its recomputation runs in the middle of
        a backward, out of this manager's reach, and would draw other numbers.
        """
        return pushed(_CellGenerators(self, stage, microbatch, recomputed, sys._getframe(1).f_code))


class _CellGenerators(TorchDispatchMode):
    """Hands each random operator of PyTorch a generator of this cell."""

    def __init__(self, randomness: Randomness, stage: int, microbatch: int, recomputed: bool, entered_in: CodeType):
        super().__init__()
        self.cell, self.recomputed, self.entered_in = (randomness, stage, microbatch), recomputed, entered_in
        self.generators = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default wraps each call in a guard that costs more than the call

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not _is_random(function):
            return function(*args, **kwargs)
        if kwargs.get("generator") is not None:
            if self.recomputed:
                raise RuntimeError(
                    "a layer draws from a generator of its own, and would draw other numbers when it is recomputed: "
                    "leave generator out (each cell has its own), or use_checkpoint=False"
                )
            return function(*args, **kwargs)
        self._refuse_inner_checkpoint()
        generator = self._generator(_device(args, kwargs))
        if any(argument.name == "generator" for argument in function._schema.arguments):
            return function(*args, **{**kwargs, "generator": generator})
        return _through_default_generator(generator, function, args, kwargs)

    def _refuse_inner_checkpoint(self) -> None:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self.entered_in:
            if frame.f_globals is torch.utils.checkpoint.__dict__:
                raise RuntimeError(
                    "a layer draws random numbers under torch.utils.checkpoint, and could not draw the same ones "
                    "again: let GPipe's use_checkpoint recompute the stage instead"
                )
            frame = frame.f_back

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            randomness, stage, microbatch = self.cell
            self.generators[device] = torch.Generator(device).manual_seed(randomness.seed(stage, microbatch))
        return self.generators[device]


@cache
def _is_random(function) -> bool:
    return torch.Tag.nondeterministic_seeded in function.tags


def _device(args, kwargs) -> torch.device:
    """Where an operator's result lives: its first tensor's device, else the one asked for, else the CPU."""
    for argument in args:
        if isinstance(argument, torch.Tensor):
            return argument.device
    return torch.device(kwargs.get("device") or "cpu")


def _through_default_generator(generator: torch.Generator, function, args, kwargs):
    device = generator.device
    default = torch.default_generator
    if device.type == "cuda":
        default = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    with _default_generator:
        found = default.get_state()
        default.set_state(generator.get_state())
        try:
            return function(*args, **kwargs)
        finally:
            generator.set_state(default.get_state())
            default.set_state(found)
