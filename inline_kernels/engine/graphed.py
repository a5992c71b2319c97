"""`graphed(step, example)`: a whole training step as one CUDA graph, which the host launches as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import library


def graphed(step: Callable, example: Tensor | Sequence[Tensor], *, warmup: int = 3) -> Graphed:
    """What is called as `step` and does the same, by one launch:

        def step(x, target):
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(model(x), target)
            loss.backward()
            optimizer.step()  # with capturable=True, where the optimizer has that
            return loss

        run = graphed(step, (x, target))
        loss = run(x, target)  # the next call writes over it

    example: step's arguments, tensors on a GPU; those of calls have their shapes and dtypes, lie anywhere, and are copied into run.inputs.
    Each call is a step: the first `warmup` (11 with DistributedDataParallel) as they are, but on another stream, as PyTorch asks; the next one
    captures; from then on no Python runs. A number is then what it was: a learning rate that changes has to be a tensor. Gradients lie where
    they were captured, and are added to where step doesn't set them to None.
    torch.cuda.make_graphed_callables makes two graphs of a module, forward and backward; loss, zero_grad and optimizer stay Python's.

    TypeError, of this and of calls: it is no tensor. RuntimeError: it isn't on a GPU, of another shape or dtype, or step can't be captured.
    """
    inputs = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    if not inputs or not all(isinstance(t, Tensor) for t in inputs):
        raise TypeError(f"expected step's arguments, tensors on a GPU, as an example, got {_said(inputs)}")
    if {library.device_type(t) for t in inputs} != {"cuda"} or len({t.device for t in inputs}) > 1:
        raise RuntimeError(f"expected an example on one GPU, got {_said(inputs)}; elsewhere call step itself")
    return Graphed(step, [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs], warmup)


def _said(given: Sequence) -> str:
    return ", ".join(
        [f"{t.dtype} {[*t.shape]} on {t.device}" if isinstance(t, Tensor) else repr(t) for t in given]
    )


class Graphed:
    """What `graphed` makes. inputs: step's, always; who gives them themselves saves a copy. graph: None before there is one."""

    def __init__(self, step: Callable, inputs: list[Tensor], warmup: int):
        self.step, self.inputs, self.left, self.graph = step, inputs, warmup, None
        self.device, self.stream = inputs[0].device, torch.cuda.Stream(inputs[0].device)

    def __call__(self, *given: Tensor):
        tensors = len(given) == len(self.inputs) and all([isinstance(t, Tensor) for t in given])
        if not tensors or [(t.shape, t.dtype) for t in given] != [(t.shape, t.dtype) for t in self.inputs]:
            error = RuntimeError if tensors else TypeError
            raise error(f"expected {_said(self.inputs)}, as in the example, got {_said(given)}")
        with torch.no_grad():
            [own.copy_(t) for t, own in zip(given, self.inputs) if t is not own]
        if self.graph is None and self.left > 0:
            self.left -= 1
            current = torch.cuda.current_stream(self.device)
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                result = self.step(*self.inputs)
            current.wait_stream(self.stream)
            return result
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            generator = torch.cuda.default_generators[self.device.index]
            before = generator.clone_state()
            try:
                with torch.cuda.device(self.device), torch.cuda.graph(graph, stream=self.stream):
                    self.result = self.step(*self.inputs)
            except RuntimeError as error:
                generator.graphsafe_set_state(before)  # its own waits for the capture's end for ever
                advice = "no .item(), print or if of a result, and an optimizer that is capturable"
                raise RuntimeError(f"step can't be captured: {error}\nExpected {advice}") from error
            self.graph = graph
        self.graph.replay()
        return self.result
