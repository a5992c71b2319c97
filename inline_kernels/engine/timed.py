"""What `fuse(model, tune=True)` runs: of a segment's candidates (each schedule that can run it, whatever rules expect, and eager) the one that was
fastest when they were timed, once for each kind of call.

The times are kept in the loader's folder, timed_<digest>.json, beside what they are `of`: the segment, its tensors' sizes, strides and dtypes, which
have gradients, settings, the device, its driver, torch, cuDNN, digests of the sources. A file that is of something else, or isn't whole,
counts for nothing, and is written anew. Where nothing can be written, the times are this process's.

Rules decide, as without tuning, in deterministic mode and where something sees operators by themselves. Nothing is timed under capture or inside
of a backward pass. What is timed is given copies of what it writes to, its gradients go nowhere, no hook sees it, and generators stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

import inline_loader
from inline_kernels.loader import cache, toolchain
from inline_kernels.loader.library import key_of
from inline_kernels.loader.operators import is_watched, precision
from inline_loader import BuildError

from . import library, support
from .operator import Decision

LEAST, MOST, SECONDS = 3, 25, 0.3  # rounds of a choice, and when no other one begins
_known: dict[str, dict[str, float]] = {}  # milliseconds by candidate, by the file's name
_lock = threading.Lock()


def settings() -> tuple:
    """Those that choices hang on, and no tensor."""
    cudnn, deterministic = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    return deterministic, cudnn.benchmark, cudnn.deterministic, torch.get_num_threads()


def chosen(part, by_rule: Decision, arguments: tuple, like: Tensor, saving: bool, foreseen: bool) -> Decision:
    """The fastest candidate, if they were timed; else what the rule says, with what is to be timed: `of` what, and the candidates. foreseen: nobody
    calls now, and whether inputs have gradients isn't known of all."""
    if torch.are_deterministic_algorithms_enabled():
        return by_rule.because("deterministic mode takes no timed choice")
    found = {name: each.decide(part.name, arguments, like, saving) for name, each in part.able.items()}
    candidates = {name: each._replace(able=True) for name, each in found.items() if each.runs != "eager"}
    if is_watched() or not candidates:
        return by_rule
    candidates["eager"] = Decision(part.name, "eager", "")
    gradients = [saving and t.requires_grad for t in arguments[: len(part.names)]]
    of = _of(part, arguments[: len(part.names)], like, gradients, candidates)
    times = _read(of)
    if times is None and foreseen and saving:
        times = _read(of | {"gradients": [True] * part.inputs + gradients[part.inputs :]})
    if not times:
        return by_rule.because("not timed yet")._replace(timing=(of, candidates))
    fastest, *_ = order = sorted(times, key=times.get)
    return candidates[fastest].because(
        f"timed: {', '.join(f'{name} {times[name]:.3g} ms' for name in order)}"
    )


def _of(part, tensors: Sequence[Tensor], like: Tensor, gradients: list[bool], candidates: Mapping) -> dict:
    device = tensors[part.inputs].device
    modes = precision(tensors[part.inputs]), support.autocast_dtype(tensors[0], device.type)
    return {
        "segment": [part.segment.digest, part.exact_order, str(like.dtype)],
        "tensors": [[str(t.dtype), [*t.shape], [*t.stride()]] for t in tensors],
        "gradients": gradients,
        "settings": [*settings(), *map(str, modes)],
        "device": toolchain.device_name(device),
        "versions": [toolchain.driver(device), torch.__version__, torch.backends.cudnn.version()],
        "sources": {name: [*map(_digest, each.requests)] for name, each in candidates.items()},
    }


def _digest(request: Mapping) -> str | None:
    given = [request.get(name) for name in ("name", "source", "device", "folder")]
    return key_of(inline_loader.generation, *given, *sorted(request["defines"].items()))


def _name(of: dict) -> str:
    return f"timed_{hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]}.json"


def _read(of: dict) -> dict[str, float] | None:
    name, found = _name(of), {}
    if name not in _known:
        with contextlib.suppress(OSError, BuildError):
            found = cache.whole(cache.cache_folder() / name, {"of": dict, "ms": dict})
        times = found.get("ms", {})
        right = all(type(each) is float and 0 < each < math.inf for each in times.values())
        if times and right and found["of"] == of and times.keys() <= of["sources"].keys():
            _known[name] = times
    return _known.get(name)


def time_candidates(part, tensors: Sequence[Tensor], of: dict, candidates: Mapping[str, Decision]) -> bool:
    """Times them on such tensors, and keeps the times; False where nothing may be timed."""
    device = tensors[part.inputs].device
    on_gpu, autocast = device.type == "cuda", support.autocast_dtype(tensors[0], device.type)
    if torch._C._current_graph_task_id() != -1 or support.capturing():
        return False
    with (
        _lock,
        torch.cuda.device(device if on_gpu else -1),
        torch.random.fork_rng([device] if on_gpu else []),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        torch.autocast(device.type, autocast, enabled=autocast is not None, cache_enabled=False),
    ):
        if _read(of) is None:  # another thread may have, meanwhile
            trials = {name: part.trial(each, tensors, of["gradients"]) for name, each in candidates.items()}
            times = _known[_name(of)] = least({name: run for name, run in trials.items() if run}, on_gpu)
            with contextlib.suppress(OSError, BuildError):  # a read-only folder
                cache.replace(cache.cache_folder() / _name(of), {"of": of, "ms": times})
    return True


def least(trials: dict[str, Callable], on_gpu: bool) -> dict[str, float]:
    """Milliseconds, the least of rounds in turn. What finds no memory is out."""
    times, end = {}, time.perf_counter() + SECONDS
    for name, run in trials.items():  # the first builds backward's kernels, and asks cuDNN
        with contextlib.suppress(torch.OutOfMemoryError):
            run(), run()
            times[name] = math.inf
    for i in range(MOST):
        if i < LEAST or time.perf_counter() < end:
            times = {name: min(least, _clock(trials[name], on_gpu)) for name, least in times.items()}
    return times


def _clock(run: Callable, on_gpu: bool) -> float:
    if on_gpu:
        return library.milliseconds(run)
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3
