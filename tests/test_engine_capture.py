"""Models become segments: the 33 problems and real models' blocks, forward and every gradient against autograd; and what is not captured."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.level2 import PROBLEMS
from fuzz_engine import check_graph
from inline_kernels.engine.capture import NotCaptured, capture
from inline_kernels.engine.cases import levels_of
from inline_kernels.engine.graph import order
from reference_graph import Reference


def randomised(model: nn.Module) -> nn.Module:
    """In float64, its parameters away from their initial values."""
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model


class Masks:
    """The same dropout masks for eager and the reference."""

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.restart()

    def restart(self):
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, shape):
        return (torch.rand(shape, generator=self.generator) > 0.3).double()

    def dropout(self, x, p=0.5, training=True, inplace=False):
        return x * (self(x.shape) * (1 / (1 - p))) if training and p else x


def check(model: nn.Module, *inputs: torch.Tensor, monkeypatch=None):
    """Result, gradients of inputs and parameters, and running statistics: captured as eager. Returns what was captured."""
    captured = capture(model, model.training, inputs[0].dim())
    masks, twin = Masks(), copy.deepcopy(model)
    found = []
    for run, own in ((model, model), (Reference(twin, captured, masks).run, twin)):
        masks.restart()
        given = [x.clone().requires_grad_() for x in inputs]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "dropout", masks.dropout)
            y = run(*given)
        ys = y if isinstance(y, (tuple, list)) else [y]
        torch.manual_seed(1)
        torch.autograd.backward(ys, [torch.randn_like(each) for each in ys])
        gradients = {n: p.grad for n, p in own.named_parameters()} | {
            f"x{i}": x.grad for i, x in enumerate(given)
        }
        statistics = {n: b for n, b in own.named_buffers() if b.is_floating_point()}
        found.append({f"y{i}": each for i, each in enumerate(ys)} | gradients | statistics)
    want, got = found
    for name, value in want.items():
        if value is None:
            assert got[name] is None, name
            continue
        # Biases before norms have gradients of zero, and rounding.
        scale = max(value.norm().item(), 1e-3)
        assert (got[name] - value).norm().item() < 1e-9 * scale, name
    return captured


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("number", PROBLEMS)
def test_the_33(number, training):
    torch.manual_seed(number)
    problem = PROBLEMS[number]
    model = randomised(problem.small_model()).train(training)
    captured = check(model, torch.randn(problem.small_input_shape, dtype=torch.float64))
    (segment,) = captured.segments
    calls = [node.op for node in captured.module.graph.nodes]
    assert calls == ["placeholder", "call_function", "output"], "all of the model is the segment"
    x, weight = problem.small_input_shape, model.conv.weight.shape
    with torch.device("meta"):
        z = type(model.conv)(*problem.small_init_inputs[:3], padding=model.conv.padding)(torch.empty(x))
    weight, x = (torch.empty(shape, device="meta") for shape in (weight, x))
    assert levels_of(segment, x, weight)["e"] == z.shape[2:]


# ---- models of several convolutions
class BasicBlock(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet-18's structure, narrow."""

    def __init__(self, width=4, classes=5):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(BasicBlock(a, b, 1 if i == 0 else 2), BasicBlock(b, b, 1))
                for i, (a, b) in enumerate(zip(widths, widths[1:]))
            )
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layers(x))
        return self.fc(torch.flatten(x, 1))


class UNet(nn.Module):
    """Two levels, skips by concatenation; the norm is nnU-Net's where `dimensions` is 3."""

    def __init__(self, dimensions=2, width=4):
        super().__init__()
        self.dimensions = dimensions
        conv = nn.Conv2d if dimensions == 2 else nn.Conv3d
        norm = nn.BatchNorm2d if dimensions == 2 else lambda c: nn.InstanceNorm3d(c, affine=True)

        def double(a, b, stride=1):
            first = [conv(a, b, 3, stride, 1), norm(b), nn.LeakyReLU(0.01, inplace=True)]
            return nn.Sequential(*first, conv(b, b, 3, padding=1), norm(b), nn.LeakyReLU(0.01, inplace=True))

        self.down = nn.ModuleList([double(1, width), double(width, 2 * width, 2)])
        self.middle = double(2 * width, 4 * width, 2)
        self.up = nn.ModuleList([double(6 * width, 2 * width), double(3 * width, width)])
        self.head = conv(width, 2, 1)

    def forward(self, x):
        skips = []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
        x = self.middle(x)
        for stage, skip in zip(self.up, reversed(skips)):
            x = F.interpolate(x, size=skip.shape[2:], mode="nearest")
            x = stage(torch.cat([x, skip], dim=1))
        return torch.sigmoid(self.head(x))


class VaeBlock(nn.Module):
    def __init__(self, inside=4, outside=8):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, inside, eps=1e-6), nn.GroupNorm(4, outside, eps=1e-6)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding="same")
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, padding_mode="reflect")
        self.dropout = nn.Dropout(0.3)
        self.shortcut = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()
        self.output_scale = 2**0.5

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return (self.shortcut(x) + h) / self.output_scale


class Gated(nn.Module):
    """A second input of another shape: squeeze and excitation."""

    def __init__(self, c=4):
        super().__init__()
        self.conv, self.squeeze, self.excite = (
            nn.Conv2d(c, c, 3, padding=1),
            nn.Conv2d(c, 2, 1),
            nn.Conv2d(2, c, 1),
        )

    def forward(self, x):
        gate = self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True))))
        return F.hardswish(self.conv(x)) * torch.sigmoid(gate) + x


MODELS = {
    # (model, input, segments in training, of how many convolutions)
    "resnet": (ResNet, (2, 3, 33, 33), 20, 20),
    "unet": (UNet, (2, 1, 16, 18), 11, 11),
    "nnunet": (lambda: UNet(3), (2, 1, 8, 8, 10), 11, 11),
    "vae": (VaeBlock, (2, 4, 9, 8), 2, 3),
    "gated": (Gated, (2, 4, 7, 6), 3, 3),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_several_convolutions(name, training):
    torch.manual_seed(0)
    build, shape, segments, convolutions = MODELS[name]
    model = randomised(build()).train(training)
    captured = check(model, torch.randn(shape, dtype=torch.float64))
    assert len(captured.segments) == segments
    found = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d))]
    assert len(found) == convolutions == len(captured.segments) + len(captured.remarks), captured.remarks


def test_what_a_residual_block_becomes():
    captured = capture(ResNet(), True, 4)
    by_name = {segment.conv.name: segment for segment in captured.segments}
    last = by_name["layers.0.0.conv2"]
    assert (
        len(last.inputs) == 2 and last.inputs[1].space == ("n", "c", "e") or last.inputs[1].space.level == "e"
    )
    assert (
        "relu" in {node.op for node in order(last.outputs)}
        and "relu" not in by_name["layers.1.0.downsample.0"].stopped
    )
    same = by_name["layers.0.0.conv1"], by_name["layers.0.1.conv1"]
    assert same[0].digest == same[1].digest, "equal but for names"
    assert last.digest != same[0].digest


# ---- what steers a capture
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.scale, self.slope, self.power = 0.5, 0.1, 3.0

    def forward(self, x):
        y = F.leaky_relu(self.conv(x) * self.scale, self.slope)
        return y * (self.power * 2.0)


def test_numbers_of_the_model_are_inputs():
    model = Scaled()
    captured = capture(model, True, 4)
    (segment,) = captured.segments
    assert set(segment.scalars) == {"scale", "slope"} and captured.values == {"power"}
    model.scale = 4.0
    x = torch.randn(1, 2, 5, 5)
    torch.testing.assert_close(Reference(model, captured).run(x), model(x))


class Steered(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.conv, self.body, self.n = nn.Conv2d(2, 4, 3), body, 0

    def forward(self, x):
        return self.body(self, self.conv(x))


def _counts(m, v):
    m.n += 1
    return torch.relu(v)


def _no_grad(m, v):
    with torch.no_grad():
        return torch.relu(v)


NOT_CAPTURED = {
    "control flow": lambda m, v: torch.relu(v) if v.sum() > 0 else v,
    "writes self.n": _counts,
    "gradients or autocast are switched": _no_grad,
    "random numbers": lambda m, v: v * __import__("random").random(),
    "len": lambda m, v: v[: len(v)],
}


@pytest.mark.parametrize("reason", NOT_CAPTURED)
def test_what_can_t_be_traced_says_where(reason):
    with pytest.raises(NotCaptured, match=reason) as info:
        capture(Steered(NOT_CAPTURED[reason]), True, 4)
    if reason != "random numbers":
        assert f"{__file__}:" in str(info.value)


def test_a_part_that_can_t_be_traced_is_called_as_a_whole():
    class Part(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), Part(), nn.Conv2d(4, 4, 1), nn.Tanh())
    captured = capture(model, True, 4)
    assert (
        len(captured.segments) == 2
        and list(captured.opaque) == ["2"]
        and "control flow" in captured.opaque["2"]
    )
    x = torch.randn(2, 2, 5, 5)
    torch.testing.assert_close(Reference(model, captured).run(x), model(x))


def test_nothing_is_written_and_torch_is_as_before():
    model = ResNet()
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    call, get = nn.Module.__call__, nn.Module.__getattr__
    capture(model, True, 4)
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
    assert nn.Module.__call__ is call and nn.Module.__getattr__ is get


def test_two_uses_that_leave_end_a_segment():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 4, 3)

        def forward(self, x):
            a = torch.relu(self.conv(x))
            return a, torch.tanh(a)

    captured = check(Two().double(), torch.randn(2, 2, 5, 5, dtype=torch.float64))
    (segment,) = captured.segments
    ops = {node.op for node in order(segment.outputs)}
    assert "relu" in ops and "tanh" not in ops


def _read_before_it_is_written(m, x):
    h = x * 1.0
    v = m.conv(h)
    h.mul_(2.0)
    return torch.tanh(torch.relu(v))


def _seen_through_a_view(m, x):
    v = m.conv(x) * 2.0
    w = v.flatten(2)
    v.add_(1.0)
    return torch.tanh(v).flatten(2) + w


def _another_name(m, x):
    v = m.conv(x) * 2.0
    w = v
    w += 1.0
    return v * torch.tanh(w)


def _a_residual_that_is_written(m, x):
    h = x * 1.0
    h += torch.relu(m.conv(x))
    return torch.tanh(h)


@pytest.mark.parametrize(
    "forward", [_read_before_it_is_written, _seen_through_a_view, _another_name, _a_residual_that_is_written]
)
def test_writes_in_place_are_seen(forward):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x):
            return forward(self, x)

    model, x = Model().double(), torch.randn(2, 2, 5, 5, dtype=torch.float64)
    captured = capture(model, True, 4)
    assert captured.segments or "in place" in captured.remarks["conv"]
    with torch.no_grad():  # where backward raises in eager
        torch.testing.assert_close(Reference(model, captured).run(x), model(x))


def test_tensors_made_on_the_way_are_made_at_each_call():
    def body(m, v):
        return torch.min(v, torch.tensor(m.limit)) * torch.rand(1), torch.zeros(2)

    model = Steered(body)
    model.limit = 0.5
    captured = capture(model, True, 4)
    (segment,) = captured.segments
    assert set(segment.scalars) == {"limit"} and not captured.constants and not captured.values
    model.limit, x = -0.25, torch.randn(2, 2, 5, 5)
    torch.manual_seed(3)
    want, _ = model(x)
    torch.manual_seed(3)
    torch.testing.assert_close(Reference(model, captured).run(x)[0], want)


def test_hooks_and_unknown_classes_keep_their_calls():
    class Own(nn.Conv2d):
        pass

    model = nn.Sequential(
        nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.ReLU(), Own(2, 2, 1), nn.ReLU()
    )
    model[2].register_forward_hook(lambda m, args, y: y * 2)
    captured = capture(model, True, 4)
    assert [segment.parameters[0] for segment in captured.segments] == ["0.weight", "4.weight"]


def test_unbatched_inputs_have_no_segments():
    captured = capture(Scaled(), True, 3)
    assert not captured.segments and "axes" in captured.remarks["conv"]


@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed):
    """More of them: tests/fuzz_engine.py."""
    wrong, _ = check_graph(seed)
    assert not wrong


def test_calls_on_parameters_alone_are_part_of_the_segment():
    class Soft(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.p = nn.Conv2d(2, 4, 3), nn.Parameter(torch.randn(4, 1, 1))

        def forward(self, x):
            return self.conv(x) * F.softplus(self.p).add(0.1)

    captured = check(Soft().double(), torch.randn(2, 2, 5, 5, dtype=torch.float64))
    (segment,) = captured.segments
    assert len(captured.module.graph.nodes) == 3 and len(segment.inputs) == 1 and "p" in segment.parameters
