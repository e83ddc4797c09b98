"""One stage at work: forward(m), recompute(m), backward(m).

A stage is a few consecutive layers on one device. It takes the actions of its list one at a time and
keeps, for each micro-batch between F and B, what B needs: the graph that F built or, with
re-materialization, nothing but the stage's input, from which R builds the graph again (GPipe, §2.3).

    F m   inputs -> outputs              keeps a graph, or the inputs alone
    R m   (nothing) -> (nothing)         the inputs become a graph
    B m   gradients of the outputs -> gradients of the inputs; parameters' gradients add up

Nothing here knows about threads, processes or the order of the actions.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from micropp.batchnorm import MiniBatchStatistics, tracking_layers
from micropp.context import Autocast
from micropp.hooks import ForwardHooks
from micropp.randomness import Randomness, may_draw

_run_backward = torch.autograd.Variable._execution_engine.run_backward

Tensors = tuple[torch.Tensor, ...]


class _Graph(NamedTuple):
    """What one micro-batch leaves behind for its backward."""

    inputs: Tensors  # leaves: their .grad is what the previous stage gets
    outputs: Tensors


class PipelineStage:
    """Some consecutive layers, at work on the micro-batches of one mini-batch.

    The layers compute with *aliases* of their parameters: other leaves, the same storage. A stage can so
    call backward once a micro-batch, in a thread of its own, and the parameter itself still gets exactly
    one gradient, from whoever asked for it: hooks fire once, `torch.autograd.grad` leaves `.grad` alone.
    The aliases are in place only inside `substituted()`.

    Args:
        index: the stage's number k, 0 … K−1.
        layers: its layers, called one after the other on a tensor or a tuple of tensors.
        device: where inputs are moved; None leaves them where they are.
        randomness: the run's random numbers, shared by its stages.
        rematerialize: keep a micro-batch's input only, and expect R before B.
        differentiable: whether anybody will call backward.
    """

    def __init__(
        self,
        index: int,
        layers: list[nn.Module],
        *,
        device: torch.device | None = None,
        randomness: Randomness | None = None,
        rematerialize: bool = False,
        differentiable: bool = True,
    ):
        self.index, self.layers, self.device = index, layers, device
        self.differentiable = differentiable
        self.rematerialize = rematerialize and differentiable
        self.randomness = randomness or Randomness()
        # A cast weight that was cached under no_grad has no graph, and would be handed out again in R.
        self.autocast = Autocast(cache_enabled=not self.rematerialize)
        modules = list(dict.fromkeys(module for layer in layers for module in layer.modules()))
        self.hooks = ForwardHooks(modules)
        self.statistics = [MiniBatchStatistics(layer) for layer in tracking_layers(modules)]
        self._modes = [(module, module.training) for module in modules]
        self._may_draw = bool(self.hooks.modules) or may_draw(modules)
        # A stage that starts in place would change the kept input, or a leaf. Which layer comes first is only known
        # for sure by running them, so a stage with any such layer works on a copy.
        self._in_place = any(getattr(module, "inplace", False) is True for module in modules)
        self._slots = [
            (module, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._aliases = {parameter: _alias(parameter) for _, _, parameter in self._slots}
        tracked = {statistics.layer for statistics in self.statistics}
        self._buffers = [
            (buffer, type(module).__name__, name)
            for module in modules
            if module not in tracked
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._kept: dict[int, tuple[Tensors, bool]] = {}  # inputs, and whether they came as one tensor
        self._graphs: dict[int, _Graph] = {}

    @contextmanager
    def substituted(self):
        """In this block the layers compute with the aliases, in the mode (training or not) that the forward
        found them in, and leave running statistics alone."""
        parameters = [(module, name, module._parameters[name]) for module, name, _ in self._slots]
        modes = [(module, module.training) for module, _ in self._modes]
        with ExitStack() as stack:
            for statistics in self.statistics:
                stack.enter_context(statistics.apart())
            try:
                for module, training in self._modes:
                    module.training = training
                for module, name, parameter in self._slots:
                    module._parameters[name] = self._aliases[parameter]
                yield
            finally:  # what was found: the user may have put something else there since the forward
                for module, name, parameter in parameters:
                    module._parameters[name] = parameter
                for module, training in modes:
                    module.training = training

    def forward(self, microbatch: int, value):
        """F m: the stage's outputs for one micro-batch.

        Args:
            value: a tensor, or a tuple of tensors, (N/M, …) each. `requires_grad` says whether the sender
                wants a gradient for it.

        Returns:
            What the last layer returned, detached, with `requires_grad` set where B will take a gradient.

        Raises:
            TypeError: the stage returned something other than tensors.
            RuntimeError: the stage cannot be recomputed, since it changes its input or a buffer in place; or its
                output depends on a tensor that needs a gradient but is no parameter of the model.
        """
        inputs, single = self._received(value), isinstance(value, torch.Tensor)
        compute = self._without_graph if self.rematerialize else self._call
        with self._gathering() if self.statistics else nullcontext():
            result = compute(microbatch, inputs, single)
        outputs = _as_tuple(result, self.index)
        if self.rematerialize:
            self._kept[microbatch] = inputs, single
            # Without a graph nobody knows what depends on what, but a tensor handed through is the one that came.
            through = (
                {id(x) for x in inputs if not x.requires_grad} if self._wanted(inputs) else {id(y) for y in outputs}
            )
            differentiable = [id(y) not in through and (y.is_floating_point() or y.is_complex()) for y in outputs]
        else:
            if self.differentiable:
                self._graphs[microbatch] = _Graph(inputs, outputs)
            differentiable = [self.differentiable and y.requires_grad for y in outputs]
        if not self.differentiable and any(y.requires_grad for y in outputs):
            raise RuntimeError(
                f"stage {self.index} uses a tensor that needs a gradient and is no parameter of the model: "
                "register it as one, or detach it"
            )
        sent = tuple(y.detach().requires_grad_() if d else y.detach() for y, d in zip(outputs, differentiable))
        return sent[0] if isinstance(result, torch.Tensor) else sent

    def recompute(self, microbatch: int) -> None:
        """R m: builds the graph of a micro-batch again, from its kept input, with the same random numbers."""
        inputs, single = self._kept[microbatch]
        outputs = ()
        if self._wanted(inputs):
            hooks = self.hooks.repeated() if self.hooks.modules else nullcontext()
            with torch.enable_grad(), self.autocast.restored(), hooks:
                outputs = _as_tuple(self._call(microbatch, inputs, single), self.index)
        self._graphs[microbatch] = _Graph(inputs, outputs)

    def backward(self, microbatch: int, gradients: tuple[torch.Tensor | None, ...], retain: bool = False):
        """B m: the gradients of the micro-batch's inputs; the parameters' gradients add up until `gradients()`.

        Args:
            gradients: one for each output; None where there is none.
            retain: keep what a second backward needs.

        Returns:
            tuple of tensors or None, one for each input.
        """
        graph = self._graphs[microbatch]
        if not retain or self.rematerialize:
            del self._graphs[microbatch]
        if not retain:
            self._kept.pop(microbatch, None)
        pairs = [(y, g) for y, g in zip(graph.outputs, gradients) if g is not None and y.requires_grad]
        if pairs:
            # Autograd adds a leaf's gradients up itself, layer by layer, while each is still in the cache.
            first = all(alias.grad is None for alias in self._aliases.values())
            outputs, received = zip(*((y, g if g.device == y.device else g.to(y.device)) for y, g in pairs))
            # The engine itself: torch.autograd.backward checks shapes that are right here, at 30 µs a cell.
            _run_backward(outputs, received, retain, False, (), allow_unreachable=True, accumulate_grad=True)
            if first:
                self._own_gradients()
        sent = tuple(x.grad for x in graph.inputs)
        for x in graph.inputs:
            x.grad = None
        return sent

    def _own_gradients(self) -> None:
        """The next micro-batch's gradient is added in place, so no one else may be using the first one's memory.

        Autograd takes over a gradient that nobody else refers to, but looks at the tensor alone: two views of one
        storage (as the gradients of `b.view(5, 5) + c.view(5, 5)` are) both pass for unused.
        """
        for alias in self._aliases.values():
            if alias.grad is None or alias.grad.is_sparse:
                continue
            users = torch._C._storage_Use_Count(alias.grad.untyped_storage()._cdata)
            if users > 2:  # more than the gradient itself and this look at it
                alias.grad = alias.grad.clone()

    def gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """Hands over each parameter's gradient, summed over the micro-batches since the last call."""
        handed_over = {}
        for parameter, alias in self._aliases.items():
            if alias.grad is not None:
                handed_over[parameter] = alias.grad
                alias.grad = None
        return handed_over

    def _received(self, value) -> Tensors:
        tensors = (value,) if isinstance(value, torch.Tensor) else value
        if self.device is None or all(tensor.device == self.device for tensor in tensors):
            return tensors
        return tuple(
            t.detach().to(self.device, non_blocking=True).requires_grad_(t.requires_grad and self.differentiable)
            for t in tensors
        )

    @contextmanager
    def _gathering(self):
        with ExitStack() as stack:
            for statistics in self.statistics:
                stack.enter_context(statistics.gathering())
            yield

    def _wanted(self, inputs: Tensors) -> bool:
        """Whether anything in this stage, or before it, is to get a gradient."""
        return any(tensor.requires_grad for tensor in (*inputs, *self._aliases.values()))

    def _call(self, microbatch: int, inputs: Tensors, single: bool):
        if self._in_place:
            inputs = tuple(tensor.clone() for tensor in inputs)
        value = inputs[0] if single else inputs
        with self.randomness.cell(self.index, microbatch, self.rematerialize) if self._may_draw else nullcontext():
            for layer in self.layers:
                value = layer(value)
        return value

    def _without_graph(self, microbatch: int, inputs: Tensors, single: bool):
        versions = _versions(inputs), _versions(buffer for buffer, *_ in self._buffers)
        with torch.no_grad(), self.hooks.watched() if self.hooks.modules else nullcontext():
            result = self._call(microbatch, inputs, single)
        if versions[0] != _versions(inputs):
            raise RuntimeError(
                f"stage {self.index} changes its input in place, so it cannot be recomputed from it: "
                "use the out-of-place operation"
            )
        for (buffer, owner, name), version in zip(self._buffers, versions[1]):
            if buffer._version != version:
                raise RuntimeError(
                    f"stage {self.index} changes a buffer in its forward ({name} of {owner}), and would change it "
                    "again when it is recomputed: use_checkpoint=False"
                )
        return result


def _versions(tensors) -> list[int]:
    """How often each tensor has been changed in place."""
    return [tensor._version for tensor in tensors]


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Another leaf on the same storage, with whatever attributes the user gave the parameter."""
    alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    alias.__dict__.update(parameter.__dict__)
    return alias


def _as_tuple(result, index: int) -> Tensors:
    outputs = (result,) if isinstance(result, torch.Tensor) else result
    if not isinstance(outputs, tuple) or not all(isinstance(y, torch.Tensor) for y in outputs):
        raise TypeError(
            f"stage {index} returned {type(result).__name__}: "
            "what passes between stages must be a tensor or a tuple of tensors"
        )
    return outputs


def twin(module: nn.Module) -> nn.Module:
    """A module that shares everything with the given one but the slots that a stage fills with its own.

    Two stages that hold the very same layer work with it at the same time.
    """
    other = module.__new__(type(module))
    other.__dict__ = module.__dict__.copy()
    for slots in ("_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
        other.__dict__[slots] = module.__dict__[slots].copy()
    other._modules = {name: child and twin(child) for name, child in module._modules.items()}
    return other
