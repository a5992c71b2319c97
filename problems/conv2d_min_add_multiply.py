"""y = (min(conv2d(x), constant_value) + bias) * scaling_factor."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

import inline_loader
import library
import operators
import tiling
from problems import Problem
from twin import Twin

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

    def constants(self) -> tuple[float, float]:
        """constant as eager compares with it, and scale."""
        return operators.rounded(self.constant, self.x.dtype), self.scale


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail
# On a GPU it runs channels last where that is fastest, and the kernels transpose: v is (N, H', W', C) there, (N, C, H', W') on a CPU.


def _outputs(a: Arguments, saving: bool) -> list[operators.Output]:
    """y; for backward v, or by Winograd what min withholds of a gradient, in halves."""
    (N, *_), (C, *_), size = a.x.shape, a.weight.shape, library.output_size(a.x, a.weight)
    v = (N, *size, C) if library.device_type(a.x) == "cuda" else (N, C, *size)
    dtype = torch.uint8 if library.winograd_applies(a.x, a.weight) else a.x.dtype
    y_format = library.result_format(a.x, a.weight, True)
    return [((N, C, *size), a.bias.dtype, y_format), (v if saving else 0, dtype)]


def _plan(a: Arguments, *, saving: bool) -> operators.Plan:
    """How such an input is convolved, and by what the rest is computed."""
    x, weight, on_gpu = a.x, a.weight, library.device_type(a.x) == "cuda"
    applies = library.convolves_channels_last if on_gpu else library.is_channels_last
    winograd = library.winograd_applies(x, weight)
    return operators.Plan(
        NAME,
        a,
        PARAMETERS,
        _outputs(a, saving and winograd),
        on_gpu=on_gpu,
        winograd=winograd,
        layout=torch.channels_last if applies(x, weight) else torch.contiguous_format,  # of the convolution
        # In eager's layout the library rounds operands of TF32; channels last it cuts off, so they are rounded before.
        round_to_tf32=on_gpu and library.surely_runs_tf32(x, weight),
        sizes=(len(weight), math.prod(library.output_size(x, weight))),
        samples=library.samples_per_piece(x, weight, saving),
    )


def _to_channels_last(t: Tensor, kernels: inline_loader.Operators, round_to_tf32: bool = False) -> Tensor:
    """t (N, C, H, W) with channels-last strides, by our own transposition: the library's takes twice as long."""
    if t.is_contiguous(memory_format=torch.channels_last):
        return t
    N, C, H, W = t.shape
    out = t.new_empty(N, H, W, C)
    kernels.transpose(out, t.contiguous(), N, C, H * W, round_to_tf32)
    return out.permute(0, 3, 1, 2)


def _convolved(x: Tensor, weight: Tensor, plan: operators.Plan) -> Tensor:
    """v, contiguous."""
    if not plan.on_gpu:
        return library.convolve(x, weight, plan.layout).contiguous()
    if plan.layout == torch.channels_last:
        operands = [_to_channels_last(t, plan.kernels, plan.round_to_tf32) for t in (x, weight)]
        return library.convolve(*operands, plan.layout).permute(0, 2, 3, 1)
    return _to_channels_last(library.convolve(x, weight), plan.kernels).permute(0, 2, 3, 1)


def _epilogue(a: Arguments, *, plan: operators.Plan, saving: bool) -> tuple[Tensor, ...]:
    parameters, (y, v) = (*plan.parameters(a), *a.constants()), plan.outputs(a)
    if plan.winograd:
        _forward_by_winograd(y, v, a, parameters, plan)
    else:
        for x, out in library.pieces(plan.samples, a.x, y):
            v = _convolved(x, a.weight, plan)
            plan.kernels.forward(out, v, *parameters, x.shape[0], *plan.sizes)
    y = y.contiguous(memory_format=plan.y_format)
    return (y, v) if saving else (y,)


def _forward_by_winograd(
    y: Tensor, withheld: Tensor, a: Arguments, parameters: tuple, plan: operators.Plan
) -> None:
    """Writes y, and withheld where it has elements. The library repeats a sample whose convolution is not finite everywhere: direct
    sums say what is infinite and what NaN. (A normalisation makes NaN of both.)"""
    N, Cin, *of_x = a.x.shape
    finite, operands = a.x.new_ones(N, dtype=torch.int32), (a.x.contiguous(), a.weight.contiguous())
    plan.kernels.convolve_forward(y, withheld, finite, *operands, *parameters, N, Cin, len(a.weight), *of_x)
    for n in (finite == 0).nonzero().flatten().tolist():
        direct = library.convolve(a.x[n : n + 1], a.weight)
        plan.kernels.forward(y[n : n + 1], direct, *parameters, 1, *plan.sizes)
        if withheld.numel():
            u, bound = direct[0] + parameters[0].view(-1, 1, 1), parameters[2]
            withheld[n] = (u >= bound).to(torch.uint8) + (u > bound)


def _backward(dy: Tensor, a: Arguments, v: Tensor, *, plan: operators.Plan, needs) -> tuple:
    if v.dtype == torch.uint8:
        return _backward_by_winograd(dy.contiguous(), a, v, plan, needs)
    N, (C, S), dv, gradients = v.shape[0], plan.sizes, torch.empty_like(v), plan.gradients(a)
    chunks = min(S, 8) if plan.on_gpu else 1
    sums = torch.empty((2, N * chunks, C), dtype=torch.float64, device=v.device)
    inputs = dy.contiguous(), v, plan.parameters(a)[0], *a.constants()
    plan.kernels.backward(dv, *gradients, sums, *inputs, a.bias.numel(), N, C, S, chunks, plan.round_to_tf32)
    dv, operands = dv.permute(0, 3, 1, 2) if plan.on_gpu else dv, None
    if plan.on_gpu and plan.layout == torch.channels_last:
        operands = [_to_channels_last(t, plan.kernels, plan.round_to_tf32) for t in (a.x, a.weight)]
    dx, dw = library.convolve_backward(dv, a.x, a.weight, plan.layout, needs, operands)
    return dx, dw, *plan.as_parameters(a, gradients)


def _backward_by_winograd(dy: Tensor, a: Arguments, withheld: Tensor, plan: operators.Plan, needs) -> tuple:
    """The gradient of weight without dv, which only that of x needs: a convolution of dv, zeros around it, with the filters turned round.
    The library repeats those that are not finite everywhere, as in forward, and does what Winograd's way is not for."""
    (N, Cin, *of_x), (_, C, *of_y), gradients = a.x.shape, withheld.shape, plan.gradients(a)
    x, none = a.x.contiguous(), a.x.new_empty(0)
    sizes = a.bias.numel(), N, Cin, C, *of_x, torch.get_num_threads()

    def run(dw: Tensor, with_dv: bool) -> Tensor:
        dv = x.new_zeros(N, C, *[size + 4 for size in of_y]) if with_dv else none
        plan.kernels.convolve_backward(dw, dv, *gradients, dy, withheld, x, a.scale, *sizes)
        return dv

    dx, dw = None, torch.empty_like(a.weight, memory_format=torch.contiguous_format) if needs[1] else none
    dv = run(dw, needs[0])
    if needs[0]:
        turned = a.weight.flip(2, 3).transpose(0, 1).contiguous()
        if library.winograd_suits(dv, turned):
            dx = library.convolve_by_winograd(dv.unsqueeze(2), turned.unsqueeze(2), plan.kernels).squeeze(2)
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
    saved = tiling.gemm_saved(a.x.shape, a.weight.shape) if saving else 0
    return [_outputs(a, False)[0], (saved, torch.int32)]


def _plan_fused(a: Arguments, *, saving: bool) -> operators.Plan:
    x, weight = a.x.contiguous(), a.weight
    # A single float16 is as exact as TF32, which is what eager then runs.
    split = x.dtype == torch.float32 and not library.eager_runs_tf32(x, weight)
    tiles = tiling.plan_gemm(x, weight, a.bias.dtype, split=split, aligned=x.data_ptr() % 4 == 0)
    workspace = tiling.gemm_workspace(tiles, x.shape, weight.shape, saving)
    defines = {**tiling.gemm_defines(tiles, weight.shape), "SAVES": int(saving)}
    outputs, (N, _, H, W) = [*_fused_outputs(a, saving), (workspace, torch.uint8)], x.shape
    own = _plan_gradients(a) if saving else {}
    return operators.Plan(f"{NAME}_fused", a, PARAMETERS, outputs, defines, sizes=(N, H, W), **own)


def _plan_gradients(a: Arguments) -> dict:
    """What the backward kernels are given. They are built when they first run."""
    x, weight = a.x, a.weight
    split = x.dtype == torch.float32 and not library.surely_runs_tf32(x, weight)
    of_sums, of_weight, slot = tiling.plan_weight_gradient(x, weight, split)
    of_input, piece, workspace = tiling.plan_input_gradient(x, weight, split)
    load = functools.partial(operators.load, x=x.new_empty(0), out_dtype=a.bias.dtype)
    defines = {**tiling.spatial_defines(weight.shape), "SPLIT": int(split)}
    return dict(
        by_weight=functools.cache(functools.partial(load, f"{NAME}_weight_gradient_fused", **defines)),
        by_input=functools.cache(functools.partial(load, f"{NAME}_input_gradient_fused", **of_input)),
        of_sums=of_sums,
        of_weight=of_weight,
        slot=slot,
        piece=piece,
        workspace=workspace,
    )


def _fused(a: Arguments, *, plan: operators.Plan, saving: bool) -> tuple[Tensor, ...]:
    y, saved, workspace = plan.outputs(a)
    inputs = a.x.contiguous(), a.weight.contiguous(), *plan.parameters(a), *a.constants()
    plan.kernels.forward(y, saved, workspace, *inputs, workspace.numel(), *plan.sizes)
    y = y.contiguous(memory_format=plan.y_format)
    return (y, saved) if saving else (y,)


def _fused_backward(dy: Tensor, a: Arguments, saved: Tensor, *, plan: operators.Plan, needs) -> tuple:
    dy, scale, kernels, new = dy.contiguous(), a.constants()[1], plan.by_weight(), a.x.new_empty
    gradients, largest = plan.gradients(a), new(len(a.x), dtype=torch.int32)
    sums, of_sums = new((2, plan.of_sums, len(a.weight)), dtype=torch.float64), (a.bias.numel(), plan.of_sums)
    kernels.gradient_sums(*gradients, largest, sums, dy, saved, scale, *of_sums, *plan.sizes)
    dx = dw = None
    if needs[1]:
        dw, slots = new(a.weight.shape), new((plan.of_weight, plan.slot), dtype=torch.float32)
        inputs = dy, a.x.contiguous(), saved, largest, scale
        kernels.weight_gradient(dw, slots, *inputs, plan.slot, plan.of_weight, *plan.sizes)
    if needs[0]:
        dx, workspace = new(a.x.shape), new(plan.workspace, dtype=torch.uint8)
        inputs = dy, a.weight.contiguous(), saved, largest, scale
        plan.by_input().input_gradient(dx, workspace, *inputs, plan.piece, plan.workspace, *plan.sizes)
        dx = dx.contiguous(memory_format=plan.y_format)
    return dx, dw, *plan.as_parameters(a, gradients)


fused = operators.declare(
    f"{NAME}_fused", _fused, outputs=_fused_outputs, backward=_fused_backward, plan=_plan_fused
)


# ------------------------------------------------------------------------------------------------------------- the model


class Conv2dMinAddMultiplyNew(Twin, Conv2dMinAddMultiply):
    __doc__ = Conv2dMinAddMultiply.__doc__
    submodules = {"conv": nn.Conv2d}
    operands = ("conv.weight", "conv.bias", "bias")
    constants = {"constant_value": float, "scaling_factor": float}
    epilogue, fused = epilogue, fused

    def _tail_obstacle(self):
        return self._not_by_channel("bias")

    def _fused_obstacle(self, x, dtype):
        return tiling.gemm_obstacle(x, self.conv.weight, dtype)


PROBLEM = Problem(
    NAME,
    number=31,
    Model=Conv2dMinAddMultiply,
    ModelNew=Conv2dMinAddMultiplyNew,
    init_inputs=(64, 128, 3, 0.5, (128, 1, 1), 2.0),
    input_shape=(128, 64, 128, 128),
    cpu_batch_size=2,
)
