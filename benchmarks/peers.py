"""Peers of single problems: somebody else's fused kernels, run beside torch.compile where they are installed.

PEERS: problem to {name: Peer}, as `compare.compare(…, peers=)` takes them. Making one raises ImportError or
RuntimeError, whose text says why it isn't there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inline_kernels.bench import compare


class CudnnMinAdd(nn.Module):
    """(min(conv(x), constant) + bias) * scale as one graph of cuDNN's, which makes one kernel of it: channels
    last, float32 in TF32.

    Needs nvidia-cudnn-frontend. Forward alone: its parameters are taken when it is made, and its output has
    no gradient.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        if not model.conv.weight.is_cuda:
            raise RuntimeError("cuDNN needs a GPU")
        try:
            import cudnn
        except ImportError as error:
            raise ImportError("nvidia-cudnn-frontend is not installed") from error
        if model.conv.weight.dtype != torch.float32:
            raise RuntimeError("this graph is float32's")
        self.cudnn, self.handle, self.graphs = cudnn, cudnn.create_handle(), {}
        channels, by_channel = model.conv.out_channels, (1, model.conv.out_channels, 1, 1)
        constants = torch.tensor(
            [model.constant_value, model.scaling_factor], device=model.conv.weight.device
        )
        self.operands = {
            "weight": model.conv.weight.detach().contiguous(memory_format=torch.channels_last),
            "conv_bias": model.conv.bias.detach().reshape(by_channel),
            "constant": constants[0].reshape(1, 1, 1, 1),
            "bias": model.bias.detach().reshape(-1).expand(channels).contiguous().reshape(by_channel),
            "scale": constants[1].clone().reshape(1, 1, 1, 1),
        }

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("this graph has no backward")
        rows, columns = (
            extent - kernel + 1 for extent, kernel in zip(x.shape[2:], self.operands["weight"].shape[2:])
        )
        size = len(x), len(self.operands["weight"]), rows, columns
        y = torch.empty(size, device=x.device, memory_format=torch.channels_last)
        if x.shape not in self.graphs:
            self.graphs[x.shape] = self._graph(x, y)
        graph, places, workspace = self.graphs[x.shape]
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream(x.device).cuda_stream)
        tensors = self.operands | {"x": x, "y": y}
        graph.execute({place: tensors[name] for name, place in places.items()}, workspace, handle=self.handle)
        return y

    def _graph(self, x: Tensor, y: Tensor) -> tuple:
        """The graph for an input and an output like these, the places of its tensors by name, and its
        workspace."""
        kind = self.cudnn.data_type.FLOAT
        graph = self.cudnn.pygraph(
            io_data_type=kind, intermediate_data_type=kind, compute_data_type=kind, handle=self.handle
        )  # fmt: skip
        places = {
            name: graph.tensor(name=name, dim=list(t.shape), stride=_channels_last_strides(t), data_type=kind)
            for name, t in {"x": x, **self.operands}.items()
        }
        v = graph.conv_fprop(
            image=places["x"], weight=places["weight"], padding=[0, 0], stride=[1, 1], dilation=[1, 1]
        )  # fmt: skip
        v = graph.add(a=v, b=places["conv_bias"])
        v = graph.min(input0=v, input1=places["constant"])
        v = graph.add(a=v, b=places["bias"])
        places["y"] = graph.mul(a=v, b=places["scale"])
        places["y"].set_output(True)  # one by one: what the next ones return is a copy
        places["y"].set_data_type(kind)
        places["y"].set_dim(list(y.shape))
        places["y"].set_stride(_channels_last_strides(y))
        graph.build([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        return graph, places, torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=x.device)


def _channels_last_strides(t: Tensor) -> list[int]:
    """PyTorch leaves the strides of extents of 1 open; cuDNN knows a layout by them."""
    _, channels, rows, columns = t.shape
    return [rows * columns * channels, 1, columns * channels, channels]


PEERS = {"conv2d_min_add_multiply": {"cudnn": compare.Peer(CudnnMinAdd, channels_last=True)}}
