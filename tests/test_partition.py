"""Cutting L layers into K stages: exact against every possible cut, and measuring costs disturbs nothing."""

import copy
import math
import random
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from torch import nn

from micropp import partition
from micropp.partition import check_balance, equal_counts, layer_parameters, layer_seconds, lightest_split


def heaviest(costs, counts) -> Fraction:
    """The heaviest stage, added up without rounding."""
    exact, stages, start = [Fraction(cost) for cost in costs], [], 0
    for count in counts:
        stages.append(sum(exact[start : start + count]))
        start += count
    return max(stages)


def every_cut(n_layers: int, n_partitions: int):
    for cuts in combinations(range(1, n_layers), n_partitions - 1):
        edges = (0, *cuts, n_layers)
        yield [end - start for start, end in zip(edges, edges[1:])]


KINDS = {
    "ints": lambda r: r.randint(0, 20),
    "floats": lambda r: r.random(),
    "mostly zeros": lambda r: r.choice([0, 0, 0, r.random()]),
    "far apart": lambda r: r.random() * 10.0 ** r.randint(-20, 20),
    "rounding matters": lambda r: r.choice([0.1, 0.2, 0.3]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_cut_at_all_is_lighter(kind):
    r = random.Random(kind)
    equal_was_worse = 0
    for _ in range(150):
        n_layers = r.randint(1, 9)
        n_partitions = r.randint(1, n_layers)
        costs = [KINDS[kind](r) for _ in range(n_layers)]
        given = list(costs)
        counts = lightest_split(costs, n_partitions)
        assert costs == given
        assert len(counts) == n_partitions and sum(counts) == n_layers and min(counts) >= 1, (costs, counts)
        best = min(heaviest(costs, cut) for cut in every_cut(n_layers, n_partitions))
        assert heaviest(costs, counts) == best, (costs, n_partitions, counts)
        equal_was_worse += heaviest(costs, equal_counts(n_layers, n_partitions)) > best
    assert equal_was_worse > 5  # the cases tell a good cut from a plain one


@pytest.mark.parametrize(
    "costs, n_partitions, counts",
    [([4, 1, 1, 1, 1, 4], 3, [1, 4, 1]), ([1, 1, 1, 9], 2, [3, 1]), ([9, 0, 0, 0], 4, [1, 1, 1, 1]), ([5], 1, [1])],
)
def test_cuts_with_one_right_answer(costs, n_partitions, counts):
    assert lightest_split(costs, n_partitions) == counts


def test_layers_of_one_cost_are_shared_out_evenly():
    for cost in (0, 1, 0.1):
        assert sorted(lightest_split([cost] * 10, 4)) == [2, 2, 3, 3]


def test_the_papers_largest_model():
    """Transformer-L with 1663 layers over 128 partitions, Table 1: 13 layers a stage can hold, 12 cannot."""
    counts = lightest_split([0.1] * 1663, 128)
    assert len(counts) == 128 and sum(counts) == 1663 and set(counts) <= set(range(1, 14)) and max(counts) == 13
    r = random.Random(0)
    costs = [r.random() for _ in range(1663)]
    assert heaviest(costs, lightest_split(costs, 128)) < heaviest(costs, equal_counts(1663, 128))


@pytest.mark.parametrize("bad", [-1, -0.5, math.nan, math.inf])
def test_a_cost_that_is_no_cost(bad):
    with pytest.raises(ValueError, match=r"costs\[1\] is "):
        lightest_split([1, bad, 1], 2)


@pytest.mark.parametrize("n_layers", range(1, 13))
def test_equal_counts(n_layers):
    for n_partitions in range(1, n_layers + 1):
        counts = equal_counts(n_layers, n_partitions)
        assert len(counts) == n_partitions and sum(counts) == n_layers
        assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)
    assert equal_counts(10, 4) == [3, 3, 2, 2]


@pytest.mark.parametrize(
    "cut",
    [
        equal_counts,
        lambda n_layers, k: lightest_split([1] * n_layers, k),
        lambda n_layers, k: check_balance([1] * k, n_layers, k),
    ],
)
def test_sizes_that_cannot_be_cut(cut):
    with pytest.raises(
        ValueError, match="^8 partitions need at least 8 layers, but the model has 6: lower n_partitions$"
    ):
        cut(6, 8)
    for n_partitions in (0, -1):
        with pytest.raises(ValueError, match=f"n_partitions must be at least 1, got {n_partitions}"):
            cut(6, n_partitions)


def test_check_balance():
    assert check_balance((1, 4, torch.tensor(1)), 6, 3) == [1, 4, 1]
    for balance, error, message in [
        ([3, 3], ValueError, r"balance \[3, 3\] is for 2 stages, but n_partitions is 3"),
        ([3, 0, 3], ValueError, r"balance\[1\] is 0, but a stage needs at least 1 layer"),
        ([7, -2, 1], ValueError, r"balance\[1\] is -2"),
        ([2, 2, 1], ValueError, r"balance \[2, 2, 1\] adds up to 5 layers, but the model has 6"),
        ([2.0, 2, 2], TypeError, r"balance\[0\] is 2.0"),
        (["2", 2, 2], TypeError, r"balance\[0\] is '2'"),
    ]:
        with pytest.raises(error, match=message) as raised:
            check_balance(balance, 6, 3)
        assert "\n" not in str(raised.value) and ": " in str(raised.value)


def test_layer_parameters_counts_each_parameter_once():
    shared = nn.Linear(4, 4)
    tied = nn.Linear(4, 4)
    tied.weight = shared.weight
    model = nn.Sequential(
        shared, nn.ReLU(), tied, shared, nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    )
    assert layer_parameters(model) == [20, 0, 4, 0, 16]
    assert sum(layer_parameters(model)) == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(TypeError, match="nn.Sequential"):
        layer_parameters(nn.Linear(2, 2))


class Draws(nn.Module):
    """Uses both generators, and writes into what it is given."""

    def forward(self, x):
        return x.mul_(1 + random.random()) + torch.rand_like(x)


class Both(nn.Module):
    def forward(self, pair):
        a, b = pair
        return a + b, a * b


def test_layer_seconds_leaves_everything_as_it_was():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), Draws(), nn.Linear(8, 3)
    )
    model[5].eval()
    model[5].bias.requires_grad_(False)
    x = torch.randn(10, 6, requires_grad=True)
    model(torch.randn(10, 6)).sum().backward()
    state, x_before = copy.deepcopy(model.state_dict()), x.detach().clone()
    gradients = {
        name: (parameter.grad, None if parameter.grad is None else parameter.grad.clone())
        for name, parameter in model.named_parameters()
    }
    assert gradients["0.weight"][1].abs().sum() > 0 and gradients["5.bias"][0] is None
    modes = [module.training for module in model.modules()]
    generator, python_generator = torch.get_rng_state(), random.getstate()

    for grad_mode in (torch.enable_grad, torch.no_grad):
        with grad_mode():
            seconds = layer_seconds(model, x, repeats=2)
            assert torch.is_grad_enabled() == (grad_mode is torch.enable_grad)
        assert len(seconds) == 6 and all(0 < second < 60 for second in seconds)

    assert torch.equal(torch.get_rng_state(), generator) and random.getstate() == python_generator
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        grad, copied = gradients[name]
        assert parameter.grad is grad and (grad is None or torch.equal(grad, copied))
    assert torch.equal(x, x_before) and x.grad is None
    model(x)  # had it run on the model itself, the states would differ
    assert not torch.equal(torch.get_rng_state(), generator)
    assert not torch.equal(model[1].running_mean, state["1.running_mean"])


def test_layer_seconds_takes_tuples_integers_and_frozen_layers():
    pair = (torch.randn(4, 3), torch.randn(4, 3, requires_grad=True))
    assert len(layer_seconds(nn.Sequential(Both(), Both()), pair, repeats=1)) == 2
    frozen = nn.Embedding(7, 3).requires_grad_(False)
    assert len(layer_seconds(nn.Sequential(frozen, nn.Linear(3, 2)), torch.tensor([1, 2, 6]), repeats=1)) == 2


def test_layer_seconds_runs_forward_and_backward_once_a_repeat():
    counts = {"forward": 0, "backward": 0}

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            counts["forward"] += 1
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            counts["backward"] += 1
            return gradient

    class Layer(nn.Module):
        def forward(self, x):
            return Counted.apply(x)

    layer_seconds(nn.Sequential(nn.Linear(2, 2), Layer()), torch.ones(1, 2), repeats=3)
    assert counts == {"forward": 4, "backward": 4}  # three and a warm-up
    layer_seconds(nn.Sequential(Layer()), torch.ones(1, 2), repeats=3)
    assert counts == {"forward": 8, "backward": 4}  # nobody wants the gradient of a first layer's input
    with torch.no_grad():
        layer_seconds(nn.Sequential(nn.Linear(2, 2), Layer()), torch.ones(1, 2), repeats=3)
    assert counts == {"forward": 12, "backward": 8}  # the caller's grad mode is not what is measured


def test_layer_seconds_is_the_median_of_forward_and_backward_after_a_warm_up(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(partition, "_now", lambda: clock[0])

    class Takes(nn.Module):
        def __init__(self, *seconds):
            super().__init__()
            self.seconds, self.weight = iter(seconds), nn.Parameter(torch.ones(()))

        def forward(self, x):
            took = next(self.seconds)

            def backward(gradient):
                clock[0] += 2 * took

            clock[0] += took
            y = x * self.weight
            y.register_hook(backward)
            return y

    model = nn.Sequential(Takes(100, 3, 1, 2), Takes(100, 5, 5, 50))
    assert layer_seconds(model, torch.ones(4, 2), repeats=3) == [6, 15]


def test_layer_seconds_refuses():
    with pytest.raises(TypeError, match="nn.Sequential"):
        layer_seconds(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="repeats is 0"):
        layer_seconds(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), repeats=0)
