"""From a model to kernels: graph.py, scalars.py (the graph), ops.py (torch's operations as nodes), capture.py with context.py, growth.py, segment.py (torch.fx); the schedules, composed.py
(sources of kernels/), direct.py and sinks.py with their mainloops.py, stored.py, schedule.py (`load`) with programs.py and layouts.py; passes.py, which divides them,
and source.py, which writes text (plane_text.py and small_text.py a pass, gates.py, naming.py); launching.py; operator.py, part.py, chain.py (parts as one operator), structure.py, fuse.py, variants.py."""
