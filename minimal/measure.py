"""What is measured of the pipeline and of its plain twin: seconds, what every stage did when, bytes, gradients.

A step is forward, loss and backward; the optimizer, the same for both, is left out.
"""

import copy
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from implementation import GPipe
from micropp.memory import MemoryTracker
from micropp.schedule import SCHEDULES, naive, rematerialized, split
from micropp.timeline import Timeline, replay

Step = Callable[[Tensor, Tensor], Tensor]  # (N, 64), (N,) → the mini-batch loss, its gradients in place


class Twins:
    """The pipeline and the plain model, equal weights at first, and how each takes one step.

    "One device" is the first stage's: on a CPU, as many intra-op threads as one stage gets.
    """

    def __init__(self, model: nn.Sequential, schedule: str, **arguments):
        """`arguments`: those of GPipe, after the model."""
        plain = copy.deepcopy(model)
        self.pipeline, self.schedule = GPipe(model, **arguments), schedule
        self.device = (self.pipeline.devices or [torch.device("cpu")])[0]
        self.plain = plain.to(self.device)

    @property
    def threads_a_stage(self) -> int:
        return max(1, torch.get_num_threads() // self.pipeline.n_partitions)

    def pipeline_step(self, x: Tensor, y: Tensor) -> Tensor:
        if self.schedule == "gpipe":
            y = y.to((self.pipeline.devices or [self.device])[-1])
            loss = cross_entropy(self.pipeline(x), y)
        else:
            loss = self._loss_inside(x, y, SCHEDULES[self.schedule])
        loss.backward()
        return loss.detach()

    def stop_and_wait_step(self, x: Tensor, y: Tensor) -> Tensor:
        """One cell at a time: nothing competes with it for a core."""
        loss = self._loss_inside(x, y, naive)
        loss.backward()
        return loss.detach()

    def plain_step(self, x: Tensor, y: Tensor) -> Tensor:
        found = torch.get_num_threads()
        torch.set_num_threads(self.threads_a_stage)
        try:
            loss = cross_entropy(self.plain(x), y)
            loss.backward()
        finally:
            torch.set_num_threads(found)
        return loss.detach()

    def _loss_inside(self, x: Tensor, y: Tensor, schedule) -> Tensor:
        return self.pipeline.loss(cross_entropy, x, y.to((self.pipeline.devices or [self.device])[-1]), schedule)


def seconds(step: Step, x: Tensor, y: Tensor, devices: Iterable[torch.device]) -> tuple[float, Tensor]:
    """How long the step took, its last kernel included, and its loss."""
    devices = [device for device in set(devices) if device.type == "cuda"]
    for device in devices:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    loss = step(x, y)
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, loss


class Recordings:
    """What every stage did when, in a few steps spread over the training, so that noise hits them as it hits the rest.

    Each time there are two: a step as it really goes, and one of the same cells run one at a time, for the replay.
    """

    def __init__(self, twins: Twins):
        self.twins = twins
        self._steps: list[Timeline] = []
        self._cells = Timeline(twins.pipeline.n_partitions)

    def take(self, x: Tensor, y: Tensor) -> None:
        """One more of both, on a mini-batch as large as the others; leaves no gradients behind."""
        pipeline = self.twins.pipeline
        self.n_microbatches = min(pipeline.n_microbatches, len(x))
        with pipeline.recorded() as timeline:
            self.twins.pipeline_step(x, y)
        self._steps.append(timeline)
        rematerialize = pipeline.use_checkpoint
        # An R needs nothing but its own stage's input: it would run beside the next stage's F even in stop-and-wait.
        # It does just what an F does that keeps its graph, so that is what is taken for it.
        pipeline.use_checkpoint = False
        try:
            pipeline.zero_grad()
            with pipeline.recorded() as timeline:
                self.twins.stop_and_wait_step(x, y)
        finally:
            pipeline.use_checkpoint = rematerialize
        pipeline.zero_grad()
        for stage, action, start, end in timeline.spans:
            kind = "R" if rematerialize and action.kind == "F" else action.kind
            self._cells.add(stage, action._replace(kind=kind), start, end)
        if rematerialize:
            self._take_forwards(x)

    def _take_forwards(self, x: Tensor) -> None:
        """The F cells of re-materialization, which keep no graph: each micro-batch goes through by itself."""
        pipeline, given = self.twins.pipeline, self.twins.pipeline.n_microbatches
        parts = split(x, self.n_microbatches)
        pipeline.n_microbatches = 1
        try:
            for m, part in enumerate(parts):
                with pipeline.recorded() as timeline, torch.no_grad():
                    pipeline(part)
                for stage, action, start, end in timeline.spans:
                    self._cells.add(stage, action._replace(microbatch=m), start, end)
        finally:
            pipeline.n_microbatches = given

    def recorded(self) -> Timeline:
        """The step with the median makespan."""
        return sorted(self._steps, key=lambda timeline: timeline.makespan)[(len(self._steps) - 1) // 2]

    def replayed(self) -> Timeline:
        """The run's own schedule with what its cells take alone, as on K devices that share nothing."""
        pipeline = self.twins.pipeline
        schedule = SCHEDULES[self.twins.schedule](pipeline.n_partitions, self.n_microbatches)
        return replay(self._cells, rematerialized(schedule) if pipeline.use_checkpoint else schedule)


def memory(twins: Twins, optimizers: dict[str, torch.optim.Optimizer], x: Tensor, y: Tensor) -> dict[str, float]:
    """Peak and activation MB of one step each: the plain model's, the pipeline's with and without re-materialization.

    Not to be timed: every operation is watched.
    """

    def watch(name: str, module: nn.Module, step: Step) -> tuple[float, float]:
        with MemoryTracker(module, optimizer=optimizers[name], existing=(x, y)) as tracker:
            step(x, y)
        module.zero_grad()
        return tracker.peak_mb, tracker.activation_mb

    found = {}
    found["sequential_peak_mb"], found["sequential_activation_mb"] = watch("plain", twins.plain, twins.plain_step)
    chosen = twins.pipeline.use_checkpoint
    try:
        for name, twins.pipeline.use_checkpoint in (("with", True), ("without", False)):
            peak, activations = watch("pipeline", twins.pipeline, twins.pipeline_step)
            found[f"peak_mb_{name}_checkpoint"], found[f"activation_mb_{name}_checkpoint"] = peak, activations
            if twins.pipeline.use_checkpoint == chosen:
                found["peak_mb"], found["activation_mb"] = peak, activations
    finally:
        twins.pipeline.use_checkpoint = chosen
    return found


def gradient_difference(twins: Twins, x: Tensor, y: Tensor) -> dict[str, float]:
    """The largest difference between two entries of the gradients, and the largest entry, to judge it by.

    Both models are float64 copies of the pipeline's, as it is now.
    """
    pipeline = twins.pipeline
    model = nn.Sequential(*(layer for stage in pipeline.stages for layer in stage))
    exact = Twins(
        copy.deepcopy(model).to(twins.device).double(),
        twins.schedule,
        n_partitions=pipeline.n_partitions,
        n_microbatches=pipeline.n_microbatches,
        use_checkpoint=pipeline.use_checkpoint,
        balance=pipeline.balance,
        devices=pipeline.devices,
    )
    exact.plain_step(x.double(), y)
    exact.pipeline_step(x.double(), y)
    pairs = [
        (p.grad, q.grad.to(p.device))
        for p, q in zip(exact.plain.parameters(), exact.pipeline.parameters(), strict=True)
    ]
    return {  # torch's max is NaN if there is one anywhere, so it never looks like agreement
        "max_gradient_difference": torch.stack([(g - h).abs().max() for g, h in pairs]).max().item(),
        "max_gradient": torch.stack([g.abs().max() for g, _ in pairs]).max().item(),
    }
