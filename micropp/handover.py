"""The pipeline as autograd sees it: a few operations, whose backward hands the gradients over.

Gradients go back through autograd rather than into `.grad`, so that `torch.autograd.grad`, hooks,
accumulation over mini-batches and a surrounding DistributedDataParallel work as on any module.
A `run` here is one mini-batch on its way through a pipeline (`implementation.Run`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
        ctx.mark_non_differentiable(*(y for y, d in zip(outputs, run.differentiable_outputs) if not d))
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
        return sum(run.losses)

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


def leaves(microbatch):
    """A micro-batch cut off from the caller's graph, to be differentiated by itself."""
    if isinstance(microbatch, Tensor):
        return microbatch.detach().requires_grad_(microbatch.requires_grad)
    return tuple(leaves(tensor) for tensor in microbatch)


def merged_gradients(parts: Sequence[Tensor | None], whole: Tensor) -> Tensor | None:
    if all(part is None for part in parts):
        return None
    sizes = [len(piece) for piece in whole.tensor_split(len(parts))]
    return torch.cat(
        [
            whole.new_zeros(size, *whole.shape[1:]) if part is None else part.to(whole.device)
            for part, size in zip(parts, sizes)
        ]
    )
