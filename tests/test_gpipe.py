"""GPipe takes the model's place: output, gradients, parameters, errors."""

import copy
import pickle

import pytest
import torch
from torch import nn

from implementation import (
    GPipe,
    calculate_bubble_overhead,
    estimate_memory_reduction,
    get_peak_memory,
    summarize_results,
)
from micropp.schedule import SCHEDULES
from tests.oracle import assert_same_gradients, mlp, squares, twins

# (L, K, M, N): M=1, K=1, M<K, K=L, 10 samples in 4, one sample a micro-batch, fewer samples than M
AWKWARD = [
    (6, 1, 1, 3),
    (6, 1, 4, 10),
    (6, 3, 1, 4),
    (7, 3, 4, 10),
    (7, 7, 2, 5),
    (6, 4, 3, 7),
    (5, 2, 8, 8),
    (6, 3, 8, 5),
    (4, 2, 5, 1),
]


@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("L, K, M, N", AWKWARD)
def test_output_and_gradients_are_the_models(L, K, M, N, use_checkpoint):
    plain, model = twins(mlp(L))
    pipeline = GPipe(model, K, M, use_checkpoint)
    x = torch.randn(N, 5, dtype=torch.float64)
    x_plain, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, output = plain(x_plain), pipeline(x_ours)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    squares(expected).backward()
    squares(output).backward()
    assert_same_gradients(plain, model)
    torch.testing.assert_close(x_ours.grad, x_plain.grad, rtol=1e-10, atol=1e-12)
    assert x_plain.grad.abs().max() > 0


@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("L, K, M, N", AWKWARD)
def test_loss_inside_gives_the_same_gradients_on_every_schedule(L, K, M, N, schedule, use_checkpoint):
    plain, model = twins(mlp(L))
    x, target = torch.randn(2, N, 5, dtype=torch.float64)
    x_plain, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = nn.functional.mse_loss(plain(x_plain), target)
    loss = GPipe(model, K, M, use_checkpoint).loss(nn.functional.mse_loss, x_ours, target, SCHEDULES[schedule])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    (3 * expected).backward()
    (3 * loss).backward()
    assert_same_gradients(plain, model)
    torch.testing.assert_close(x_ours.grad, x_plain.grad, rtol=1e-10, atol=1e-12)


def test_training_is_the_models_over_several_steps():
    plain, model = twins(mlp(6))
    pipeline = GPipe(model, 3, 4)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (plain, pipeline)]
    start = copy.deepcopy(plain.state_dict())
    for N in (10, 10, 3, 10, 1):  # short batches among them
        x = torch.randn(N, 5, dtype=torch.float64)
        for m, optimizer in zip((plain, pipeline), optimizers):
            optimizer.zero_grad()
            squares(m(x)).backward()
            optimizer.step()
        pipeline.eval()
        with torch.no_grad():
            torch.testing.assert_close(pipeline(x), plain(x), rtol=1e-9, atol=1e-9)
        pipeline.train()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(pipeline.state_dict()[name], value, rtol=1e-8, atol=1e-10)
        assert not torch.equal(value, start[name])


def test_parameters_and_names_are_the_models_own():
    model = mlp(6)
    pipeline = GPipe(model, 3, 2)
    assert [id(p) for p in pipeline.parameters()] == [id(p) for p in model.parameters()]
    assert list(pipeline.state_dict()) == list(model.state_dict())
    plain = mlp(6, seed=1)
    assert not torch.equal(plain[0].weight, model[0].weight)
    plain.load_state_dict(pipeline.state_dict())
    assert torch.equal(plain[0].weight, model[0].weight)
    pipeline.load_state_dict(mlp(6, seed=2).state_dict())
    assert torch.equal(model[0].weight, mlp(6, seed=2)[0].weight)
    assert [len(stage) for stage in pipeline.stages] == [2, 2, 2]
    assert pipeline.stages[1][0] is model[2]


def test_a_run_leaves_the_models_parameters_in_place():
    model = mlp(4)
    before = [layer._parameters.copy() for layer in model]
    squares(GPipe(model, 2, 2)(torch.randn(4, 5, dtype=torch.float64))).backward()
    for layer, parameters in zip(model, before):
        assert all(layer._parameters[name] is parameter for name, parameter in parameters.items())


def test_tuples_pass_between_stages_and_integers_come_in():
    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 5)

        def forward(self, pair):
            words, mask = pair
            return self.table(words), mask

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, pair):
            x, mask = pair
            return torch.tanh(self.linear(x)) * mask[..., None], mask

    torch.manual_seed(3)
    plain, model = twins(nn.Sequential(Embed(), Masked(), Masked(), Masked()).double())
    words, mask = torch.randint(11, (7, 3)), torch.rand(7, 3).double()
    for use_checkpoint in (True, False):
        plain.zero_grad(), model.zero_grad()
        expected, output = plain((words, mask)), GPipe(model, 3, 4, use_checkpoint)((words, mask))
        assert isinstance(output, tuple) and len(output) == 2
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        squares(expected).backward()
        squares(output).backward()
        assert_same_gradients(plain, model)


def test_evaluation_before_the_first_step_and_after():
    plain, model = twins(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2)).double())
    pipeline, x = GPipe(model, 2, 3), torch.randn(8, 5, dtype=torch.float64)
    for _ in range(2):
        pipeline.eval(), plain.eval()
        with torch.no_grad():
            output = pipeline(x)
        assert not output.requires_grad
        with torch.inference_mode():
            inferred = pipeline(x)
        assert inferred.is_inference()
        torch.testing.assert_close(output, plain(x).detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(inferred, output, rtol=0, atol=0)
        pipeline.train()
        squares(pipeline(x)).backward()
        plain.load_state_dict(model.state_dict())


def test_eval_mode_still_differentiates():
    plain, model = twins(mlp(4))
    plain.eval(), model.eval()
    pipeline, x = GPipe(model, 2, 3), torch.randn(7, 5, dtype=torch.float64)
    assert not pipeline.training  # the pipeline starts in the model's mode
    squares(plain(x)).backward()
    squares(pipeline(x)).backward()
    assert_same_gradients(plain, model)


def test_frozen_parts_get_no_gradient_and_cost_no_backward():
    plain, model = twins(mlp(8))
    for m in (plain, model):
        m[0].requires_grad_(False), m[4].requires_grad_(False)
        m[2].bias.requires_grad_(False)
    x = torch.randn(9, 5, dtype=torch.float64)
    for use_checkpoint in (True, False):
        plain.zero_grad(), model.zero_grad()
        squares(plain(x)).backward()
        squares(GPipe(model, 4, 3, use_checkpoint)(x)).backward()
        assert_same_gradients(plain, model)
    model.requires_grad_(False)
    assert not GPipe(model, 4, 3)(x).requires_grad


@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("K", [1, 2, 5])
def test_tied_weights_within_and_across_stages(K, use_checkpoint):
    def tie(model):
        model[8].weight = model[0].weight  # another layer, the same parameter
        model[2] = model[6]  # the very same layer twice
        return model

    plain, model = tie(mlp(10)), tie(mlp(10))
    x = torch.randn(7, 5, dtype=torch.float64)
    squares(plain(x)).backward()
    squares(GPipe(model, K, 3, use_checkpoint)(x)).backward()
    assert_same_gradients(plain, model)


def test_given_balance():
    plain, model = twins(mlp(7))
    pipeline = GPipe(model, 3, 2, balance=[1, 5, 1])
    assert [len(stage) for stage in pipeline.stages] == [1, 5, 1]
    x = torch.randn(4, 5, dtype=torch.float64)
    squares(plain(x)).backward()
    squares(pipeline(x)).backward()
    assert_same_gradients(plain, model)
    assert [len(stage) for stage in GPipe(mlp(7), 3, 2).stages] == [3, 2, 2]


def test_devices_by_any_name_and_to_moves_everything():
    pipeline = GPipe(mlp(4), 2, 2, devices=["cpu", torch.device("cpu")])
    squares(pipeline(torch.randn(4, 5, dtype=torch.float64))).backward()
    assert pipeline.to(torch.float32)(torch.randn(4, 5)).dtype == torch.float32
    assert all(parameter.is_meta for parameter in pipeline.to("meta").parameters())


def test_a_stage_that_ends_in_place_or_starts_in_place():
    layers = [nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.Hardswish(inplace=True), nn.Linear(5, 5)]
    torch.manual_seed(0)
    plain, model = twins(nn.Sequential(*layers).double())
    x = torch.randn(6, 5, dtype=torch.float64)
    for K in (1, 2, 3, 5):
        for use_checkpoint in (True, False):
            plain.zero_grad(), model.zero_grad()
            squares(plain(x)).backward()
            squares(GPipe(model, K, 2, use_checkpoint)(x)).backward()
            assert_same_gradients(plain, model)


def test_an_unused_output_and_an_unused_parameter():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x):
            return self.used(x), x.detach() * 2

    class First(nn.Module):
        def forward(self, pair):
            return pair[0]

    torch.manual_seed(0)
    plain, model = twins(nn.Sequential(nn.Linear(5, 5), Split(), First(), nn.Linear(5, 5)).double())
    x = torch.randn(6, 5, dtype=torch.float64)
    for use_checkpoint in (True, False):
        plain.zero_grad(), model.zero_grad()
        squares(plain(x)).backward()
        squares(GPipe(model, 3, 2, use_checkpoint)(x)).backward()
        assert_same_gradients(plain, model)
    assert model[1].unused.weight.grad is None


def test_copies_and_pickles():
    pipeline = GPipe(mlp(4), 2, 2)
    x = torch.randn(4, 5, dtype=torch.float64)
    for other in (copy.deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline))):
        assert other.stages[0][0] is not pipeline.stages[0][0]
        torch.testing.assert_close(other(x), pipeline(x), rtol=0, atol=0)


def test_recorded_run_follows_the_schedule():
    K, M = 3, 4
    for name, schedule in SCHEDULES.items():
        pipeline = GPipe(mlp(6), K, M, use_checkpoint=False)
        x, target = torch.randn(2, 8, 5, dtype=torch.float64)
        with pipeline.recorded() as timeline:
            pipeline.loss(nn.functional.mse_loss, x, target, schedule).backward()
        assert timeline.order() == schedule(K, M), name
        assert all(peak <= bound for peak, bound in zip(timeline.live(), [M, M, M] if name == "gpipe" else [3, 2, 1]))
    with pipeline.recorded() as timeline:
        squares(pipeline(x)).backward()
    assert timeline.order() == SCHEDULES["gpipe"](K, M)
    happened = len(timeline.spans)
    squares(pipeline(x)).backward()
    assert len(timeline.spans) == happened == 2 * K * M


def test_rematerialization_runs_every_layer_once_more_and_keeps_the_input_only():
    calls = []

    class Counting(nn.Module):
        def forward(self, x):
            calls.append(torch.is_grad_enabled())
            return torch.tanh(x) * 2

    x = torch.randn(5, 3, requires_grad=True)
    model = nn.Sequential(Counting(), Counting(), Counting(), Counting())
    squares(GPipe(model, 2, 5, use_checkpoint=True)(x)).backward()
    assert calls.count(False) == 4 * 5 and calls.count(True) == 4 * 5
    for pipeline in (GPipe(model, 2, 5, use_checkpoint=False), GPipe(model, 2, 5).eval()):
        calls.clear()
        squares(pipeline(x)).backward()
        assert calls == [True] * 20
    calls.clear()
    GPipe(model, 2, 5)(x.detach())
    assert calls == [True] * 20  # nothing to differentiate: nothing to recompute


@pytest.mark.parametrize(
    "build, error, says",
    [
        (lambda: GPipe(nn.Linear(2, 2), 1, 1), TypeError, "nn.Sequential"),
        (lambda: GPipe(mlp(3), 0, 1), ValueError, "n_partitions"),
        (lambda: GPipe(mlp(3), 4, 1), ValueError, "lower n_partitions"),
        (lambda: GPipe(mlp(3), 2, 0), ValueError, "n_microbatches"),
        (lambda: GPipe(mlp(3), 2, 2.0), TypeError, "n_microbatches"),
        (lambda: GPipe(mlp(3), 2.0, 2), TypeError, "n_partitions"),
        (lambda: GPipe(mlp(3), "2", 2), TypeError, "n_partitions"),
        (lambda: GPipe(mlp(3), 2, 2, balance=[2, 2]), ValueError, "balance"),
        (lambda: GPipe(mlp(3), 2, 2, balance=[3]), ValueError, "balance"),
        (lambda: GPipe(mlp(3), 2, 2, balance=[3, 0]), ValueError, "balance"),
        (lambda: GPipe(mlp(3), 2, 2, devices=["cpu"]), ValueError, "devices"),
        (lambda: GPipe(nn.Sequential(nn.LazyLinear(3)), 1, 1), ValueError, "lazy"),
        (lambda: GPipe(mlp(3), 2, 2)(torch.randn(0, 5).double()), ValueError, "0 samples"),
        (lambda: GPipe(mlp(3), 2, 2)(torch.tensor(1.0)), ValueError, "dim"),
        (lambda: GPipe(mlp(3), 2, 2)([torch.randn(2, 5)]), TypeError, "tuple of tensors"),
    ],
)
def test_bad_input_says_what_to_do(build, error, says):
    with pytest.raises(error, match=says) as raised:
        build()
    assert "\n" not in str(raised.value)


def test_scalar_outputs_and_other_types_are_refused():
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean()

    class Dictionary(nn.Module):
        def forward(self, x):
            return {"x": x}

    with pytest.raises(ValueError, match="batch must stay in dim"):
        GPipe(nn.Sequential(Mean()), 1, 2)(torch.randn(4, 5))
    with pytest.raises(TypeError, match="stage 1 returned dict"):
        GPipe(nn.Sequential(nn.Linear(5, 5), Dictionary()), 2, 2)(torch.randn(4, 5))


def test_the_helpers():
    text = summarize_results({"K": 4}, {"step_seconds": 0.123456})
    assert text.splitlines() == ["K             4", "step_seconds  0.1235"]
    assert get_peak_memory() > 0
    assert calculate_bubble_overhead(4, 16) == 3 / 19 and calculate_bubble_overhead(1, 5) == 0
    assert round(estimate_memory_reduction(4, 16, layers=40, batch_size=128), 1) == 24.6
    with pytest.raises(ValueError, match="at least 1"):
        estimate_memory_reduction(4, 0, 40, 128)
