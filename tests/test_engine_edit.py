"""fuse(model).edit: a segment's text in a reader's words; `%tail` and `%%tail` put it into a cell, and bind the cell."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import engine_stand_in
import inline_kernels
import reference_graph
from generated import arguments_of, segment_of
from inline_kernels import fuse
from inline_kernels.engine import programs
from inline_kernels.engine.cases import Case
from inline_kernels.engine.followed import NotFollowed, followed
from inline_kernels.engine.graph import ELEMENTS, order
from inline_loader import BuildError
from test_emulated import folder, gpu, guarded, remembers_nothing  # noqa: F401


class Scaled(nn.Module):
    """relu(conv(x)) * factor."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.factor = 0.5

    def forward(self, x):
        return torch.relu(self.conv(x)) * self.factor


def negated(text: str) -> str:
    assert "math::relu(add2)" in text
    return text.replace("math::relu(add2)", "-math::relu(add2)")


@pytest.fixture
def x():
    return torch.randn(2, 3, 9, 9)


@pytest.fixture
def fast(x):
    """With its formula edited: the negative."""
    fast = fuse(Scaled())
    with torch.no_grad():
        fast.edit(x, negated(fast.source(x)))
    return fast


def expected(fast, x):
    return torch.relu(fast.conv(x)) * fast.factor


@pytest.mark.parametrize("saving", [False, True])
def test_what_was_edited_runs(x, saving):
    fast = fuse(Scaled())
    with torch.set_grad_enabled(saving):
        fast.edit(x, negated(fast.source(x)))
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            torch.testing.assert_close(fast(x), -expected(fast, x))
            assert "edited" in str(fast.plan(x))
    fast.factor = 3.0  # numbers are read at each call
    torch.testing.assert_close(fast(x[:1]), -expected(fast, x[:1]))


class Renamed(nn.Module):
    """Equal but for its names."""

    def __init__(self):
        super().__init__()
        self.body, self.gain = nn.Conv2d(3, 8, 3), 0.5

    def forward(self, x):
        return torch.relu(self.body(x)) * self.gain


@pytest.mark.parametrize("models", [(Scaled, Renamed), (Renamed, Scaled)], ids=str)
def test_of_equal_models_each_can_be_edited(models, x):
    """Their kernels are the first one's, with its names."""
    for number, model in enumerate(models):
        fast = fuse(model())
        with torch.no_grad():
            y = fast(x)
            text = fast.source(x)
            fast.edit(x, text.replace("math::relu(add2)", f"real({number + 2}) * math::relu(add2)"))
            torch.testing.assert_close(fast(x), (number + 2) * y)


def test_what_can_t_be_followed_has_no_gradient(x):
    fast = fuse(Scaled())
    fast.edit(x, fast.source(x).replace("math::relu(add2)", "math::relu(add2) + real(1 / 2)"))
    assert "without a gradient" in str(fast.plan(x))
    y = fast(x.requires_grad_())
    torch.testing.assert_close(y, expected(fast, x))
    with pytest.raises(
        RuntimeError, match=r"its gradient is not known: .*math::relu\(add2\) \+ real\(1 / 2\)"
    ):
        y.sum().backward()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.factor = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), 2.0
        self.shift = nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, x):
        return F.silu(self.norm(self.conv(x))) * self.factor + self.shift


EDITS = {
    "const auto silu22 = math::silu(add20);": "const auto twice = add20 * add20 * real(0.5);  // a line more\n"
    "const auto silu22 = math::tanh(add20) - twice;",
    "at.write(y, add26);": "at.write(y, add26 * shift_25 / factor);",
}


def edited_normed(model, x):
    v = model.norm(model.conv(x))
    return ((torch.tanh(v) - 0.5 * v * v) * model.factor + model.shift) * model.shift / model.factor


@pytest.mark.parametrize("saving", [False, True])
def test_gradients_are_those_of_the_edited_lines(saving):
    """Of all parameters, as forward read them, and of the batch's statistics."""
    theirs = Normed().double()
    fast, x = fuse(copy.deepcopy(theirs)), torch.randn(2, 3, 9, 8, dtype=torch.float64)
    with torch.set_grad_enabled(saving):
        text = fast.source(x)
        for line, other in EDITS.items():
            assert text.count(line) == 1
            text = text.replace(line, other)
        fast.edit(x, text)
    assert "with the gradient of its lines" in str(fast.plan(x))
    for given in (x, x[:1]):
        given = given.detach().requires_grad_()
        exact, y = edited_normed(theirs, given), fast(given)
        dy = torch.randn_like(y)
        torch.testing.assert_close(y, exact)
        for module in (fast, theirs):  # forward has read it, a derivative reads it now
            module.shift.data.add_(0.25)
        found = torch.autograd.grad(y, [given, *fast.parameters()], dy)
        for a, b in zip(found, torch.autograd.grad(exact, [given, *theirs.parameters()], dy)):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    for a, b in zip(fast.buffers(), theirs.buffers()):
        torch.testing.assert_close(a, b)


def test_gradients_on_a_gpu_that_is_emulated(gpu):
    gpu()
    theirs = Normed()
    fast, x = fuse(copy.deepcopy(theirs)), torch.randn(2, 3, 9, 8, requires_grad=True)
    text = fast.source(x)
    assert "cudaStream_t" in text
    for line, other in EDITS.items():
        text = text.replace(line, other)
    fast.edit(x, text)
    y, exact = fast(x), edited_normed(theirs, x)
    torch.testing.assert_close(y, exact, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *fast.parameters()], dy)
    for a, b in zip(found, torch.autograd.grad(exact, [x, *theirs.parameters()], dy)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------------ what can be followed


class Tailed(nn.Module):
    def __init__(self, tail):
        super().__init__()
        self.conv, self.bound, self.tail = nn.Conv2d(3, 4, 2, bias=False), 0.3, tail
        self.scale = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x):
        return self.tail(self, self.conv(x))


def read(model: nn.Module, changes: dict[str, str], saving: bool = True, whole: bool = False):
    """What the segment's text computes with those changes, in forward alone or in the whole of it: by the graph, and as a node; for what input."""
    x = torch.randn(2, 3, 6, 6)
    segment = segment_of(model, x)
    arguments = arguments_of(model, segment, x)
    composed = programs.composed_of(
        segment, programs.kind_for(Case(segment, arguments, saving, torch.float32))
    )
    text, *rest = composed.text.split("struct Backward", 0 if whole else 1)
    for line, other in changes.items():
        assert re.search(line, text), text
        text = re.sub(line, other, text)
    text = "struct Backward".join([text, *rest])
    node = followed(composed.forward.roots[0].node, composed.text, text)
    leaves, sizes = engine_stand_in._leaves(segment, [*arguments, 0], model.conv(x).detach())
    return reference_graph.evaluate([node], leaves, sizes)[0], node, x


MAPPED = lambda m, v: F.gelu(v) * m.bound + m.scale  # noqa: E731
LINE = r"const auto (gelu\d+) = math::gelu\((\w+)\);"
FOLLOWED = {
    "math::tanh({v}) * scale_{s} - real(2)": lambda m, v: torch.tanh(v) * m.scale - 2,
    "-math::maximum({v}, real(0.25f)) / (real(3) + math::square({v}))": lambda m, v: (
        -torch.clamp_min(v, 0.25) / (3 + v * v)
    ),
    "{v} * (real(1) / real(4) - 1e-3)": lambda m, v: v * 0.249,
    "math::tanh({v}) * 2.5e-1f + .5f": lambda m, v: torch.tanh(v) * 0.25 + 0.5,
    "math::maximum(real(0.25), {v})": lambda m, v: torch.clamp_min(v, 0.25),
    "math::minimum({v}, scale_{s})": lambda m, v: torch.minimum(v, m.scale),
    "math::select({v} > scale_{s}, {v}, bound)": lambda m, v: torch.where(
        v > m.scale, v, torch.tensor(m.bound)
    ),
    "math::select(({v} >= real(0)) & ({v} <= real(1)), {v}, real(0))": lambda m, v: torch.where(
        (v >= 0) & (v <= 1), v, 0.0
    ),
    "math::clamp(+{v}, real(-1), bound)": lambda m, v: torch.clamp(v, -1, m.bound),
    "math::elu(double({v}), 2 * 1.5)": lambda m, v: F.elu(v, 3.0),
    "math::exp(math::sigmoid({v})) + 1": lambda m, v: torch.exp(torch.sigmoid(v)) + 1,
}


@pytest.mark.parametrize("expression", FOLLOWED)
def test_expressions(expression):
    """Value and gradient, through autograd's eyes."""
    formula = FOLLOWED[expression]
    model = Tailed(MAPPED)
    _, own, _ = read(model, {})
    names = {n.attr[0]: n.id for n in order([own]) if n.op == "leaf"}
    text = expression.replace("{v}", r"\2").replace("{s}", str(names["scale"]))
    changes = {LINE: rf"const auto \1 = {text};"}
    assert_followed(model, changes, lambda m, v: formula(m, v) * m.bound + m.scale)


def assert_followed(model, changes, formula, saving=True):
    ours, node, x = read(model, changes, saving)
    v = model.conv(x).detach().requires_grad_()
    exact = formula(model, v)
    dy = torch.randn_like(exact)
    segment, graph = segment_of(model, x), node.graph
    leaves, sizes = engine_stand_in._leaves(segment, [*arguments_of(model, segment, x), 0], v.detach())
    torch.testing.assert_close(ours.expand(sizes.shape(node.space)).reshape(exact.shape), exact)
    adjoints = graph.adjoints(node, graph.leaf("dy", node.space, "dy"), [graph.leaf("z", ELEMENTS, "z")])
    (found,) = reference_graph.evaluate(
        adjoints, {**leaves, "dy": dy.reshape(sizes.shape(node.space))}, sizes
    )
    (exact,) = torch.autograd.grad(exact, v, dy)
    torch.testing.assert_close(found.expand_as(exact), exact, rtol=1e-4, atol=1e-5)


# Values whose gradient has a form of its own: softmax and what is like it, extremes that share it, pools that are moved.
BEFORE = {r"= math::relu\((\S+)\);": r"= math::tanh(\1);"}
FORMS = {
    "softmax, before": (
        lambda m, v: torch.softmax(torch.relu(v), 1),
        BEFORE,
        lambda m, v: torch.softmax(torch.tanh(v), 1),
    ),
    "softmax, inside": (
        lambda m, v: torch.softmax(v, 1),
        {r"= math::exp\((\w+)\);": r"= math::sigmoid(\1);"},
        lambda m, v: (lambda e: e / e.sum(1, True))(torch.sigmoid(v - v.amax(1, True))),
    ),
    "softmax, behind": (
        lambda m, v: torch.softmax(v, 1),
        {r"write\(y, (\w+)\)": r"write(y, math::square(\1))"},
        lambda m, v: torch.softmax(v, 1) ** 2,
    ),
    "logsumexp, before": (
        lambda m, v: torch.logsumexp(torch.relu(v), 1),
        BEFORE,
        lambda m, v: torch.logsumexp(torch.tanh(v), 1),
    ),
    "logsumexp, inside": (
        lambda m, v: torch.logsumexp(v, 1),
        {r"= math::log\((\w+)\);": r"= math::sqrt(\1);"},
        lambda m, v: (lambda top: (v - top).exp().sum(1, True).sqrt() + top)(v.amax(1, True))[:, 0],
    ),
    "logsumexp, behind": (
        lambda m, v: torch.logsumexp(v, 1),
        {r"write\(y, (\w+)\)": r"write(y, math::tanh(\1))"},
        lambda m, v: torch.tanh(torch.logsumexp(v, 1)),
    ),
    "amax, before": (
        lambda m, v: torch.amax(torch.relu(v), 1),
        BEFORE,
        lambda m, v: torch.amax(torch.tanh(v), 1),
    ),
    "amax of planes, before": (
        lambda m, v: torch.amax(torch.relu(v), (2, 3)),
        BEFORE,
        lambda m, v: torch.amax(torch.tanh(v), (2, 3)),
    ),
    "a pool of planes, before": (
        lambda m, v: F.adaptive_max_pool2d(torch.relu(v), 1),
        BEFORE,
        lambda m, v: F.adaptive_max_pool2d(torch.tanh(v), 1),
    ),
    "max_pool": (
        lambda m, v: F.max_pool2d(torch.relu(v), 2),
        BEFORE,
        lambda m, v: F.max_pool2d(torch.tanh(v), 2),
    ),
}


@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_values_with_a_gradient_of_a_form_of_its_own(name, saving):
    tail, changes, formula = FORMS[name]
    assert_followed(Tailed(tail), changes, formula, saving)


NORMED = lambda m, v: F.gelu(F.group_norm(v * m.scale, 2))  # noqa: E731
REFUSED = {
    "a loop": (MAPPED, {LINE: r"auto \1 = \2; for (int i = 0; i < 3; i++) \1 = \1 * \2;"}, r"for \(int i"),
    "whole numbers": (MAPPED, {LINE: r"const auto \1 = \2 * (1 / 2);"}, r"\* \(1 / 2\)"),
    "a bound that varies": (
        MAPPED,
        {LINE: r"const auto \1 = math::clamp(\2, real(-1), math::exp(\2));"},
        "clamp",
    ),
    "a function that isn't the graph's": (MAPPED, {LINE: r"const auto \1 = sinf(\2);"}, "sinf"),
    "without a derivative": (
        MAPPED,
        {LINE: r"const auto \1 = math::gelu_gradient(\2);"},
        "math::gelu_gradient",
    ),
    "a comparison of a comparison": (
        MAPPED,
        {LINE: r"const auto \1 = math::select(\2 > real(0) & \2, \2, \2);"},
        "select",
    ),
    "a truth value": (MAPPED, {LINE: r"const auto \1 = \2 > real(0);"}, "> real"),
    "memory": (MAPPED, {LINE: r"const auto \1 = \2 * scale[0];"}, r"scale\[0\]"),
    "a number for all": (MAPPED, {LINE: r"const auto \1 = real(0.5);"}, "real"),
    "a name that hides a number": (MAPPED, {LINE: r"const auto bound = \2;\n\g<0>"}, "const auto bound"),
    "a name that nobody reads": (MAPPED, {LINE: r"const auto other = \2;\n\g<0>"}, "const auto other"),
    "one of two places": (
        NORMED,
        {r"(?s)(const auto mul\d+ = math::product\(z_0, scale_\d+\));(.*)": r"\1 * real(2);\2"},
        "z_0, scale",
    ),
    "a parameter hidden behind another": (
        NORMED,
        {r"(?s)(z_0, (scale_\d+).*?)(\n *const auto gelu)": r"\1\nconst auto \2 = z_0;\3"},
        "const auto scale_",
    ),
    "a comment that goes on": (MAPPED, {LINE: r"const auto \1 = \2;  // \\"}, "const auto|others"),
    "another mean": (
        lambda m, v: F.gelu(F.batch_norm(v, None, None, training=True)),
        {r"const auto (div\d+) = (sum\d+ / mul\d+);": r"const auto \1 = \2 * 2.0;"},
        r"\* 2.0",
    ),
    "a macro": (MAPPED, {r"struct Forward0": "#define gelu silu\nstruct Forward0"}, "#define gelu silu"),
    "its own backward": (MAPPED, {r"math::gelu_gradient": "math::silu_gradient"}, "silu_gradient"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_lines_that_can_t_be_followed_are_named(what):
    tail, changes, says = REFUSED[what]
    with pytest.raises(NotFollowed, match=says):
        read(Tailed(tail), changes, whole=what == "its own backward")


def test_comments_change_nothing():
    model = Tailed(MAPPED)
    x = torch.randn(2, 3, 6, 6)
    segment = segment_of(model, x)
    kind = programs.kind_for(Case(segment, arguments_of(model, segment, x), True, x.dtype))
    composed = programs.composed_of(segment, kind)
    y = composed.forward.roots[0].node
    assert followed(y, composed.text, re.sub(";\n", ";  // a comment\n\n", composed.text).strip()) is y


def test_the_models_own_comes_back(fast, x):
    fast.edit(x, None)
    torch.testing.assert_close(fast(x), expected(fast, x))
    fast(x).sum().backward()
    assert "edited" not in str(fast.plan(x))


def test_compiled_code_follows(x):
    fast = fuse(Scaled())
    compiled = torch.compile(fast, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected(fast, x))
        fast.edit(x, negated(fast.source(x)))
        torch.testing.assert_close(compiled(x), -expected(fast, x))


def test_copies_and_pickles_are_without_it(fast, x):
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        torch.testing.assert_close(other(x), expected(fast, x))
    torch.testing.assert_close(fast(x), -expected(fast, x))


def test_another_formula_than_the_one_that_was_edited_is_refused(fast, x):
    fast.conv = nn.Conv2d(3, 8, 3, bias=False)
    with pytest.raises(RuntimeError, match="was edited for other inputs, or another model"):
        fast(x)


def test_a_text_that_does_not_compile_changes_nothing(fast, x):
    with torch.no_grad():
        text = fast.source(x)
        with pytest.raises(BuildError, match="'?mth'?"):
            fast.edit(x, text.replace("math::relu", "mth::relu"))
    torch.testing.assert_close(fast(x), -expected(fast, x))


def test_another_launcher_is_refused(fast, x):
    with pytest.raises(ValueError, match="expected the launcher `forward` as source"):
        fast.edit(x, "EXPORT void forward(float* y, int64_t n) { y[n] = 0; }")
    with pytest.raises(IndexError, match="expected a segment below 1, got 1"):
        fast.edit(x, None, segment=1)
    with pytest.raises(RuntimeError, match="eager runs"):
        fuse(nn.Linear(3, 3)).edit(x, "")


def test_cells(x):
    testing = pytest.importorskip("IPython.testing.globalipapp")
    shell = testing.get_ipython() or testing.start_ipython()
    shell.push({"fast": fuse(Scaled()), "x": x})
    inline_kernels.load_ipython_extension(shell)
    shell.run_line_magic("tail", "fast x")
    head, text = shell.rl_next_input.split("\n", 1) if getattr(shell, "rl_next_input", None) else (None, None)
    if head is None:
        head, text = shell.payload_manager.read_payload()[-1]["text"].split("\n", 1)
    assert head == "%%tail fast x"
    shell.run_cell_magic("tail", "fast x", negated(text))
    fast = shell.user_ns["fast"]
    torch.testing.assert_close(fast(x), -expected(fast, x))
    shell.run_line_magic("tail", "--own fast x")
    torch.testing.assert_close(fast(x), expected(fast, x))
    with pytest.raises(TypeError, match="expected a fused module"):
        shell.run_line_magic("tail", "x x")
