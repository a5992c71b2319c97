"""What a call must leave as it was: torch's settings, Python's, and the functions that a judge relies on.

before = surroundings(model)
…
complaints = changes(before)
put_back(before)
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import dataclasses
import gc
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from operator import is_

import torch
from torch import Tensor, nn

_cudnn, _modules = torch.backends.cudnn, nn.modules.module
_GLOBAL_HOOKS = [
    value for name, value in vars(_modules).items() if name.startswith("_global_") and isinstance(value, dict)
]


def _fill(table: dict, values: dict) -> None:
    table.clear()
    table.update(values)


_BY_BUILDS = (  # torch and the loader set them
    "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "CUDA_MODULE_LOADING", "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES", "PATH"
)  # fmt: skip


def _set_environment(values: dict[str, str]) -> None:
    others = {name: value for name, value in os.environ.items() if name.startswith(_BY_BUILDS)}
    _fill(os.environ, values | others)


def _shorten(length: Callable[[], int], pop: Callable[[], object]) -> Callable[[int], None]:
    """What takes from a stack what was put there."""
    return lambda before: [pop() for _ in range(length() - before)]


def _saved_tensors_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True) or ()


def tracers() -> tuple:
    """What Python calls at each line or call."""
    return sys.getprofile(), sys.gettrace()


_attention = torch.backends.cuda
_ATTENTION = [
    (getattr(_attention, f"{kind}_sdp_enabled"), getattr(_attention, f"enable_{kind}_sdp"))
    for kind in ("flash", "mem_efficient", "math", "cudnn")
]


# What a call must leave as it was: how to read it, and how to put it back.
_SETTINGS = {
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "the precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "TF32 in convolutions": (lambda: _cudnn.allow_tf32, lambda value: setattr(_cudnn, "allow_tf32", value)),
    "cuDNN's search": (lambda: _cudnn.benchmark, lambda value: setattr(_cudnn, "benchmark", value)),
    "cuDNN's determinism": (lambda: _cudnn.deterministic, lambda value: setattr(_cudnn, "deterministic", value)),
    "the use of cuDNN": (lambda: _cudnn.enabled, lambda value: setattr(_cudnn, "enabled", value)),
    "the use of oneDNN": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "autocast on the CPU": (lambda: torch.is_autocast_enabled("cpu"), lambda value: torch.set_autocast_enabled("cpu", value)),
    "autocast on the GPU": (lambda: torch.is_autocast_enabled("cuda"), lambda value: torch.set_autocast_enabled("cuda", value)),
    "anomaly mode": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "how denormal numbers are treated": (lambda: (torch.tensor(1e-40) * 0.5).item() == 0, torch.set_flush_denormal),
    "modes of torch's functions": (
        torch._C._len_torch_function_stack, _shorten(torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack)
    ),
    "modes of torch's operators": (
        torch._C._len_torch_dispatch_stack, _shorten(torch._C._len_torch_dispatch_stack, lambda: torch._C._pop_torch_dispatch_stack(None))
    ),
    "hooks of saved tensors": (_saved_tensors_hooks, lambda value: torch._C._autograd._pop_saved_tensors_default_hooks()),
    "kernels of attention": (lambda: [read() for read, _ in _ATTENTION], lambda found: [write(v) for (_, write), v in zip(_ATTENTION, found)]),
    "the current GPU": (lambda: torch.cuda.current_device() if torch.cuda.is_initialized() else None, torch.cuda.set_device),
    "the current stream": (lambda: torch.cuda.current_stream() if torch.cuda.is_initialized() else None, torch.cuda.set_stream),
    "garbage collection": (gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
    "when garbage is collected": (gc.get_threshold, lambda value: gc.set_threshold(*value)),
    "what garbage collection calls": (lambda: [*gc.callbacks], lambda found: gc.callbacks.__setitem__(slice(None), found)),
    "how long a thread runs": (sys.getswitchinterval, sys.setswitchinterval),
    "timers": (lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0, lambda on: on or signal.setitimer(signal.ITIMER_REAL, 0)),
    "the environment": (lambda: {k: v for k, v in os.environ.items() if not k.startswith(_BY_BUILDS)}, lambda found: _set_environment(found)),
    "the working directory": (os.getcwd, os.chdir),
    "Python's profiler": (tracers, lambda found: (sys.setprofile(found[0]), sys.settrace(found[1]))),
    "hooks of all modules": (lambda: [dict(hooks) for hooks in _GLOBAL_HOOKS], lambda found: [_fill(*each) for each in zip(_GLOBAL_HOOKS, found)]),
}  # fmt: skip


def surroundings(model: nn.Module | None = None) -> dict:
    """Torch's settings and other global state by name, and by owner the functions that a judge relies on, with those of the
    reference's classes."""
    import torch._dynamo  # noqa: F401  which wraps some of them when it is first imported

    owners = [
        builtins, copy, dataclasses, math, random, random.Random, random.SystemRandom, statistics, time,
        torch, Tensor, nn.Module, nn.functional, torch.autograd, torch.cuda, torch.cuda.Event,
    ]  # fmt: skip
    owners += [*_judges(), *{type(m) for m in (model.modules() if model else ())}]
    return _settings() | {owner: dict(vars(owner)) for owner in owners}


def _judges() -> list:
    """The modules and classes that judge."""
    modules = [module for name, module in sys.modules.items() if name.startswith(__package__ + ".")]
    return modules + [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]


def _counts(owner, name: str, value) -> bool:
    """Functions do, and all members of who judges; but not what the compiler wraps of nn.Module when it first compiles."""
    if owner is nn.Module and name in ("__init__", "__setstate__"):
        return False
    judges = (getattr(owner, "__module__", None) or owner.__name__).startswith(__package__ + ".")
    return callable(value) or judges and not name.startswith("__")


def _settings() -> dict[str, object]:
    found = {}
    for name, (read, _) in _SETTINGS.items():
        with contextlib.suppress(RuntimeError):  # an older setting is not read where a newer one was made
            found[name] = read()
    return found


def _changed(before: dict) -> list:
    """What is no longer as it was: names of settings, owners with names. Classes have no functions that they hadn't."""
    now = _settings()
    settings = ((key, value) for key, value in before.items() if isinstance(key, str) and value is not None)
    changed: list = [key for key, value in settings if now.get(key, value) != value]
    for owner, members in before.items():
        if isinstance(owner, str):
            continue
        held = vars(owner)
        if len(held) == len(members) and all(map(is_, held.values(), members.values())):
            continue
        found = [name for name, value in members.items() if held.get(name) is not value]
        found += [name for name in held if isinstance(owner, type) and name not in members]
        changed += [
            (owner, name) for name in found if _counts(owner, name, members.get(name, held.get(name)))
        ]
    return changed


def changes(before: dict) -> list[str]:
    """What is no longer as it was, as complaints."""
    return [f"changes {_called(key, before)}" for key in _changed(before)]


def _called(key, before: dict) -> str:
    if key == "the environment":
        now, was = _settings()[key], before[key]
        return f"{key}: {', '.join(sorted(k for k in {*now, *was} if now.get(k) != was.get(k)))}"
    return key if isinstance(key, str) else ".".join((key[0].__name__, key[1]))


def put_back(before: dict) -> None:
    """Settings and functions are again what they were."""
    for key in _changed(before):
        if isinstance(key, str):
            _SETTINGS[key][1](before[key])
        elif key[1] in before[key[0]]:
            setattr(*key, before[key[0]][key[1]])
        else:
            delattr(*key)
