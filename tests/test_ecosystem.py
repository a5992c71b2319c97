"""The four models under the rest of PyTorch: compile, export, autocast, functional calls, checkpoints.

Each test compares with the same module called plainly, or with the reference under the same treatment.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import numerics
from numerics import DEVICES, DROPOUT, SMALL, results

every_name = pytest.mark.parametrize("name", list(SMALL))
every_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def assert_close(ours: dict, theirs: dict) -> None:
    """Equal up to the order in which the library's convolution adds."""
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-4, msg=lambda text: f"{key}: {text}")


@pytest.mark.parametrize("variant, device", numerics.VARIANTS)
@every_name
@numerics.steady_library()
def test_compile(name, variant, device):
    """One graph, forward and backward, through the default compiler."""
    model, x = numerics.small(name, variant, device=device)
    new = numerics.twin_of(model, variant, x)
    compiled = torch.compile(new, fullgraph=True)
    assert_close(results(compiled, x), results(new, x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), new(x))


@every_device
@every_name
@numerics.steady_library()
def test_compile_with_dynamic_shapes(name, device):
    """Several batch sizes, spatial sizes and layouts take no more graphs than the reference's."""
    model, x = numerics.small(name, device=device)
    new, graphs = numerics.twin_of(model), {}
    for module in (model, new):

        def backend(graph, inputs):
            graphs[module] = graphs.get(module, 0) + 1
            return graph

        compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
        for part in (x, x.repeat_interleave(2, 0), x[:2, ..., 1:, :-1]):
            assert_close(results(compiled, part), results(module, part))
    assert graphs[new] <= graphs[model]


@every_name
def test_compile_in_training(name):
    """The graph draws a new dropout mask each time, and goes back through the mask that it drew."""
    model, x = numerics.small(name)
    if name == DROPOUT:
        with torch.no_grad():
            model.norm.weight.zero_(), model.norm.bias.fill_(model.min_value)
    new = numerics.twin_of(model.train())
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
    answers = [results(compiled, x) for _ in range(2)]
    assert torch.equal(answers[0]["output"], answers[1]["output"]) == (name != DROPOUT)
    if name == DROPOUT:
        for answer in answers:
            kept = (answer["output"] != 0).sum((0, 2, 3, 4))
            torch.testing.assert_close(answer["norm.bias"], kept * 0.5 / (1 - model.dropout.p))


@pytest.mark.parametrize("dynamic", [False, True])
@every_name
def test_export(name, dynamic):
    model, x = numerics.small(name)
    new = numerics.twin_of(model)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},) if dynamic else None
    program = torch.export.export(new, (x,), dynamic_shapes=shapes)
    assert any("inline_kernels" in str(node.target) for node in program.graph.nodes)
    for part in (x, x.repeat_interleave(2, 0)) if dynamic else (x,):
        torch.testing.assert_close(program.module()(part), new(part))


@pytest.mark.parametrize("variant, device", numerics.VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_name
def test_autocast(name, dtype, variant, device):
    """The reference's dtypes for the output and every gradient, and values as near to float64 as its own."""
    model, x = numerics.small(name, variant, device=device)
    new, answers = numerics.twin_of(model, variant, x), []
    for module in (model, new):
        with torch.autocast(device, dtype=dtype):
            answers.append(results(module, x))
    exact = results(copy.deepcopy(model).double(), x.double())
    for key, value in answers[0].items():
        ours = answers[1][key]
        assert (ours.dtype, ours.shape, ours.stride()) == (value.dtype, value.shape, value.stride()), key
        error, limit = ((t.double() - exact[key]).norm() for t in (ours, value))
        assert error <= 2 * limit + 4 * torch.finfo(dtype).eps * exact[key].norm(), key


@every_device
@every_name
def test_autocast_of_other_inputs(name, device):
    """Inputs that are half already, float64 (which autocast leaves alone, so that eager raises), and float32 in a region
    that is switched off."""
    model, x = numerics.small(name, device=device)
    new = numerics.twin_of(model)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert new(x.bfloat16()).dtype == model(x.bfloat16()).dtype
        with pytest.raises(RuntimeError) as theirs:
            model(x.double())
        with pytest.raises(RuntimeError) as ours:
            new(x.double())
        assert str(ours.value) == str(theirs.value)
        with torch.autocast(device, enabled=False):
            assert torch.equal(new(x), numerics.twin_of(model)(x)) and new(x).dtype == torch.float32
    assert new(x).dtype == torch.float32


@every_device
@every_name
@numerics.steady_library()
def test_functional_call_and_func_grad(name, device):
    """A transformation of torch.func can't look into our operators, so eager runs, and the plan says so."""
    model, x = numerics.small(name, device=device)
    new = numerics.twin_of(model, "auto")
    other = {key: value.detach() * 0.5 for key, value in new.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(new, other, x), torch.func.functional_call(model, other, x))

    seen = []

    def loss(module):
        return lambda parameters, x: torch.func.functional_call(module, parameters, x).square().mean()

    for ours, theirs in zip(*(torch.func.grad(loss(module), argnums=(0, 1))(other, x) for module in (new, model))):
        torch.testing.assert_close(ours, theirs)
    torch.func.vmap(lambda x: seen.append(new.plan(x)) or x)(x[None])
    assert seen[0].variant == "eager" and "torch.func" in seen[0].reason


@every_device
@pytest.mark.parametrize("reentrant", [True, False])
@every_name
@numerics.steady_library()
def test_checkpoint(name, reentrant, device):
    """The forward pass that is run again must draw the same dropout mask."""
    model, x = numerics.small(name, device=device)
    if name == DROPOUT:
        with torch.no_grad():
            model.norm.weight.zero_(), model.norm.bias.fill_(model.min_value)
    new, answers = numerics.twin_of(model.train()), []
    wrapped = Wrapped(new, reentrant)
    for module in (new, wrapped):
        torch.manual_seed(5)
        answers.append({key.removeprefix("module."): value for key, value in _backward(module, x).items()})
    numerics.assert_equal(*answers)


class Wrapped(nn.Module):
    def __init__(self, module, reentrant):
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


def _backward(module, x):
    """Like `results`, through backward() and .grad."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.sum().backward()
    return {"output": y.detach(), "x": x.grad, **{key: p.grad.clone() for key, p in module.named_parameters()}}


@every_name
def test_fake_and_meta_tensors(name):
    """Shape, dtype and strides are known without computing."""
    model, x = numerics.small(name)
    expected = numerics.twin_of(model)(x)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = numerics.twin_of(copy.deepcopy(model))(torch.empty(x.shape))
    assert (fake.shape, fake.stride(), fake.dtype) == (expected.shape, expected.stride(), expected.dtype)
    meta = numerics.twin_of(copy.deepcopy(model).to("meta"), "auto")(x.to("meta"))
    assert meta.shape == expected.shape and meta.device.type == "meta"


@every_name
def test_profiler_shows_our_names(name):
    model, x = numerics.small(name)
    with torch.profiler.profile() as profile:
        numerics.twin_of(model)(x).sum().backward()
    keys = {event.key for event in profile.key_averages()}
    assert {f"inline_kernels::{name}", f"inline_kernels::{name}_backward"} <= keys


@pytest.mark.parametrize("variant, device", numerics.VARIANTS)
@every_name
def test_deterministic_algorithms(name, variant, device, monkeypatch):
    """Allowed, and with memory that PyTorch fills with NaN then: all of it gets written."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, x = numerics.small(name, variant, device=device)
    new = numerics.twin_of(model, variant, x)
    with numerics.steady_library():
        expected = results(new, x)
        torch.use_deterministic_algorithms(True)
        try:
            numerics.assert_equal(results(new, x), expected)
        finally:
            torch.use_deterministic_algorithms(False)
