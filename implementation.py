"""GPipe on one machine: an `nn.Sequential`, cut into K stages that work at the same time.

    model = nn.Sequential(...)
    model = GPipe(model, n_partitions=4, n_microbatches=16)      # the training loop stays as it was

Three steps, top to bottom in this file (Huang et al., GPipe, arXiv 1811.06965v5, §2.2):

1. cut the layers into K stages and the mini-batch into M micro-batches (`GPipe`);
2. walk: a worker thread a stage takes the actions of the stage's list one by one, and hands what comes
   out to its neighbour (`Run`): outputs to the right, gradients to the left;
3. tell autograd: to the rest of the program all of this is one operation, whose backward walks the
   backward part of the same lists (`GPipe.forward`).

What one stage does with one action is in micropp/stage.py, how autograd is told in micropp/handover.py;
the lists are made in micropp/schedule.py.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import lru_cache
from queue import SimpleQueue
from weakref import WeakKeyDictionary

import torch
from torch import nn

from micropp.context import CallerContext, shared_intra_op_threads
from micropp.handover import HandOver, InnerLoss, LossInside, MiniBatch, Pipeline
from micropp.memory import estimate_memory_reduction, get_peak_memory
from micropp.partition import check_balance, equal_counts
from micropp.randomness import Randomness
from micropp.schedule import (
    Action,
    Schedule,
    ScheduleError,
    gpipe,
    one_f_one_b,
    positive_count,
    rematerialized,
    validate,
)
from micropp.stage import PipelineStage, twin
from micropp.timeline import Timeline, calculate_bubble_overhead

__all__ = [
    "GPipe",
    "PipelineStage",
    "calculate_bubble_overhead",
    "estimate_memory_reduction",
    "get_peak_memory",
    "summarize_results",
]


class GPipe(nn.Module):
    """Runs `model` as a pipeline; takes its place in any training loop.

    Output, gradients and parameters are the model's own (batch norm in training excepted: it normalises
    each micro-batch by itself). So are the names in `state_dict()`: what was saved from one loads in the other.

    Args:
        model: the layers. Inputs, outputs and what passes between layers: a tensor, or a tuple of tensors,
            the batch in dim 0 of each.
        n_partitions: K, the number of stages, 1 … number of layers.
        n_microbatches: M ≥ 1. A mini-batch with fewer samples runs with as many micro-batches as it has samples.
        use_checkpoint: re-materialization (§2.3): in training keep only each stage's inputs and recompute the rest.
        balance: layers a stage, in order; by default as equal as can be, the longer stages first.
        devices: where each stage lives, K of them; by default the layers stay where they are.

    Raises:
        TypeError: `model` is not an nn.Sequential.
        ValueError: K, M, balance or devices do not fit the model.
    """

    def __init__(
        self,
        model: nn.Sequential,
        n_partitions: int,
        n_microbatches: int,
        use_checkpoint: bool = True,
        *,
        balance: Sequence[int] | None = None,
        devices: Sequence[torch.device | str | int] | None = None,
    ):
        if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
            raise TypeError(
                f"GPipe cuts an nn.Sequential between its layers, but model is a {type(model).__name__} "
                "with a forward of its own: put its layers in an nn.Sequential"
            )
        super().__init__()
        positive_count("n_microbatches", n_microbatches)
        counts = equal_counts(len(model), n_partitions)
        self.balance = counts if balance is None else check_balance(balance, len(model), n_partitions)
        self.n_partitions, self.n_microbatches, self.use_checkpoint = n_partitions, n_microbatches, use_checkpoint
        self.devices = None if devices is None else [torch.device(device) for device in devices]
        if devices is not None and len(self.devices) != n_partitions:
            raise ValueError(f"{n_partitions} partitions need {n_partitions} devices, got {len(self.devices)}")
        self._timeline = None
        if model._parameters or model._buffers:
            raise ValueError(
                "the model itself has parameters or buffers, which no stage would own: put them in a layer"
            )
        for name, layer in model._modules.items():
            if name in dir(self):
                raise ValueError(f"a layer may not be called {name!r} (GPipe has an attribute of that name): rename it")
            self.add_module(name, layer)
        self.training = model.training
        if any(nn.parameter.is_lazy(parameter) for parameter in self.parameters()):
            raise ValueError("the model has lazy layers: run it once on a sample, so that their sizes are known")
        if self.devices is not None:
            self._place()

    @property
    def stages(self) -> nn.ModuleList:
        """The K stages, each an nn.Sequential over the model's own layers."""
        return nn.ModuleList(nn.Sequential(*layers) for layers in self._layers())

    def forward(self, batch):
        """The model's output for a mini-batch.

        Args:
            batch: a tensor, or a tuple of tensors, (N, …) each.

        Returns:
            what `model(batch)` returns.

        Raises:
            ValueError: the mini-batch is empty.
        """
        with self._lock():
            run = Run(self, batch, gpipe)
            if not run.differentiable:
                run.forward()
                outputs = run.outputs()
            else:
                # Two operations, joined by a token on the CPU: autograd runs an operation's backward in the thread
                # that owns the device of its outputs. There our workers' kernels have to run too, so the one that
                # waits for the workers must not occupy it.
                outputs = HandOver.apply(run, Pipeline.apply(run, *run.minibatch.tensors))
            return outputs[0] if run.minibatch.single_output else outputs

    def loss(
        self,
        loss_fn: Callable[..., torch.Tensor],
        batch,
        target: torch.Tensor,
        schedule: Callable[[int, int], Schedule] = one_f_one_b,
    ) -> torch.Tensor:
        """The mini-batch loss, where the last stage computes each micro-batch's share as soon as it can.

        A backward can then start before the last forward is done, as 1F1B needs. All of the schedule is
        walked in this call; `.backward()` on the result only hands the gradients over.

        Args:
            loss_fn: `loss_fn(output, target)`, a mean over dim 0 in which every sample counts alike.
            batch: as in `forward`.
            target: a tensor, or a tuple of tensors, (N, …) each; neither it nor loss_fn gets a gradient.
            schedule: a function of K and M, such as those in micropp.schedule.

        Returns:
            scalar tensor.

        Raises:
            ValueError: batch and target are of different lengths, or something in target or loss_fn needs a gradient.
            ScheduleError: the schedule cannot be run.
        """
        with self._lock():
            run = Run(self, batch, schedule, InnerLoss(loss_fn, target))
            if not run.differentiable:
                run.forward()
                return run.loss.total()
            return LossInside.apply(run, *run.minibatch.tensors)

    @contextmanager
    def recorded(self):
        """Yields a Timeline that fills with what every stage does for the forwards that begin in this block.

        Their backwards belong to it, also where they come later. Blocks are not nested.

        On CUDA each action is followed by a synchronisation, so that its end is its kernels' end.
        """
        self._timeline = Timeline(self.n_partitions)
        try:
            yield self._timeline
        finally:
            self._timeline = None

    def _lock(self) -> threading.RLock:
        """Held while the stages have the layers; not an attribute, since a lock can be neither copied nor pickled."""
        return _locks.setdefault(self, threading.RLock())

    def _layers(self) -> list[list[nn.Module]]:
        layers = iter(list(self._modules.values()))
        return [[next(layers) for _ in range(count)] for count in self.balance]

    def device_of(self, stage: int) -> torch.device | None:
        """Where a stage lives: with its parameters and buffers; if it has none, where `devices` says, if it does."""
        layers = self._layers()[stage]
        there = next((tensor.device for layer in layers for tensor in (*layer.parameters(), *layer.buffers())), None)
        return there if there is not None or self.devices is None else self.devices[stage]

    def _place(self) -> None:
        home = {}
        for k, (layers, device) in enumerate(zip(self._layers(), self.devices)):
            for layer in layers:
                for parameter in layer.parameters():
                    j = home.setdefault(parameter, k)
                    if self.devices[j] != device:
                        raise ValueError(
                            f"stages {j} and {k} share a parameter but not a device ({self.devices[j]}, {device}): "
                            "put them on one device, or choose another balance"
                        )
        for layers, device in zip(self._layers(), self.devices):
            for layer in layers:
                layer.to(device)


_locks: WeakKeyDictionary[GPipe, threading.RLock] = WeakKeyDictionary()


class _Stopped(Exception):
    """Another stage has failed: nothing more will come."""


class _Mailbox:
    """What one stage sends to its neighbour: values by micro-batch, taken in any order."""

    def __init__(self):
        self._queue, self._arrived = SimpleQueue(), {}

    def put(self, microbatch: int | None, value=None) -> None:
        self._queue.put((microbatch, value))

    def take(self, microbatch: int):
        while microbatch not in self._arrived:
            sender, value = self._queue.get()
            if sender is None:
                raise _Stopped
            self._arrived[sender] = value
        return self._arrived.pop(microbatch)


class Run:
    """One mini-batch on its way through the pipeline.

    Between stages k−1 and k there is a mailbox for each direction; those at the ends are the caller's.

        inputs[0] → stage 0 → inputs[1] → stage 1 → … → inputs[K]
        gradients[0] ← stage 0 ← gradients[1] ← stage 1 ← … ← gradients[K]
    """

    def __init__(self, pipeline: GPipe, batch, schedule, loss: InnerLoss | None = None):
        K = pipeline.n_partitions
        self.minibatch = MiniBatch(batch, pipeline.n_microbatches, list(pipeline.parameters()))
        self.differentiable, self.loss = self.minibatch.differentiable, loss
        if loss is not None:
            loss.prepare(self.minibatch)
        rematerialize = pipeline.use_checkpoint and pipeline.training and self.differentiable
        self.lists = _lists(schedule, K, self.minibatch.n_microbatches, rematerialize)
        self.context, self.timeline, self.lock = CallerContext(), pipeline._timeline, pipeline._lock()
        self.stages, randomness, seen = [], Randomness(), set()
        for k, layers in enumerate(pipeline._layers()):
            layers = [twin(layer) if not seen.isdisjoint(layer.modules()) else layer for layer in layers]
            seen.update(module for layer in layers for module in layer.modules())
            self.stages.append(
                PipelineStage(
                    k,
                    layers,
                    device=pipeline.device_of(k),
                    randomness=randomness,
                    rematerialize=rematerialize,
                    differentiable=self.differentiable,
                )
            )
        self.inputs = [_Mailbox() for _ in range(K + 1)]
        self.gradients = [_Mailbox() for _ in range(K + 1)]
        for m, part in enumerate(self.minibatch.parts):
            self.inputs[0].put(m, part)
        self.retain, self.broken, self._failure = False, False, None

    def walk(self, kinds: str) -> None:
        """Takes the actions of these kinds off every stage's list, all stages at once, a thread each.

        Raises:
            what a stage raised first, with that stage's traceback and a note of its number.
        """
        if self.broken:
            raise RuntimeError("a backward through this output has failed before: run the forward again")
        context = self.context if "F" in kinds else CallerContext()
        workers = []
        with shared_intra_op_threads(len(self.stages)) as take_share:
            self._take_share = take_share
            try:
                for k in range(1, len(self.stages)):
                    work = copy_context().run, self._work, k, kinds, context
                    worker = threading.Thread(target=work[0], args=work[1:], name=f"stage {k}", daemon=True)
                    worker.start()
                    workers.append(worker)
                self._work(0, kinds, context)  # the caller's own thread would only wait
                for worker in workers:
                    worker.join()
            except BaseException as error:  # Ctrl-C: the workers still have the layers, so they must end first
                self._fail(error)
                for worker in workers:
                    worker.join()
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # it knows this frame, through its traceback

    def _fail(self, error: BaseException) -> None:
        self.broken, self._failure = True, self._failure or error
        for mailbox in (*self.inputs, *self.gradients):
            mailbox.put(None)

    def _work(self, k: int, kinds: str, context: CallerContext) -> None:
        action = None
        try:
            self._take_share()
            with context.entered(self.stages[k].device):
                for action in self.lists[k]:
                    if self._failure is not None:
                        raise _Stopped
                    if action.kind in kinds:
                        self._act(k, action)
        except _Stopped:
            pass
        except BaseException as error:
            error.add_note(f"raised in stage {k}" + (f", at {action}" if action else ""))
            self._fail(error)

    def _act(self, k: int, action: Action) -> None:
        stage, m = self.stages[k], action.microbatch
        if action.kind == "F":
            value = self.inputs[k].take(m)
            started = time.perf_counter()
            output = stage.forward(m, value)
            if self.loss is not None and k == len(self.stages) - 1:
                self.gradients[-1].put(m, self.loss.share(m, output))
            self._record(k, action, started)
            self.inputs[k + 1].put(m, output)
        elif action.kind == "R":
            started = time.perf_counter()
            stage.recompute(m)
            self._record(k, action, started)
        else:
            received = self.gradients[k + 1].take(m)
            started = time.perf_counter()
            sent = stage.backward(m, received, self.retain)
            self._record(k, action, started)
            self.gradients[k].put(m, sent)

    def _record(self, k: int, action: Action, started: float) -> None:
        if self.timeline is not None:
            device = self.stages[k].device
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)
            self.timeline.add(k, action, started, time.perf_counter())

    @contextmanager
    def substituted(self):
        """The stages' parameters and statistics are theirs in this block (see PipelineStage)."""
        with ExitStack() as stack:
            for stage in self.stages:
                stack.enter_context(stage.substituted())
            yield

    def forward(self, then: str = "") -> None:
        """Walks the forward part (and what else is named), and lets running statistics move once."""
        with self.substituted():
            self.walk("F" + then)
        for stage in self.stages:
            for statistics in stage.statistics:
                statistics.commit()

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The micro-batches' outputs, merged; called once, after the forward part."""
        return self.minibatch.merged(self._taken(self.inputs[-1]))

    def backward(self, output_gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Walks the backward part: from the outputs' gradients to those of the mini-batch and the parameters."""
        for m, gradients in enumerate(self.minibatch.split_gradients(output_gradients)):
            self.gradients[-1].put(m, gradients)
        with self.lock, self.substituted():
            self.walk("RB")
        return self.found_gradients()

    def found_gradients(self) -> list[torch.Tensor | None]:
        """After the backward part: one gradient for each of `minibatch.tensors`, None where it had no say."""
        return self.minibatch.gradients(self._taken(self.gradients[0]), [stage.gradients() for stage in self.stages])

    def _taken(self, mailbox: _Mailbox) -> list:
        return [mailbox.take(m) for m in range(self.minibatch.n_microbatches)]


@lru_cache(maxsize=256)
def _lists(schedule, n_partitions: int, n_microbatches: int, rematerialize: bool) -> Schedule:
    lists = schedule(n_partitions, n_microbatches)
    validate(lists)
    found = len(lists), 1 + max(action.microbatch for actions in lists for action in actions)
    if found != (n_partitions, n_microbatches):
        raise ScheduleError(
            f"the schedule is for {found[0]} stages and {found[1]} micro-batches, "
            f"but it is to run {n_partitions} and {n_microbatches}: make it from the K and M that it is called with"
        )
    return rematerialized(lists) if rematerialize else lists


def summarize_results(config: dict, stats: dict) -> str:
    """Two columns of text: what was run, and what came out of it; floats with four significant digits."""
    rows = [*config.items(), *stats.items()]
    width = max((len(str(name)) for name, _ in rows), default=0)
    return "\n".join(
        f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}"
        for name, value in rows
    )
