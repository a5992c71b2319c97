"""Which results stay channels last between a model's convolutions, and that all is right there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import numerics
from benchmarks.networks import NETWORKS, Bottleneck
from inline_kernels import fuse
from inline_kernels.engine import between, costs, gradients, library, precision
from inline_kernels.engine import capture as capturing
from inline_kernels.engine.between import ENDS, KEPT, OPERAND
from inline_kernels.engine.capture import capture
from inline_kernels.engine.layouts import Turns
from inline_kernels.engine.structure import Structure
from test_emulated import folder, gpu, guarded, remembers_nothing  # noqa: F401


class Chain(nn.Module):
    """Two convolutions, and what stands `between` them; `leaves`: the first one's result, too, does."""

    def __init__(self, between=None, leaves: bool = False, channels: int = 32, **second):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.between, self.leaves = between or nn.Identity(), leaves
        self.second = nn.Conv2d(channels, 32, 3, **second)

    def forward(self, x):
        x = F.silu(self.first(x))
        y = F.silu(self.second(self.between(x)))
        return (x, y) if self.leaves else y


def results(model: nn.Module) -> list[str | None]:
    return [
        segment.result for segment in between.laid_out(capture(model, model.training, 4, bare=True), model)
    ]


def test_what_is_kept():
    assert results(Chain()) == [OPERAND, ENDS]
    assert results(Chain(nn.MaxPool2d(2))) == [OPERAND, ENDS]
    resnet = results(NETWORKS["resnet18"].model())
    assert resnet.count(OPERAND) == 9 and resnet.count(KEPT) == 10 and resnet[-1] == ENDS
    stem = capture(NETWORKS["resnet18"].model(), True, 4, bare=True).segments[0]
    assert resnet[0] == OPERAND and stem.outputs[0].space.level == "w", (
        "what is kept is what the stem's pool gives"
    )
    unet = results(NETWORKS["unet"].model())
    assert unet.count(OPERAND) == 14 and unet[-1] == ENDS
    assert results(NETWORKS["vae_block"].model()) == [OPERAND, OPERAND, ENDS]
    assert results(Before(32)) == [KEPT, OPERAND, KEPT, OPERAND, KEPT, ENDS]


@pytest.mark.parametrize(
    "model",
    [
        Chain(leaves=True),
        Chain(channels=16),
        Chain(nn.Flatten(2)),
        Chain(nn.AlphaDropout()),
        Chain(nn.LayerNorm(8)),
        Chain(groups=2),
        Chain(padding=1, padding_mode="reflect"),
        Chain().to(memory_format=torch.channels_last),
    ],
    ids=["a result of the model", "few channels", "flat", "drawn in memory's order", "over columns", "groups", "reflected", "filters"],
)  # fmt: skip
def test_what_is_not_kept(model):
    assert {*results(model)} == {None}


def test_what_is_added_keeps_its_digits():
    """A sum is rounded where it is convolved, not where it is written; convolutions know of what their x is."""
    segments = between.laid_out(capture(Before(32), True, 4, bare=True), Before(32))
    assert [segment.of_operand for segment in segments] == [False, False, True, False, True, False]
    assert [len(segment.read_by) for segment in segments] == [0, 1, 0, 1, 1, 0]


def test_hooks_see_what_eager_gives():
    model = Chain(nn.MaxPool2d(2))
    model.between.register_forward_hook(lambda *given: None)
    assert {*results(model)} == {None}


# ------------------------------------------------------------------------------------------------------------------ what runs


class Branches(nn.Module):
    """Two convolutions whose sum, a residual, is pooled, beside a mean; the first one's stride halves the image."""

    def __init__(self, channels: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, 2, 1)
        self.left, self.right = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 1)
        self.norm, self.last = nn.BatchNorm2d(channels), nn.Conv2d(2 * channels, 5, 3)

    def forward(self, x):
        x = F.relu(self.stem(x))
        y = F.silu(self.norm(self.left(x)) + torch.tanh(self.right(x)))
        return (
            torch.sigmoid(self.last(torch.cat([F.max_pool2d(x, 2), F.max_pool2d(y, 2)], 1)))
            * x.mean((2, 3))[:, :5, None, None]
        )


class Before(nn.Module):
    """Norms stand before convolutions, in training with running statistics; of one the input is a sum that is used twice."""

    def __init__(self, channels: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.norm, self.again = nn.BatchNorm2d(channels), nn.GroupNorm(2, channels)
        self.one, self.two, self.last = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3))

    def forward(self, x):
        x = self.stem(x) * 2.0
        x = x + self.one(F.relu(self.norm(x)))
        return self.last(x + torch.tanh(self.two(F.silu(self.again(x)))))


MODELS = {
    "before": (Before, (2, 3, 7, 8)),
    "vae_block": (NETWORKS["vae_block"].small_model, (2, 16, 9, 11)),
    "chain": (Chain, (2, 3, 9, 10)),
    "branches": (Branches, (2, 3, 17, 20)),
    "resnet18": (NETWORKS["resnet18"].small_model, (2, 3, 48, 48)),
    "unet": (NETWORKS["unet"].small_model, (2, 3, 16, 12)),
}


@pytest.fixture
def layouts(gpu, monkeypatch):  # noqa: F811
    """A CPU is a GPU whose library runs TF32; of each convolution's x the memory format."""
    gpu()
    found = []
    convolve = library.convolve

    def noted(how, x, *given):
        found.append(library.is_channels_last(x))
        return convolve(how, x, *given)

    monkeypatch.setattr(library, "convolve", noted)
    monkeypatch.setattr(library, "may_run_tf32", lambda x: x.dtype == torch.float32)
    monkeypatch.setattr(precision, "runs_tf32", lambda *given, **settings: True)
    monkeypatch.setattr(between, "FEWEST_CHANNELS", 4)
    monkeypatch.setattr(capturing, "capture", lambda *given, **_: capture(*given, bare=True))
    monkeypatch.setattr(
        Structure, "_laid_out", lambda self, model, captured: between.laid_out(captured, model)
    )
    return found


@pytest.mark.parametrize(
    "name, phase",
    [
        *((name, "train_dx") for name in MODELS),
        *((name, "forward") for name in MODELS if name not in ("unet", "resnet18")),
    ],
)
def test_is_right(name, phase, layouts, monkeypatch):
    """Without rounding, which a CPU's eager does not know."""
    monkeypatch.setattr(between, "rounds", lambda segment, x: False)
    make, shape = MODELS[name]
    assert not numerics.wrong_of(make, shape, phase)
    assert not layouts[0] and any(layouts)


@pytest.mark.parametrize("name", ["chain", "branches", "before"])
def test_filters_gradients_of_our_own(name, layouts, monkeypatch):
    """Of x and dz channels last, of all of float32's digits."""
    monkeypatch.setattr(between, "rounds", lambda segment, x: False)
    monkeypatch.setattr(costs, "weight_gradient", lambda *_: (1.0, 2.0))
    monkeypatch.setattr(gradients, "_splits", lambda *_: True)
    planned, lay = gradients.planned, []

    def noted(ways, segment, x, weight, last=False):
        lay.append((ways.weight, library.is_channels_last(x), last))
        return planned(ways, segment, x, weight, last)

    monkeypatch.setattr(gradients, "planned", noted)
    make, shape = MODELS[name]
    assert not numerics.wrong_of(make, shape, "train_dx")
    assert (gradients.PACKS, True, True) in lay


def test_what_only_another_gradient_reads_is_not_rounded(layouts, monkeypatch):
    """Where ours gives that of filters, the library is asked for x's alone, and no pass rounds or turns an x."""
    monkeypatch.setattr(costs, "weight_gradient", lambda *_: (1.0, 2.0))
    backward, seen, asked = library.convolve_backward, [], []

    def noted(how, dz, x, weight, needs, operands=None, turned=None):
        seen.append(x.data_ptr())
        asked.append(needs)
        return backward(how, dz, x, weight, needs, operands, turned)

    monkeypatch.setattr(library, "convolve_backward", noted)
    planned, read = gradients.planned, []

    def planning(*given):
        run = planned(*given)
        return lambda dz, x, weight: read.append(x.data_ptr()) or run(dz, x, weight)

    monkeypatch.setattr(gradients, "planned", planning)
    torch.manual_seed(0)
    fuse(Before())(torch.randn(2, 3, 9, 10)).sum().backward()
    assert asked[0] == (True, False) and seen[0] == read[0]  # of a sum


def test_eager_is_asked_in_its_own_layout(layouts, monkeypatch):
    """Which is planes, though here x is channels last: of the gradient of filters, too."""
    asked = []

    def noted(x, weight, of="forward", *given, channels_last=None):
        asked.append((of, channels_last))
        return True

    monkeypatch.setattr(costs, "weight_gradient", lambda *_: (1.0, 2.0))
    monkeypatch.setattr(precision, "runs_tf32", noted)
    fuse(Chain(channels=8))(torch.randn(2, 3, 9, 10)).sum().backward()
    assert ("dw", False) in asked and {last for _, last in asked} == {False}


@pytest.mark.parametrize("name", ["chain", "branches", "before", "vae_block"])
def test_operands_are_rounded(name, layouts, monkeypatch):
    """Results, filters and gradients of v that a library convolves channels last have no more digits than TF32; filters where x's gradient is asked for."""
    seen = []
    backward = library.convolve_backward

    def noted(how, dz, x, weight, needs, operands=None, turned=None):
        seen.extend([] if how.is_nothing else [dz, *operands(x, weight, turned)[: 1 + needs[0]]])
        return backward(how, dz, x, weight, needs, operands, turned)

    monkeypatch.setattr(library, "convolve_backward", noted)
    torch.manual_seed(0)
    make, shape = MODELS[name]
    fuse(make())(torch.randn(shape)).sum().backward()
    assert seen and all(library.is_channels_last(t) or t.shape[2:] == (1, 1) for t in seen)
    assert [i for i, t in enumerate(seen) if (t.detach().contiguous().view(torch.int32) & 0x1FFF).any()] == []


def test_eagers_float32_stays(layouts, monkeypatch):
    """What eager convolves in float32 is convolved in planes, of all digits."""
    monkeypatch.setattr(precision, "runs_tf32", lambda x, weight, *given, **settings: weight.shape[-1] > 1)
    torch.manual_seed(0)
    model, x = Before().eval(), torch.randn(2, 3, 7, 8)
    model.last = nn.Conv2d(8, 5, 1)
    monkeypatch.setattr(Turns, "planes", None)  # which nothing has to be turned for
    with torch.no_grad():
        fuse(model)(x)
    assert layouts == [False, True, True, True, True, False]


def test_what_lies_otherwise_is_turned_by_kernels(layouts, monkeypatch):
    """PyTorch's copies take three times as long. What a block adds is the model's own at one end, and the result at the other."""
    monkeypatch.setattr(between, "rounds", lambda segment, x: False)
    aligned, contiguous, copied = library.aligned, torch.Tensor.contiguous, []

    def noted(t, layout=torch.contiguous_format, **given):
        layout = given.get("memory_format", layout)
        copied.extend([*t.shape] for _ in range(t.dim() == 4 and not t.is_contiguous(memory_format=layout)))
        return contiguous(t, memory_format=layout)

    blocks = lambda: nn.Sequential(Bottleneck(16), Bottleneck(16), Bottleneck(16))  # noqa: E731
    monkeypatch.setattr(library, "aligned", lambda t, *layout: (noted(t, *layout), aligned(t, *layout))[1])
    assert not numerics.wrong_of(blocks, (2, 16, 5, 6), "train_dx")
    torch.manual_seed(0)
    model, x = fuse(blocks()), torch.randn(2, 16, 5, 6)
    y = model(x)
    with monkeypatch.context() as also:
        also.setattr(torch.Tensor, "contiguous", noted)
        y.backward(torch.randn_like(y))
    assert any(layouts) and not copied


class Pooled(Chain):
    """What is convolved is also pooled, and that convolved."""

    def forward(self, x):
        x = F.silu(self.first(x))
        return F.silu(self.second(x)), F.silu(self.second(F.max_pool2d(x, 2)))


def test_what_is_pooled_and_has_no_error(layouts, monkeypatch):
    """Isn't rounded: it may be convolved in float32, for all that is known."""
    monkeypatch.setattr(precision, "runs_tf32", lambda x, weight, *given, **settings: weight.shape[1] > 3)
    with torch.no_grad():
        fuse(Pooled())(torch.randn(2, 3, 9, 10))
    assert layouts == [False] * 3


class Added(Chain):
    """What is convolved is also added to that."""

    def forward(self, x):
        x = F.silu(self.first(x))
        return F.silu(self.second(x) + x)


def test_what_is_added_and_has_no_error(layouts, monkeypatch):
    """Keeps all its digits."""
    monkeypatch.setattr(precision, "runs_tf32", lambda x, weight, *given, **settings: weight.shape[1] > 3)
    model, x = Added(padding=1), torch.randn(2, 3, 9, 10)
    nn.init.zeros_(model.second.weight), nn.init.zeros_(model.second.bias)
    with torch.no_grad():
        torch.testing.assert_close(fuse(model)(x), model(x))
    assert layouts == [False] * 2


def test_what_has_no_error(layouts, monkeypatch):
    """The result of a convolution that eager runs in float32: of all digits, then rounded as the library would for a convolution that reads it at
    once. Gradients of the first are those of float32."""
    monkeypatch.setattr(precision, "runs_tf32", lambda x, weight, *given, **settings: weight.shape[1] > 3)
    convolve, backward, seen, gradients = library.convolve, library.convolve_backward, [], []

    def noted(how, x, *given):
        seen.append(x.detach())
        return convolve(how, x, *given)

    def noted_backward(how, dz, *given):
        gradients.append(dz)
        return backward(how, dz, *given)

    monkeypatch.setattr(library, "convolve", noted)
    monkeypatch.setattr(library, "convolve_backward", noted_backward)
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(2, 3, 9, 10)
    fast = fuse(model)
    fast(x).sum().backward()
    assert layouts == [False, True] and "y channels last for what follows" in fast.plan(x)[0].reason
    exact = F.silu(model.first(x)).detach()
    torch.testing.assert_close(seen[1].contiguous(), exact, rtol=2**-11 * 1.01, atol=1e-6)
    assert not seen[1].contiguous().view(torch.int32).bitwise_and(0x1FFF).any()
    assert (
        not library.is_channels_last(gradients[1])
        and gradients[1].view(torch.int32).bitwise_and(0x1FFF).any()
    )
    eager = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for parameter, of_eager in zip(model.parameters(), eager):
        torch.testing.assert_close(parameter.grad, of_eager, rtol=1e-2, atol=1e-2)


class Reduced(Chain):
    """A factor of all channels, so that y is written by sample; what is convolved next is also added to that."""

    def __init__(self):
        super().__init__(channels=8)
        self.one, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        x = torch.tanh(self.first(x) * torch.sigmoid(self.one(x)).mean(1, keepdim=True))
        return F.silu(self.second(x) + x)


def _float32_forward_alone(x, weight, of="forward", *given, **settings) -> bool:
    return of != "forward" or weight.shape[1] > 3


def test_what_passes_cannot_turn_keeps_its_digits(layouts, monkeypatch):
    """Its convolution runs in float32, so that passes might turn it in planes; its gradients would be in TF32."""
    monkeypatch.setattr(precision, "runs_tf32", _float32_forward_alone)
    torch.manual_seed(0)
    model, x = Reduced(), torch.randn(2, 3, 9, 10)
    nn.init.zeros_(model.second.weight), nn.init.zeros_(model.second.bias)
    torch.testing.assert_close(fuse(model)(x), model(x))


@pytest.mark.parametrize("between_them", [nn.Softmax(1), nn.SiLU()], ids=["by sample", "by channel"])
def test_gradients_of_v_are_rounded_for_tf32(between_them, layouts, monkeypatch):
    """… as y is that the next convolution reads, by whatever pass they are written."""
    monkeypatch.setattr(precision, "runs_tf32", _float32_forward_alone)
    seen, backward = [], library.convolve_backward

    def noted(how, dz, x, weight, needs, operands=None, turned=None):
        if operands is not None:
            read = operands(x, weight, turned)[: 1 + needs[0]]
            seen.extend(t.detach().contiguous() for t in (dz, *read))
        return backward(how, dz, x, weight, needs, operands, turned)

    monkeypatch.setattr(library, "convolve_backward", noted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), between_them, nn.Conv2d(8, 8, 3), nn.SiLU())
    fuse(model)(torch.randn(2, 3, 9, 10)).sum().backward()
    assert [t.shape[1] for t in seen].count(8) > 3
    assert not any((t.view(torch.int32) & 0x1FFF).any() for t in seen)


def test_gradients_in_float32_stay_so(layouts, monkeypatch):
    """Where eager has them in float32, the library has them in planes, of all digits; one of both is enough."""
    monkeypatch.setattr(precision, "runs_tf32", lambda x, weight, of, *given, **settings: of != "dx")
    torch.manual_seed(0)
    model, x = Before(), torch.randn(2, 3, 7, 8, requires_grad=True)
    backward, seen = library.convolve_backward, []

    def noted(how, dz, x, *given):
        seen.extend([] if how.is_nothing else [dz, x])
        return backward(how, dz, x, *given)

    monkeypatch.setattr(library, "convolve_backward", noted)
    fuse(model)(x).sum().backward()
    assert len(seen) == 8 and not any(map(library.is_channels_last, seen)) and layouts.count(True) == 5
    assert seen[2].view(torch.int32).bitwise_and(0x1FFF).any()


class TwoReaders(nn.Module):
    """A sum is convolved by filters of 3 x 3 and, once more, of 1 x 1."""

    def __init__(self, channels: int = 8):
        super().__init__()
        self.stem, self.add = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(3, channels, 3, padding=1)
        self.wide, self.small = nn.Conv2d(channels, 5, 3, padding=1), nn.Conv2d(channels, 5, 1)

    def forward(self, x):
        y = F.silu(self.stem(x) + F.relu(self.add(x)))
        return torch.tanh(self.wide(y)), torch.sigmoid(self.small(y))


def test_one_reader_in_float32(layouts, monkeypatch):
    """A sum that is kept for one convolution is turned back for another, which eager runs in float32, with all of its digits."""
    monkeypatch.setattr(precision, "runs_tf32", lambda x, weight, *given, **settings: weight.shape[-1] > 1)
    convolve, seen = library.convolve, {}

    def noted(how, x, weight, *given):
        seen[tuple(weight.shape)] = x
        return convolve(how, x, weight, *given)

    monkeypatch.setattr(library, "convolve", noted)
    torch.manual_seed(0)
    with torch.no_grad():
        fuse(TwoReaders())(torch.randn(2, 3, 7, 8))
    wide, small = seen[5, 8, 3, 3], seen[5, 8, 1, 1]
    assert library.is_channels_last(wide) and not library.is_channels_last(small)
    assert not wide.contiguous().view(torch.int32).bitwise_and(0x1FFF).any()
    assert small.view(torch.int32).bitwise_and(0x1FFF).any()
    torch.testing.assert_close(wide, small, rtol=2**-11, atol=0)


@pytest.mark.parametrize("make, wanted", [(Before, [(True, False)] * 4), (Branches, [(True, False)])])
def test_frozen_convolutions(make, wanted, layouts, monkeypatch):
    """Gradients of norms' parameters alone: the library is asked for those of x that lead there, and for no more."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(MODELS[make.__name__.lower()][1])
    norms = [name for name, _ in model.named_parameters() if "norm" in name or "again" in name]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in norms)
    backward, asked = library.convolve_backward, []

    def noted(how, dz, x, weight, needs, *given):
        asked.append(needs)
        return backward(how, dz, x, weight, needs, *given)

    monkeypatch.setattr(library, "convolve_backward", noted)
    fuse(model)(x).square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(x).square().sum().backward()
    assert [*found] == norms and asked == wanted
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=2e-2, atol=2e-2)


def test_what_a_gradient_reads_keeps_its_digits(layouts, monkeypatch):
    """Where eager has a gradient of filters in float32, their x isn't rounded for forward's sake."""
    monkeypatch.setattr(precision, "runs_tf32", lambda x, weight, of, *given, **settings: of != "dw")
    torch.manual_seed(0)
    with torch.no_grad():
        fuse(Chain())(torch.randn(2, 3, 9, 10))
    assert layouts == [False, False]


def test_results_lie_as_eagers(layouts):
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(2, 3, 17, 20, requires_grad=True)
    fast = fuse(model)
    y = fast(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.stride() == model(x).stride() and dx.is_contiguous() and layouts == [False, True, True, True]


@pytest.mark.parametrize("model", ["before", "branches"])
def test_what_is_saved_may_come_back_otherwise(model, layouts):
    """In planes, as torch's hooks that save on the CPU give it: gradients are the same to the bit."""
    torch.manual_seed(0)
    make, shape = MODELS[model]
    model, x = make(), torch.randn(shape, requires_grad=True)
    fast, found = fuse(model), []
    for hook in (lambda t: t, lambda t: t.contiguous(), lambda t: t):
        with torch.autograd.graph.saved_tensors_hooks(hook, lambda t: t):
            y = fast(x)
        found.append(torch.autograd.grad(y.sum(), [x, *model.parameters()]))
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_filters_channels_last_later(layouts):
    """Then so are eager's results, the model's, too."""
    torch.manual_seed(0)
    model, x = Chain().eval(), torch.randn(2, 3, 9, 10)
    fast = fuse(model)
    with torch.no_grad():
        before = fast(x)
        fast.to(memory_format=torch.channels_last)
        after = fast(x)
    assert before.is_contiguous() and library.is_channels_last(after)
    torch.testing.assert_close(before, after, rtol=1e-2, atol=1e-2)


def test_what_stands_in_front_turns_on_its_way(layouts):
    """x, in planes, isn't copied for a norm's sake."""
    torch.manual_seed(0)
    model, x = NETWORKS["vae_block"].small_model().eval(), torch.randn(2, 16, 9, 11)
    with torch.no_grad():
        first, *others = fuse(model).plan(x)
    assert first.reason.startswith("x as it is, y channels last for what follows, then sums (reads ")
    assert not any("y channels last" in other.reason for other in others)


def test_what_is_given_is_kept_as_it_is(layouts):
    """For a backward that refuses to run, as eager's, once it was written."""
    torch.manual_seed(0)
    model, x = NETWORKS["vae_block"].small_model(), torch.randn(2, 16, 9, 11, requires_grad=True)
    for run in (model, fuse(model)):
        given = x * 1.0
        y = run(given)
        given.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            y.sum().backward()


def test_in_half_precision(layouts):
    torch.manual_seed(0)
    model, x = Branches().bfloat16().eval(), torch.randn(2, 3, 17, 20).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(fuse(model)(x), model(x), rtol=0.05, atol=0.05)
    assert layouts == [False, True, True, True]


def test_who_watches_operators_sees_eagers_layouts(layouts):
    """Of a traced model results are in planes, as what its operators say of them."""
    torch.manual_seed(0)
    model, x = Chain().eval(), torch.randn(2, 3, 9, 10)
    fast = fuse(model)
    with torch.no_grad():
        fast(x)
        torch.testing.assert_close(torch.func.vmap(fast)(x[None])[0], model(x), rtol=1e-2, atol=1e-2)
    structure = fast._kept[0]
    assert [part.segment.result for part in structure.plain] == [None, None]
    assert [part.segment.result for part in structure.parts] == [OPERAND, ENDS]


# ------------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["forward", "train_dx"])
@pytest.mark.parametrize("name", ["resnet18", "unet", "vae_block"])
def test_networks_are_right_on_a_gpu(name, phase):
    network = NETWORKS[name]
    shape = (2, *network.input_shape[1:2], 64, 64)
    assert not numerics.wrong_of(network.model, shape, phase, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_lie_as_eagers_on_a_gpu(layout, dtype):
    torch.manual_seed(0)
    model = Before(64).cuda().to(dtype)
    x = torch.randn(4, 3, 48, 40, device="cuda").to(dtype).contiguous(memory_format=layout).requires_grad_()
    wanted, y = model(x), fuse(model)(x)
    assert y.stride() == wanted.stride()
    for ours, eager in zip(torch.autograd.grad(y.sum(), x), torch.autograd.grad(wanted.sum(), x)):
        assert ours.stride() == eager.stride()
    torch.testing.assert_close(y, wanted, rtol=2e-2, atol=5e-2)


@pytest.mark.gpu
def test_what_surrounds_a_model_on_a_gpu():
    """Compiled, under autocast, and in a graph, whose inputs change."""
    torch.manual_seed(0)
    model, x = Before(64).cuda().eval(), torch.randn(4, 3, 48, 40, device="cuda")
    fast, wanted = fuse(model), model(x)
    with torch.no_grad():
        assert all(plan.runs != "eager" for plan in fast.plan(x))
        torch.testing.assert_close(fast(x), wanted, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(torch.compile(fast)(x), wanted, rtol=1e-2, atol=1e-2)
        with torch.autocast("cuda", torch.bfloat16):
            torch.testing.assert_close(fast(x), model(x), rtol=5e-2, atol=5e-2)
        graph, other = torch.cuda.CUDAGraph(), torch.randn_like(x)
        with torch.cuda.graph(graph):
            y = fast(x)
        x.copy_(other)
        graph.replay()
        torch.testing.assert_close(y, model(other), rtol=1e-2, atol=1e-2)
