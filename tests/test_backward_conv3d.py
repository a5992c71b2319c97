"""The backward passes with a 3-D convolution inside, without a GPU (tests/test_emulated.py), against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import numerics
from inline_kernels.bench import checks
from inline_kernels.engine import tiling
from numerics import DROPOUT, INSTANCE_NORM
from test_emulated import folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401

every_name = pytest.mark.parametrize("name", [INSTANCE_NORM, DROPOUT])
TAILS = {INSTANCE_NORM: lambda C: ((C, 1, 1, 1), -1.0, 1.0), DROPOUT: lambda C: (4, 0.25, 1.0, 0.2)}


def drawn(name, channels, C, kernel, shape, dtype=torch.float32):
    """A model and an input. Of the dropout problem some elements tie: they are whole numbers, zero at the ends, so that nothing is taken
    from them, and the channels of a group come in pairs of opposite sign, so that its mean is exactly 0; where the convolution is 0, z is
    exactly norm.bias = min_value."""
    model = numerics.build(name, (channels, C, kernel, *TAILS[name](C)), dtype=dtype).train()
    if name == INSTANCE_NORM:
        return model, numerics.random_input(shape, dtype=dtype)
    with torch.no_grad():
        model.conv.weight.copy_(torch.randint(-1, 2, model.conv.weight.shape)), model.conv.bias.zero_()
        model.conv.weight[1::2] = -model.conv.weight[::2]
        model.norm.bias.fill_(model.min_value)
    x = torch.randint(-2, 3, shape).to(dtype)
    x.flatten(2)[..., [0, -1]] = 0
    return model, x


def assert_gradients(model, x, *phases):
    """By the rule: all gradients, or in these phases, "train" being without x's."""
    module = numerics.twin_of(model, "fused")
    for phase in phases or ("train_dx",):
        numerics.assert_within_limits(lambda x, phase=phase: checks.errors_of("", module, model, x, phase), x)


@every_name
@pytest.mark.parametrize(
    "dtype, architecture, width",
    [(torch.float32, 800, 10), (torch.float16, 800, 11), (torch.float16, 900, 12)],
    ids=str,
)
def test_gradients(name, dtype, architecture, width, gpu):
    """Rows of dv that fill the last fragment, and that don't; more planes than the ring holds at a time; planes by the copy engine, which
    moves 16 bits of either type alike."""
    model, x = drawn(name, 3, 16, 3, (3, 3, 10, 7, width), dtype)
    gpu(architecture=architecture)
    assert_gradients(model, x, "train", "train_dx")


# Channels in and out, kernel size, dtype, architecture: each is compiled for, and all problems have these kernels.
BUILDS = {
    INSTANCE_NORM: [
        (1, 16, (5, 1, 2), torch.bfloat16, 900),
        (4, 32, (1, 2, 4), torch.float32, 800),
    ],
    DROPOUT: [
        (1, 32, (1, 4, 6), torch.float32, 900),
        (2, 16, (5, 1, 2), torch.bfloat16, 800),
    ],
}


@every_name
def test_random_sizes_devices_and_pieces(name, gpu, monkeypatch):
    """Blocks with one job or many, samples in one piece or several, channels out in several sixteens, dx in whole rows or not."""

    spatial_defines = tiling.spatial_defines

    @settings(max_examples=8)
    @given(st.data())
    def run(data):
        size, one_of = (
            lambda low, high: data.draw(st.integers(low, high)),
            lambda *values: data.draw(st.sampled_from(values)),
        )
        channels, C, kernel, dtype, architecture = one_of(*BUILDS[name])
        shape = size(1, 4), channels, *(extent - 1 + size(4, 12) for extent in kernel)
        model, x = drawn(name, channels, C, kernel, shape, dtype)
        own = {"DV_BYTES": 1 << (17 if architecture == 800 else 20)}  # of each, as each is compiled for
        monkeypatch.setattr(tiling, "spatial_defines", lambda filters: spatial_defines(filters) | own)
        multiprocessors = size(1, 12)

        def takes(kilobytes: int) -> bool:
            gpu(architecture=architecture, multiprocessors=multiprocessors, shared=kilobytes << 10)
            return numerics.takes(model, x)

        assert any(
            map(takes, range(one_of(20, 163), 164, 3))
        )  # the least shared memory that will do, or much
        assert_gradients(model, x, one_of("train", "train_dx"))

    run()


@pytest.mark.parametrize("multiplier", [(1,), ()], ids=["one element", "a number"])
def test_instance_norm_with_one_multiplier_for_all_channels(multiplier, gpu):
    """Its gradient is summed over them, and is all that is written of it."""
    model = numerics.build(INSTANCE_NORM, (3, 32, 3, multiplier, -1.0, 1.0)).train()
    gpu()
    assert_gradients(model, numerics.random_input((3, 3, 6, 9, 11)))


def test_dropout_where_one_channel_ties_off_its_mean(gpu):
    """A bound that is one of the normalised values as the kernel rounds them: the sum of dz·(v - mean) counts."""
    model, x = drawn(DROPOUT, 3, 16, 3, (2, 3, 6, 9, 11))
    conv, norm = model.conv, model.norm
    with torch.no_grad():
        norm.weight.copy_(torch.rand(16) + 0.5), norm.bias.copy_(torch.randn(16))
    gpu()
    _, operator = numerics.operator_of(numerics.twin_of(model.eval(), "fused"), x, "fused")
    operands = x, conv.weight, conv.bias, norm.weight, norm.bias
    with torch.no_grad():
        saved = operator.save(*operands, -9.0, 9.0, 0)[1]
        affine = saved[: 2 * 16 * 4].view(2, 16, 4)[1, 3].double()
        v = conv(x)
        low = (3 * affine[1] + affine[2]).float().item()
    dy = torch.randn(v.shape)
    leaves = [t.requires_grad_() for t in (x, conv.weight, conv.bias, norm.weight, norm.bias)]
    ours = torch.autograd.grad(operator(*operands, low, 99.0, 0), leaves, dy)
    ties = torch.zeros_like(v)
    ties[1, 3] = v[1, 3] == 3
    assert ties.sum() > 5
    exact = [t.detach().double().requires_grad_() for t in leaves]
    z = torch.group_norm(torch.conv3d(*exact[:3]), norm.num_groups, *exact[3:], norm.eps)
    expected = torch.autograd.grad(z, exact, dy.double() * ties / 2)
    for found, right in zip(ours, expected):
        torch.testing.assert_close(found.double(), right, rtol=0, atol=2e-6 * right.abs().max().item())


@pytest.mark.parametrize("channels_out", [16, 32])
@pytest.mark.parametrize("cache", [1 << 16, 1 << 22], ids=["sums computed twice", "sums held"])
def test_instance_norm_where_all_channels_tie_the_first_wins(cache, channels_out, gpu):
    """Every z is below the lower bound, so that every channel has the same value."""
    model = numerics.build(INSTANCE_NORM, (3, channels_out, 3, (channels_out, 1, 1, 1), 50.0, 60.0)).train()
    torch.nn.init.ones_(model.multiplier)
    x = numerics.random_input((2, 3, 6, 9, 11))
    gpu(cache=cache)
    y = numerics.twin_of(model, "fused")(x)
    dy = torch.rand_like(y)
    [gradient] = torch.autograd.grad(y, [model.multiplier], dy)
    expected = torch.zeros_like(model.multiplier)
    expected[0] = 50 * dy.sum()
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("low, high, multiplier", [(0.0, 1.0, -1.0), (-1.0, 0.0, 1.0)])
def test_instance_norm_bounds_hit_exactly(low, high, multiplier, gpu):
    """What the clamp leaves of whole numbers and their negatives, in turn along an axis, has its maximum where z is 0, a bound, or beyond."""
    model = numerics.build(INSTANCE_NORM, (3, 16, 3, (16, 1, 1, 1), low, high)).train()
    with torch.no_grad():
        model.conv.weight.copy_(torch.randint(-1, 2, model.conv.weight.shape)), model.conv.bias.zero_()
        model.multiplier.fill_(multiplier)
    x = torch.randint(-2, 3, (2, 3, 1, 8, 9)) * torch.tensor([1.0, -1.0] * 2).view(4, 1, 1)
    x.flatten(2)[..., [0, -1]] = 0  # nothing is taken from them, so that sums are exact
    dy = torch.randn(2, 2, 6, 7)
    eager = numerics.results(model, x, dy)
    gpu()
    ours = numerics.results(numerics.twin_of(model, "fused"), x, dy)
    assert eager["conv.weight"].abs().max() > 0.1
    for name, theirs in eager.items():
        torch.testing.assert_close(
            ours[name], theirs, rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}: {text}"
        )


@every_name
def test_gradients_do_not_depend_on_which_are_asked_for(name, gpu):
    """Bitwise, from run to run, too; and an empty batch has gradients of zero."""
    model, x = drawn(name, 3, 16, 3, (3, 3, 6, 9, 12))
    gpu()
    module = numerics.twin_of(model, "fused")

    def gradients(*wanted):
        leaves = {"x": x.clone(), **dict(module.named_parameters())}
        asked_for = [t.requires_grad_(not wanted or key in wanted) for key, t in leaves.items()]
        torch.manual_seed(5)
        y = module(leaves["x"])
        asked_for = [t for t in asked_for if t.requires_grad]
        return torch.autograd.grad(y, asked_for, torch.ones(()).expand(y.shape))

    keys = ["x", *[key for key, _ in module.named_parameters()]]
    everything = gradients()
    for wanted in (keys, keys[1:], ["x"], ["conv.weight"], keys[-1:]):
        for key, found in zip([key for key in keys if key in wanted], gradients(*wanted), strict=True):
            assert torch.equal(found, everything[keys.index(key)]), (wanted, key)
    empty = x[:0].clone().requires_grad_()
    module.variant = "auto"
    y = module.eval().requires_grad_()(empty)
    for found in torch.autograd.grad(y, [empty, *module.parameters()], y):
        assert not found.any()


@every_name
@pytest.mark.parametrize(
    "change", ["large mean", "1e6", "1e-6", "channels apart", "samples apart", "late and large"]
)
def test_gradients_at_any_magnitude(name, change, gpu):
    model, x = drawn(name, 3, 16, 3, (3, 3, 6, 9, 12))
    if change == "large mean":
        x += 128
    elif change == "channels apart":
        x[:, 0] *= 2**14
    elif change == "samples apart":
        x *= torch.tensor([2.0**20, 1, 2.0**-20]).view(-1, 1, 1, 1, 1)
    elif change == "late and large":
        x[:, :, 4:] *= 2**20
    else:
        x *= float(change)
    gpu()
    assert_gradients(model, x)
