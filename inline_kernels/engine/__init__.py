"""From a model to kernels: graph.py, scalars.py (the graph), ops.py (torch's operations as nodes), capture.py (torch.fx), schedule.py,
source.py (the text), operator.py, fuse.py. What the four problems share: twin.py, choice.py, operators.py, tiling.py, volumes.py."""
