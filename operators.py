"""The four problems as PyTorch operators: schema, shape function, gradient, and what each variant does.

An operator is a whole problem, the convolution included: `conv2d_min_add_multiply(x, weight, …) -> y`. It works with
autograd, autocast, torch.compile and torch.export. The functions here check nothing that eager PyTorch would check first
(`models.py` sends what does not fit to eager, whose errors are the right ones); the loader's host side checks every pointer.

Per problem there are, in this order: a forward operator, which returns the result and what backward needs; a backward
operator; the function that users call. Variants:
- epilogue: the library's convolution without its bias, then our fused tail. On the CPU our own convolution where that is faster
  (kernels/winograd.h); and without gradients a few samples at a time, so that the convolution's output stays in cache.
- folded: 83 without its convolution, where the input at hand is proved to make no difference; else, and in backward, as epilogue.
- fused: on a GPU the convolution inside our kernels (fused.py). Its output is not written as a whole; 83's lies in the result's
  place for a while, a part of 79's in scratch. Backward runs the epilogue's forward once more for what it needs. On the CPU the same as epilogue.

Parameters by channel (biases, affine, multiplier, scale) are vectors of C elements, in the dtype of the result; the problems' own
(bias, multiplier, scale) may be of one element for all channels.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

import fused
import inline_loader

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# The convolution's output per piece of work on the CPU: a quarter of a usual last-level cache.
CPU_PIECE_BYTES = 8 << 20


# ------------------------------------------------------------------------------------------------------ common ground


def _device_type(x: Tensor) -> str:
    """Whose kernels take x: "cpu" or "cuda"."""
    return x.device.type


def _kernels(name: str, x: Tensor, out_dtype: torch.dtype, **defines) -> inline_loader.Operators:
    """The kernels of kernels/<name>.* for x's device and dtype, results in `out_dtype`."""
    return inline_loader.load(
        name, device=_device_type(x), defines={**fused.element_types(x.dtype, out_dtype), **defines}
    )


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _output_size(x: Tensor, weight: Tensor) -> list[int]:
    """The convolution's spatial output size."""
    return [size - kernel + 1 for size, kernel in zip(x.shape[2:], weight.shape[2:])]


def _channels_last(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def _is_channels_last(*tensors: Tensor) -> bool:
    """Would the library's convolution of these give a channels-last result?"""
    return any(t.is_contiguous(memory_format=_channels_last(t)) and not t.is_contiguous() for t in tensors)


def _result_format(x: Tensor, weight: Tensor, follows_on_cuda: bool) -> torch.memory_format:
    """Eager's layout of a result with the convolution's number of dimensions: contiguous where its library has no other way."""
    if _device_type(x) == "cuda":
        follows = follows_on_cuda and x.dtype != torch.float64
    else:
        follows = x.dim() == 4 or x.dtype in (torch.float32, torch.bfloat16)
    return _channels_last(x) if follows and _is_channels_last(x, weight) else torch.contiguous_format


def _is_captured(x: Tensor) -> bool:
    """Does a CUDA graph record what is done to x?"""
    return (
        _device_type(x) == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


def _convolve(x: Tensor, weight: Tensor, channels_last: bool) -> Tensor:
    """The library's convolution without bias, stride 1, no padding: contiguous (N, C, …), or (N, …, C) if channels_last."""
    layout = _channels_last(x) if channels_last else torch.contiguous_format
    convolve = torch.conv2d if x.dim() == 4 else torch.conv3d
    v = convolve(x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout))
    return (v.movedim(1, -1) if channels_last else v).contiguous()


def _winograd_applies(x: Tensor, weight: Tensor) -> bool:
    """Is kernels/winograd.h faster than the library's convolution, and as exact? On a CPU, with 3×3 filters, and channels enough to
    make transforming cheap. Its error grows with the terms of a sum: up to 64 of them 1.2 times the library's on average, 1.7
    at most (benchmarks/NOTES.md).
    """
    if (
        _device_type(x) != "cpu"
        or x.dtype != torch.float32
        or weight.shape[-2:] != (3, 3)
        or _is_channels_last(x, weight)
    ):
        return False
    terms = math.prod(weight.shape[1:-2])
    return 8 <= terms <= 64 and weight.shape[0] % 8 == 0 and min(_output_size(x, weight)[-2:]) >= 16


def _convolve_contiguous(x: Tensor, weight: Tensor, kernels: inline_loader.Operators) -> Tensor:
    """The convolution without bias, contiguous (N, C, D', H', W'): our own where it is faster."""
    if not _winograd_applies(x, weight):
        return _convolve(x, weight, channels_last=False)
    v = x.new_empty(len(x), len(weight), *_output_size(x, weight))
    kernels.convolve(
        v, x.contiguous(), weight.contiguous(), *x.shape[:2], len(weight), *x.shape[2:], weight.shape[2]
    )
    return v


def _convolve_backward(
    dv: Tensor,
    x: Tensor,
    weight: Tensor,
    channels_last: bool,
    need_x: bool,
    need_weight: bool,
    laid_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of x, in eager's layout, and of weight, contiguous; without elements where not needed. dv as _convolve's result;
    laid_out is x in the convolution's layout, where the caller has it.
    """
    dx, dw, dx_layout = x.new_empty(0), weight.new_empty(0), _result_format(x, weight, True)
    if need_x or need_weight:
        layout = _channels_last(x) if channels_last else torch.contiguous_format
        ones, zeros = [1] * (x.dim() - 2), [0] * (x.dim() - 2)
        x, weight = (
            (x if laid_out is None else laid_out).contiguous(memory_format=layout),
            weight.contiguous(memory_format=layout),
        )
        dv = dv.movedim(-1, 1) if channels_last else dv
        mask = [need_x, need_weight, False]
        grads = torch.ops.aten.convolution_backward(
            dv, x, weight, None, ones, zeros, ones, False, zeros, 1, mask
        )
        dx, dw = (
            grads[0].contiguous(memory_format=dx_layout) if need_x else dx,
            grads[1].contiguous() if need_weight else dw,
        )
    return dx, dw


def _fake_gradients(x: Tensor, weight: Tensor, need_x: bool, need_weight: bool) -> tuple[Tensor, Tensor]:
    dx = (
        x.new_empty(x.shape).contiguous(memory_format=_result_format(x, weight, True))
        if need_x
        else x.new_empty(0)
    )
    return dx, weight.new_empty(weight.shape if need_weight else 0)


def _samples_per_piece(x: Tensor, weight: Tensor, keep: bool) -> int:
    """How many samples are convolved at a time: all on a GPU or if backward will follow, else as CPU_PIECE_BYTES says.

    A piece has two samples or more, because the library is slow on single ones.
    """
    if keep or _device_type(x) == "cuda":
        return x.shape[0]
    sample = weight.shape[0] * math.prod(_output_size(x, weight)) * x.element_size()
    return max(2, CPU_PIECE_BYTES // sample)


def _pieces(count: int, *tensors: Tensor):
    """The tensors' first `count` rows, then the next, …"""
    if count >= tensors[0].shape[0]:
        return [tensors]
    return zip(*(tensor.split(count) if tensor.numel() else itertools.repeat(tensor) for tensor in tensors))


def _begun(values):
    """The iterator `values` with its first item made already: a GPU then convolves while the host allocates."""
    return itertools.chain([next(values)], values)


def _index(count: int) -> tuple[str, torch.dtype]:
    """The smallest index type for numbers below `count`: its C type and its dtype."""
    return ("uint8_t", torch.uint8) if count <= 256 else ("int32_t", torch.int32)


def _accumulated(dtype: torch.dtype, conv_bias: Tensor, *parameters: Tensor) -> list[Tensor]:
    """Parameters by channel as the kernels read them: C elements each."""
    accumulate = _accumulate_dtype(dtype)
    return [
        parameter.to(accumulate).expand(conv_bias.shape).contiguous()
        for parameter in (conv_bias, *parameters)
    ]


@functools.lru_cache(None)
def _rounded(value: float, dtype: torch.dtype) -> float:
    """A bound as eager compares with it: a tensor of the dtype at hand."""
    return torch.tensor(value, dtype=dtype).item()


def _summed(gradients: Tensor, *like: Tensor) -> list[Tensor]:
    """Gradients by sample (k, N, C) to k gradients, each in shape (C or 1) and dtype of `like`, rounded once, sharing no memory."""
    totals = [
        total.sum(0, keepdim=True) if len(other) == 1 else total
        for total, other in zip(gradients.sum(1), like)
    ]
    return [total.to(other.dtype, copy=True) for total, other in zip(totals, like)]


def _check_by_channel(weight: Tensor, may_be_one: tuple[str, ...] = (), **parameters: Tensor) -> None:
    """Raises RuntimeError unless each parameter holds an element for each channel, or one in all where it may."""
    for name, parameter in parameters.items():
        if parameter.shape != weight.shape[:1] and (name not in may_be_one or parameter.shape != (1,)):
            shapes = f"[{weight.shape[0]}], one per channel" + (", or [1]" if name in may_be_one else "")
            raise RuntimeError(f"expected {name} of shape {shapes}, got {list(parameter.shape)}")


def _check_device(x: Tensor, **parameters: Tensor) -> None:
    """Raises RuntimeError unless all parameters are where x is: kernels see to that themselves, torch's sums take single numbers from anywhere."""
    for name, parameter in parameters.items():
        if parameter.device != x.device:
            raise RuntimeError(f"expected {name} on {x.device}, where x is, got it on {parameter.device}")


def _autocast(x: Tensor, weight: Tensor, variant: str) -> tuple[Tensor, Tensor, torch.dtype | None]:
    """x and weight as the convolution sees them under autocast, and autocast's dtype or None where it does not apply.

    The fused kernels take x and weight as they are: that is more exact, and no pass converts x.
    """
    device = _device_type(x)
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, weight, None
    dtype = torch.get_autocast_dtype(device)
    if variant == "fused" and device == "cuda" and x.dtype == weight.dtype:
        return x, weight, dtype
    return x.to(dtype), weight.to(dtype), dtype


def keeps(*tensors: Tensor) -> bool:
    """Will a backward pass follow, so that forward should keep what it needs?"""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _kept(keep: bool, *outputs: Tensor) -> list[Tensor]:
    """What an operator returns beside its result: without elements unless backward will need it."""
    return list(outputs) if keep else [output.new_empty(0) for output in outputs]


def _nothing(x: Tensor, *dtypes: torch.dtype) -> list[Tensor]:
    return [x.new_empty(0, dtype=dtype) for dtype in dtypes]


def _register_gradient(
    operator, backward_operator, tensors: int, constants: int, backward_constants: int
) -> None:
    """Autograd of `operator(tensors…, constants…, variant, keep) -> (result, kept…)`.

    It comes from `backward_operator(dy, tensors…, kept…, the first constants…, need_x, need_weight)`, which returns gradients of
    the first tensors. Where forward kept nothing, the epilogue variant runs once more, and keeps.
    """

    def setup(ctx, inputs, output):
        ctx.constants, ctx.kept = inputs[tensors:-2], inputs[-1]
        ctx.save_for_backward(*inputs[:tensors], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def backward(ctx, dy, *_):
        nones = [None] * (tensors + constants + 2)
        if dy is None:  # whoever used the result has no gradient for it
            return tuple(nones)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[:2]
        if not ctx.kept:
            with torch.autocast(
                dy.device.type, enabled=False
            ):  # forward chose the dtypes; an autocast region around backward may not
                saved = *saved[:tensors], *operator(*saved[:tensors], *ctx.constants, "epilogue", True)[1:]
        dx, dw, *parameters = backward_operator(dy, *saved, *ctx.constants[:backward_constants], *needs)
        gradients = [dx if needs[0] else None, dw if needs[1] else None, *parameters]
        return *gradients, *nones[len(gradients) :]

    operator.register_autograd(backward, setup_context=setup)


# ------------------------------------------------------------------------------------- 31: conv2d_min_add_multiply


@torch.library.custom_op("inline_kernels::conv2d_min_add_multiply", mutates_args=())
def _conv2d_min_add_multiply(
    x: Tensor,
    weight: Tensor,
    conv_bias: Tensor,
    bias: Tensor,
    constant: float,
    scale: float,
    variant: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """y (N, C, H', W'), and if `keep` v: (N, H', W', C) on a GPU and (N, C, H', W') on the CPU, each where it serves best."""
    if variant == "fused" and _device_type(x) == "cuda":
        parameters, constant = _accumulated(x.dtype, conv_bias, bias), _rounded(constant, x.dtype)
        y = fused.conv2d_min_add_multiply(x, weight, *parameters, bias.dtype, constant, scale)
        return y.contiguous(memory_format=_result_format(x, weight, True)), *_nothing(x, x.dtype)
    if _winograd_applies(x, weight):
        y, v = _conv2d_min_add_multiply_winograd(x, weight, conv_bias, bias, constant, scale, keep)
        return y, *_kept(keep, v)
    kernels, count = _kernels("conv2d_min_add_multiply", x, bias.dtype), _samples_per_piece(x, weight, keep)
    convolve = _convolve_to_channels_last if _device_type(x) == "cuda" else _convolve_as_eager
    convolved = _begun(convolve(part, weight, kernels) for (part,) in _pieces(count, x))
    C, size = weight.shape[0], _output_size(x, weight)
    parameters, constant = _accumulated(x.dtype, conv_bias, bias), _rounded(constant, x.dtype)
    y = x.new_empty(x.shape[0], C, *size, dtype=bias.dtype)
    for v, (out,) in zip(convolved, _pieces(count, y)):
        kernels.forward(out, v, *parameters, constant, scale, len(v), C, math.prod(size))
    return y.contiguous(memory_format=_result_format(x, weight, True)), *_kept(keep, v)


def _conv2d_min_add_multiply_winograd(
    x: Tensor, weight: Tensor, conv_bias: Tensor, bias: Tensor, constant: float, scale: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """y and v (N, C, H', W'), tile by tile; v without elements unless `keep`. The library repeats a sample whose convolution is not
    finite everywhere: direct sums say what is infinite and what NaN. (A normalisation makes NaN of both.)
    """
    kernels, (N, Cin, H, W), C, size = (
        _kernels("conv2d_min_add_multiply", x, bias.dtype),
        x.shape,
        len(weight),
        _output_size(x, weight),
    )
    x, weight, *parameters = x.contiguous(), weight.contiguous(), *_accumulated(x.dtype, conv_bias, bias)
    y = x.new_empty(N, C, *size, dtype=bias.dtype)
    v, finite = x.new_empty(y.shape if keep else 0), x.new_ones(N, dtype=torch.int32)
    kernels.convolve_forward(y, v, finite, x, weight, *parameters, constant, scale, N, Cin, C, H, W)
    for n, is_finite in enumerate(finite.tolist()):
        if is_finite:
            continue
        direct = _convolve(x[n : n + 1], weight, channels_last=False)
        kernels.forward(y[n : n + 1], direct, *parameters, constant, scale, 1, C, math.prod(size))
        if keep:
            v[n] = direct[0]
    return y, v


def _to_channels_last(x: Tensor, kernels: inline_loader.Operators, tf32: bool = False) -> Tensor:
    """x (N, C, H, W) with channels-last strides, by our own transposition: the library's takes twice as long. tf32: rounded to TF32
    where it is copied."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return x
    N, C, H, W = x.shape
    out = x.new_empty(N, H, W, C)
    kernels.transpose(out, x.contiguous(), N, C, H * W, tf32)
    return out.permute(0, 3, 1, 2)


def _surely_runs_tf32(x: Tensor, weight: Tensor) -> bool:
    """Does a GPU's library run TF32 in forward and backward, in every layout? For filters of two or three columns and up to three rows it
    did from 14 thousand positions on, up to the 254 thousand that were tried (cuDNN on an H200: benchmarks/results/trials/tf32.json).
    Eager's layout stays in float32 here and there with fewer positions, fewer channels and other filters.
    """
    (C, channels, height, width), positions = weight.shape, len(x) * math.prod(_output_size(x, weight))
    return (
        fused.may_run_tf32(x)
        and channels >= 64
        and C >= 128
        and height <= 3
        and 1 < width <= 3
        and positions >= 2**16
    )


def _convolves_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Is a GPU's convolution to run channels last? As eager, and where that takes no precision away."""
    if _is_channels_last(x, weight) or _surely_runs_tf32(x, weight):
        return True
    return not fused.may_run_tf32(x) and min(weight.shape[:2]) >= 32


def _convolve_to_channels_last(x: Tensor, weight: Tensor, kernels: inline_loader.Operators) -> Tensor:
    """The convolution without bias, contiguous (N, H', W', C)."""
    if _convolves_channels_last(x, weight):
        return _convolve(_to_channels_last(x, kernels), weight, channels_last=True)
    return _to_channels_last(_convolve(x, weight, channels_last=False), kernels).permute(0, 2, 3, 1)


def _convolve_as_eager(x: Tensor, weight: Tensor, kernels: inline_loader.Operators) -> Tensor:
    """The convolution without bias in the layout that eager computes in, contiguous (N, C, H', W')."""
    v = _convolve(x, weight, channels_last=_is_channels_last(x, weight))
    return v.permute(0, 3, 1, 2).contiguous() if _is_channels_last(x, weight) else v


@_conv2d_min_add_multiply.register_fake
def _(x, weight, conv_bias, bias, constant, scale, variant, keep):
    N, C, size = x.shape[0], weight.shape[0], _output_size(x, weight)
    y = x.new_empty(N, C, *size, dtype=bias.dtype).contiguous(memory_format=_result_format(x, weight, True))
    return y, *_kept(keep, x.new_empty((N, C, *size) if _device_type(x) == "cpu" else (N, *size, C)))


@torch.library.custom_op("inline_kernels::conv2d_min_add_multiply_backward", mutates_args=())
def _conv2d_min_add_multiply_backward(
    dy: Tensor, x: Tensor, weight: Tensor, conv_bias: Tensor, bias: Tensor, v: Tensor, constant: float, scale: float,
    need_x: bool, need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, conv_bias and bias."""
    kernels = _kernels("conv2d_min_add_multiply", x, dy.dtype)
    N, C, S = x.shape[0], weight.shape[0], math.prod(_output_size(x, weight))
    (inner,) = _accumulated(x.dtype, conv_bias)
    on_gpu = _device_type(x) == "cuda"
    dv, chunks, constant = torch.empty_like(v), min(S, 8) if on_gpu else 1, _rounded(constant, x.dtype)
    sums = inner.new_empty(2, N * chunks, C, dtype=torch.float64)
    channels_last = _convolves_channels_last(x, weight) if on_gpu else _is_channels_last(x, weight)
    # Channels last the library cuts off what TF32 doesn't hold, for the gradient of weight; in eager's layout it may round.
    tf32 = on_gpu and _surely_runs_tf32(x, weight)
    kernels.backward(dv, sums, dy.contiguous(), v, inner, constant, scale, N, C, S, chunks, tf32)
    laid_out = _to_channels_last(x, kernels, tf32) if on_gpu and channels_last else x
    if on_gpu != channels_last:  # dv lies otherwise than the convolution wants it
        dv = (dv.movedim(-1, 1) if on_gpu else dv.movedim(1, -1)).contiguous()
    dx, dw = _convolve_backward(dv, x, weight, channels_last, need_x, need_weight, laid_out)
    return dx, dw, *_summed(sums, conv_bias, bias)


@_conv2d_min_add_multiply_backward.register_fake
def _(dy, x, weight, conv_bias, bias, v, constant, scale, need_x, need_weight):
    return (
        *_fake_gradients(x, weight, need_x, need_weight),
        torch.empty_like(conv_bias),
        torch.empty_like(bias),
    )


_register_gradient(
    _conv2d_min_add_multiply, _conv2d_min_add_multiply_backward, tensors=4, constants=2, backward_constants=2
)


def conv2d_min_add_multiply(x, weight, conv_bias, bias, constant, scale, variant="epilogue") -> Tensor:
    """(min(conv2d(x, weight, conv_bias), constant) + bias) * scale.

    x (N, Cin, H, W), weight (C, Cin, kh, kw), conv_bias (C), bias (C or 1); constant and scale are numbers.
    Returns (N, C, H - kh + 1, W - kw + 1) in the dtype that `conv + bias` has.
    """
    _check_by_channel(weight, ("bias",), conv_bias=conv_bias, bias=bias)
    x, weight, autocast = _autocast(x, weight, variant)
    if autocast is not None:
        bias = bias.to(torch.promote_types(autocast, bias.dtype))
    keep = variant != "fused" and keeps(x, weight, conv_bias, bias)
    return _conv2d_min_add_multiply(x, weight, conv_bias, bias, float(constant), float(scale), variant, keep)[
        0
    ]


# ------------------------------------------------------- 79: conv3d_multiply_instancenorm_clamp_multiply_max


@torch.library.custom_op("inline_kernels::conv3d_multiply_instancenorm_clamp_multiply_max", mutates_args=())
def _conv3d_multiply_instancenorm_clamp_multiply_max(
    x: Tensor, weight: Tensor, conv_bias: Tensor, multiplier: Tensor, low: float, high: float, eps: float, variant: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y (N, D', H', W'); if `keep` v (N, C, D', H', W'), the winners' index and v (N, D', H', W'); mean, m2 (N, C)."""
    if variant == "fused" and _device_type(x) == "cuda":
        parameters = _accumulated(x.dtype, conv_bias, multiplier)
        y = fused.conv3d_multiply_instancenorm_clamp_multiply_max(
            x, weight, *parameters, multiplier.dtype, low, high, eps
        )
        accumulate = parameters[0].dtype
        return y, *_nothing(x, x.dtype, _index(weight.shape[0])[1], x.dtype, accumulate, accumulate)
    N, C, size = x.shape[0], weight.shape[0], _output_size(x, weight)
    ctype, dtype = _index(C)
    kernels, count = (
        _kernels("conv3d_multiply_instancenorm_clamp_multiply_max", x, multiplier.dtype, INDEX_T=ctype),
        _samples_per_piece(x, weight, keep),
    )
    convolved = _begun(_convolve_contiguous(part, weight, kernels) for (part,) in _pieces(count, x))
    parameters = _accumulated(x.dtype, conv_bias, multiplier)
    y = x.new_empty(N, *size, dtype=multiplier.dtype)
    index = x.new_empty(y.shape if keep else 0, dtype=dtype)
    winner = x.new_empty(index.shape)
    mean, m2 = parameters[0].new_empty(N, C), parameters[0].new_empty(N, C)
    for v, outputs in zip(convolved, _pieces(count, y, index, winner, mean, m2)):
        kernels.forward(*outputs, v, *parameters, low, high, eps, len(v), C, math.prod(size))
    return y, *_kept(keep, v, index, winner, mean, m2)


@_conv3d_multiply_instancenorm_clamp_multiply_max.register_fake
def _(x, weight, conv_bias, multiplier, low, high, eps, variant, keep):
    N, C, size = x.shape[0], weight.shape[0], _output_size(x, weight)
    y = x.new_empty(N, *size, dtype=multiplier.dtype)
    index, winner = (
        x.new_empty(y.shape if keep else 0, dtype=_index(C)[1]),
        x.new_empty(y.shape if keep else 0),
    )
    mean = x.new_empty(N, C, dtype=_accumulate_dtype(x.dtype))
    return y, *_kept(keep, x.new_empty(N, C, *size), index, winner, mean, torch.empty_like(mean))


@torch.library.custom_op(
    "inline_kernels::conv3d_multiply_instancenorm_clamp_multiply_max_backward", mutates_args=()
)
def _conv3d_multiply_instancenorm_clamp_multiply_max_backward(
    dy: Tensor, x: Tensor, weight: Tensor, conv_bias: Tensor, multiplier: Tensor, v: Tensor, index: Tensor,
    winner: Tensor, mean: Tensor, m2: Tensor, low: float, high: float, eps: float, need_x: bool, need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, conv_bias and multiplier."""
    N, C = mean.shape
    name = "conv3d_multiply_instancenorm_clamp_multiply_max"
    kernels = _kernels(name, x, dy.dtype, INDEX_T=_index(C)[0])
    dv, gradients, sums = torch.empty_like(v), torch.empty_like(mean), mean.new_empty(3, N, C)
    inputs = dy.contiguous(), v, index, winner, mean, m2, *_accumulated(x.dtype, conv_bias, multiplier)
    kernels.backward(dv, gradients, sums, *inputs, low, high, eps, N, C, math.prod(v.shape[2:]))
    dx, dw = _convolve_backward(dv, x, weight, False, need_x, need_weight)
    # The normalisation removes the convolution's bias, so its gradient is zero; times zero keeps NaN.
    return dx, dw, *_summed(torch.stack([gradients * 0, gradients]), conv_bias, multiplier)


@_conv3d_multiply_instancenorm_clamp_multiply_max_backward.register_fake
def _(dy, x, weight, conv_bias, multiplier, v, index, winner, mean, m2, low, high, eps, need_x, need_weight):
    return (
        *_fake_gradients(x, weight, need_x, need_weight),
        torch.empty_like(conv_bias),
        torch.empty_like(multiplier),
    )


_register_gradient(
    _conv3d_multiply_instancenorm_clamp_multiply_max,
    _conv3d_multiply_instancenorm_clamp_multiply_max_backward,
    tensors=4,
    constants=3,
    backward_constants=3,
)


def conv3d_multiply_instancenorm_clamp_multiply_max(
    x, weight, conv_bias, multiplier, low, high, eps=1e-5, variant="epilogue"
) -> Tensor:
    """max over channels of multiplier * clamp(instance_norm(conv3d(x, weight, conv_bias) * multiplier), low, high).

    x (N, Cin, D, H, W), weight (C, Cin, kd, kh, kw), conv_bias (C), multiplier (C or 1); low, high, eps are numbers.
    Returns (N, D', H', W') in the dtype that `conv * multiplier` has.
    """
    _check_by_channel(weight, ("multiplier",), conv_bias=conv_bias, multiplier=multiplier)
    x, weight, autocast = _autocast(x, weight, variant)
    if autocast is not None:
        multiplier = multiplier.to(torch.promote_types(autocast, multiplier.dtype))
    keep = variant != "fused" and keeps(x, weight, conv_bias, multiplier)
    constants = float(low), float(high), float(eps)
    return _conv3d_multiply_instancenorm_clamp_multiply_max(
        x, weight, conv_bias, multiplier, *constants, variant, keep
    )[0]


# ------------------------------------------------------------------- 83: conv3d_groupnorm_min_clamp_dropout


@torch.library.custom_op("inline_kernels::conv3d_groupnorm_min_clamp_dropout", mutates_args=())
def _conv3d_groupnorm_min_clamp_dropout(
    x: Tensor, weight: Tensor, conv_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, seed: Tensor, groups: int,
    low: float, high: float, p: float, eps: float, variant: str, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y (N, C, D', H', W'); if `keep` v likewise and active (N, C); mean (N, C); group mean and rstd (N, G)."""
    if variant == "fused" and _device_type(x) == "cuda":
        parameters, low = (
            _accumulated(x.dtype, conv_bias, norm_weight, norm_bias),
            _rounded(low, norm_weight.dtype),
        )
        y = fused.conv3d_groupnorm_min_clamp_dropout(
            x, weight, parameters, norm_weight.dtype, seed, groups, low, high, p, eps
        )
        y, accumulate = y.contiguous(memory_format=_result_format(x, weight, False)), parameters[0].dtype
        return y, *_nothing(x, x.dtype, torch.int32, accumulate, accumulate, accumulate)
    if (
        variant == "folded"
        and low == low
        and high == high
        and _normalises_to_finite(x, weight, conv_bias, norm_weight, norm_bias, groups, eps)
    ):
        y = x.new_empty(x.shape[0], weight.shape[0], *_output_size(x, weight), dtype=norm_weight.dtype)
        kernels, value = (
            _kernels("conv3d_groupnorm_min_clamp_dropout", x, y.dtype),
            min(_rounded(low, y.dtype), high),
        )
        kernels.constant(y, seed, value, p, y.numel())
        y, accumulate = (
            y.contiguous(memory_format=_result_format(x, weight, False)),
            _accumulate_dtype(x.dtype),
        )
        return y, *_nothing(x, x.dtype, torch.int32, accumulate, accumulate, accumulate)
    kernels, count = (
        _kernels("conv3d_groupnorm_min_clamp_dropout", x, norm_weight.dtype),
        _samples_per_piece(x, weight, keep),
    )
    convolved = _begun(_convolve_contiguous(part, weight, kernels) for (part,) in _pieces(count, x))
    N, C, size = x.shape[0], weight.shape[0], _output_size(x, weight)
    parameters, low = (
        _accumulated(x.dtype, conv_bias, norm_weight, norm_bias),
        _rounded(low, norm_weight.dtype),
    )
    y = x.new_empty(N, C, *size, dtype=norm_weight.dtype)
    active = x.new_zeros((N, C) if keep else 0, dtype=torch.int32)
    mean, m2 = parameters[0].new_empty(N, C), parameters[0].new_empty(N, C)
    group_mean, group_rstd = parameters[0].new_empty(N, groups), parameters[0].new_empty(N, groups)
    for v, outputs in zip(convolved, _pieces(count, y, mean, m2, group_mean, group_rstd, active)):
        offset, sizes = outputs[0].storage_offset(), (len(v), C, groups, math.prod(size))
        kernels.forward(*outputs, v, *parameters, seed, low, high, p, eps, offset, *sizes)
    y = y.contiguous(memory_format=_result_format(x, weight, False))
    return y, *_kept(keep, v, active, mean, group_mean, group_rstd)


def _normalises_to_finite(x, weight, conv_bias, norm_weight, norm_bias, groups: int, eps: float) -> bool:
    """Is group_norm(conv3d(x)) finite in every element, by the largest values that can occur, and no channel's slope zero?

    Then min(z, low) is at most low and the clamp lifts it there: after both, every element is min(low, high).
    """
    if _is_captured(x):
        raise RuntimeError(
            "the variant 'folded' looks at its input's values, so no CUDA graph can capture it: capture 'epilogue' or 'fused'"
        )
    conv = (
        weight.double().abs().flatten(1).sum(1) * x.abs().amax() + conv_bias.double().abs()
    ).amax()  # NaN fails each comparison
    count = weight.shape[0] // groups * math.prod(_output_size(x, weight))
    z = (
        2 * conv / max(eps, 1e-300) ** 0.5 * norm_weight.double().abs().amax()
        + norm_bias.double().abs().amax()
    )
    bounds = (conv, x.dtype), (count * (2 * conv) ** 2, _accumulate_dtype(x.dtype)), (z, norm_weight.dtype)
    fits = [value < torch.finfo(dtype).max for value, dtype in bounds]
    return bool(torch.stack([*fits, (norm_weight != 0).all()]).all())


@_conv3d_groupnorm_min_clamp_dropout.register_fake
def _(x, weight, conv_bias, norm_weight, norm_bias, seed, groups, low, high, p, eps, variant, keep):
    N, C, size = x.shape[0], weight.shape[0], _output_size(x, weight)
    y = x.new_empty(N, C, *size, dtype=norm_weight.dtype).contiguous(
        memory_format=_result_format(x, weight, False)
    )
    v, active = x.new_empty(N, C, *size), x.new_empty(N, C, dtype=torch.int32)
    mean = x.new_empty(N, C, dtype=_accumulate_dtype(x.dtype))
    return y, *_kept(keep, v, active, mean, mean.new_empty(N, groups), mean.new_empty(N, groups))


@torch.library.custom_op("inline_kernels::conv3d_groupnorm_min_clamp_dropout_backward", mutates_args=())
def _conv3d_groupnorm_min_clamp_dropout_backward(
    dy: Tensor, x: Tensor, weight: Tensor, conv_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, seed: Tensor,
    v: Tensor, active: Tensor, mean: Tensor, group_mean: Tensor, group_rstd: Tensor, groups: int, low: float,
    high: float, p: float, need_x: bool, need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, conv_bias, norm_weight and norm_bias."""
    kernels = _kernels("conv3d_groupnorm_min_clamp_dropout", x, dy.dtype)
    N, C = mean.shape
    dv, gradients = torch.empty_like(v), mean.new_empty(3, N, C)
    scratch = mean.new_empty(2, N, C), mean.new_empty(2, N, groups)
    inputs = dy.contiguous(), v, mean, group_mean, group_rstd, active
    parameters, low = _accumulated(x.dtype, conv_bias, norm_weight, norm_bias), _rounded(low, dy.dtype)
    sizes = N, C, groups, math.prod(v.shape[2:])
    kernels.backward(dv, gradients, *scratch, *inputs, *parameters, seed, low, high, p, *sizes)
    dx, dw = _convolve_backward(dv, x, weight, False, need_x, need_weight)
    return dx, dw, *_summed(gradients, conv_bias, norm_weight, norm_bias)


@_conv3d_groupnorm_min_clamp_dropout_backward.register_fake
def _(
    dy, x, weight, conv_bias, norm_weight, norm_bias, seed, v, active, mean, group_mean, group_rstd, groups, low, high, p,
    need_x, need_weight,
):  # fmt: skip
    parameters = torch.empty_like(conv_bias), torch.empty_like(norm_weight), torch.empty_like(norm_bias)
    return *_fake_gradients(x, weight, need_x, need_weight), *parameters


_register_gradient(
    _conv3d_groupnorm_min_clamp_dropout,
    _conv3d_groupnorm_min_clamp_dropout_backward,
    tensors=6,
    constants=5,
    backward_constants=4,
)


def conv3d_groupnorm_min_clamp_dropout(
    x,
    weight,
    conv_bias,
    norm_weight,
    norm_bias,
    groups,
    low,
    high,
    p=0.0,
    eps=1e-5,
    variant="epilogue",
    seed=None,
) -> Tensor:
    """dropout(clamp(min(group_norm(conv3d(x, weight, conv_bias)), low), low, high), p).

    x (N, Cin, D, H, W), weight (C, Cin, kd, kh, kw), conv_bias, norm_weight and norm_bias (C); the others are numbers.
    p = 0 means no dropout. The mask is a function of `seed`, an int64 tensor of one element on x's device, which comes
    from PyTorch's generator unless given.
    Returns (N, C, D', H', W') in the dtype of group_norm's result.
    """
    _check_by_channel(weight, conv_bias=conv_bias, norm_weight=norm_weight, norm_bias=norm_bias)
    if variant == "folded":
        _check_device(x, weight=weight, conv_bias=conv_bias, norm_weight=norm_weight, norm_bias=norm_bias)
    x, weight, autocast = _autocast(x, weight, variant)
    if autocast is not None:
        norm_weight, norm_bias = norm_weight.float(), norm_bias.float()
    if seed is None:
        seed = torch.empty(0, dtype=torch.int64, device=x.device)
        if p > 0:
            halves = torch.randint(
                2**31 - 1, (2,), dtype=torch.int32, device=x.device
            )  # inductor knows no larger bounds on a GPU
            seed = halves.view(torch.int64)
    keep = variant not in ("fused", "folded") and keeps(x, weight, conv_bias, norm_weight, norm_bias)
    y = _conv3d_groupnorm_min_clamp_dropout(
        x,
        weight,
        conv_bias,
        norm_weight,
        norm_bias,
        seed,
        groups,
        float(low),
        float(high),
        float(p),
        float(eps),
        variant,
        keep,
    )[0]
    return (
        y.to(autocast) if autocast is not None and _device_type(x) == "cpu" else y
    )  # only on CUDA does autocast widen group_norm's result


# ----------------------------------------------------------------- 85: conv2d_groupnorm_scale_maxpool_clamp


def _pool_defines(pool: list[int]) -> dict[str, object]:
    return {"POOL_H": pool[0], "POOL_W": pool[1], "INDEX_T": _index(pool[0] * pool[1])[0]}


@torch.library.custom_op("inline_kernels::conv2d_groupnorm_scale_maxpool_clamp", mutates_args=())
def _conv2d_groupnorm_scale_maxpool_clamp(
    x: Tensor, weight: Tensor, conv_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, scale: Tensor, groups: int,
    pool: list[int], low: float, high: float, eps: float, variant: str, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y (N, C, PH, PW); if `keep` v and the selected values' places; the selected v; mean (N, C); group mean, rstd (N, G).

    v is (N, C, H', W') on a GPU and (N, H', W', C) on the CPU: each where the library is fastest.
    """
    if variant == "fused" and _device_type(x) == "cuda":
        parameters = _accumulated(x.dtype, conv_bias, norm_weight, norm_bias, scale)
        y = fused.conv2d_groupnorm_scale_maxpool_clamp(
            x, weight, parameters, scale.dtype, groups, pool, low, high, eps
        )
        accumulate = parameters[0].dtype
        return y, *_nothing(
            x, x.dtype, _index(pool[0] * pool[1])[1], x.dtype, accumulate, accumulate, accumulate
        )
    N, C, (H, W), channels_last = (
        x.shape[0],
        weight.shape[0],
        _output_size(x, weight),
        _device_type(x) == "cpu",
    )
    count, by_winograd = (
        _samples_per_piece(x, weight, keep),
        C % 32 == 0 and pool[0] % 2 == 0 and _winograd_applies(x, weight),
    )
    convolved = (
        None
        if by_winograd
        else _begun(_convolve(part, weight, channels_last) for (part,) in _pieces(count, x))
    )
    kernels = _kernels("conv2d_groupnorm_scale_maxpool_clamp", x, scale.dtype, **_pool_defines(pool))
    parameters = _accumulated(x.dtype, conv_bias, norm_weight, norm_bias, scale)
    y = x.new_empty(N, C, H // pool[0], W // pool[1], dtype=scale.dtype)
    in_place = (
        _device_type(x) == "cpu" and not keep and y.dtype == x.dtype
    )  # the selected values become the result where they are
    extreme = y if in_place else x.new_empty(y.shape)
    index = x.new_empty(y.shape if keep else 0, dtype=_index(pool[0] * pool[1])[1])
    mean, m2 = parameters[0].new_empty(N, C), parameters[0].new_empty(N, C)
    group_mean, group_rstd = parameters[0].new_empty(N, groups), parameters[0].new_empty(N, groups)
    outputs = y, extreme, index, mean, m2, group_mean, group_rstd
    if by_winograd:
        v, sizes = x.new_empty((N, H, W, C) if keep else 0), (N, x.shape[1], C, groups, *x.shape[2:])
        kernels.convolve_forward(
            *outputs, v, x.contiguous(), weight.contiguous(), *parameters, low, high, eps, *sizes
        )
    else:
        for v, part in zip(convolved, _pieces(count, *outputs)):
            kernels.forward(*part, v, *parameters, low, high, eps, len(v), C, groups, H, W)
    y = y.contiguous(memory_format=_result_format(x, weight, False))
    return y, *_kept(keep, v, index, extreme, mean, group_mean, group_rstd)


@_conv2d_groupnorm_scale_maxpool_clamp.register_fake
def _(x, weight, conv_bias, norm_weight, norm_bias, scale, groups, pool, low, high, eps, variant, keep):
    N, C, (H, W) = x.shape[0], weight.shape[0], _output_size(x, weight)
    y = x.new_empty(N, C, H // pool[0], W // pool[1], dtype=scale.dtype)
    v = (N, H, W, C) if _device_type(x) == "cpu" else (N, C, H, W)
    index = x.new_empty(y.shape if keep else 0, dtype=_index(pool[0] * pool[1])[1])
    mean = x.new_empty(N, C, dtype=_accumulate_dtype(x.dtype))
    extreme, group_mean, group_rstd = (
        x.new_empty(y.shape),
        mean.new_empty(N, groups),
        mean.new_empty(N, groups),
    )
    y = y.contiguous(memory_format=_result_format(x, weight, False))
    return y, *_kept(keep, x.new_empty(v), index, extreme, mean, group_mean, group_rstd)


@torch.library.custom_op("inline_kernels::conv2d_groupnorm_scale_maxpool_clamp_backward", mutates_args=())
def _conv2d_groupnorm_scale_maxpool_clamp_backward(
    dy: Tensor, x: Tensor, weight: Tensor, conv_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, scale: Tensor,
    v: Tensor, index: Tensor, extreme: Tensor, mean: Tensor, group_mean: Tensor, group_rstd: Tensor, groups: int,
    pool: list[int], low: float, high: float, need_x: bool, need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, conv_bias, norm_weight, norm_bias and scale."""
    kernels = _kernels("conv2d_groupnorm_scale_maxpool_clamp", x, dy.dtype, **_pool_defines(pool))
    N, C = mean.shape
    dv, gradients = torch.empty_like(v), mean.new_empty(4, N, C)
    scratch = mean.new_empty(2, N, C), mean.new_empty(2, N, groups)
    inputs = dy.contiguous(), v, extreme, index, mean, group_mean, group_rstd
    parameters = _accumulated(x.dtype, conv_bias, norm_weight, norm_bias, scale)
    sizes = N, C, groups, *_output_size(x, weight)
    kernels.backward(dv, gradients, *scratch, *inputs, *parameters, low, high, *sizes)
    dx, dw = _convolve_backward(dv, x, weight, _device_type(x) == "cpu", need_x, need_weight)
    return dx, dw, *_summed(gradients, conv_bias, norm_weight, norm_bias, scale)


@_conv2d_groupnorm_scale_maxpool_clamp_backward.register_fake
def _(
    dy, x, weight, conv_bias, norm_weight, norm_bias, scale, v, index, extreme, mean, group_mean, group_rstd, groups, pool,
    low, high, need_x, need_weight,
):  # fmt: skip
    parameters = [torch.empty_like(parameter) for parameter in (conv_bias, norm_weight, norm_bias, scale)]
    return *_fake_gradients(x, weight, need_x, need_weight), *parameters


_register_gradient(
    _conv2d_groupnorm_scale_maxpool_clamp,
    _conv2d_groupnorm_scale_maxpool_clamp_backward,
    tensors=6,
    constants=5,
    backward_constants=4,
)


def conv2d_groupnorm_scale_maxpool_clamp(
    x, weight, conv_bias, norm_weight, norm_bias, scale, groups, pool, low, high, eps=1e-5, variant="epilogue"
) -> Tensor:
    """clamp(max_pool2d(group_norm(conv2d(x, weight, conv_bias)) * scale, pool), low, high).

    x (N, Cin, H, W), weight (C, Cin, kh, kw), conv_bias, norm_weight and norm_bias (C), scale (C or 1); pool (height, width); the
    others are numbers. Returns (N, C, H' // pool height, W' // pool width) in the dtype of `group_norm * scale`.
    """
    _check_by_channel(
        weight, ("scale",), conv_bias=conv_bias, norm_weight=norm_weight, norm_bias=norm_bias, scale=scale
    )
    x, weight, autocast = _autocast(x, weight, variant)
    if autocast is not None:
        norm_weight, norm_bias, scale = norm_weight.float(), norm_bias.float(), scale.float()
    keep = variant != "fused" and keeps(x, weight, conv_bias, norm_weight, norm_bias, scale)
    return _conv2d_groupnorm_scale_maxpool_clamp(
        x,
        weight,
        conv_bias,
        norm_weight,
        norm_bias,
        scale,
        groups,
        list(pool),
        float(low),
        float(high),
        float(eps),
        variant,
        keep,
    )[0]
