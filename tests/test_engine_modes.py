"""`fuse(model)` does what the model does with odd inputs, in every mode and dtype."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine_stand_in import stand_in  # noqa: F401
from fused_pairs import (  # noqa: F401
    SEGMENTS,
    Dropping,
    Normed,
    Pointwise,
    Residual,
    assert_same,
    backward,
    every_model,
    here,
    pair,
    results,
    runs,
)
from inline_kernels.engine.fuse import fuse

# --------------------------------------------------------------------------------------------------------- odd inputs


ODD = {
    "nothing": lambda x: x[:0],
    "not batched": lambda x: x[0],
    "too few dimensions": lambda x: x[0, 0],
    "another dtype": lambda x: x.double(),
    "an integer": lambda x: x.long(),
    "a boolean": lambda x: x.bool(),
    "one dimension too many": lambda x: x[None],
    "no rows": lambda x: x[..., :0, :],
    "no channels": lambda x: x[:, :0],
    "other channels": lambda x: x[:, :1],
    "too small": lambda x: x[..., :1, :1],
    "sparse": lambda x: x.to_sparse(),
    "a negative view": lambda x: torch.complex(x, -x).conj().imag,
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "channels last": lambda x: x.contiguous(
        memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    ),
    "expanded": lambda x: x[:1].expand_as(x),
    "a view": lambda x: torch.cat([x.flatten(), x.flatten()])[1 : x.numel() + 1].view_as(x),
    "a Parameter": lambda x: nn.Parameter(x),
    "NaN": lambda x: x.clone().fill_(float("nan")),
    "infinities": lambda x: x / 0,
}


@pytest.mark.parametrize("how", ODD)
@every_model
def test_odd_inputs(kind, how):
    """Before other calls, and after."""
    model, fast, x = pair(kind, called=False)
    given = ODD[how](x)
    assert_same(fast, model, given)
    results(fast, x)
    with torch.no_grad():
        fast(x)
    assert_same(fast, model, given)
    if how in ("sparse", "a negative view"):
        assert set(runs(fast, given)) == {"eager"}
    elif how in ("transposed", "channels last", "expanded", "a view", "a Parameter"):
        assert set(runs(fast, given)) == {"load"}


@every_model
def test_a_subclass_of_tensor_is_eagers(kind):
    class Asked(torch.Tensor):
        functions = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.functions.append(getattr(function, "__name__", ""))
            return super().__torch_function__(function, types, args, kwargs)

    model, fast, x = pair(kind)
    asked = x.as_subclass(Asked)
    assert "subclass of Tensor" in str(fast.plan(asked))
    with torch.no_grad():
        assert torch.equal(fast(asked), model(asked))
    assert any(name.startswith("conv") for name in Asked.functions)


class Tail(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 6, 3), function

    def forward(self, x):
        return self.function(self.conv(x))


TAILS = {
    "instance norm": nn.InstanceNorm2d(6),
    "batch norm": nn.BatchNorm2d(6),
    "group norm": nn.GroupNorm(3, 6),
    "average pool": nn.AvgPool2d(2),
    "max pool": nn.MaxPool2d(2),
    "softmax": nn.Softmax(1),
    "logsumexp": functools.partial(torch.logsumexp, dim=1, keepdim=True),
    "maximum of channels": functools.partial(torch.amax, dim=1),
    "minimum along an axis": lambda x: torch.min(x, dim=2)[0],
    "mean": lambda x: x.mean((2, 3)),
    "activation": F.mish,
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("label", TAILS)
def test_results_are_laid_out_as_eagers(label, layout):
    """With x's layout or the weight's."""
    tail = TAILS[label]
    model = Tail(tail)
    x = torch.randn(2, 3, 8, 7)
    for given, module in (
        (x.contiguous(memory_format=layout), model),
        (x, copy.deepcopy(model).to(memory_format=layout)),
    ):
        fast, expected = fuse(copy.deepcopy(module)), module(given)
        assert runs(fast, given) == ["load"]
        for y in (fast(given), fast(given.clone().requires_grad_())):
            assert y.stride() == expected.stride()
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_results_share_no_memory_and_inputs_stay():
    _, fast, x = pair(Pointwise)
    before = x.clone()
    with torch.no_grad():
        first, second = fast(x), fast(x)
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr() and torch.equal(x, before)


# ---------------------------------------------------------------------------------------------------------- modes, dtypes


@every_model
def test_dtype_and_autocast_are_toggled(kind):
    model, fast, x = pair(kind)
    for convert in (nn.Module.double, nn.Module.float, nn.Module.bfloat16, nn.Module.float):
        convert(model), convert(fast)
        dtype = next(model.parameters()).dtype
        theirs, ours = model(x.to(dtype)), fast(x.to(dtype))
        assert ours.dtype == theirs.dtype and runs(fast, x.to(dtype)) == ["load"] * SEGMENTS[kind]
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=3e-2)
    for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            theirs, ours, inside = model(x), fast(x), runs(fast, x)
        assert ours.dtype == theirs.dtype and inside == ["load"] * SEGMENTS[kind]
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=0.1)


@every_model
def test_autocast_gradients(kind):
    """In eager's dtypes."""
    model, fast, x = pair(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, ours = results(model, x), results(fast, x)
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype, key
        torch.testing.assert_close(ours[key], value, rtol=0.1, atol=0.1 * max(1.0, value.abs().max().item()))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError):
        fast(x.double())


@every_model
def test_inference_mode_and_back(kind):
    model, fast, x = pair(kind, called=False)
    with torch.inference_mode():
        inside = fast(x)
        assert inside.is_inference()
        torch.testing.assert_close(fast(x.clone()), model(x))
    assert_same(fast, model, x)
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), model(x))


def test_requires_grad_is_toggled():
    _, fast, x = pair(Normed)
    for wanted in (False, True, False):
        fast.requires_grad_(wanted)
        assert fast(x).requires_grad == wanted and fast(x.clone().requires_grad_()).requires_grad
        fast.conv.bias.requires_grad_(True)
        assert fast(x).requires_grad


def test_weights_count_at_once():
    model, fast, x = pair(Normed)
    for change in (
        lambda p: p.detach().mul_(-0.5),
        lambda p: setattr(p, "data", torch.ones_like(p) * 0.3),
        lambda p: p.data.add_(0.25),
    ):
        for parameter in (*model.parameters(), *fast.parameters()):
            change(parameter)
        assert_same(fast, model, x)
    for module in (model, fast):
        torch.manual_seed(1)
        module.conv.weight = nn.Parameter(torch.randn_like(module.conv.weight))
        module.norm.weight = nn.Parameter(torch.randn_like(module.norm.weight))
    assert_same(fast, model, x)
    for module in (model, fast):  # another number of channels in, through .data
        module.conv.weight.data = module.conv.weight.data[:, :2].contiguous()
    assert_same(fast, model, x[:, :2])
    assert runs(fast, x[:, :2]) == ["load"]


def test_a_parameter_that_stands_for_two():
    model, fast, x = pair(Normed)
    for module in (model, fast):
        module.norm.weight = module.norm.bias
    for _ in range(2):
        assert_same(fast, model, x)
    assert runs(fast, x) == ["load"]


def test_batch_norm_counts_its_batches():
    """And writes its running statistics as eager does, of which autograd isn't told."""
    model, fast, x = pair(Residual, training=True)
    before = [[t._version for t in module.buffers()] for module in (model, fast)]
    for _ in range(3):
        assert_same(fast, model, torch.randn_like(x))
    assert fast.blocks[0].norm.num_batches_tracked == model.blocks[0].norm.num_batches_tracked == 3
    for module, were in zip((model, fast), before):
        told = [t._version - was for t, was in zip(module.buffers(), were)]
        assert told == [0, 0, 3] * (len(told) // 3)
    model.eval(), fast.eval()
    assert_same(fast, model, x)


class Norms(nn.Module):
    """Three batch norms, of which the last one counts for two; behind the first stands what somebody may look from."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.third, self.look = nn.Conv2d(4, 4, 3), nn.MaxPool2d(2, 1)
        self.norm, self.own, self.twice = (nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x):
        x = self.look(F.relu(self.norm(self.first(x))))
        x = F.relu(self.own(self.second(x)))
        return F.relu(self.twice(self.third(F.relu(self.twice(x)))))

    def counted(self) -> list[int]:
        return [int(each.num_batches_tracked) for each in (self.norm, self.own, self.twice)]


def test_batches_are_counted_at_once(monkeypatch):
    """One launch for a model's counters: where it ends, and where it raises; and a counter that stands twice counts twice."""
    model, x = Norms(), torch.randn(2, 3, 12, 13)
    fast, raised, add = fuse(copy.deepcopy(model)), [], torch._foreach_add_
    monkeypatch.setattr(
        torch, "_foreach_add_", lambda tensors, one: (raised.append(len(tensors)), add(tensors, one))
    )
    for _ in range(2):
        assert_same(fast, model, x)
    assert fast.counted() == model.counted() == [2, 2, 4] and raised == []
    fast.twice = model.twice = nn.Identity()
    assert_same(fast, model, x)
    assert raised == [2] and fast.norm.num_batches_tracked == fast.own.num_batches_tracked == 3
    for module in (model, fast):
        with pytest.raises(RuntimeError):  # of the second convolution: the image is smaller than its filters
            module(torch.randn(2, 3, 5, 5))
        assert module.norm.num_batches_tracked == 4 and module.own.num_batches_tracked == 3


def test_who_looks_between_segments_sees_the_count():
    """A hook sees each norm's count as eager's; without it a call counts at its end."""
    found = {}
    for name, module in (("eager", model := Norms()), ("fused", fuse(copy.deepcopy(model)))):
        seen = found[name] = []
        module.look.register_forward_hook(
            lambda m, *_, seen=seen, module=module: seen.append(module.counted())
        )
        module(torch.randn(2, 3, 12, 13))
    assert found["fused"] == found["eager"] == [[1, 0, 0]]


def test_a_batch_norm_that_is_called_twice():
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), norm)
    fast, x = fuse(copy.deepcopy(model)), torch.randn(2, 3, 6, 7)
    for _ in range(2):
        assert_same(fast, model, x)
    assert runs(fast, x) == ["load"] and fast[1].num_batches_tracked == model[1].num_batches_tracked


def test_forward_twice_then_backward():
    """Running statistics change in between, and no gradient hangs on them."""
    model, fast, x = pair(Residual, training=True)
    found = []
    for module in (model, fast):
        (module(x).sum() + module(2 * x).square().sum()).backward()
        found.append([p.grad for p in module.parameters()])
    for theirs, ours in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_batch_too_small_for_its_norm():
    for size in (1, 2):
        model, fast, x = pair(Residual, training=True)
        assert_same(fast, model, x[:1, :, :size, :size])


def test_dropout():
    _, fast, x = pair(Dropping)
    fast.train()
    torch.manual_seed(1)
    first, second = fast(x), fast(x)
    torch.manual_seed(1)
    again = fast(x)
    assert torch.equal(first, again) and not torch.equal(first, second)
    torch.testing.assert_close(first, torch.where(first == 0, 0.0, 2 * fast.eval()(x)))
    fast.train()
    fast.dropout.p = 0.0
    assert fast(x).all()
    fast.dropout.p = 1.5
    with pytest.raises(ValueError, match="probability"):
        fast(x)
    fast.dropout.p = 0.5
    fast.dropout.eval()
    assert fast(x).all()
    fast.train().eval()
    state = torch.get_rng_state()
    fast(x)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"


class Checkpointed(nn.Module):
    def __init__(self, module, reentrant):
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@every_model
def test_checkpoint(kind, reentrant):
    _, fast, x = pair(kind)
    answers = []
    for module in (fast, Checkpointed(fast, reentrant)):
        torch.manual_seed(5)
        fast.train(kind is Dropping)
        answers.append({key.removeprefix("module."): value for key, value in backward(module, x).items()})
    for key, value in answers[0].items():
        assert torch.equal(answers[1][key], value), key


@every_model
def test_saved_tensors_may_be_packed(kind):
    model, fast, x = pair(kind)
    packed = []

    def pack(t):
        packed.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        assert_same(fast, model, x)
    assert packed


def test_deterministic_algorithms():
    model, fast, x = pair(Residual)
    expected = results(fast, x)
    torch.use_deterministic_algorithms(True)
    try:
        for key, value in results(fast, x).items():
            assert torch.equal(value, expected[key]), key
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["linear", "square"])
def test_differentiated_twice(loss):
    """An error that says so, in every way to ask for it, also where an unused input would be allowed."""
    _, fast, x = pair(Pointwise)
    (gradient,) = torch.autograd.grad(loss(fast(x.requires_grad_())), x, create_graph=True)
    total, retain = gradient.sum(), {"retain_graph": True}
    for twice in (
        lambda: torch.autograd.grad(total, x, **retain),
        lambda: torch.autograd.grad(total, x, allow_unused=True, **retain),
        lambda: total.backward(**retain),
    ):
        with pytest.raises(RuntimeError, match="can't be differentiated twice"):
            twice()
