"""What the tests of models and operators share: the problems at small sizes, and the one rule for 'the same results'.

The rule is checks.py's: against a float64 reference, the error of the output and of every gradient is at most twice eager's
plus a few units in the last place of the largest value, in norm and in the largest element.

Tests iterate over the registry. What they know of one problem beyond its row there stands in the table `KNOWN`; of a problem
without a row in it they know what follows from the registry. Each size has its reason. Dtypes and pools are few, because each
combination is compiled once per cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import models
from inline_kernels import fuse
from inline_kernels.bench import checks, compare, honesty
from inline_kernels.engine.fuse import structure_of

NAMES = list(models.PROBLEMS)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]
VARIANTS = [("epilogue", "cpu")] + [
    pytest.param(variant, "cuda", marks=pytest.mark.gpu)
    for variant in dict.fromkeys(
        name for problem in models.PROBLEMS.values() for name in problem.variants if name != "eager"
    )
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

every_name = pytest.mark.parametrize("name", NAMES)
every_device = pytest.mark.parametrize("device", DEVICES)
every_variant = pytest.mark.parametrize("variant, device", VARIANTS)

# The problems by their roles, for what concerns one alone.
MIN_ADD = "conv2d_min_add_multiply"
INSTANCE_NORM = "conv3d_multiply_instancenorm_clamp_multiply_max"
DROPOUT = "conv3d_groupnorm_min_clamp_dropout"
POOL = "conv2d_groupnorm_scale_maxpool_clamp"

# For what surrounds kernels. On a CPU one schedule runs all problems: a pointwise one, and one of norm, ties and dropout, stand for them.
FEW = [name for name in NAMES if name not in (INSTANCE_NORM, POOL)]
FEW_VARIANTS = [(name, *VARIANTS[0]) for name in FEW] + [
    pytest.param(name, *variant.values, marks=pytest.mark.gpu) for name in NAMES for variant in VARIANTS[1:]
]
few_variants = pytest.mark.parametrize("name, variant, device", FEW_VARIANTS)
few_names = pytest.mark.parametrize(
    "name, device",
    [(name, "cpu") for name in FEW] + [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in NAMES],
)

# ------------------------------------------------------------------------------------------------ what is known of a problem


class Size(NamedTuple):
    """A size to try: the constructor's arguments, the input's shape, and the reason why."""

    arguments: tuple
    shape: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True)
class Known:
    """What the tests know of a problem."""

    small: Size
    fused: Size | None = None  # small where a GPU's fused kernels run; where None, `small`
    tiny: Size | None = None  # for finite differences
    winograd: Size | None = None  # where Winograd's convolution runs on a CPU
    awkward: tuple[Size, ...] = ()  # for every variant
    tiles: tuple[Size, ...] = ()  # awkward for a GPU's fused kernels; a CPU has the like of another problem
    not_fused: tuple[Size, ...] = ()  # too small or too odd for a GPU's fused kernels
    raising: tuple[Size, ...] = ()  # for which the reference raises an error
    slopes: tuple[str, ...] = ()  # parameters that scale what is compared or clamped afterwards
    large: float = 1e15  # a factor of the input, whose square may be summed
    hiding: tuple[str, ...] = ()  # parameters beside which a result of 1 / large would not be seen
    least: int = 2  # that the convolution's result extends, at random sizes
    runs_tf32: bool = False  # may its fused kernels, where eager does?
    tail: Callable[..., tuple] | None = (
        None  # drawn(number, shape by channel, groups): the arguments after the kernel's size
    )


KNOWN = {
    MIN_ADD: Known(
        small=Size((5, 20, 3, 0.1, (20, 1, 1), 2.0), (3, 5, 11, 13), "odd everywhere, no two sizes alike"),
        tiny=Size((2, 3, 2, 0.1, (3, 1, 1), -1.5), (2, 2, 4, 3)),
        winograd=Size((9, 40, 3, 0.1, (40, 1, 1), 2.0), (3, 9, 19, 22), "odd and even results"),
        awkward=(
            Size((4, 8, 3, 0.1, (8, 1, 1), 2.0), (1, 4, 3, 3), "one output element"),
            Size((1, 1, 1, 0.1, (1, 1, 1), 2.0), (2, 1, 4, 5), "one channel in and out"),
            Size((3, 7, (1, 4), 0.1, (7, 1, 1), 2.0), (2, 3, 5, 9), "rectangular kernel"),
            Size((5, 20, 3, 0.1, (1,), -2.0), (3, 5, 11, 13), "one bias for all"),
            Size((5, 20, 3, 0.1, (), 2.0), (3, 5, 11, 13), "a number as bias"),
            Size((5, 20, 3, 0.1, (20, 1, 1), 0.0), (3, 5, 11, 13), "scaled by zero"),
            Size((5, 20, 3, 1e9, (20, 1, 1), 2.0), (3, 5, 11, 13), "constant never reached"),
        ),
        tiles=(
            Size((4, 64, 1, 0.1, (64, 1, 1), 2.0), (2, 4, 8, 8), "whole tiles"),
            Size((3, 65, 2, 0.1, (65, 1, 1), 2.0), (1, 3, 14, 6), "one more than a tile"),
        ),
        large=1e20,
        hiding=("conv.bias", "bias"),
        runs_tf32=True,
        tail=lambda number, shape, groups: (number(), shape, number()),
    ),
    INSTANCE_NORM: Known(
        small=Size((3, 20, (2, 3, 3), (20, 1, 1, 1), -1.0, 1.0), (3, 3, 5, 7, 9)),
        fused=Size((3, 32, (2, 3, 3), (32, 1, 1, 1), -1.0, 1.0), (3, 3, 5, 7, 9)),
        tiny=Size((2, 3, (1, 2, 2), (3, 1, 1, 1), -0.6, 0.8), (2, 2, 2, 3, 4)),
        winograd=Size((4, 16, (2, 3, 3), (16, 1, 1, 1), -1.0, 1.0), (3, 4, 4, 21, 20)),
        awkward=(
            Size((3, 32, (2, 3, 3), (1,), -1.0, 1.0), (3, 3, 5, 7, 9), "one multiplier for all"),
            Size((3, 32, (2, 3, 3), (32, 1, 1, 1), 0.5, -0.5), (3, 3, 5, 7, 9), "bounds swapped"),
        ),
        tiles=(
            Size((3, 16, 3, (16, 1, 1, 1), -1.0, 1.0), (2, 3, 6, 6, 6), "64 positions"),
            Size(
                (1, 16, (1, 5, 5), (16, 1, 1, 1), -1.0, 1.0), (2, 1, 3, 37, 141), "one channel in, long rows"
            ),
            Size((4, 32, 2, (32, 1, 1, 1), -1.0, 1.0), (1, 4, 9, 6, 35), "four channels in, one sample"),
            Size((2, 16, 3, (16, 1, 1, 1), -1.0, 1.0), (3, 2, 5, 7, 9), "two channels in"),
            Size((3, 32, (2, 3, 3), (), -0.5, 0.7), (3, 3, 5, 7, 9), "a number as multiplier"),
        ),
        not_fused=(
            Size((3, 4, 3, (4, 1, 1, 1), -1.0, 1.0), (1, 3, 3, 3, 4), "two positions"),
            Size((1, 1, 1, (1, 1, 1, 1), -1.0, 1.0), (2, 1, 2, 3, 5), "one channel in and out"),
            Size((2, 300, 1, (300, 1, 1, 1), -1.0, 1.0), (2, 2, 2, 3, 5), "more channels than a byte counts"),
            Size(
                (1, 4, 3, (4, 1, 1, 1), -1.0, 1.0),
                (2, 1, 19, 19, 19),
                "planes longer than a block of statistics",
            ),
            Size((3, 20, 3, (20, 1, 1, 1), 0.5, -0.5), (3, 3, 5, 7, 9), "20 channels, bounds swapped"),
        ),
        raising=(Size((3, 20, (2, 3, 3), (20, 1, 1, 1), -1.0, 1.0), (3, 3, 2, 3, 3), "one position"),),
        slopes=("multiplier",),
        tail=lambda number, shape, groups: (shape, number(), number()),
    ),
    DROPOUT: Known(
        small=Size((3, 12, 3, 4, -0.3, 1.0, 0.2), (3, 3, 5, 7, 9)),
        fused=Size((3, 48, 3, 12, -0.3, 1.0, 0.2), (3, 3, 5, 7, 9)),
        winograd=Size((3, 24, 3, 4, -0.3, 1.0, 0.2), (3, 3, 5, 18, 23)),
        awkward=(Size((3, 16, 3, 4, 0.5, -0.25, 0.2), (3, 3, 5, 7, 9), "bounds swapped"),),
        tiles=(
            Size((3, 16, 3, 4, -0.3, 1.0, 0.2), (2, 3, 6, 6, 6), "64 positions"),
            Size((1, 16, (1, 5, 5), 16, -0.3, 1.0, 0.2), (2, 1, 3, 37, 141), "one channel in, long rows"),
            Size((4, 32, 2, 4, -0.3, 1.0, 0.2), (1, 4, 9, 6, 35), "four channels in, one sample"),
            Size((2, 16, 3, 4, -0.3, 1.0, 0.2), (3, 2, 5, 7, 9), "two channels in"),
            Size((3, 48, 3, 1, -0.3, 1.0, 0.2), (3, 3, 5, 7, 9), "one group"),
            Size((3, 48, 3, 48, -0.3, 1.0, 0.2), (3, 3, 5, 7, 9), "a group per channel"),
        ),
        not_fused=(
            Size((3, 12, 3, 4, -0.3, 1.0, 0.2), (1, 3, 3, 3, 3), "one position, batch 1"),
            Size(
                (1, 6, 3, 2, -0.3, 1.0, 0.2), (2, 1, 19, 19, 19), "planes longer than a block of statistics"
            ),
            Size((3, 12, 3, 4, 0.5, -0.25, 0.2), (3, 3, 5, 7, 9), "12 channels, bounds swapped"),
        ),
        raising=(Size((3, 4, 3, 4, 0.0, 1.0, 0.2), (1, 3, 3, 3, 3), "one element per group"),),
        slopes=("norm.weight",),
        tail=lambda number, shape, groups: (groups, number(), number(), 0.2),
    ),
    POOL: Known(
        small=Size(
            (5, 24, 3, 4, (24, 1, 1), (2, 3), -0.5, 1.0),
            (3, 5, 15, 13),
            "a pool that leaves a row and a column",
        ),
        fused=Size((5, 80, 3, 10, (80, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 15, 13)),
        tiny=Size((2, 4, 2, 2, (4, 1, 1), (2, 3), -0.6, 0.8), (2, 2, 6, 5)),
        winograd=Size(
            (9, 64, 3, 4, (64, 1, 1), (2, 3), -0.5, 1.0),
            (3, 9, 19, 140),
            "more tiles than it takes at a time",
        ),
        awkward=(
            Size((5, 80, 3, 1, (80, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 15, 13), "one group"),
            Size((5, 80, 3, 80, (80, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 15, 13), "a group per channel"),
            Size(
                (3, 16, (2, 1), 2, (16, 1, 1), (2, 3), -0.5, 1.0),
                (1, 3, 3, 3),
                "one output position, batch 1",
            ),
            Size((5, 80, 3, 10, (1,), (2, 3), -0.5, 1.0), (3, 5, 15, 13), "one scale for all"),
            Size((5, 80, 3, 10, (80, 1, 1), (2, 3), 0.5, -0.5), (3, 5, 15, 13), "bounds swapped"),
        ),
        tiles=(
            Size(
                (12, 128, 3, 16, (128, 1, 1), (2, 3), -0.5, 1.0), (2, 12, 11, 261), "rows longer than a tile"
            ),
            Size((5, 80, 3, 10, (), (2, 3), -0.5, 1.0), (3, 5, 15, 13), "a number as scale"),
        ),
        not_fused=(
            Size(
                (2, 4, 1, 2, (4, 1, 1), (17, 16), -0.5, 1.0),
                (2, 2, 36, 37),
                "windows longer than a byte counts",
            ),
            Size((5, 24, 3, 4, (24, 1, 1), (2, 3), 0.5, -0.5), (3, 5, 15, 13), "24 channels, bounds swapped"),
        ),
        raising=(
            Size((3, 4, 3, 4, (4, 1, 1), (1, 1), 0.0, 1.0), (1, 3, 3, 3), "one element per group"),
            Size((5, 24, 3, 4, (24, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 3, 13), "window larger than its input"),
        ),
        slopes=("scale", "group_norm.weight"),
        least=3,
        tail=lambda number, shape, groups: (groups, shape, (2, 3), number(), number()),
    ),
}

# Where each block of the fused kernel has a whole sample, some of whose sums it holds.
HELD = Size((3, 16, (2, 3, 3), (16, 1, 1, 1), -1.0, 1.0), (132, 3, 5, 7, 9), "in shared memory")
HELD_IN_SCRATCH = Size((3, 16, 3, (16, 1, 1, 1), -1.0, 1.0), (140, 3, 16, 32, 32), "in scratch, too")

# Where Winograd's convolution gives the gradient of x, too, on a CPU: of few channels, and of as many as it may have.
WINOGRAD_DX = Size((16, 40, 3, 0.1, (40, 1, 1), 2.0), (3, 16, 19, 22), "of few channels")
WINOGRAD_MANY = Size((8, 128, 3, 0.1, (128, 1, 1), 2.0), (2, 8, 18, 21), "of many channels")

# Where the fused kernel runs by wgmma, on Hopper: float32 where TF32 is allowed, and halves.
WGMMA = Size((64, 128, 3, 0.1, (128, 1, 1), 2.0), (3, 64, 11, 260), "whole and part of a tile")


def known(name: str) -> Known:
    """What KNOWN has of the problem `name`; else its default sizes, for three samples of few and unlike extents."""
    if name in KNOWN:
        return KNOWN[name]
    problem = models.PROBLEMS[name]
    _, channels, *spatial = problem.input_shape
    cropped = [min(extent, 13 + 2 * place) for place, extent in enumerate(spatial)]
    return Known(Size(problem.init_inputs, (3, channels, *cropped)))


def size_of(name: str, variant: str = "epilogue") -> Size:
    """A small one that `variant` takes."""
    row = known(name)
    return row.fused or row.small if variant == "fused" else row.small


def build(name: str, arguments: tuple, *, device="cpu", dtype=torch.float32, seed=0) -> torch.nn.Module:
    """A reference model in eval mode; all that scales or shifts in it is random."""
    torch.manual_seed(seed)
    model = models.PROBLEMS[name].Model(*arguments)
    for key, parameter in model.named_parameters():
        if key != "conv.weight":
            torch.nn.init.normal_(parameter)
    return model.to(device=device, dtype=dtype).eval()


def random_input(shape: tuple, *, device="cpu", dtype=torch.float32, seed=1) -> torch.Tensor:
    """Normal, around 1, so that a kernel that takes the mean for zero is found out."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 1).to(
        device=device, dtype=dtype
    )


def sized(name: str, size: Size, **options) -> tuple[torch.nn.Module, torch.Tensor]:
    """The reference model and an input of `size`; options as in `build`."""
    return build(name, size.arguments, **options), random_input(size.shape, **options)


def small(name: str, variant: str = "epilogue", **options) -> tuple[torch.nn.Module, torch.Tensor]:
    """The same of size_of(name, variant)."""
    return sized(name, size_of(name, variant), **options)


def give_gradients(model: torch.nn.Module, x: torch.Tensor) -> None:
    """Changes the model so that it has gradients, where with random parameters all are zero."""
    for _, prepare in problem_of(model).timed_cases:
        prepare(model, x)


def ties(model: torch.nn.Module, x: torch.Tensor) -> None:
    """The same, with gradients that differ from group to group: its case "ties, training"."""
    dict(problem_of(model).cases).get("ties, training", lambda model, x: None)(model, x)


def twin_of(
    model: torch.nn.Module, variant: str = "epilogue", x: torch.Tensor | None = None
) -> torch.nn.Module:
    """The ModelNew that shares `model`'s parameters, running `variant`.

    Skips the test if the problem has no such variant, or if it says why it can't run for x; "epilogue" always can.
    """
    problem = problem_of(model)
    if variant not in ("auto", *problem.variants):
        pytest.skip(f"{problem.name} has no variant {variant!r}")
    twin = problem.ModelNew.from_eager(model)
    twin.variant = variant
    try:
        assert x is None or variant == "auto" or twin.plan(x).variant == variant, twin.plan(x)
    except RuntimeError as error:
        if variant == "epilogue":
            raise
        pytest.skip(str(error))
    return twin


def takes(model: torch.nn.Module, x: torch.Tensor) -> bool:
    """Do the fused kernels take x?"""
    twin = problem_of(model).ModelNew.from_eager(model)
    twin.variant = "fused"
    try:
        return twin.plan(x).variant == "fused"
    except RuntimeError:
        return False


def operator_of(twin: torch.nn.Module, x: torch.Tensor, variant: str = "epilogue"):
    """The segment of `twin` for such inputs, and its operator: of x, part.tensors(), a seed and a number where there is dropout,
    part.numbers(), and the place of the result's dtype in support.DTYPES."""
    (part,) = structure_of(twin, (x,), {}).parts
    return part, part.by_schedule[{"epilogue": "load"}.get(variant, variant)].operator


def problem_of(model: torch.nn.Module) -> models.Problem:
    return next(problem for problem in models.PROBLEMS.values() if isinstance(model, problem.Model))


BOTH = "forward", "train_dx"


def assert_rule(model: torch.nn.Module, x: torch.Tensor, variant: str = "epilogue", phases=BOTH) -> None:
    """The rule for `variant` on x: without gradients, and with those of x and of all parameters. Kernels that never run TF32 are held
    to what eager gives without it, too, shared memory being NaN: where eager runs TF32, the rule would let float16 pass."""
    twin = twin_of(model, variant, x)
    assert_module_follows_rule(twin, model, x, phases)
    if (
        x.is_cuda
        and x.dtype == torch.float32
        and variant == "fused"
        and not known(problem_of(model).name).runs_tf32
    ):
        spoilt = functools.partial(_with_spoilt_shared_memory, twin)
        with steady_library(allow_tf32=False):
            assert_within_limits(lambda x: checks.errors_of("", spoilt, model, x, "forward"), x)


def _with_spoilt_shared_memory(module, x: torch.Tensor) -> torch.Tensor:
    honesty.spoil_shared_memory(x.device)
    return module(x)


def assert_rule_by_sample(model: torch.nn.Module, x: torch.Tensor, variant: str = "epilogue") -> None:
    """The rule for each sample of x in the company of the others, in whose results its own errors would be lost if they are larger."""
    twin = twin_of(model, variant, x)
    for n, sample in enumerate(x.split(1)):
        assert_module_follows_rule(_Among(twin, x, n), _Among(model, x, n), sample)


class _Among(torch.nn.Module):
    """`module` on a sample in the place n of the batch x. In float64, where it is the reference, on the sample alone."""

    def __init__(self, module: torch.nn.Module, x: torch.Tensor, n: int):
        super().__init__()
        self.module, self.before, self.after = module, x[:n], x[n + 1 :]

    def forward(self, sample):
        if sample.dtype == torch.float64:
            return self.module(sample)
        return self.module(torch.cat([self.before, sample, self.after]))[len(self.before)][None]


def assert_module_follows_rule(module, model: torch.nn.Module, x: torch.Tensor, phases=BOTH) -> None:
    """The rule for `module`, which shares the parameters of `model`; all results have eager's dtypes, too."""
    assert _dtypes(module, model, x, phases) == _dtypes(model, model, x, phases)
    for phase in phases:
        assert_within_limits(lambda x: checks.errors_of("", module, model, x, phase), x)


def assert_within_limits(errors_of, x: torch.Tensor) -> None:
    """errors_of(x) gives errors and complaints. Judged as in checks.py, but for what cancels; draws are of the incoming gradient and of the input's last digits:
    x comes in sizes that are at most 6 % apart."""
    complaints: list[str] = []

    def errors(number: int, cancelling: bool):
        found, wrong = errors_of(x * (1 + number / 256) if number else x)
        complaints.extend(wrong)
        return found

    judged = checks.judged_on_draws(errors)
    # In float64 eager is its own reference, so both err by a few units in the last place of the largest value they sum.
    exact = 4 * max(error.limit_max for error in judged) if x.dtype == torch.float64 else 0.0
    report = "\n".join(["", *complaints, *map(str, judged)])
    assert not complaints and all(error.share <= 1 or error.max <= exact for error in judged), report


def _dtypes(module, model: torch.nn.Module, x: torch.Tensor, phases) -> list[dict[str, torch.dtype]]:
    """Those of all results in these phases."""
    leaves, found = dict(model.named_parameters()), []
    for phase in phases:
        dy = torch.ones_like(model(x)) if phase != "forward" else None
        out, gradients = checks.call(module, leaves, x, phase, dy)
        found.append({"output": out.dtype, **{name: t.dtype for name, t in gradients.items()}})
    return found


def steady_library(allow_tf32: bool = False):
    """On a GPU the library's convolution then takes the same algorithm each time, in float32 unless TF32 is allowed."""
    return torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=allow_tf32)


def results(module, x: torch.Tensor, g: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The output and the gradients of x and of all parameters, for the incoming gradient g (ones unless given)."""
    x = x.detach().requires_grad_()
    leaves = {"x": x, **{key.removeprefix("_orig_mod."): p for key, p in module.named_parameters()}}
    y = module(x)
    g = torch.ones_like(y) if g is None else g
    gradients = torch.autograd.grad(y, list(leaves.values()), g, allow_unused=True, materialize_grads=True)
    return {"output": y.detach(), **dict(zip(leaves, gradients))}


def pair(name: str, called: bool = True) -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor]:
    """A reference model that has gradients, its twin, which keeps plans if it has been called, and an input."""
    model, x = small(name)
    ties(model, x)
    twin = models.PROBLEMS[name].ModelNew.from_eager(model.eval())
    if called:
        call_both(twin, x)
    return model, twin, x


def call_both(twin: torch.nn.Module, x: torch.Tensor) -> None:
    """With gradients and without."""
    results(twin, x)
    with torch.no_grad():
        twin(x)


def assert_near(values: dict, theirs: dict) -> None:
    """Not finite in the same places, and equal but for the order of sums."""
    assert values.keys() == theirs.keys()
    for key, value in values.items():
        largest = float(theirs[key].nan_to_num(0.0, 0.0, 0.0).abs().max())
        torch.testing.assert_close(
            value,
            theirs[key],
            rtol=0,
            atol=2**-20 * largest,
            equal_nan=True,
            msg=lambda text: f"{key}: {text}",
        )


def assert_equal(ours: dict, theirs: dict) -> None:
    """Two answers of `results`, bitwise equal; NaN equals NaN."""
    for key, value in ours.items():
        assert value.dtype == theirs[key].dtype and value.shape == theirs[key].shape, key
        assert torch.equal(value.nan_to_num(123.0), theirs[key].nan_to_num(123.0)), key
        assert torch.equal(value.isnan(), theirs[key].isnan()), key


class Recorder(TorchDispatchMode):
    """The arguments with which each of our operators gets called, by the operator."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "inline_kernels":
            self.calls[func] = args
        return func(*args, **(kwargs or {}))


def wrong_of(
    make: Callable, shape: Sequence[int], phase: str, device="cpu", dtype=torch.float32
) -> list[str]:
    """What misses the rule where `fuse` runs such models in training, with random parameters and inputs."""

    def errors(number: int, cancelling: bool) -> list[checks.Error]:
        torch.manual_seed(number)
        model = make().to(device, dtype).train()
        compare.randomize(model)
        x = torch.randn(shape, device=device).to(dtype)
        found, complaints = checks.errors_of("", fuse(model), model, x, phase, cancelling=cancelling)
        assert not complaints
        return found

    return [str(error) for error in checks.judged_on_draws(errors) if not error.share <= 1]
