"""What torch.cat joins channels last, with transposed convolutions: which calls become one operator, and that all is right there."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import numerics
from benchmarks.networks import NETWORKS, UNet
from inline_kernels import fuse
from inline_kernels.engine import between, joining, library, precision
from inline_kernels.engine.between import KEPT, OPERAND
from inline_kernels.engine.capture import capture
from inline_kernels.engine.cases import CTYPES
from test_emulated import Emulated, around_ties, folder, gpu, guarded, library_of, remembers_nothing  # noqa: F401
from test_engine_between import layouts  # noqa: F401
from test_kernels_compile import entries, needs_nvcc, nvcc


class Joined(nn.Module):
    """What a transposed convolution makes of a pooled image, or a few do of as many, beside the image and its maximum; convolved together."""

    def __init__(self, channels: int = 8, grown: int = 8, count: int = 1, join=torch.cat, **settings):
        super().__init__()
        self.stem, self.join = nn.Conv2d(3, channels, 3, padding=1), join
        settings = {"kernel_size": 2, "stride": 2, **settings}
        self.grow = nn.ModuleList(nn.ConvTranspose2d(channels, grown + i, **settings) for i in range(count))
        width = 2 * channels + sum(grown + i for i in range(count))
        self.last = nn.Conv2d(width, 6, 3, padding=1)

    def forward(self, x):
        x = F.silu(self.stem(x))
        y = F.max_pool2d(x, 2)
        largest = F.max_pool2d(x, 3, 1, 1)
        return torch.tanh(self.last(self.join([x, *[grow(y) for grow in self.grow], largest], dim=1)))


def joins(model: nn.Module) -> list[between.Join]:
    captured = capture(model, model.training, 4, bare=True)
    return [*between.joins(captured, model, between.laid_out(captured, model)).values()]


# ----------------------------------------------------------------------------------------------------------- which calls do


def test_what_is_joined():
    unet = joins(NETWORKS["unet"].model())
    assert [join.result for join in unet] == [OPERAND] * 3
    assert [[t and t.of_operand for t in join.parts] for join in unet] == [[None, True]] * 3
    assert [len(join.read_by) for join in unet] == [1] * 3
    for join in (torch.cat, torch.concat, torch.concatenate):
        (found,) = joins(Joined(32, 5, 2, join))
        assert [bool(t) for t in found.parts] == [False, True, True, False] and found.result == OPERAND
    (found,) = joins(Joined(32, count=0))
    assert found.parts == (None, None) and found.result == OPERAND


class Read(Joined):
    """The transposed convolution's result is read by something else, too."""

    def forward(self, x):
        x = F.silu(self.stem(x))
        y = self.grow[0](F.max_pool2d(x, 2))
        return torch.tanh(self.last(torch.cat([x, y, F.relu(y)], 1)))


class Twice(Joined):
    """The same part twice."""

    def forward(self, x):
        x = F.silu(self.stem(x))
        y = self.grow[0](F.max_pool2d(x, 2))
        return torch.tanh(self.last(torch.cat([y, x, y], 1)))


class Sum(Joined):
    """A part is a sum, of all digits."""

    def __init__(self, channels: int = 8, grown: int = 8):
        super().__init__(channels, grown)
        self.add = nn.Conv2d(3, channels, 3, padding=1)

    def forward(self, x):
        x = self.stem(x) + F.silu(self.add(x))
        y = self.grow[0](F.max_pool2d(x, 2))
        return torch.tanh(self.last(torch.cat([x, y, F.relu(x)], 1)))


@pytest.mark.parametrize("model", [Read(32, 32), Sum(32, 32)], ids=["read twice", "a sum"])
def test_digits_stay(model):
    """Of what isn't an OPERAND, or may not be, the whole is none, and is rounded where it is convolved."""
    (found,) = joins(model)
    assert found.result == KEPT and found.parts[2] is None
    told = between.laid_out(capture(model, True, 4, bare=True), model)
    assert not any(segment.of_operand for segment in told)


class Leaves(Joined):
    def forward(self, x):
        x = F.silu(self.stem(x))
        y = torch.cat([x, self.grow[0](F.max_pool2d(x, 2)), x], 1)
        return torch.tanh(self.last(y)), y


def hooked(model: nn.Module) -> nn.Module:
    model.grow[0].register_forward_hook(lambda *given: None)
    return model


def by_rows(parts, dim):
    return torch.cat(parts, 2)


def called_otherwise(parts, dim):
    return torch.cat(tensors=parts, dim=dim)


@pytest.mark.parametrize(
    "model",
    [
        hooked(Joined(32)),
        Joined(32, join=by_rows),
        Joined(32, join=called_otherwise),
        Leaves(32),
        Joined(8),
        Joined(32).to(memory_format=torch.channels_last),
    ],
    ids=["hooks", "rows", "keywords", "a result of the model", "few channels", "filters"],
)
def test_what_is_not_joined(model):
    assert joins(model) == []


# ----------------------------------------------------------------------------------------------------------------- kernels

CHANNELS = [(8, 4), (3, 4, 5), (16, 8, 64), (3, 5), (1, 1), (2, 6, 1, 12), (6, 2), (40, 1030), (2060, 4)]


def to_tf32(t: torch.Tensor) -> torch.Tensor:
    return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels(dtype, channels, folder, guarded):  # noqa: F811
    """To the bit; the sums of whole numbers, too, which float32 does not hold before positions far apart cancel."""
    torch.manual_seed(0)
    count, rounds = len(channels), dtype == torch.float32
    biased = tuple(i % 2 == 1 for i in range(count))
    text = joining.text(biased)
    kernels = Emulated(text, library_of(text, 800, {"VALUE_T": CTYPES[dtype]}, (), folder))
    for positions in (1, 7, 300) if sum(channels) > 1000 else (1, 13, 1030, 4500):
        parts = [around_ties(positions, c)[0].to(dtype) for c in channels]
        biases = [torch.randn(c).to(dtype) for c, is_biased in zip(channels, biased) if is_biased]
        out = torch.full((positions, sum(channels)), float("nan"), dtype=dtype)
        flags = [rounds and is_biased for is_biased in biased]
        kernels.join(out, *parts, *biases, positions, *channels, *flags)
        added, rest = list(parts), iter(biases)
        for i in range(1, count, 2):
            added[i] = (parts[i].float() + next(rest).float()).to(dtype)
            added[i] = to_tf32(added[i]) if rounds else added[i]
        assert torch.equal(out, torch.cat(added, 1)), positions

        dy = torch.randint(-3, 4, (positions, sum(channels))).to(dtype)
        half, big = positions // 2, 2.0**10 if dtype == torch.bfloat16 else 2.0**20 if rounds else 2.0**9
        dy[:half] = (torch.randn(half, sum(channels)) * big).round().to(dtype)
        dy[half : 2 * half] = -dy[:half]
        dy[0] += torch.randint(-2, 3, dy[0].shape) if rounds else 0
        found = [torch.full((positions, c), float("nan"), dtype=dtype) for c in channels]
        sums = [torch.full((c,), float("nan"), dtype=dtype) for c, each in zip(channels, biased) if each]
        kernels.split(*found, *sums, dy, positions, *channels, *flags)
        wanted = dy.split(channels, 1)
        for i, (one, other) in enumerate(zip(found, wanted)):
            assert torch.equal(one, to_tf32(other.contiguous()) if flags[i] else other), (positions, i)
        for one, other in zip(sums, wanted[1::2]):
            assert torch.equal(one, other.double().sum(0).to(dtype)), positions
        none = [torch.empty(0, dtype=dtype)] * count
        again = [torch.full_like(t, float("nan")) for t in sums]
        kernels.split(*none, *again, dy, positions, *channels, *flags)  # sums alone
        assert all(map(torch.equal, sums, again))


@needs_nvcc
@pytest.mark.parametrize("architecture, value", [("75", "half_t"), ("90a", "float")])
def test_registers_suffice(architecture, value, tmp_path):
    (path := tmp_path / "join.cu").write_text(joining.text((False, True, True)))
    done = nvcc(path, architecture, [f"VALUE_T={value}"], tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    found = entries(done.stderr)
    assert {"join_kernel", "split_kernel", "join_bias_kernel"} <= found.keys()
    assert [name for name, entry in found.items() if entry.spilled] == []


# ---------------------------------------------------------------------------------------------------------------- what runs


@pytest.fixture
def runs(layouts, monkeypatch):  # noqa: F811
    """The shapes of what is joined by the operator, a list a call."""
    found, forward = [], joining.Plan.forward

    def noted(self, a):
        found.append([tuple(t.shape) for t in a])
        return forward(self, a)

    monkeypatch.setattr(joining.Plan, "forward", noted)
    return found


MODELS = {
    "one": (lambda: Joined(8), (2, 3, 6, 10), 1),
    "odd channels": (lambda: Joined(5, 3, 2), (2, 3, 4, 6), 1),
    "odd sizes": (lambda: Joined(8, 7, 1, kernel_size=3, stride=2, padding=(1, 0), output_padding=(1, 0)), (1, 3, 6, 5), 1),
    "without a bias": (lambda: Joined(4, 4, 2, bias=False), (2, 3, 4, 4), 1),
    "none grown": (lambda: Joined(6, 0, 0), (2, 3, 5, 7), 1),
    "read twice": (lambda: Read(8), (2, 3, 6, 4), 1),
    "twice": (lambda: Twice(8), (2, 3, 6, 4), 1),
    "a sum": (lambda: Sum(8), (2, 3, 6, 4), 1),
    "unet": (lambda: UNet(7, 2), (2, 3, 16, 12), 2),
}  # fmt: skip


@pytest.mark.parametrize("phase", ["forward", "train_dx"])
@pytest.mark.parametrize("name", MODELS)
def test_is_right(name, phase, runs, monkeypatch):
    """Without rounding, which a CPU's eager does not know. Against float64, with every gradient."""
    monkeypatch.setattr(between, "rounds", lambda segment, x: False)
    make, shape, count = MODELS[name]
    assert not numerics.wrong_of(make, shape, phase)
    assert len(runs) >= count


def is_tf32(t: torch.Tensor) -> bool:
    return not (t.detach().contiguous().view(torch.int32) & 0x1FFF).any()


def test_operands_are_rounded(runs, monkeypatch):
    """What is joined for a convolution, and what a transposed convolution and its gradients are made of."""
    seen, forward, grow, back = (
        [],
        joining.Plan.forward,
        torch.conv_transpose2d,
        joining._convolution_backward,
    )

    def of_forward(self, a):
        seen.append(forward(self, a))
        return seen[-1]

    def of_grow(x, weight, *given):
        seen.extend([x, weight] if not x.is_meta else [])
        return grow(x, weight, *given)

    def of_back(dy, x, weight, *given):
        seen.extend([dy, x, weight])
        return back(dy, x, weight, *given)

    monkeypatch.setattr(joining.Plan, "forward", of_forward)
    monkeypatch.setattr(torch, "conv_transpose2d", of_grow)
    monkeypatch.setattr(joining, "_convolution_backward", of_back)
    torch.manual_seed(0)
    model, x = Joined(), torch.randn(2, 3, 6, 10)
    fuse(model)(x).square().sum().backward()
    assert len(seen) == 6 and all(map(library.is_channels_last, seen))
    assert [i for i, t in enumerate(seen) if not is_tf32(t)] == []
    seen.clear()
    model.zero_grad()
    model = Sum(8)
    fuse(model)(x).square().sum().backward()
    assert [i for i, t in enumerate(seen) if not is_tf32(t)] == [2], "but a sum that is joined"


def test_bias_gradients_keep_their_digits(runs, monkeypatch):
    """They are sums of what isn't rounded yet; and are the same to the bit each time."""
    torch.manual_seed(0)
    model, x = Joined(), torch.randn(2, 3, 6, 10)
    fast, found = fuse(model), []
    given = []
    back = joining.Plan.backward
    monkeypatch.setattr(
        joining.Plan, "backward", lambda self, dy, *rest: (given.append(dy), back(self, dy, *rest))[1]
    )
    for _ in range(2):
        y = fast(x)
        found.append(torch.autograd.grad(y.square().sum(), [*model.parameters()]))
    assert all(map(torch.equal, *found))
    names = [name for name, _ in model.named_parameters()]
    bias = dict(zip(names, found[0]))["grow.0.bias"]
    assert not is_tf32(given[0])
    torch.testing.assert_close(bias, given[0][:, 8:16].double().sum((0, 2, 3)).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("of", ["dx", "forward", "dw"])
def test_eagers_float32_stays(of, runs, monkeypatch):
    """A transposed convolution that eager runs in float32 runs in planes, of all digits, and so does what reads it; its gradients likewise."""
    monkeypatch.setattr(
        precision,
        "runs_tf32",
        lambda x, weight, asked, *given, **settings: asked != of or weight.shape[-1] != 2,
    )
    torch.manual_seed(0)
    model, x = Joined(), torch.randn(2, 3, 6, 10)
    seen, back = [], joining._convolution_backward
    monkeypatch.setattr(
        joining, "_convolution_backward", lambda *given: (seen.append(given), back(*given))[1]
    )
    fast = fuse(model)
    y = fast(x)
    assert bool(runs) == (of != "dx")
    y.square().sum().backward()
    assert [library.is_channels_last(t) for given in seen for t in given[:2]] == (
        [] if of == "dx" else [False] * 2
    )
    if of == "dx":
        seen, grow = [], F.conv_transpose2d
        monkeypatch.setattr(F, "conv_transpose2d", lambda x, *given: (seen.append(x), grow(x, *given))[1])
        joiner = fast._kept[0].replacements[0]
        image = torch.randn(2, 8, 6, 10).contiguous(memory_format=torch.channels_last)
        pooled = F.max_pool2d(image, 2)
        with torch.no_grad():
            result = joiner(image, pooled, image)
        assert result.is_contiguous() and seen[0].is_contiguous()
        assert torch.equal(result, torch.cat([image, model.grow[0](pooled.contiguous()), image], 1))


def test_filters_gradients_in_float32(runs, monkeypatch):
    """Where eager has that of the filters that read what is joined in float32, nothing is rounded."""
    monkeypatch.setattr(
        precision, "runs_tf32", lambda x, weight, of, *given, **settings: of != "dw" or weight.shape[0] != 6
    )
    torch.manual_seed(0)
    with torch.no_grad():
        fuse(Joined())(torch.randn(2, 3, 6, 10))
    assert not runs


@pytest.mark.parametrize("wanted", [*itertools.product([False, True], repeat=4)], ids=str)
def test_frozen(wanted, runs, monkeypatch):
    """Of the stem, the transposed convolution's weight and bias, and what reads them, some have gradients."""
    monkeypatch.setattr(between, "rounds", lambda segment, x: False)
    torch.manual_seed(0)
    model, x = Joined(), torch.randn(2, 3, 4, 6)
    parameters = [model.stem.weight, model.grow[0].weight, model.grow[0].bias, model.last.weight]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    own = [parameter.requires_grad_() for parameter, wants in zip(parameters, wanted) if wants]
    ours = fuse(model)(x).square().sum()
    eager = model(x).square().sum()
    assert ours.requires_grad == bool(own) and len(runs) == 1
    if own:
        for one, other in zip(torch.autograd.grad(ours, own), torch.autograd.grad(eager, own)):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            assert one.stride() == other.stride()


def test_in_half_precision(runs):
    torch.manual_seed(0)
    model, x = Joined(5, 3, 2).bfloat16(), torch.randn(2, 3, 6, 10).bfloat16()
    ours, eager = fuse(model)(x), model(x)
    torch.testing.assert_close(ours, eager, rtol=0.05, atol=0.05)
    own = [*model.parameters()]
    found = torch.autograd.grad(ours.float().square().sum(), own)
    for one, other in zip(found, torch.autograd.grad(eager.float().square().sum(), own)):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.2)
    assert len(runs) == 1


def test_what_is_saved_may_come_back_otherwise(runs):
    torch.manual_seed(0)
    model, x = Joined(), torch.randn(2, 3, 6, 10, requires_grad=True)
    fast, found = fuse(model), []
    for hook in (lambda t: t, lambda t: t.contiguous()):
        with torch.autograd.graph.saved_tensors_hooks(hook, lambda t: t):
            y = fast(x)
        found.append(torch.autograd.grad(y.sum(), [x, *model.parameters()]))
    assert all(map(torch.equal, *found))


# ------------------------------------------------------------------------------------------------------- where it isn't asked


def test_eager_where_nothing_fits(runs, monkeypatch):
    """Mixed types and layouts, other sizes, no elements: PyTorch's own calls, with their errors."""
    torch.manual_seed(0)
    model, x = Joined().eval(), torch.randn(2, 3, 6, 10)
    fast = fuse(model)
    with torch.no_grad():
        fast(x)
        joiner, last = fast._kept[0].replacements[0], torch.channels_last
        image, pooled = torch.randn(2, 8, 6, 10), torch.randn(2, 8, 3, 5)
        assert len(runs) == 1
        given = [t.contiguous(memory_format=last) for t in (image, pooled, image)]
        wanted = torch.cat([image, model.grow[0](pooled), image], 1)
        torch.testing.assert_close(joiner(*given), wanted, rtol=1e-2, atol=1e-2)
        assert len(runs) == 2
        for others in ((image, *given[1:]), (given[0], pooled, given[2]), (image, pooled, image)):
            y = joiner(*others)
            assert torch.equal(y, wanted) and y.is_contiguous()
        assert joiner(*[t[:0] for t in given]).shape == (0, 24, 6, 10)
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            joiner(given[0][:, :, :4], *given[1:])
        assert len(runs) == 2
        model.grow[0].double()
        with pytest.raises(RuntimeError):
            joiner(*given)


def test_autocast_and_tracers_see_pytorchs_calls(runs):
    torch.manual_seed(0)
    model, x = Joined().eval(), torch.randn(2, 3, 6, 10)
    fast = fuse(model)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(fast(x), model(x), rtol=5e-2, atol=5e-2)
        torch.testing.assert_close(torch.func.vmap(fast)(x[None])[0], model(x), rtol=1e-2, atol=1e-2)
        assert not runs
        fast(x)
    assert len(runs) == 1


def test_who_changes_a_transposed_convolution_is_heard(runs):
    """Hooks, settings, other parameters."""
    torch.manual_seed(0)
    model, x = Joined().eval(), torch.randn(2, 3, 6, 10)
    fast = fuse(model)
    with torch.no_grad():
        fast(x)
        fast.grow[0].weight.data.mul_(2)
        fast.grow[0].bias = nn.Parameter(torch.randn(8))
        torch.testing.assert_close(fast(x), copy.deepcopy(model)(x), rtol=1e-2, atol=1e-2)
        assert len(runs) == 2
        seen = []
        hook = fast.grow[0].register_forward_hook(lambda *given: seen.append(given))
        fast(x)
        assert len(seen) == 1 and len(runs) == 2
        hook.remove()
        fast.grow[0].padding, fast.grow[0].kernel_size = (1, 1), (4, 4)
        fast.grow[0].weight = nn.Parameter(torch.randn(8, 8, 4, 4))
        torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-2)
        fast.grow[0].bias = None
        torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-2)
        assert len(runs) == 4


def test_on_a_cpu_nothing_changes():
    model, x = Joined(32).eval(), torch.randn(2, 3, 6, 10)
    fast = fuse(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert not fast._kept[0].replacements


# ------------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["forward", "train_dx"])
@pytest.mark.parametrize("width", [64, 33, 34])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_skips_are_right_on_a_gpu(dtype, width, phase, monkeypatch):
    runs, forward = [], joining.Plan.forward
    monkeypatch.setattr(joining.Plan, "forward", lambda self, a: (runs.append(a), forward(self, a))[1])
    assert not numerics.wrong_of(lambda: UNet(width, 2), (4, 3, 64, 48), phase, "cuda", dtype)
    assert runs or dtype == torch.float32  # what eager runs in float32 stays so
