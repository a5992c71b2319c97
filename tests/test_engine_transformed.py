"""`fuse(model)` under torch's transformations: torch.func, traces, torch.compile, torch.export."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from engine_stand_in import stand_in  # noqa: F401
from fused_pairs import (  # noqa: F401
    INPUTS,
    SEGMENTS,
    Dropping,
    Normed,
    Pointwise,
    Residual,
    Volume,
    assert_same,
    every_model,
    here,
    pair,
    runs,
)
from inline_kernels import fuse

# --------------------------------------------------------------------------------------------------------- transformations


@every_model
def test_forward_mode_ad(kind):
    """Eager's tangent; without one, kernels run. Before other calls, and after."""
    model, fast, x = pair(kind, called=False)
    for _ in range(2):
        with forward_ad.dual_level():
            assert runs(fast, x) == ["load"] * SEGMENTS[kind]
            pairs = [
                forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x))))
                for module in (model, fast)
            ]
        assert pairs[1].tangent is not None
        for theirs, ours in zip(*pairs):
            torch.testing.assert_close(ours, theirs)
        assert_same(fast, model, x)


@every_model
def test_transformations_of_torch_func(kind):
    model, fast, x = pair(kind)
    parameters = {key: p.detach() for key, p in model.named_parameters()}

    def loss(module):
        return lambda values, x: torch.func.functional_call(module, values, x).square().mean()

    transformed = (
        lambda run: torch.func.grad(run)(parameters, x),
        lambda run: torch.func.vmap(lambda x: run(parameters, x))(torch.stack([x, 2 * x])),
        lambda run: torch.func.jvp(lambda x: run(parameters, x), (x,), (torch.ones_like(x),)),
    )
    for transform in transformed:
        torch.testing.assert_close(transform(loss(fast)), transform(loss(model)), rtol=1e-4, atol=1e-5)
    plans = []
    torch.func.vmap(lambda x: plans.append(str(fast.plan(x))) or x)(x[None])
    assert "eager" in plans[0] and "torch.func" in plans[0]
    assert_same(fast, model, x)


@every_model
def test_functional_call(kind):
    model, fast, x = pair(kind)
    other = {key: value.detach() * 0.5 for key, value in model.named_parameters()}
    torch.testing.assert_close(
        torch.func.functional_call(fast, other, x), torch.func.functional_call(model, other, x)
    )
    assert_same(fast, model, x)


@every_model
def test_fake_and_meta_tensors(kind):
    """Shape, dtype and strides are known without computing."""
    model, fast, x = pair(kind)
    expected = model(x)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake = fast(torch.empty(x.shape))
    assert (fake.shape, fake.stride(), fake.dtype) == (expected.shape, expected.stride(), expected.dtype)
    meta = copy.deepcopy(fast).to("meta")(x.to("meta"))
    assert meta.shape == expected.shape and meta.device.type == "meta"
    assert_same(fast, model, x)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@every_model
def test_traces(kind):
    """A dispatch mode sees the operator, not what it is made of."""
    model, fast, x = pair(kind)
    with torch.no_grad():
        graph = make_fx(fast)(x)
    seen = [node.target for node in graph.graph.nodes if "inline_kernels" in str(node.target)]
    assert len(seen) == SEGMENTS[kind]
    torch.testing.assert_close(graph(x * 2), model(x * 2))
    for wanted in (True, False):
        with torch.set_grad_enabled(wanted):
            traced = torch.jit.trace(fast, x)
            torch.testing.assert_close(traced(x * 2), model(x * 2))
    fast = pair(kind, called=False)[1]  # whose forward is captured at its first call
    fast.load_state_dict(model.state_dict())
    torch.testing.assert_close(torch.jit.trace(fast, x)(x * 2), model(x * 2))


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return forward_of(self.conv(x))


forward_of = nn.functional.gelu  # a name that this file alone knows


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripts():
    """Of the user's forward; the fused module is what it was."""
    model, x = Scripted(), torch.randn(2, 3, 8, 9)
    fast = fuse(model)
    modules = dict(fast.named_modules())
    scripted = torch.jit.script(fast)
    torch.testing.assert_close(scripted(x), model(x))
    assert dict(fast.named_modules()) == modules and [*scripted.parameters()][0] is model.conv.weight
    assert_same(fast, model, x)


@every_model
def test_symbolic_traces(kind):
    """torch.fx sees the user's forward, of a model and of a part, before other calls and after."""
    for called in (False, True):
        model, fast, x = pair(kind, called=called)
        theirs = torch.fx.symbolic_trace(model)
        assert str(torch.fx.symbolic_trace(fast).graph) == str(theirs.graph)
        traced = torch.fx.symbolic_trace(nn.Sequential(fast, nn.Identity()))
        torch.testing.assert_close(traced(x), model(x))
        assert_same(fast, model, x)


@pytest.mark.parametrize("kind, training", [*((kind, False) for kind in INPUTS), (Residual, True)])
def test_compile(kind, training):
    """One graph, forward and backward, with the operators in it; of a batch norm also while it counts."""
    torch._dynamo.reset()
    model, fast, x = pair(kind, called=False, training=training)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(fast, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    called = [node for node in graphs[0].graph.nodes if "fused_" in str(node.target)]
    # Running statistics are written by operators that torch.compile knows.
    assert len(called) == (1 if training else SEGMENTS[kind])
    if kind is Pointwise:  # one change at a time: each has to be seen
        model.conv.stride = fast.conv.stride = (2, 2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        model.factor = fast.factor = 2.0
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Normed, Volume], ids=lambda kind: kind.__name__)
def test_compile_with_dynamic_shapes(kind):
    """One graph for all batch sizes."""
    torch._dynamo.reset()
    model, fast, x = pair(kind, called=False)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(fast, fullgraph=True, dynamic=True, backend=backend)
    for size in (7, 9, 11, 13):
        part = x[:1].repeat(size, *[1] * (x.dim() - 1))
        torch.testing.assert_close(compiled(part), model(part), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compile_under_autocast():
    torch._dynamo.reset()
    model, fast, x = pair(Normed, called=False)
    compiled = torch.compile(fast, fullgraph=True, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = compiled(x), model(x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "kind, strict", [*((kind, True) for kind in INPUTS), (Residual, False), (Dropping, False)]
)
def test_export(kind, strict):
    model, fast, x = pair(kind, called=False)
    program = torch.export.export(fast, (x,), strict=strict)
    ours = [node for node in program.graph.nodes if "fused_" in str(node.target)]
    assert len(ours) == SEGMENTS[kind]
    torch.testing.assert_close(program.module()(x), model(x))


def test_parametrizations():
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight * 0.5

    model, fast, x = pair(Pointwise)
    for module in (model, fast):
        nn.utils.parametrize.register_parametrization(module, "bias", Symmetric())
    assert runs(fast, x) == ["eager"] and "parametrizations" in str(fast.plan(x))
    assert_same(fast, model, x)
