"""The operators by themselves: what torch.library promises, gradients against finite differences, and the dropout mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import inline_loader
import models
import numerics
from inline_kernels.engine import drawing, library, tiling
from inline_kernels.engine.support import DTYPES
from numerics import (
    DROPOUT,
    NAMES,
    POOL,
    Recorder,
    every_device,
    every_name,
    every_variant,
    known,
    results,
)


@every_device
@pytest.mark.parametrize("name, layout", [(DROPOUT, "contiguous"), (POOL, "channels last")])
def test_opcheck(name, layout, device):
    """Schema, fake tensors, autograd registration and ahead-of-time dispatch with dynamic shapes; of all three operators."""
    model, x = numerics.small(name, device=device)
    if layout == "channels last":
        x = x.to(memory_format=library.channels_last(x))
    twin, recorder = numerics.twin_of(model), Recorder()
    with recorder:
        results(twin, x)
    _, operator = numerics.operator_of(twin, x)
    forward, saving, backward = (
        getattr(torch.ops.inline_kernels, operator.name + suffix).default
        for suffix in ("", "_saving", "_backward")
    )
    arguments = recorder.calls[saving]
    torch.library.opcheck(forward, tuple(map(_leaf, arguments)))
    for each in (forward, saving):
        torch.library.opcheck(each, tuple(map(_detached, arguments)))
    dy, *_, saved, needs = recorder.calls[backward]
    dy, saved = dy.detach(), [t.detach() for t in saved]
    for asked in ([True] * len(needs), [False, True] * len(needs)):
        some = [need and ask for need, ask in zip(needs, asked)]  # whole numbers have no gradient
        torch.library.opcheck(backward, (dy, *map(_detached, arguments), saved, some))


@pytest.mark.parametrize("variant", ["fused", "epilogue"])
@every_name
def test_shapes_leave_the_batch_size_open(name, variant, monkeypatch):
    """With and without what is saved: else a compiled model would be compiled anew for each size. Nothing is built."""
    monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    monkeypatch.setattr(tiling, "device_properties", lambda index: tiling.Device((9, 0), 227 << 10, 132))
    monkeypatch.setattr(inline_loader, "load", None)
    model, x = numerics.small(name, variant)
    if variant not in models.PROBLEMS[name].variants:
        pytest.skip("there are no fused kernels")
    part, operator = numerics.operator_of(numerics.twin_of(model.train()), x, variant)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (x.dim() - 1))
    drawn = (mode.from_tensor(torch.zeros(1, dtype=torch.int64)), 0) if part.segment.random else ()
    operands = [mode.from_tensor(p, static_shapes=True) for p in part.tensors()]
    symbolic = mode.from_tensor(x, symbolic_context=sizes)
    for saving in (False, True):
        with mode:  # in which a compiler asks
            y, *saved = operator.shapes(symbolic, *operands, *drawn, *part.numbers(), 0, saving=saving)
        assert isinstance(y.shape[0], torch.SymInt) and bool(saved) == saving


def _detached(argument):
    return argument.detach() if isinstance(argument, torch.Tensor) else argument


def _leaf(argument):
    floating = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.detach().clone().requires_grad_() if floating else _detached(argument)


@every_device
@pytest.mark.parametrize("name", [name for name in NAMES if known(name).tiny])
@numerics.steady_library()
def test_gradcheck(name, device):
    """Finite differences in float64, at a point where no comparison is close."""
    model, x = numerics.sized(name, known(name).tiny, device=device, dtype=torch.float64)
    new = numerics.twin_of(model)

    def run(x, *parameters):
        return torch.func.functional_call(new, dict(zip(dict(new.named_parameters()), parameters)), x)

    leaves = x.requires_grad_(), *[p.detach().clone().requires_grad_() for p in new.parameters()]
    assert run(*leaves).unique().numel() > 2, "the bounds leave something to differentiate"
    assert torch.autograd.gradcheck(run, leaves, eps=1e-6, atol=1e-6)


def test_gradcheck_where_min_ties():
    """The gradient of the one problem whose gradients hang on ties, from z = norm_bias = low: half of a plain norm's."""
    model, x = numerics.sized(
        DROPOUT, numerics.Size((2, 4, (1, 2, 2), 2, 0.25, 1.0, 0.2), (2, 2, 2, 3, 4)), dtype=torch.float64
    )
    with torch.no_grad():
        model.norm.weight.zero_(), model.norm.bias.fill_(0.25)
    leaves = [x.requires_grad_(), *model.parameters()]
    y = numerics.twin_of(model)(x)
    g, plain = torch.randn_like(y), model.norm(model.conv(x))
    for ours, theirs in zip(torch.autograd.grad(y, leaves, g), torch.autograd.grad(plain, leaves, g)):
        torch.testing.assert_close(ours, theirs / 2)


# ---------------------------------------------------------------------------------------------------------------- dropout


DROPPING = known(DROPOUT).fused.arguments[:-1]  # all but the probability


def visible(device="cpu", p=0.2, dtype=torch.float32, ties=False, variant="epilogue"):
    """A module in training whose output is not zero where kept, and its input. With ties, gradients show the mask too."""
    size = numerics.Size((*DROPPING, p), (5, 3, 6, 13, 11))
    model, x = numerics.sized(DROPOUT, size, device=device, dtype=dtype)
    if ties:
        numerics.give_gradients(model, x)
    return numerics.twin_of(model.train(), variant, x), x


@every_variant
@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dropout_keeps_the_right_share(p, variant, device):
    """Within six standard deviations, over all, by channel and by position; kept values are scaled up."""
    new, x = visible(device, p, variant=variant)
    y = new(x)
    kept = y != 0
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], new.min_value / (1 - p)))
    for dims in ((0, 1, 2, 3, 4), (0, 2, 3, 4), (1, 2, 3, 4), (0, 1, 2, 3)):
        share = kept.double().mean(dims)
        trials = kept.numel() / share.numel()
        assert (share - (1 - p)).abs().max() <= 6 * math.sqrt(p * (1 - p) / trials)
    # Neighbours, and elements that share a draw of random numbers, are independent.
    flat = kept.flatten().double() - (1 - p)
    for distance in (1, 2, 3, 4, 128):
        correlation = (flat[distance:] * flat[:-distance]).mean() / (p * (1 - p))
        assert correlation.abs() <= 6 / math.sqrt(flat.numel())


@every_variant
def test_dropout_follows_the_generator(variant, device):
    new, x = visible(device, variant=variant)
    torch.manual_seed(11)
    first, second = new(x), new(x)
    torch.manual_seed(11)
    again = new(x)
    assert torch.equal(first, again) and not torch.equal(first, second)
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    new.eval()(x)
    new.train().dropout.p = 0.0
    new(x)
    after = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    assert torch.equal(state, after), "eval and p = 0 use no random numbers"


@every_variant
def test_dropout_backward_uses_the_mask_of_forward(variant, device):
    """Every element ties, so its gradient is half its factor: read through the gradient of norm.bias, channel by channel,
    and, with one channel at a time let through, position by position."""
    new, x = visible(device, ties=True, variant=variant)
    y = new(x)
    kept = (y != 0).float()
    torch.manual_seed(99)  # a backward pass that drew again would draw something else
    for g in (torch.ones_like(y), torch.randn_like(y)):
        (gradient,) = torch.autograd.grad(y, new.norm.bias, g, retain_graph=True)
        expected = (g * kept).sum((0, 2, 3, 4)) * 0.5 / (1 - new.dropout.p)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


@every_variant
def test_dropout_is_drawn_again_where_the_state_is_restored(variant, device):
    """By fork_rng, and by hand; forward with gradients or without."""
    new, x = visible(device, variant=variant)
    rng = torch.cuda if device == "cuda" else torch
    new(x)
    with torch.random.fork_rng(), torch.no_grad():
        first = new(x)
    state = rng.get_rng_state()
    assert torch.equal(new(x), first)
    second = new(x)
    rng.set_rng_state(state)
    assert torch.equal(new(x), first) and torch.equal(new(x), second) and not torch.equal(first, second)


def test_numbers_drawn_by_different_states_are_different():
    """What two states' numbers differ by is s + k * _GOLDEN for seeds s apart and draws k apart, all modulo 2⁶³. The multiples nearest to 0
    are at denominators of convergents of _GOLDEN / 2⁶³."""
    step, before, denominator, (number, rest) = drawing._GOLDEN, 0, 1, (2**63, drawing._GOLDEN)
    nearest = []
    while rest and denominator < 2**32:
        nearest.append(min(denominator * step % 2**63, -denominator * step % 2**63))
        before, denominator = denominator, number // rest * denominator + before
        number, rest = rest, number % rest
    assert step % 2 and len(nearest) > 30 and min(nearest) > 2**30
    numbers = {drawing._number(Generator(seed, 4 * draw)) for seed in range(30) for draw in range(100)}
    assert len(numbers) == 3000 and all(30 <= number < 2**63 for number in numbers), "none is a seed"


class Generator:
    def __init__(self, seed, offset):
        self.initial_seed, self.get_offset, self.set_offset = lambda: seed, lambda: offset, [offset + 4].index


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dropout_is_a_function_of_the_seed(dtype, variant, device):
    """Of the seed alone, or of a number in its place: not of dtype, and not of whether a gradient is wanted."""
    new, x = visible(device, dtype=dtype, variant=variant)
    seed = torch.tensor([12345], device=device)
    part, operator = numerics.operator_of(new, x, variant)

    def run(x, seed=seed, number=0):
        return operator(x, *part.tensors(), seed, number, *part.numbers(), DTYPES.index(x.dtype)) != 0

    mask = run(x)
    assert torch.equal(mask, run(x, seed[:0], 12345)) and not torch.equal(mask, run(x, seed[:0], 12346))
    with torch.no_grad():
        assert torch.equal(mask, run(x))
    assert torch.equal(mask[:2], run(x[:2]))
    seed += 1
    assert not torch.equal(mask, run(x))


@every_device
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_masks_are_equal_across_variants(p, device):
    """For the same seed, also where one computes with gradients."""
    masks = []
    for variant in models.PROBLEMS[DROPOUT].variants_on(device)[1:]:
        new, x = visible(device, p, variant=variant)
        torch.manual_seed(7)
        masks.append(new(x) != 0)
        torch.manual_seed(7)
        with torch.no_grad():
            masks.append(new(x) != 0)
    assert all(torch.equal(mask, masks[0]) for mask in masks)


@pytest.mark.parametrize("samples", [2, 3])
def test_dropout_in_pieces_draws_the_same_mask(samples, monkeypatch):
    new, x = visible()
    torch.manual_seed(4)
    with torch.no_grad():
        whole = new(x)
        sample = whole[0].numel() * whole.element_size()
        monkeypatch.setattr(library, "CPU_PIECE_BYTES", samples * sample)
        inline_loader.forget()
        torch.manual_seed(4)
        assert torch.equal(new(x), whole)
    inline_loader.forget()


@every_variant
def test_dropout_probabilities_at_the_ends(variant, device):
    """p = 0 drops nothing; p = 1 gives x times 0, which keeps NaN, with gradients of 0; eval returns the input."""
    new, x = visible(device, p=1.0, ties=True, variant=variant)
    x[1, 0, 0, 0, 0] = math.nan
    reference = numerics.problem_of(new).Model(*DROPPING, 1.0).to(device).train()
    reference.load_state_dict(new.state_dict())
    for p, training in ((1.0, True), (0.0, True), (0.5, False)):
        for module in (new, reference):
            module.dropout.p = p
            module.train(training)
        ours, theirs = results(new, x), results(reference, x)
        numerics.assert_equal({"output": ours["output"]}, theirs)
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], equal_nan=True, rtol=1e-4, atol=1e-4)
