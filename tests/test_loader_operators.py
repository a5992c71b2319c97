"""declare() by itself, as a reader uses it for a kernel of their own: y = leaky_relu(x + bias), its gradients, and what PyTorch
makes of them. No model is imported here.
"""

from __future__ import annotations

import gc
import importlib.util
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import inline_loader
from inline_kernels.loader import operators as loader_operators
from inline_kernels.loader.operators import Drawn, declare

SOURCE = """
EXPORT void forward(double* y, const double* x, const double* bias, double slope, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows * columns; i++) {
    const double v = x[i] + bias[i % columns];
    y[i] = v > 0 ? v : slope * v;
  }
}

EXPORT void backward(double* dx, const double* dy, const double* x, const double* bias, double slope, int64_t rows,
                     int64_t columns) {
  for (int64_t i = 0; i < rows * columns; i++) {
    dx[i] = x[i] + bias[i % columns] > 0 ? dy[i] : slope * dy[i];
  }
}
"""


def kernels() -> inline_loader.Operators:
    return inline_loader.load("leaky_relu", source=SOURCE)


def forward(x: Tensor, bias: Tensor, slope: float) -> Tensor:
    """x (rows, columns), bias (columns)."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernels().forward(y, x.contiguous(), bias.contiguous(), slope, *x.shape)
    return y


def backward(dy, x, bias, slope, *, needs):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernels().backward(dx, dy.contiguous(), x.contiguous(), bias.contiguous(), slope, *x.shape)
    return dx if needs[0] else None, dx.sum(0) if needs[1] else None


def shapes(x, bias, slope):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def gradients(x, bias, slope):
    return shapes(x, bias, slope), torch.empty_like(bias)


leaky_relu = declare("tested_leaky_relu", forward, shapes=shapes, backward=backward, gradients=gradients)


def in_torch(x, bias, slope):
    return torch.nn.functional.leaky_relu(x + bias, slope)


def operands(rows=3, columns=5, needs=(True, True)) -> tuple[Tensor, Tensor, float]:
    """No sum is close to zero, where a finite difference would not know the slope."""
    x = torch.randn(rows, columns, dtype=torch.float64)
    x += x.sign()
    bias = torch.linspace(-0.5, 0.5, columns, dtype=torch.float64)
    return x.requires_grad_(needs[0]), bias.requires_grad_(needs[1]), 0.1


def assert_as_torch(call, *arguments):
    """The same result and gradients."""
    leaves = [t for t in arguments if isinstance(t, Tensor) and t.requires_grad]
    answers = []
    for run in (call, in_torch):
        y = run(*arguments)
        answers.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    torch.testing.assert_close(*answers, rtol=1e-13, atol=1e-13)


class Seen(TorchDispatchMode):
    """The operators of ours that a dispatch mode sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == loader_operators.NAMESPACE:
            self.names.append(func._opname.removeprefix("tested_"))
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------------------------------------- calling


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_result_and_gradients(needs):
    assert_as_torch(leaky_relu, *operands(needs=needs))
    assert_as_torch(leaky_relu.registered, *operands(needs=needs))
    assert torch.autograd.gradcheck(leaky_relu, operands(needs=needs))


def test_only_the_gradients_that_are_needed_are_computed():
    asked = []

    def watching(dy, x, bias, slope, *, needs):
        asked.append(list(needs))
        return backward(dy, x, bias, slope, needs=[True, True])  # more than was asked for is dropped

    operator = declare("tested_needs", forward, shapes=shapes, backward=watching, gradients=gradients)
    for needs in ((True, False), (False, True)):
        for call in (operator, operator.registered):
            x, bias, slope = operands(needs=needs)
            call(x, bias, slope).sum().backward()
            assert asked.pop() == list(needs)
            assert (x.grad is not None, bias.grad is not None) == needs
    x, bias, slope = operands(needs=(False, False))
    found = torch.ops.inline_kernels.tested_needs_backward(x, x, bias, slope, [], [False, True])
    assert [t.numel() for t in found] == [0, bias.numel()] and asked.pop() == [False, True]
    found = operator.backward(x, (x, bias, slope), [], [False, True])
    assert found[0] is None and found[1].shape == bias.shape and asked.pop() == [False, True]
    with torch.no_grad():
        assert not operator(*operands()).requires_grad
    assert not operator(*operands(needs=(False, False))).requires_grad and not asked


def test_plain_calls_make_no_detour():
    """Who watches sees the operator and its halves; a plain call is the function alone."""
    for wanted, names in ((True, ["leaky_relu_saving", "leaky_relu_backward"]), (False, ["leaky_relu"])):
        with torch.set_grad_enabled(wanted), Seen() as seen:
            y = leaky_relu(*operands())
            if wanted:
                y.sum().backward()
        assert seen.names == names
    with torch.profiler.profile() as profile:
        leaky_relu(*operands()).sum().backward()
    keys = {event.key for event in profile.key_averages()}
    assert "tested_leaky_reluBackward" in keys
    assert not any(key.startswith(loader_operators.NAMESPACE) for key in keys), keys
    assert {key.split("::")[1] for key in keys if key.startswith("leaky_relu_")} == {"forward", "backward"}


def test_saved_memory_is_freed():
    """The graph goes with its result, and what it saved with backward()."""
    x, bias, slope = operands()
    y = leaky_relu(x.sin(), bias, slope)
    node = weakref.ref(y.grad_fn)
    gc.disable()
    try:
        del y
        assert node() is None
    finally:
        gc.enable()
    y = leaky_relu(x, bias, slope)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_input_changed_before_backward_is_noticed():
    x, bias, slope = operands(needs=(False, True))
    y = leaky_relu(x, bias, slope)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_result_that_gets_no_gradient():
    """dy is None: of a result that the loss hangs on only through others that give none."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x, bias, slope = operands()
    total = Nothing.apply(leaky_relu(x, bias, slope)).sum() + (2 * x).sum()
    total.backward()
    assert torch.equal(x.grad, torch.full_like(x, 2)) and bias.grad is None


@pytest.mark.parametrize("call", [leaky_relu, leaky_relu.registered], ids=["plain", "registered"])
def test_twice_differentiated_is_an_error(call):
    x, bias, slope = operands()
    (dx,) = torch.autograd.grad(call(x, bias, slope).square().sum(), x, create_graph=True)
    for again in (
        lambda: torch.autograd.grad(dx.sum(), x, allow_unused=True),
        lambda: dx.sum().backward(),
    ):
        with pytest.raises(RuntimeError, match="tested_leaky_relu can't be differentiated twice"):
            again()


# ------------------------------------------------------------------------------------------------------- what PyTorch makes


def test_opcheck():
    x, bias, slope = operands()
    named = [getattr(torch.ops.inline_kernels, f"tested_leaky_relu{end}") for end in ("_saving", "_backward")]
    saving, gradient = (each.default for each in named)
    torch.library.opcheck(leaky_relu.registered, (x, bias, slope))
    torch.library.opcheck(leaky_relu.registered, (x.detach().t().contiguous().t(), bias.detach(), slope))
    torch.library.opcheck(saving, (x.detach(), bias.detach(), slope))
    dy = torch.randn(3, 5, dtype=torch.float64)
    for needs in ([True, True], [True, False]):
        torch.library.opcheck(gradient, (dy, x.detach(), bias.detach(), slope, [], needs))


def test_a_wrong_shape_function_is_found_out():
    wrong = declare("tested_wrong_shapes", forward, shapes=lambda x, bias, slope: torch.empty_like(bias))
    with pytest.raises(Exception, match="test_faketensor"):
        torch.library.opcheck(wrong.registered, operands(needs=(False, False)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_is_one_graph(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(leaky_relu, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 4, 6):
        assert_as_torch(compiled, *operands(rows, 5))


def test_the_default_compiler():
    torch._dynamo.reset()
    inductor = torch.compile(lambda *given: leaky_relu(*given) * 2, fullgraph=True)
    arguments = operands()
    torch.testing.assert_close(inductor(*arguments), in_torch(*arguments) * 2)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))

    def forward(self, x):
        return leaky_relu(x, self.bias, 0.1)


def test_export():
    module, (x, *_) = Module(), operands(needs=(False, False))
    batch = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: batch},))
    targets = [node.target for node in program.graph.nodes]
    assert leaky_relu.registered in targets
    for part in (x, torch.cat([x, x])):
        torch.testing.assert_close(program.module()(part), module(part))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transformations():
    """vmap runs it once for each; torch.func.grad, which an operator of this kind has no rule for, says so."""
    x, bias, slope = operands(needs=(False, False))
    ours = torch.func.vmap(lambda x: leaky_relu(x, bias, slope))(torch.stack([x, 2 * x]))
    assert torch.equal(ours, torch.stack([leaky_relu(x, bias, slope), leaky_relu(2 * x, bias, slope)]))
    with pytest.raises(RuntimeError, match="autograd.Function"):
        torch.func.grad(lambda x: leaky_relu(x, bias, slope).sum())(x)
    with forward_ad.dual_level():
        assert torch.equal(leaky_relu(x, bias, slope), ours[0])
        for operator in (leaky_relu, declare("tested_no_tangent", forward, shapes=shapes)):
            with pytest.raises(RuntimeError, match=f"{operator.name} has no derivative in forward mode"):
                operator(x, forward_ad.make_dual(bias, bias), slope)


def test_under_checkpoint_and_autocast():
    def checkpointed(*given):
        return torch.utils.checkpoint.checkpoint(leaky_relu, *given, use_reentrant=False)

    assert_as_torch(checkpointed, *operands())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_as_torch(leaky_relu, *operands())


def test_subclasses_of_tensor_see_the_operator():
    class Wrapped(torch.Tensor):
        seen = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(func)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    x, bias, slope = operands(needs=(False, False))
    y = leaky_relu(x.as_subclass(Wrapped), bias, slope)
    assert leaky_relu.registered in Wrapped.seen and torch.equal(y, leaky_relu(x, bias, slope))
    assert torch.equal(leaky_relu(x, torch.nn.Parameter(bias), slope), y)


# ------------------------------------------------------------------------------------------------------------- declarations


def test_declared_again_it_is_the_new_one():
    """As an edited cell does; also where another copy of the module declares it."""

    def twice(x: Tensor) -> Tensor:
        return 2 * x

    def thrice(x: Tensor, extra: float) -> Tensor:
        return 3 * x + extra

    x = torch.ones(2, requires_grad=True)
    declare("tested_again", twice, shapes=torch.empty_like)
    new = declare(
        "tested_again",
        thrice,
        shapes=lambda x, extra: torch.empty_like(x),
        backward=lambda dy, x, extra, *, needs: [3 * dy],
    )
    assert torch.ops.inline_kernels.tested_again(x, 1.0).tolist() == new(x, 1.0).tolist() == [4, 4]
    new(x, 0.0).sum().backward()
    assert x.grad.tolist() == [3, 3]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: new(x, 1.0), fullgraph=True, backend="aot_eager")
    assert compiled(x.detach()).tolist() == [4, 4]
    specification = importlib.util.spec_from_file_location("another_copy", loader_operators.__file__)
    another = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(another)
    another.declare("tested_again", twice, shapes=torch.empty_like)
    assert torch.ops.inline_kernels.tested_again(x).tolist() == [2, 2]


def test_without_a_gradient():
    operator = declare("tested_no_gradient", forward, shapes=shapes)
    assert not operator(*operands()).requires_grad
    assert not hasattr(torch.ops.inline_kernels, "tested_no_gradient_backward")


def test_saving():
    """What forward keeps for backward; it is asked for only where a gradient may follow."""
    asked = []

    def exponential(x: Tensor, *, saving: bool) -> tuple[Tensor, ...]:
        asked.append(saving)
        y = x.exp()
        return (y, y.clone()) if saving else (y,)

    def like(x, *, saving):
        return (torch.empty_like(x), torch.empty_like(x)) if saving else (torch.empty_like(x),)

    operator = declare(
        "tested_saving", exponential, shapes=like, backward=lambda dy, x, y, *, needs: [dy * y]
    )
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(operator, (x,)) and asked and all(asked)
    with torch.no_grad():
        operator(x), operator.registered(x)
    assert asked[-2:] == [False, False]
    torch._dynamo.reset()
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], x.exp())


@pytest.mark.parametrize("planned", [False, True])
def test_backward_takes_the_result(planned):
    """What is there anyway, whoever sees the operators; changed in between, it is noticed."""
    plans = {"plan": lambda x, *, saving: SimpleNamespace(keeps_result=True)} if planned else {}

    def forward(x: Tensor, *, saving: bool, plan=None) -> tuple[Tensor, ...]:
        return (x.relu(),)

    def backward(dy, x, y, *, needs, plan=None):
        return [torch.where(y > 0, dy, 0.0)]

    def like(x, *, saving):
        return (torch.empty_like(x),)

    operator = declare(
        f"tested_keeps_{planned}",
        forward,
        shapes=like,
        backward=backward,
        keeps_result=lambda x: True,
        **plans,
    )
    x, dy = torch.randn(2, 40, dtype=torch.float64)
    x.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    for call in (operator, operator.registered, compiled):
        assert torch.equal(torch.autograd.grad(call(x), x, dy)[0], torch.where(x > 0, dy, 0.0))
    y = operator(x)
    with torch.no_grad():
        y += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


class Arguments(NamedTuple):
    x: Tensor
    weight: Tensor
    axis: int
    sizes: list[int]
    negated: bool
    factor: float


def test_arguments_together_and_of_every_kind():
    def run(a: Arguments) -> Tensor:
        return (a.x * a.weight).sum(a.axis).view(a.sizes) * (-a.factor if a.negated else a.factor)

    def back(dy, a, *, needs):
        scale = -a.factor if a.negated else a.factor
        dy = (dy.flatten() * scale).unsqueeze(a.axis)
        return dy * a.weight, dy * a.x

    operator = declare("tested_arguments", run, shapes=lambda a: a.x.new_empty(a.sizes), backward=back)
    assert repr(operator) == (
        "<operator inline_kernels::tested_arguments(Tensor x, Tensor weight, SymInt axis, SymInt[] sizes, "
        "bool negated, float factor) -> Tensor>"
    )
    x, weight = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, weight: operator(x, weight, 1, [2, 2], True, 0.5), (x, weight))
    torch.library.opcheck(operator.registered, (x, weight, 1, [2, 2], True, 0.5))


@pytest.mark.parametrize("kind", [str, "dict", "Tensor | None", "list[float]", None], ids=str)
def test_what_no_schema_has(kind):
    def odd(x: Tensor, other) -> Tensor:
        return x

    if kind is not None:
        odd.__annotations__["other"] = kind
    with pytest.raises(
        TypeError, match="tested_odd: expected other annotated with one of Tensor, float, int"
    ):
        declare("tested_odd", odd, shapes=torch.empty_like)


def test_tensors_come_first():
    def odd(slope: float, x: Tensor) -> Tensor:
        return x

    with pytest.raises(TypeError, match="tested_odd: expected its tensors before all other parameters"):
        declare("tested_odd", odd, shapes=torch.empty_like)


def test_what_is_drawn_comes_before_numbers():
    def odd(x: Tensor, slope: float, number: Drawn) -> Tensor:
        return x

    with pytest.raises(
        TypeError, match="tested_odd: .*then what is drawn, got .Tensor x, float slope, SymInt"
    ):
        declare("tested_odd", odd, shapes=torch.empty_like)


def test_another_number_of_arguments():
    with pytest.raises(TypeError, match="leaky_relu: expected .Tensor x, Tensor bias, float slope., got 2"):
        leaky_relu(*operands()[:2])


def test_arguments_left_out():
    """Those that forward has a default for; each way is given all of them."""

    def run(x: Tensor, factor: float = 2.0, shift: float = 1.0) -> Tensor:
        return x * factor + shift

    def back(dy, x, factor, shift, *, needs):
        return [dy * factor]

    operator = declare("tested_defaults", run, shapes=lambda x, *rest: torch.empty_like(x), backward=back)
    x = torch.ones(3, requires_grad=True)
    for call in (operator, torch.compile(operator, fullgraph=True, backend="aot_eager")):
        for given, result in (((), 3), ((5.0,), 6), ((5.0, 0.0), 5)):
            y = call(x, *given)
            assert y[0] == result and torch.autograd.grad(y.sum(), x)[0][0] == (given or (2.0,))[0]
    with pytest.raises(TypeError, match="tested_defaults: expected .Tensor x, float .*, got 0 arguments"):
        operator()


@pytest.mark.parametrize("plans", [False, True])
def test_gradients_that_nobody_needs(plans):
    """Whatever backward gives in their place: nobody is given it, no anomaly is seen in it, nothing is recorded of it."""
    shared = torch.full((1,), float("nan"))

    def back(dy, x, bias, slope, *, needs, plan=None):
        return [dy if need else shared for need in needs]

    def planned(x: Tensor, bias: Tensor, slope: float, *, plan) -> Tensor:
        return x + bias

    def run(x: Tensor, bias: Tensor, slope: float) -> Tensor:
        return x + bias

    plan = (lambda *given, saving: "a plan") if plans else None
    run = planned if plans else run
    operator = declare("tested_needs", run, shapes=shapes, backward=back, plan=plan)
    x, bias, slope = operands(needs=(True, False))
    for graph in (False, True):
        y, seen = operator(x, bias, slope), []
        y.grad_fn.register_hook(lambda given, _, seen=seen: seen.extend(given))
        with torch.autograd.set_detect_anomaly(True):
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=graph)
        assert torch.equal(dx, torch.ones_like(x)) and [t is None for t in seen] == [False, True]
        assert not shared.requires_grad and shared.grad_fn is None


def test_none_in_the_place_of_a_gradient():
    """Is none, as of an autograd.Function; and zeros where an operator has to say the shapes before, under torch.compile."""

    def back(dy, x, bias, slope, *, needs):
        return None, dy.sum(0)

    operator = declare("tested_none", forward, shapes=shapes, backward=back, gradients=gradients)
    x, bias, slope = operands()
    for call, none in (operator, None), (torch.compile(operator, fullgraph=True, backend="aot_eager"), 0 * x):
        y = call(x, bias, slope)
        dx, dbias = torch.autograd.grad(y.sum(), (x, bias), allow_unused=True)
        assert torch.equal(dbias, torch.full_like(bias, len(y)))
        assert dx is none or torch.equal(dx, none)


@pytest.mark.parametrize("found", [1, 3])
@pytest.mark.parametrize("plans", [False, True])
def test_another_number_of_gradients(found, plans):
    def run(x: Tensor, bias: Tensor, slope: float, *, plan) -> Tensor:
        return forward(x, bias, slope)

    operator = declare(
        "tested_count",
        run if plans else forward,
        shapes=shapes,
        backward=lambda dy, *given, needs, plan=None: [dy] * found,
        plan=(lambda *given, saving: "a plan") if plans else None,
    )
    for call in (operator, operator.registered):
        y = call(*operands())
        with pytest.raises(
            RuntimeError, match=f"tested_count: expected backward to give 2 gradients, got {found}"
        ):
            y.sum().backward()


# -------------------------------------------------------------------------------------------------------------------- plans


@pytest.fixture
def planned():
    """An operator with a plan, and the list of what was planned."""
    made = []

    def plan(x, factor, count, *, saving):
        made.append((tuple(x.shape), factor, saving))
        return SimpleNamespace(number=len(made))

    def run(x: Tensor, factor: float, count: list[int], *, plan) -> Tensor:
        return x * factor + 0 * plan.number

    def back(dy, x, factor, count, *, needs, plan):
        assert isinstance(plan, SimpleNamespace)
        return [dy * factor]

    return (
        declare("tested_plan", run, shapes=lambda x, *rest: torch.empty_like(x), backward=back, plan=plan),
        made,
    )


def test_plans_are_made_once(planned):
    """For the same shapes, strides, dtypes, devices, alignment and numbers; and anew after kernels are forgotten."""
    operator, made = planned
    x = torch.randn(4, 6)
    for _ in range(3):
        operator(x, 2.0, [1])
        operator.registered(x.clone(), 2.0, [1])
    assert made == [((4, 6), 2.0, False)]
    for other in (
        (x[:2], 2.0, [1]),
        (x, 3.0, [1]),
        (x, 2.0, [2]),
        (x.t().contiguous().t(), 2.0, [1]),
        (x.double(), 2.0, [1]),
        (torch.randn(25)[1:].view(4, 6), 2.0, [1]),
    ):
        before = len(made)
        operator(*other), operator(*other)
        assert len(made) == before + 1, other
    count = len(made)
    leaf = x.clone().requires_grad_()
    for _ in range(2):
        operator(leaf, 2.0, [1]).sum().backward()
    assert made[count:] == [((4, 6), 2.0, True)] and torch.equal(leaf.grad, torch.full_like(x, 4.0))
    operator(x, 2.0, [1])
    count = len(made)
    inline_loader.forget()
    operator(x, 2.0, [1])
    assert len(made) == count + 1


def test_a_plan_serves_whatever_is_drawn():
    """Forward and backward get the number of their call, on all ways, and there is one plan with gradients and one without."""
    made = []

    def plan(x, number, factor, *, saving):
        made.append(saving)
        return SimpleNamespace()

    def run(x: Tensor, number: Drawn, factor: float, *, plan) -> Tensor:
        return x * number * factor

    def back(dy, x, number, factor, *, needs, plan):
        return [dy * number * factor]

    shapes = lambda x, *rest: torch.empty_like(x)  # noqa: E731
    operator = declare("tested_drawn", run, shapes=shapes, backward=back, plan=plan)
    assert repr(operator).endswith("(Tensor x, SymInt number, float factor) -> Tensor>")
    x = torch.ones(3, requires_grad=True)
    bound = operator.bound(operator.plan((x, 9, 0.5), saving=True), (0.5,), True)

    def kept(x, number, factor):
        return bound(x, number)

    for call in (operator, operator.registered, kept):
        results = [(number, call(x, number, 0.5)) for number in (2, 3, 2**62)]
        for number, y in results:  # after all have been called
            assert y[0] == number / 2 and torch.autograd.grad(y.sum(), x)[0][0] == number / 2
    with torch.no_grad():
        assert [operator(x, number, 0.5)[0] for number in (2, 4)] == [1, 2]
    assert sorted(made) == [False, True]


def test_plans_are_limited_in_number(planned, monkeypatch):
    operator, made = planned
    monkeypatch.setattr(loader_operators, "_KEPT_PLANS", 2)
    for rows in (1, 2, 3, 4, 1):
        assert torch.equal(operator(torch.ones(rows, 2), 2.0, []), torch.full((rows, 2), 2.0))
    assert len(made) == 5 and len(operator._plans) <= 2


def test_bound_operators_follow_one_plan(planned):
    """The short ways for who has the plan."""
    operator, made = planned
    x = torch.randn(4, 6, requires_grad=True)
    constants = 2.0, [1]
    plan = operator.plan((x, *constants), saving=False)
    quiet, loud = operator.bound(plan, constants, False), operator.bound(plan, constants, True)
    assert torch.equal(quiet(x), x * 2)
    loud(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0)) and len(made) == 1
    for needs_gradient in (True, False):
        *tensors, slope = operands(needs=(needs_gradient, needs_gradient))
        unplanned = leaky_relu.bound(None, (slope,), needs_gradient)
        assert torch.equal(unplanned(*tensors), in_torch(*tensors, slope))
        assert unplanned(*tensors).requires_grad == needs_gradient
    unplanned = leaky_relu.bound(None, operands()[2:], True)
    assert_as_torch(lambda *given: unplanned(*given[:2]), *operands())


def test_tf32_is_part_of_a_situation():
    """On a GPU; toggled, it is seen at once, by the older setting and by the newer."""
    on_gpu = SimpleNamespace(is_cuda=True)
    found = []
    for allowed in (True, False, True):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            found.append(loader_operators.precision(on_gpu))
    assert found[0] == found[2] != found[1]
    with torch.backends.cudnn.flags(enabled=False):
        assert loader_operators.precision(on_gpu) not in found
    assert loader_operators.precision(torch.ones(1)) is None
