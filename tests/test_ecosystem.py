"""The models under the rest of PyTorch: compile, export, autocast, functional calls, checkpoints.

Each test compares with the same module called plainly, or with the reference under the same treatment.
"""

from __future__ import annotations

import copy
import functools
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
import numerics
from inline_kernels.engine import composed, mainloops, tiling
from inline_kernels.engine.fuse import structure_of
from numerics import every_device, every_name, few_names, few_variants, results

# What runs if a variant is asked for, and on a GPU, where there are several, unless one is.
CHOICES = [*numerics.VARIANTS, pytest.param("auto", "cuda", marks=pytest.mark.gpu)]
every_choice = pytest.mark.parametrize("variant, device", CHOICES)

pytestmark = pytest.mark.usefixtures("most_fused")
H200 = tiling.Device((9, 0), 227 << 10, 132)  # what tiling.device_properties would say of one


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def assert_close(ours: dict, theirs: dict) -> None:
    """Equal up to the order in which the library's convolution adds."""
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-4, msg=lambda text: f"{key}: {text}")


@few_variants
@numerics.steady_library()
def test_compile(name, variant, device):
    """One graph, forward and backward, through the default compiler."""
    model, x = numerics.small(name, variant, device=device)
    new = numerics.twin_of(model, variant, x)
    compiled = torch.compile(new, fullgraph=True)
    assert_close(results(compiled, x), results(new, x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), new(x))


def counted(function, dynamic: bool | None) -> tuple:
    """`function` compiled, but run as it is, and the list of its graphs, which grows."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend), graphs


def graphs_made(module, x, dynamic, call) -> tuple[int, int]:
    """How many graphs call(compiled module, …) makes for six batch sizes, and then with another spatial size and layout."""
    compiled, graphs = counted(module, dynamic)
    for size in (2, 4, 6, 8, 10, 12):  # each unlike every other extent, or a graph may take the two for one
        call(compiled, x[:size])
    batches = len(graphs)
    call(compiled, x[:2, ..., 1:, :-1])
    return batches, len(graphs)


def resizable(name, device) -> tuple[nn.Module, torch.Tensor]:
    """A reference model and an input of twelve samples, of a size at which "auto" is fused, too."""
    model, x = numerics.small(name, "fused", device=device)
    return model, x.repeat_interleave(4, 0)


@functools.cache
def graphs_of_the_reference(name, device, dynamic) -> tuple[int, int]:
    return graphs_made(*resizable(name, device), dynamic, results)


@every_choice
@pytest.mark.parametrize(
    "name, dynamic", [(name, (True, None)[i % 2]) for i, name in enumerate(numerics.FEW)]
)
@numerics.steady_library()
def test_compile_with_dynamic_shapes(name, variant, device, dynamic):
    """Batch sizes, spatial sizes and layouts take no more graphs than the reference's: one for all batch sizes, and one before
    PyTorch knows that they change."""
    model, x = resizable(name, device)
    new = numerics.twin_of(model, variant, x)
    batches, every = graphs_made(
        new, x, dynamic, lambda compiled, part: assert_close(results(compiled, part), results(new, part))
    )
    assert batches <= min(2, graphs_of_the_reference(name, device, dynamic)[0])
    assert every <= graphs_of_the_reference(name, device, dynamic)[1]


@pytest.mark.parametrize(
    "name, dynamic", [(name, (True, None)[i % 2]) for i, name in enumerate(numerics.NAMES)]
)
def test_the_choice_for_a_gpu_is_traced(name, dynamic, monkeypatch):
    """Whether the fused kernels take x is decided in the graph. The batch size has no say in it, and other sizes are decided anew."""
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    model, shape = models.get_model(name), models.PROBLEMS[name].input_shape
    if "fused" not in models.PROBLEMS[name].variants:
        pytest.skip("there are no fused kernels")
    (part,) = structure_of(model, (torch.empty(2, *shape[1:]),), {}).parts
    written, weight = composed.written_for(part.segment), model.conv.weight

    def obstacle(x):
        return mainloops.SOURCES[written.mainloop].obstacle(x, weight, False, written)

    compiled, graphs = counted(lambda x: (x + 1, obstacle(x)), dynamic)
    for size in (2, 4, 5, 6, 7, 9):
        assert compiled(torch.empty(size, *shape[1:]))[1] is None
    assert len(graphs) == (1 if dynamic else 2)
    # In 3d a block's four rows fit; two; one; not the four that stores of 16 bytes need; not one beside the kernels' own arrays.
    inputs = [
        torch.empty(2, *shape[1:-2], *size) for size in ((5, 100), (4, 400), (4, 501), (6, 401), (5, 685))
    ]
    answers = [compiled(x)[1] for x in inputs]
    assert answers == [obstacle(x) for x in inputs]
    assert [answer is None for answer in answers] == [True, True, True, len(shape) == 4, len(shape) == 4]


@few_names
@numerics.steady_library()
def test_compile_in_training(name, device):
    """By the rule, with and without gradients. The graph draws a new dropout mask each time, and goes back through the mask that it drew."""
    model, x = numerics.small(name, "fused", device=device)
    numerics.ties(model, x)
    compiled = torch.compile(numerics.twin_of(model.train(), "auto", x), fullgraph=True)
    masks = [results(compiled, x)["output"] != 0 for _ in range(2)]
    assert torch.equal(*masks) != any(isinstance(module, nn.Dropout) for module in model.modules())
    numerics.assert_module_follows_rule(compiled, model, x)


@pytest.mark.parametrize("dynamic", [False, True])
@every_choice
@every_name
@numerics.steady_library()
def test_export(name, variant, device, dynamic):
    """With the variant that runs outside, for every batch size if asked for."""
    model, x = numerics.small(name, "fused", device=device)
    new = numerics.twin_of(model, variant, x)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},) if dynamic else None
    program = torch.export.export(new, (x,), dynamic_shapes=shapes)
    assert len([node for node in program.graph.nodes if "inline_kernels" in str(node.target)]) == 1
    for part in (x, x.repeat_interleave(2, 0)) if dynamic else (x,):
        torch.testing.assert_close(program.module()(part), new(part))


@pytest.mark.parametrize("around", ["forward", "backward", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@few_variants
@numerics.steady_library()
def test_autocast(name, dtype, variant, device, around):
    """The reference's dtypes for the output and every gradient, and values as near to float64 as its own, with the region around
    forward (the usual way), around backward, where it changes nothing, or around both."""
    if device == "cpu" and dtype == torch.float16:
        pytest.skip("on a CPU bfloat16 stands for both: each is a build")
    model, x = numerics.small(name, variant, device=device)
    numerics.ties(model, x)
    new = numerics.twin_of(model, variant, x)
    regions = [
        torch.autocast(device, dtype=dtype, enabled=around in (phase, "both"))
        for phase in ("forward", "backward")
    ]
    theirs, ours = (_results_within(*regions, module, x) for module in (model, new))
    exact = _results_within(nullcontext(), nullcontext(), copy.deepcopy(model).double(), x.double())
    eps = torch.finfo(x.dtype if around == "backward" else dtype).eps
    for key, value in theirs.items():
        assert (ours[key].dtype, ours[key].shape, ours[key].stride()) == (
            value.dtype,
            value.shape,
            value.stride(),
        ), key
        error, limit = ((t.double() - exact[key]).norm() for t in (ours[key], value))
        assert error <= 2 * limit + 4 * eps * exact[key].norm(), key


def _results_within(forward, backward, module, x):
    """Like `results`, each pass within a context of its own, and for a gradient so small that float16 holds those of all parameters."""
    leaves = {"x": x.detach().requires_grad_(), **dict(module.named_parameters())}
    with forward:
        y = module(leaves["x"])
    with backward:
        gradients = torch.autograd.grad(y, list(leaves.values()), torch.full_like(y, 2**-6))
    return {"output": y.detach(), **dict(zip(leaves, gradients))}


@every_device
@pytest.mark.parametrize("name", [name for name in numerics.NAMES if name not in numerics.FEW])
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


@pytest.mark.parametrize("reentrant", [True, False])
@few_names
@numerics.steady_library()
def test_checkpoint(name, reentrant, device):
    """The forward pass that is run again must draw the same dropout mask."""
    model, x = numerics.small(name, device=device)
    numerics.give_gradients(model, x)
    new, answers = numerics.twin_of(model.train()), []
    wrapped = Wrapped(new, reentrant)
    for module in (new, wrapped):
        torch.manual_seed(5)
        answers.append({key.removeprefix("module."): value for key, value in _backward(module, x).items()})
    # The first pass of a reentrant one is without gradients, and may sum in another order.
    (numerics.assert_near if reentrant else numerics.assert_equal)(*answers)


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
    return {
        "output": y.detach(),
        "x": x.grad,
        **{key: p.grad.clone() for key, p in module.named_parameters()},
    }


@every_name
def test_profiler_shows_our_names(name):
    """Those of the launchers, <kernels>_<hash>::forward, and of the node of the gradient."""
    model, x = numerics.small(name)
    numerics.give_gradients(model, x)
    new = numerics.twin_of(model)
    new(x).sum().backward()
    with torch.profiler.profile() as profile:
        new(x).sum().backward()
    keys = {event.key for event in profile.key_averages()}
    for launcher in ("forward", "backward"):
        assert any(re.fullmatch(rf"tail_conv_[0-9a-f]+::{launcher}", key) for key in keys), keys
    own = numerics.operator_of(new, x)[1].name
    assert f"{own}Backward" in keys, "the gradient's node bears the operator's name"


@few_variants
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
