"""What the tests hold a pipeline against: one plain pass over the whole mini-batch, in float64; random schedules."""

import copy
from pathlib import Path

import torch
from torch import nn

from micropp.schedule import Action

ROOT = Path(__file__).resolve().parent.parent


def mlp(n_layers: int, width: int = 5, seed: int = 0) -> nn.Sequential:
    """Linear and Tanh in turn, n_layers in all, float64."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) if i % 2 == 0 else nn.Tanh() for i in range(n_layers))).double()


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Two models that share no storage, with the same weights."""
    return copy.deepcopy(model), copy.deepcopy(model)


def squares(output) -> torch.Tensor:
    """A loss that every element of the output, and its place, has a say in."""
    outputs = (output,) if isinstance(output, torch.Tensor) else output
    total = 0
    for i, y in enumerate(outputs):
        if y.is_floating_point():
            weights = torch.linspace(0.5, 1.5 + i, y.numel(), dtype=y.dtype).view_as(y)
            total = total + (weights * y**2).sum() / len(y)
    return total


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(expected: nn.Module, actual: nn.Module, tolerance: float = 1e-10) -> None:
    """Every parameter by name; a gradient must be there on both sides or on neither, and not all may be zero."""
    assert any(g is not None and g.abs().max() > 0 for g in gradients(expected).values()), "all zero: nothing shown"
    compare_gradients(expected, actual, tolerance)


def compare_gradients(expected: nn.Module, actual: nn.Module, tolerance: float = 1e-10) -> None:
    """The same, where there may be nothing to learn."""
    ours, theirs = gradients(actual), gradients(expected)
    assert list(ours) == list(theirs)
    for name, gradient in theirs.items():
        if gradient is None:
            assert ours[name] is None, f"{name} has a gradient, in the plain model it has none"
            continue
        assert ours[name] is not None, f"{name} has no gradient"
        torch.testing.assert_close(ours[name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")


def random_schedule(rng, K, M):
    """A valid schedule, by doing whatever may be done next, in random order."""
    todo = {(kind, m, k) for kind in "FRB" for m in range(M) for k in range(K) if kind != "R" or rng.random() < 0.5}
    schedule = [[] for _ in range(K)]
    while todo:

        def ready(cell):
            kind, m, k = cell
            if kind == "F":
                return ("F", m, k - 1) not in todo
            return ("F", m, k) not in todo and (kind == "R" or {("R", m, k), ("B", m, k + 1)}.isdisjoint(todo))

        kind, m, k = rng.choice(sorted(filter(ready, todo)))
        todo.remove((kind, m, k))
        schedule[k].append(Action(kind, m))
    return schedule
