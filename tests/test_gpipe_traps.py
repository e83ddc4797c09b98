"""Models that a pipeline could silently get wrong; each of these once did."""

import copy
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from implementation import GPipe
from micropp.schedule import ScheduleError, gpipe, naive
from tests.oracle import assert_same_gradients, mlp, squares, twins

BOTH = pytest.mark.parametrize("use_checkpoint", [True, False])


def batch(N=6, width=5):
    return torch.randn(N, width, dtype=torch.float64)


class Layer(nn.Module):
    """A layer from a function of (self, x), with a Linear of its own."""

    def __init__(self, function, **parameters):
        super().__init__()
        self.linear, self.function = nn.Linear(5, 5), function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x):
        return self.function(self, x)


@BOTH
def test_parameters_whose_gradients_are_views_of_one_storage(use_checkpoint):
    torch.manual_seed(0)
    both = Layer(
        lambda self, x: functional.linear(self.linear(x), self.b.view(5, 5) + self.c.view(5, 5)),
        b=torch.randn(25), c=torch.randn(25),
    )  # fmt: skip
    plain, model = twins(nn.Sequential(both).double())
    x = batch()
    squares(plain(x)).backward()
    squares(GPipe(model, 1, 3, use_checkpoint)(x)).backward()
    assert_same_gradients(plain, model)


@BOTH
@pytest.mark.parametrize("K", [1, 2, 3])
def test_a_gradient_that_is_a_view_of_what_the_neighbour_or_the_caller_holds(K, use_checkpoint):
    """Position embeddings with one sample a micro-batch: their gradient is the output's, seen otherwise."""
    torch.manual_seed(0)
    position = Layer(lambda self, x: x + self.pos.view(1, 5), pos=torch.randn(5))
    plain, model = twins(nn.Sequential(nn.Linear(5, 5), position, copy.deepcopy(position)).double())
    x, gradient = batch(4), batch(4)
    handed = gradient.clone()
    plain(x).backward(gradient)
    GPipe(model, K, 4, use_checkpoint)(x).backward(handed)
    assert torch.equal(handed, gradient)
    assert_same_gradients(plain, model)


@BOTH
def test_random_numbers_under_an_inner_checkpoint_are_refused(use_checkpoint):
    def dropped(self, x):
        return checkpoint(lambda x: functional.dropout(torch.tanh(self.linear(x)), 0.5), x, use_reentrant=reentrant)

    for reentrant in (True, False):
        model = nn.Sequential(nn.Linear(5, 5), Layer(dropped)).double()
        with pytest.raises(RuntimeError, match="under torch.utils.checkpoint"):
            squares(GPipe(model, 2, 2, use_checkpoint)(batch())).backward()


@BOTH
def test_an_inner_checkpoint_without_random_numbers_and_one_around_the_pipeline(use_checkpoint):
    inner = Layer(lambda self, x: checkpoint(lambda x: torch.tanh(self.linear(x)), x, use_reentrant=False))
    plain, model = twins(nn.Sequential(nn.Linear(5, 5), inner, nn.Linear(5, 5)).double())
    x = batch()
    squares(plain(x)).backward()
    pipeline = GPipe(model, 3, 2, use_checkpoint)
    squares(pipeline(x)).backward()
    assert_same_gradients(plain, model)
    model.zero_grad()
    squares(checkpoint(pipeline, x, use_reentrant=False)).backward()
    assert_same_gradients(plain, model)


def test_a_generator_of_a_layers_own_is_refused_only_where_it_would_be_recomputed():
    generator = torch.Generator().manual_seed(0)
    noise = Layer(lambda self, x: self.linear(x) + torch.empty_like(x).normal_(generator=generator))
    model = nn.Sequential(nn.Identity(), noise).double()
    with pytest.raises(RuntimeError, match="generator of its own"):
        GPipe(model, 2, 3)(batch())
    squares(GPipe(model, 2, 3, use_checkpoint=False)(batch())).backward()


def test_draws_in_a_hook_and_draws_that_only_some_micro_batches_make():
    def hooked():
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()
        model[1].register_forward_hook(lambda module, inputs, output: functional.dropout(output, 0.5))
        return model

    def sometimes():
        drop = Layer(lambda self, x: functional.dropout(self.linear(x), 0.5) if x[0, 0] > 0 else self.linear(x))
        return nn.Sequential(nn.Identity(), drop).double()

    x = batch(8)
    x[:, 0] = torch.tensor([-1, -1, 1, 1, -1, -1, 1, 1])
    for build in (hooked, sometimes):
        first = build()
        second = copy.deepcopy(first)
        for model, use_checkpoint in ((first, True), (second, False)):
            torch.manual_seed(3)
            squares(GPipe(model, 2, 4, use_checkpoint)(x)).backward()
        assert_same_gradients(second, first)


def test_the_mode_is_that_of_the_forward_when_it_is_recomputed():
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 5)).double()
    model[2].eval()
    results = []
    for use_checkpoint in (True, False):
        twin = copy.deepcopy(model)
        pipeline = GPipe(twin, 2, 3, use_checkpoint)
        torch.manual_seed(0)
        x = batch()
        output = pipeline(x)
        pipeline.eval()
        pipeline(x)
        pipeline.train()  # the frozen batch norm too
        squares(output).backward()
        assert twin[2].training and twin[2].num_batches_tracked == 0
        results.append(twin)
    assert_same_gradients(results[1], results[0])


@BOTH
def test_a_block_with_children_and_batch_norm_in_several_stages(use_checkpoint):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5, momentum=0.5)
    plain, model = twins(nn.Sequential(Blocks(), norm, nn.Tanh(), norm).double())
    model[2] = model[0]
    plain[2] = plain[0]
    for _ in range(5):
        x = batch(64) + 2
        plain(x)
        squares(GPipe(model, 4, 8, use_checkpoint)(x)).backward()
    assert model[1].num_batches_tracked == plain[1].num_batches_tracked == 10
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean, rtol=0.1, atol=0.05)
    plain, model = twins(nn.Sequential(Blocks(), nn.Tanh(), nn.Tanh()).double())
    plain[2], model[2] = plain[0], model[0]
    squares(plain(x)).backward()
    squares(GPipe(model, 3, 8, use_checkpoint)(x)).backward()
    assert_same_gradients(plain, model)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.register_module("absent", None)

    def forward(self, x):
        assert self.absent is None
        return x + self.inner(x)


@BOTH
def test_several_threads_may_share_a_pipeline(use_checkpoint):
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)).double()
    pipeline = GPipe(model, 3, 2, use_checkpoint)
    before, wrong = [id(parameter) for parameter in model.parameters()], []

    def work():
        for _ in range(10):
            x = batch().requires_grad_()
            if torch.autograd.grad(squares(pipeline(x)), x)[0].abs().max() == 0:
                wrong.append("no gradient")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and [id(parameter) for parameter in model.parameters()] == before
    assert model[1].num_batches_tracked == 30


@BOTH
def test_what_was_put_in_a_layer_since_the_forward_stays_there(use_checkpoint):
    model = mlp(4)
    output = GPipe(model, 2, 2, use_checkpoint)(batch())
    new = model[0].weight = nn.Parameter(torch.zeros(5, 5, dtype=torch.float64))
    squares(output).backward()
    assert model[0].weight is new


def test_functional_call_with_other_weights():
    plain, model = twins(mlp(4))
    others = {name: torch.randn_like(value).requires_grad_() for name, value in model.named_parameters()}
    x = batch()
    expected = torch.func.functional_call(plain, others, (x,))
    output = torch.func.functional_call(GPipe(model, 2, 2), others, (x,))
    expected = torch.autograd.grad(squares(expected), list(others.values()))
    for a, b in zip(torch.autograd.grad(squares(output), list(others.values())), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_a_tensor_that_needs_a_gradient_but_is_no_parameter_is_refused():
    prompt = torch.randn(5, dtype=torch.float64, requires_grad=True)
    model = nn.Sequential(nn.Linear(5, 5), Layer(lambda self, x: x + prompt)).double().requires_grad_(False)
    with pytest.raises(RuntimeError, match="stage 1 uses a tensor that needs a gradient"):
        GPipe(model, 2, 2)(batch())


def test_a_buffer_that_a_recomputation_would_change_again_is_refused():
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    for layer in (nn.InstanceNorm1d(3, track_running_stats=True), spectral):
        x = torch.randn(4, 3, 4)
        model = nn.Sequential(layer, nn.Linear(4, 4))
        with pytest.raises(RuntimeError, match="use_checkpoint=False"):
            GPipe(model, 2, 2)(x)
        squares(GPipe(model, 2, 2, use_checkpoint=False)(x)).backward()


@BOTH
def test_sparse_and_dense_gradients_of_a_tied_embedding(use_checkpoint):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 5, sparse=True)

        def forward(self, words):
            return self.table(words)

    def build():
        model = nn.Sequential(Words(), nn.Tanh(), nn.Linear(5, 5, bias=False)).double()
        model[2].weight = model[0].table.weight
        return model

    plain = build()
    model = copy.deepcopy(plain)
    words = torch.randint(5, (6,))
    squares(plain(words)).backward()
    squares(GPipe(model, 3, 2, use_checkpoint)(words)).backward()
    torch.testing.assert_close(model[2].weight.grad.to_dense(), plain[2].weight.grad.to_dense(), rtol=1e-10, atol=1e-12)


@BOTH
def test_attributes_of_parameters_and_a_mask_handed_through(use_checkpoint):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))
            self.weight.factor = 3.0

        def forward(self, pair):
            x, mask = pair
            mask.numpy()  # only a tensor that needs no gradient may do this
            return x * self.weight * self.weight.factor, mask

    plain, model = twins(nn.Sequential(Scaled(), Scaled()).double())
    for m in (plain, model):
        for layer in m:
            layer.weight.factor = 3.0  # deepcopy drops it
    pair = batch(), torch.ones(6, 1)
    output = GPipe(model, 2, 3, use_checkpoint)(pair)
    assert not output[1].requires_grad
    squares(plain(pair)[0]).backward()
    squares(output[0]).backward()
    assert_same_gradients(plain, model)


def test_loss_inside_with_other_targets():
    plain, model = twins(mlp(4))
    x, weights, labels = batch(7), torch.rand(7, 1).double(), torch.randint(5, (7,))
    pipeline = GPipe(model, 2, 3)

    def weighted(output, target):
        return (target[1] * (output - target[0]) ** 2).mean()

    for loss_fn, target in ((weighted, (batch(7), weights)), (functional.cross_entropy, labels)):
        plain.zero_grad(), model.zero_grad()
        loss_fn(plain(x), target).backward()
        pipeline.loss(loss_fn, x, target).backward()
        assert_same_gradients(plain, model)
    with pytest.raises(ValueError, match="7 samples, its target 14"):
        pipeline.loss(functional.mse_loss, x, batch(14))
    with pytest.raises(ValueError, match="needs a gradient"):
        pipeline.loss(functional.mse_loss, x, batch(7).requires_grad_())
    with pytest.raises(ValueError, match="a mean over dim 0"):
        pipeline.loss(nn.MSELoss(reduction="none"), x, batch(7))
    with torch.no_grad():
        expected = functional.cross_entropy(plain(x), labels)
        torch.testing.assert_close(pipeline.loss(functional.cross_entropy, x, labels), expected, rtol=1e-12, atol=0)


def test_names_and_attributes_that_a_pipeline_could_not_keep():
    with pytest.raises(ValueError, match="rename"):
        GPipe(nn.Sequential(OrderedDict(stages=nn.Linear(2, 2))), 1, 1)
    named = nn.Sequential(OrderedDict(first=nn.Linear(5, 5), last=nn.Linear(5, 5))).double()
    assert list(GPipe(named, 2, 2).state_dict()) == list(named.state_dict())
    named.register_buffer("scale", torch.ones(1))
    with pytest.raises(ValueError, match="put them in a layer"):
        GPipe(named, 2, 2)


def test_a_backward_that_failed_says_so_the_second_time():
    def fail(gradient):
        raise KeyError("hook")

    model = mlp(4)
    failing = Layer(lambda self, x: (x.register_hook(fail) if x.requires_grad else 0, x)[1])
    output = GPipe(nn.Sequential(model, failing), 2, 2)(batch())
    with pytest.raises(KeyError, match="hook"):
        squares(output).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="failed before"):
        squares(output).backward()


def test_a_schedule_for_other_sizes_is_refused_rather_than_waited_for():
    pipeline, x = GPipe(mlp(4), 2, 3), batch(6)
    for schedule in (lambda K, M: gpipe(K, M + 1), lambda K, M: gpipe(K, M - 1), lambda K, M: gpipe(K + 1, M)):
        with pytest.raises(ScheduleError, match="it is to run 2 and 3"):
            pipeline.loss(functional.mse_loss, x, x, schedule)
    with pytest.raises(ScheduleError, match="deadlock"):
        pipeline.loss(functional.mse_loss, x, x, lambda K, M: [naive(K, M)[0], gpipe(K, M)[1]])
