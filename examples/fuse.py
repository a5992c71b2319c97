"""A model of your own, fused by one call.

python examples/fuse.py         # on a GPU where there is one; or cell by cell, in an editor that knows `# %%`
"""

# %% A stranger's model: two convolutions, a norm, activations, a skip connection, a pool
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from inline_kernels import compare_pair, fuse, table  # noqa: E402

device = "cuda" if torch.cuda.is_available() else "cpu"
batch, image = (64, 128) if device == "cuda" else (4, 64)


class Block(nn.Module):
    def __init__(self, channels=32, groups=8):
        super().__init__()
        self.first = nn.Conv2d(16, channels, 3, padding=1)
        self.norm = nn.GroupNorm(groups, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.slope = 0.1

    def forward(self, x):
        v = F.silu(self.norm(self.first(x)))
        w = F.leaky_relu(self.second(v), self.slope) + v
        return F.max_pool2d(torch.tanh(w), 2)


# %% One call: a Block, too, with the same parameters. Its first call compiles; a new batch or image size compiles nothing
torch.manual_seed(0)
model = Block().to(device)
fast = fuse(model)
x = torch.randn(batch, 16, image, image, device=device)
y = fast(x)
print(type(fast).__name__, isinstance(fast, Block), fast.first.weight is model.first.weight)
print(f"largest difference: {(y - model(x)).abs().max():.1e}")
print(fast.plan(x))  # a line for each convolution: what runs, pass by pass, or why eager does

# %% What it became. tanh rises, so the pool comes first, and tanh is computed once for four values
with torch.no_grad():
    print(fast.source(x, segment=1))


# %% Its gradients: the same graph, differentiated
def gradients(module):
    module.zero_grad()
    module(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters()}


ours, eagers = gradients(fast), gradients(model)
for name in ours:
    distance = ((ours[name] - eagers[name]).norm() / eagers[name].norm()).item()
    print(f"{name:15} differs from eager's by {distance:.1e} of its norm")

# %% It stays your model: numbers are read at each call, and what can't be fused runs eager and says so
fast.slope = model.slope = 0.5
with torch.no_grad():
    print(f"another slope: {(fast(x) - model(x)).abs().max():.1e}")
hook = fast.second.register_forward_hook(lambda module, args, out: out * 2)
print(fast.plan(x))
hook.remove()

# %% Checked against float64, honest, and timed beside eager
variants = ["eager", "compile", "candidate"] if device == "cuda" else ["eager", "candidate"]
rows = compare_pair(
    model, fast, lambda: [torch.randn(batch, 16, image, image)], variants=variants, name="a block, fused"
)
print(table(rows))
