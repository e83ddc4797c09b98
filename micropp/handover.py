"""What goes in and out of a pipeline, and the operations as which autograd sees it.

Gradients go back through autograd rather than into `.grad`, so that `torch.autograd.grad`, hooks,
accumulation over mini-batches and a surrounding DistributedDataParallel work as on any module.
A `run` here is one mini-batch on its way through a pipeline (`implementation.Run`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from micropp.schedule import merge, split


class MiniBatch:
    """A mini-batch at both ends of the pipeline: cut into micro-batches on its way in, put together on its way out.

    Args:
        batch: a tensor, or a tuple of tensors, (N, …) each.
        n_microbatches: M at the most; a mini-batch of fewer samples makes as many as it has.
        parameters: of the model.
    """

    def __init__(self, batch, n_microbatches: int, parameters: list[Tensor]):
        split(batch, 1)  # says what is wrong with a batch that cannot be split
        given = (batch,) if isinstance(batch, Tensor) else batch
        self.parameters = parameters
        self.tensors = (*given, *parameters)  # all that autograd may ask a gradient for
        self.differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)
        self.n_samples = len(given[0])
        self.n_microbatches = min(n_microbatches, self.n_samples)
        self.sizes = [len(part) for part in given[0].tensor_split(self.n_microbatches)]  # n_m, N in all
        self.parts = [_leaves(part) for part in split(batch, self.n_microbatches)]

    def merged(self, outputs: list) -> tuple[Tensor, ...]:
        """The outputs of the micro-batches, (n_m, …) each, as the outputs of the mini-batch, (N, …)."""
        self.single_output = isinstance(outputs[0], Tensor)
        parts = [(part,) if self.single_output else part for part in outputs]
        if any(y.dim() == 0 for y in parts[0]):
            raise ValueError("the model returned a scalar: the batch must stay in dim 0 of what a pipeline returns")
        self.output_sizes = [[len(y) for y in column] for column in zip(*parts)]
        self.differentiable_outputs = [any(y.requires_grad for y in column) for column in zip(*parts)]
        return merge([tuple(y.detach() for y in part) for part in parts])

    def split_gradients(self, output_gradients: Sequence[Tensor | None]) -> list[tuple[Tensor | None, ...]]:
        """For each micro-batch, the gradients of its outputs."""
        columns = [
            [None] * self.n_microbatches if gradient is None else gradient.split(sizes)
            for gradient, sizes in zip(output_gradients, self.output_sizes)
        ]
        return list(zip(*columns))

    def gradients(self, parts: list[tuple], by_stage: list[dict]) -> list[Tensor | None]:
        """One gradient for each of `tensors`, None where it had no say.

        Args:
            parts: for each micro-batch, the gradients of its inputs.
            by_stage: for each stage, the gradients of its parameters.
        """
        found = [self._put_together(column, tensor) for column, tensor in zip(zip(*parts), self.tensors)]
        summed = {}
        for gradients in by_stage:  # in this order always: a tied weight's sum must not depend on timing
            for parameter, gradient in gradients.items():
                there = summed.get(parameter)
                if there is not None:
                    gradient = gradient.to(there.device)
                    gradient = gradient + there if there.is_sparse else there + gradient  # dense + sparse is defined
                summed[parameter] = gradient
        return found + [summed.get(parameter) for parameter in self.parameters]

    def _put_together(self, parts: Sequence[Tensor | None], whole: Tensor) -> Tensor | None:
        if all(part is None for part in parts):
            return None
        return torch.cat(
            [
                whole.new_zeros(size, *whole.shape[1:]) if part is None else part.to(whole.device)
                for part, size in zip(parts, self.sizes)
            ]
        )


class InnerLoss:
    """A loss that the last stage computes, micro-batch by micro-batch (`GPipe.loss`)."""

    def __init__(self, loss_fn: Callable[..., Tensor], target):
        self.loss_fn, self.target = loss_fn, target
        self.losses: dict[int, Tensor] = {}

    def prepare(self, minibatch: MiniBatch) -> None:
        """Raises ValueError for a target of another length, or anything beside the model that needs a gradient."""
        split(self.target, 1)
        targets = (self.target,) if isinstance(self.target, Tensor) else self.target
        if len(targets[0]) != minibatch.n_samples:
            raise ValueError(
                f"the batch has {minibatch.n_samples} samples, its target {len(targets[0])}: they must be as many"
            )
        outside = [*targets, *(self.loss_fn.parameters() if isinstance(self.loss_fn, nn.Module) else ())]
        if any(tensor.requires_grad for tensor in outside):
            raise ValueError(
                "the target or loss_fn needs a gradient, which only the model gets: use loss_fn(pipeline(x), y)"
            )
        self.targets = split(self.target, minibatch.n_microbatches)
        # A mean over the mini-batch weighs the means over its unequal parts by their sizes.
        self.weights = [size / minibatch.n_samples for size in minibatch.sizes]
        self.differentiable = minibatch.differentiable

    def share(self, microbatch: int, output) -> tuple[Tensor | None, ...]:
        """Computes one micro-batch's share of the loss; returns the gradients of its outputs."""
        outputs = (output,) if isinstance(output, Tensor) else output
        with torch.set_grad_enabled(self.differentiable):
            loss = self.loss_fn(output, self.targets[microbatch]) * self.weights[microbatch]
        if loss.dim() > 0:
            raise ValueError(
                f"loss_fn returned a tensor of shape {tuple(loss.shape)}, but the loss is one number, "
                "a mean over dim 0: reduction='mean'"
            )
        self.losses[microbatch] = loss.detach()
        wanted = [y for y in outputs if y.requires_grad]
        found = iter(torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else ())
        return tuple(next(found, None) if y.requires_grad else None for y in outputs)

    def total(self) -> Tensor:
        """The mini-batch loss, added up in the micro-batches' order, whatever the schedule's."""
        return sum(self.losses[m] for m in sorted(self.losses))


class Pipeline(torch.autograd.Function):
    """All of the pipeline as one operation of autograd: (inputs, parameters) → token."""

    @staticmethod
    def forward(ctx, run, *tensors):
        run.forward()
        ctx.run = run
        # Recomputing with weights that have changed since would be silently wrong: autograd checks what is saved.
        ctx.save_for_backward(*(tensors if run.stages[0].rematerialize else ()))
        return torch.zeros((), device="cpu")

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        ctx.saved_tensors  # noqa: B018  raises autograd's own error if the graph is gone, or a weight has changed
        run = ctx.run
        run.retain = _graph_is_kept()
        gradients, run.output_gradients = run.output_gradients, None
        return None, *run.backward(gradients)


class HandOver(torch.autograd.Function):
    """token → the pipeline's outputs."""

    @staticmethod
    def forward(ctx, run, token):
        ctx.run = run
        ctx.set_materialize_grads(False)
        outputs = run.outputs()
        ctx.mark_non_differentiable(*(y for y, d in zip(outputs, run.minibatch.differentiable_outputs) if not d))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        ctx.run.output_gradients = gradients
        return None, torch.zeros((), device="cpu")


class LossInside(torch.autograd.Function):
    """(inputs, parameters) → the mini-batch loss, with the backward part walked already."""

    @staticmethod
    def forward(ctx, run, *tensors):
        run.forward(then="RB")
        ctx.found = run.found_gradients()
        return run.loss.total()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        ctx.saved_tensors  # noqa: B018  raises autograd's own error if this is a second backward
        found = ctx.found
        if not _graph_is_kept():
            ctx.found = None
        if gradient == 1:  # the usual case, and worth not passing over every gradient for
            return None, *found
        return None, *(None if g is None else g * gradient.to(g.device) for g in found)


def _graph_is_kept() -> bool:
    """Whether the backward that is under way was asked to retain the graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _leaves(microbatch):
    """A micro-batch cut off from the caller's graph, to be differentiated by itself."""
    if isinstance(microbatch, Tensor):
        return microbatch.detach().requires_grad_(microbatch.requires_grad)
    return tuple(_leaves(tensor) for tensor in microbatch)
