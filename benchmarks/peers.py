"""A peer that is somebody else's fused kernel, run beside torch.compile where its package is installed.

CUDNN is cuDNN's fused graphs, for any model that they take. PEERS: problem to {name: Peer}, as `compare.compare(…,
peers=)` takes them. Making one raises ImportError or RuntimeError, whose text says why it isn't there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from inline_kernels.bench import checks, compare


class CudnnGraph(nn.Module):
    """One convolution and the pointwise operations behind it as one graph of cuDNN's, which makes one kernel of it:
    channels last, float32 in TF32.

    Needs nvidia-cudnn-frontend. Forward alone: its parameters are taken when it is made, and its output has no
    gradient. What cuDNN has no kernel for raises its error at the first call.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        parameter = next(model.parameters())
        if not parameter.is_cuda:
            raise RuntimeError("cuDNN needs a GPU")
        if parameter.dtype != torch.float32:
            raise RuntimeError("this graph is float32's")
        try:
            import cudnn
        except ImportError as error:
            raise ImportError(f"nvidia-cudnn-frontend is not there: {error}") from error
        self.cudnn, self.handle, self.graphs = cudnn, cudnn.create_handle(), {}
        self.traced = fx.symbolic_trace(model)
        for node in self.traced.graph.nodes:
            if node.op.startswith("call_"):
                _written(self.traced, node)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("this graph has no backward")
        if x.shape not in self.graphs:
            self.graphs[x.shape] = _Graph(self.cudnn, self.handle, self.traced, x)
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream(x.device).cuda_stream)
        return self.graphs[x.shape](x)


def _own(name: str) -> Callable:
    """An operation of cuDNN's own: it takes results before it, parameters and numbers."""
    return lambda graph, *operands: getattr(graph.graph, name)(*map(graph.value, operands))


class _Graph:
    """`traced` as a graph for inputs of one shape, with its operands and its workspace."""

    def __init__(self, cudnn, handle, traced: fx.GraphModule, x: Tensor):
        self.kind, self.handle, self.device = cudnn.data_type.FLOAT, handle, x.device
        self.graph = cudnn.pygraph(
            io_data_type=self.kind, intermediate_data_type=self.kind, compute_data_type=self.kind, handle=handle
        )  # fmt: skip
        self.rank, self.operands, values = x.dim(), {}, {}
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                values[node] = self.x = self.tensor(x.shape)
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(node.target)(traced).detach()
            elif node.op == "output":
                y = values[node.args[0]]
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = _written(traced, node)(self, *args, **kwargs)
        y.set_output(True)  # one by one: what the next ones return is a copy
        y.set_data_type(self.kind)
        y.set_dim(list(self.size))
        y.set_stride(_channels_last_strides(self.size))
        self.y = y
        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.workspace = torch.empty(self.graph.get_workspace_size(), dtype=torch.uint8, device=x.device)

    def __call__(self, x: Tensor) -> Tensor:
        layout = torch.channels_last if self.rank == 4 else torch.channels_last_3d
        y = torch.empty(self.size, device=x.device, memory_format=layout)
        self.graph.execute(self.operands | {self.x: x, self.y: y}, self.workspace, handle=self.handle)
        return y

    def tensor(self, shape):
        """A tensor of the graph's, channels last."""
        return self.graph.tensor(dim=list(shape), stride=_channels_last_strides(shape), data_type=self.kind)

    def value(self, given):
        """A tensor of the graph's for a result before, a parameter or a number."""
        if isinstance(given, (int, float)):
            given = torch.tensor(float(given))
        if not isinstance(given, Tensor):
            return given
        given = given.to(self.device).reshape((1,) * (self.rank - given.dim()) + given.shape)
        operand = self.tensor(given.shape)
        self.operands[operand] = checks.channels_last(given)
        return operand

    def convolution(self, conv: nn.Module, x):
        """conv(x); from then on `size` is its result's."""
        weight = checks.channels_last(conv.weight.detach())
        w = self.tensor(weight.shape)
        self.operands[w] = weight
        axes = zip(self.x.get_dim()[2:], weight.shape[2:], conv.padding, conv.stride, conv.dilation)
        self.size = (
            self.x.get_dim()[0],
            len(weight),
            *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, s, d in axes),
        )
        v = self.graph.conv_fprop(
            image=x, weight=w, padding=[*conv.padding], stride=[*conv.stride], dilation=[*conv.dilation]
        )
        return v if conv.bias is None else self.add(v, conv.bias.detach().reshape(-1, *[1] * (self.rank - 2)))

    add, sub, mul, div, min, max = map(_own, ("add", "sub", "mul", "div", "min", "max"))
    relu, sigmoid, tanh = map(_own, ("relu", "sigmoid", "tanh"))

    def clamp(self, a, min, max):
        return self.min(self.max(a, min), max)

    def leaky_relu(self, a, negative_slope, inplace=False):
        return self.graph.leaky_relu(a, negative_slope)

    def gelu(self, a, approximate="none"):
        return {"none": self.graph.gelu, "tanh": self.graph.gelu_approx_tanh}[approximate](a)

    def mish(self, a, inplace=False):
        return self.mul(a, self.tanh(self.graph.softplus(a)))

    def hardswish(self, a, inplace=False):
        return self.mul(a, self.clamp(self.add(self.mul(a, 1 / 6), 0.5), 0, 1))


_FUNCTIONS = {
    operator.add: _Graph.add,
    operator.sub: _Graph.sub,
    operator.mul: _Graph.mul,
    operator.truediv: _Graph.div,
    torch.min: _Graph.min,
    torch.clamp: _Graph.clamp,
    torch.relu: _Graph.relu,
    F.leaky_relu: _Graph.leaky_relu,
    torch.sigmoid: _Graph.sigmoid,
    torch.tanh: _Graph.tanh,
    F.gelu: _Graph.gelu,
    F.mish: _Graph.mish,
    F.hardswish: _Graph.hardswish,
}


def _written(traced: fx.GraphModule, node: fx.Node) -> Callable:
    """How a call is written into a graph; raises RuntimeError where it isn't."""
    if node.op == "call_function" and node.target in _FUNCTIONS:
        return _FUNCTIONS[node.target]
    if node.op == "call_module":
        module = traced.get_submodule(node.target)
        if isinstance(module, nn.LeakyReLU):
            return lambda graph, a: graph.leaky_relu(a, module.negative_slope)
        if isinstance(module, (nn.Conv2d, nn.Conv3d)) and module.groups == 1:
            return lambda graph, x: graph.convolution(module, x)
    raise RuntimeError(f"{node.target} is none of this graph's operations")


def _channels_last_strides(shape) -> list[int]:
    """PyTorch leaves the strides of extents of 1 open; cuDNN knows a layout by them."""
    strides, step = [0, 1], shape[1]
    for extent in reversed(shape[2:]):
        strides.insert(2, step)
        step *= extent
    return [step, *strides[1:]]


CUDNN = compare.Peer(CudnnGraph, channels_last=True)
PEERS = {"conv2d_min_add_multiply": {"cudnn": CUDNN}}
