"""What the tests of models and operators share: the four problems at small sizes, and the one rule for 'the same results'.

The rule is checks.py's: against a float64 reference, the error of the output and of every gradient is at most twice eager's
plus a few units in the last place of the largest value, in norm and in the largest element.

Each size has its reason. Dtypes and pools are few, because each combination is compiled once per cache.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import checks
import models

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]
# Variant and device; on the CPU epilogue and fused are one.
VARIANTS = [("epilogue", "cpu"), ("folded", "cpu")] + [
    pytest.param(variant, "cuda", marks=pytest.mark.gpu)
    for variant in dict.fromkeys(
        name for problem in models.PROBLEMS.values() for name in problem.variants if name != "eager"
    )
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

MIN_ADD = "conv2d_min_add_multiply"
INSTANCE_NORM = "conv3d_multiply_instancenorm_clamp_multiply_max"
DROPOUT = "conv3d_groupnorm_min_clamp_dropout"
POOL = "conv2d_groupnorm_scale_maxpool_clamp"

# Constructor arguments and input shape: odd everywhere, no two sizes alike, a pool that leaves a row and a column.
SMALL = {
    MIN_ADD: ((5, 20, 3, 0.1, (20, 1, 1), 2.0), (3, 5, 11, 13)),
    INSTANCE_NORM: ((3, 20, (2, 3, 3), (20, 1, 1, 1), -1.0, 1.0), (3, 3, 5, 7, 9)),
    DROPOUT: ((3, 12, 3, 4, -0.3, 1.0, 0.2), (3, 3, 5, 7, 9)),
    POOL: ((5, 24, 3, 4, (24, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 15, 13)),
}

# The same where only the fused kernels of a GPU run, which take 16, 32, … channels out of these.
FUSED = {
    **SMALL,
    INSTANCE_NORM: ((3, 32, (2, 3, 3), (32, 1, 1, 1), -1.0, 1.0), (3, 3, 5, 7, 9)),
    DROPOUT: ((3, 48, 3, 12, -0.3, 1.0, 0.2), (3, 3, 5, 7, 9)),
    POOL: ((5, 80, 3, 10, (80, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 15, 13)),
}

# And where each block of the fused kernel has a whole sample, some of whose sums it holds: in shared memory; in scratch, too.
HELD = ((3, 16, (2, 3, 3), (16, 1, 1, 1), -1.0, 1.0), (132, 3, 5, 7, 9))
HELD_IN_SCRATCH = ((3, 16, 3, (16, 1, 1, 1), -1.0, 1.0), (140, 3, 16, 32, 32))

# Where 31's fused kernel runs by wgmma, on Hopper: float32 where TF32 is allowed, and halves.
WGMMA = ((64, 128, 3, 0.1, (128, 1, 1), 2.0), (3, 64, 11, 260))

# And where on a CPU Winograd's convolution runs: odd and even results, more tiles than it takes at a time.
WINOGRAD = {
    MIN_ADD: ((9, 40, 3, 0.1, (40, 1, 1), 2.0), (3, 9, 19, 22)),
    INSTANCE_NORM: ((4, 16, (2, 3, 3), (16, 1, 1, 1), -1.0, 1.0), (3, 4, 4, 21, 20)),
    DROPOUT: ((3, 24, 3, 4, -0.3, 1.0, 0.2), (3, 3, 5, 18, 23)),
    POOL: ((9, 64, 3, 4, (64, 1, 1), (2, 3), -0.5, 1.0), (3, 9, 19, 140)),
}


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


def sizes_for(variant: str) -> dict[str, tuple]:
    return FUSED if variant == "fused" else SMALL


def small(name: str, variant: str = "epilogue", **options) -> tuple[torch.nn.Module, torch.Tensor]:
    """The reference model and the input of sizes_for(variant)[name]; options as in `build`."""
    arguments, shape = sizes_for(variant)[name]
    options.pop("seed", None)
    return build(name, arguments, **options), random_input(shape, **options)


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
        x is None or twin.plan(x)
    except RuntimeError as error:
        if variant == "epilogue":
            raise
        pytest.skip(str(error))
    return twin


def problem_of(model: torch.nn.Module) -> models.Problem:
    return next(problem for problem in models.PROBLEMS.values() if isinstance(model, problem.Model))


def assert_rule(model: torch.nn.Module, x: torch.Tensor, variant: str = "epilogue") -> None:
    """The rule for `variant` on x: without gradients, and with those of x and of all parameters. Kernels that never run TF32 are held
    to what eager gives without it, too, shared memory being NaN: where eager runs TF32, the rule would let float16 pass."""
    twin = twin_of(model, variant, x)
    assert_module_follows_rule(twin, model, x)
    if x.is_cuda and x.dtype == torch.float32 and variant == "fused" and problem_of(model).name != MIN_ADD:
        spoilt = functools.partial(_with_spoilt_shared_memory, twin)
        with steady_library(allow_tf32=False):
            assert_within_limits(lambda x: checks.errors_of("", spoilt, model, x, "forward"), x)


def _with_spoilt_shared_memory(module, x: torch.Tensor) -> torch.Tensor:
    checks.spoil_shared_memory(x.device)
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


def assert_module_follows_rule(module, model: torch.nn.Module, x: torch.Tensor) -> None:
    """The rule for `module`, which shares the parameters of `model`; all results have eager's dtypes, too."""
    assert _dtypes(module, model, x) == _dtypes(model, model, x)
    for phase in ("forward", "train_dx"):
        assert_within_limits(lambda x: checks.errors_of("", module, model, x, phase), x)


def assert_within_limits(errors_of, x: torch.Tensor) -> None:
    """errors_of(x) gives errors and complaints. As in checks.py, a limit that is missed is judged again on the mean of several draws,
    here of the incoming gradient and of the input's last digits: x comes in four sizes, at most 5 % apart."""
    draws = [errors_of(x)]
    if any(error.share > 1 for error in draws[0][0]):
        draws += [errors_of(x * (1 + draw / 64)) for draw in range(1, checks.DRAWS)]
    errors = [checks._mean(same) for same in zip(*(errors for errors, _ in draws))]
    # In float64 eager is its own reference, so both err by a few units in the last place of the largest value they sum.
    exact = 4 * max(error.limit_max for error in errors) if x.dtype == torch.float64 else 0.0
    report = "\n".join(["", *draws[0][1], *map(str, errors)])
    assert not draws[0][1] and all(error.share <= 1 or error.max <= exact for error in errors), report


def _dtypes(module, model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.dtype]:
    """Those of all results, without gradients and with them."""
    leaves = dict(model.named_parameters())
    out, _ = checks.call(module, leaves, x, "forward", None)
    trained, gradients = checks.call(module, leaves, x, "train_dx", torch.ones_like(out))
    return {
        "output": out.dtype,
        "output in training": trained.dtype,
        **{name: t.dtype for name, t in gradients.items()},
    }


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
