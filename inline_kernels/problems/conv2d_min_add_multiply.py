"""y = (min(conv2d(x), constant_value) + bias) * scaling_factor."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from inline_kernels.engine import library, operators, tiling
from inline_kernels.engine.twin import Twin
from inline_kernels.problems import Problem

NAME = "conv2d_min_add_multiply"
PARAMETERS = "conv_bias", "bias?"  # by channel; "?": or one for all channels


class Conv2dMinAddMultiply(nn.Module):
    """y = (min(conv(x), constant_value) + bias) * scaling_factor.

    x (N, in_channels, H, W) gives y (N, out_channels, H', W'), where H' = H - kernel height + 1 and W' likewise.
    """

    def __init__(self, in_channels, out_channels, kernel_size, constant_value, bias_shape, scaling_factor):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.constant_value = constant_value
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scaling_factor = scaling_factor

    def forward(self, x):
        x = self.conv(x)
        x = torch.min(x, torch.tensor(self.constant_value, dtype=x.dtype, device=x.device))
        x = x + self.bias
        return x * self.scaling_factor


class Arguments(NamedTuple):
    """What the operators take. They return y (N, C, H', W') in bias's dtype."""

    x: Tensor  # (N, Cin, H, W)
    weight: Tensor  # (C, Cin, kh, kw)
    conv_bias: Tensor  # C elements
    bias: Tensor  # C elements or 1
    constant: float
    scale: float


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail
# On a GPU it runs channels last where that is fastest, and the kernels transpose: v is (N, H', W', C) there, (N, C, H', W') on a CPU.
def _outputs(a: Arguments, saving: bool) -> list[operators.Output]:
    """y; for backward v and the convolution's bias as it was, or by Winograd what min withholds of a gradient, in halves."""
    (N, *_), (C, *_), size = a.x.shape, a.weight.shape, library.output_size(a.x, a.weight)
    v = (N, *size, C) if library.device_type(a.x) == "cuda" else (N, C, *size)
    dtype = torch.uint8 if library.winograd_applies(a.x, a.weight) else a.x.dtype
    y_format = library.result_format(a.x, a.weight, True)
    conv_bias = C if saving and dtype == a.x.dtype else 0, operators.accumulate_dtype(a.x.dtype)
    return [((N, C, *size), a.bias.dtype, y_format), (v if saving else 0, dtype), conv_bias]


def _plan(a: Arguments, *, saving: bool) -> operators.Plan:
    """How such an input is convolved, and by what the rest is computed."""
    x, weight, winograd = a.x, a.weight, library.winograd_applies(a.x, a.weight)
    on_gpu = library.device_type(x) == "cuda"
    name, outputs = f"{NAME}_load" if on_gpu else NAME, _outputs(a, saving and winograd)
    plan = operators.Plan(name, a, PARAMETERS, outputs, winograd=winograd, on_gpu=on_gpu)
    plan.constant = operators.rounded(a.constant, x.dtype)  # as eager compares with it
    applies = library.convolves_channels_last if plan.on_gpu else library.is_channels_last
    plan.layout = torch.channels_last if applies(x, weight) else torch.contiguous_format
    # In eager's layout the library rounds operands of TF32; channels last it cuts off, so they are rounded before.
    plan.round_to_tf32 = plan.on_gpu and library.surely_runs_tf32(x, weight)
    plan.sizes = len(weight), math.prod(library.output_size(x, weight))
    plan.samples = library.samples_per_piece(x, weight, saving)
    return plan


def _convolved(x: Tensor, weight: Tensor, plan: operators.Plan) -> Tensor:
    """v, contiguous."""
    if not plan.on_gpu:
        return library.convolve(x, weight, plan.layout).contiguous()
    if plan.layout == torch.channels_last:
        operands = [library.to_channels_last(t, plan.kernels, plan.round_to_tf32) for t in (x, weight)]
        return library.convolve(*operands, plan.layout).permute(0, 2, 3, 1)
    return library.to_channels_last(library.convolve(x, weight), plan.kernels).permute(0, 2, 3, 1)


def _epilogue(a: Arguments, *, plan: operators.Plan, saving: bool) -> tuple[Tensor, ...]:
    parameters, (y, v, conv_bias) = (*plan.parameters(a), plan.constant, a.scale), plan.outputs(a)
    if plan.winograd:
        _forward_by_winograd(y, v, a, parameters, plan)
    else:
        for x, out in library.pieces(plan.samples, a.x, y):
            v = _convolved(x, a.weight, plan)
            plan.kernels.forward(out, v, *parameters, x.shape[0], *plan.sizes)
    y = y.contiguous(memory_format=plan.y_format)
    if saving and not plan.winograd:  # eager's backward does not read it either, whatever has become of it
        conv_bias = parameters[0].clone()
    return (y, v, conv_bias) if saving else (y,)


def _forward_by_winograd(y, withheld, a: Arguments, parameters: tuple, plan: operators.Plan) -> None:
    """Writes y, and withheld where it has elements. The library repeats a sample whose convolution is not finite everywhere: direct
    sums say what is infinite and what NaN. (A normalisation makes NaN of both.)"""
    N, Cin, *of_x = a.x.shape
    finite = a.x.new_ones(N, dtype=torch.int32)
    operands = library.contiguous(a.x), library.contiguous(a.weight)
    plan.kernels.convolve_forward(y, withheld, finite, *operands, *parameters, N, Cin, len(a.weight), *of_x)
    for n in (finite == 0).nonzero().flatten().tolist():
        direct = library.convolve(a.x[n : n + 1], a.weight)
        plan.kernels.forward(y[n : n + 1], direct, *parameters, 1, *plan.sizes)
        if withheld.numel():
            u, bound = direct[0] + parameters[0].view(-1, 1, 1), parameters[2]
            withheld[n] = (u >= bound).to(torch.uint8) + (u > bound)


def _backward(
    dy: Tensor, a: Arguments, v: Tensor, conv_bias: Tensor, *, plan: operators.Plan, needs
) -> tuple:
    if v.dtype == torch.uint8:
        return _backward_by_winograd(dy.contiguous(), a, v, plan, needs)
    N, (C, S), dv, gradients = v.shape[0], plan.sizes, torch.empty_like(v), plan.gradients(a)
    chunks = min(S, 8) if plan.on_gpu else 1
    sums = torch.empty((2, N * chunks, C), dtype=torch.float64, device=v.device)
    inputs = dy.contiguous(), v, conv_bias, plan.constant, a.scale
    plan.kernels.backward(dv, *gradients, sums, *inputs, a.bias.numel(), N, C, S, chunks, plan.round_to_tf32)
    dv, operands = dv.permute(0, 3, 1, 2) if plan.on_gpu else dv, None
    if plan.on_gpu and plan.layout == torch.channels_last:
        operands = [library.to_channels_last(t, plan.kernels, plan.round_to_tf32) for t in (a.x, a.weight)]
    dx, dw = library.convolve_backward(dv, a.x, a.weight, plan.layout, needs, operands)
    return dx, dw, *plan.as_parameters(a, gradients)


def _backward_by_winograd(dy: Tensor, a: Arguments, withheld: Tensor, plan: operators.Plan, needs) -> tuple:
    """The gradient of weight without dv, which only that of x needs: a convolution of dv, zeros around it, with the filters turned round.
    The library repeats those that are not finite everywhere, as in forward, and does what Winograd's way is not for."""
    (N, Cin, *of_x), (_, C, *of_y), gradients = a.x.shape, withheld.shape, plan.gradients(a)
    x, none = library.contiguous(a.x), a.x.new_empty(0)
    sizes = a.bias.numel(), N, Cin, C, *of_x, torch.get_num_threads()

    def run(dw: Tensor, with_dv: bool) -> Tensor:
        dv = x.new_zeros(N, C, *[size + 4 for size in of_y]) if with_dv else none
        plan.kernels.convolve_backward(dw, dv, *gradients, dy, withheld, x, a.scale, *sizes)
        return dv

    dw = torch.empty_like(a.weight, memory_format=torch.contiguous_format) if needs[1] else none
    dv = run(dw, needs[0])
    dx = library.input_gradient_by_winograd(dv, a.weight, plan.kernels) if needs[0] else None
    repeat = [need and (t is None or not t.sum().isfinite()) for need, t in zip(needs, (dx, dw))]
    if any(repeat):
        dv = (dv if needs[0] else run(none, True))[:, :, 2:-2, 2:-2]
        direct = library.convolve_backward(dv, a.x, a.weight, plan.layout, repeat)
        dx, dw = (theirs if again else ours for again, ours, theirs in zip(repeat, (dx, dw), direct))
    return dx, dw, *plan.as_parameters(a, gradients)


epilogue = operators.declare(NAME, _epilogue, outputs=_outputs, backward=_backward, plan=_plan)


# ------------------------------------------------------------------------------ fused: the convolution inside our kernels
def _fused_outputs(a: Arguments, saving: bool) -> list[operators.Output]:
    """y; and for backward the largest magnitude of each sample of x, and which elements a gradient passes."""
    mask = tiling.mask_shape(a.x.shape, a.weight.shape)
    kept = [(a.x.shape[0], torch.int32), (mask, torch.int32)] if saving else []
    return [_outputs(a, False)[0], *kept]


def _plan_fused(a: Arguments, *, saving: bool) -> operators.Plan:
    x, weight = a.x.contiguous(), a.weight
    # A single float16 is as exact as TF32, which is what eager then runs.
    split = x.dtype == torch.float32 and not library.eager_runs_tf32(x, weight)
    aligned = x.data_ptr() % 4 == 0
    defines = tiling.wide_defines(x, weight, split, aligned=aligned, gradients=False)
    launcher, outputs = "forward_saving" if saving else "forward", _fused_outputs(a, saving)
    plan = operators.Plan(NAME, a, PARAMETERS, outputs, defines, launchers=(launcher,))
    plan.launch = getattr(plan.kernels, launcher).bound(operators.rounded(a.constant, x.dtype), a.scale)
    if saving:
        split = x.dtype == torch.float32 and not library.surely_runs_tf32(x, weight)
        defines = tiling.wide_defines(x, weight, split, aligned=True, gradients=True)
        for launchers in (("backward_parameters", "backward_weight"), ("backward_input",)):
            for each in launchers:
                setattr(plan, each, plan.when_needed(NAME, defines, each, a.scale, launchers=launchers))
    return plan


def _fused(a: Arguments, *, plan: operators.Plan, saving: bool) -> tuple[Tensor, ...]:
    y, *kept = plan.outputs(a)
    plan.launch(y, *kept, *plan.operands(a))
    return y.contiguous(memory_format=plan.y_format), *kept


def _fused_backward(
    dy: Tensor, a: Arguments, largest_x: Tensor, mask: Tensor, *, plan: operators.Plan, needs
) -> tuple:
    dy, new, gradients, dx, dw = library.aligned(dy), a.x.new_empty, plan.gradients(a), None, None
    largest_g, mask = new(len(dy), dtype=torch.int32), mask.contiguous()
    plan.backward_parameters()(*gradients, largest_g, dy, mask)
    if needs[1]:
        dw = new(*a.weight.shape)
        plan.backward_weight()(dw, dy, mask, largest_g, library.aligned(a.x), largest_x)
    if needs[0]:
        dx = new(*a.x.shape)
        plan.backward_input()(dx, dy, mask, largest_g, a.weight.contiguous())
        dx = dx.contiguous(memory_format=plan.y_format)
    return dx, dw, *plan.as_parameters(a, gradients)


fused = operators.declare(
    f"{NAME}_fused", _fused, outputs=_fused_outputs, backward=_fused_backward, plan=_plan_fused
)


class Conv2dMinAddMultiplyNew(Twin, Conv2dMinAddMultiply):
    submodules = {"conv": nn.Conv2d}
    operands = ("conv.weight", "conv.bias", "bias")
    constants = {"constant_value": float, "scaling_factor": float}
    epilogue, fused = epilogue, fused

    def _fused_obstacle(self, x, dtype):
        return tiling.wide_obstacle(x, self.conv.weight, dtype)

    def _fused_defines(self, x):
        weight, known = self.conv.weight, {"aligned": True, "gradients": True}  # which suits forward, too
        split = x.dtype == torch.float32 and ("!TF32" if library.suits_tf32(weight) else 1)
        return tiling.wide_defines(x, weight, bool(split), **known) | {"SPLIT": split or 0}


PROBLEM = Problem(
    NAME,
    number=31,
    Model=Conv2dMinAddMultiply,
    ModelNew=Conv2dMinAddMultiplyNew,
    init_inputs=(64, 128, 3, 0.5, (128, 1, 1), 2.0),
    input_shape=(128, 64, 128, 128),
    cpu_batch_size=2,
)
