"""What an exported cell has below its kernels, one text for all models: below the line. What is above it are the cell's own names."""

import _thread
import contextlib as _contextlib
import ctypes as _ctypes
import functools as _functools
import hashlib as _hashlib
import operator as _operator
import os as _os
import re as _re
import sys as _sys  # noqa: F401, for what composed.py writes
import tempfile as _tempfile
import time as _time

import torch
from torch import nn

Model = get_inputs = get_init_inputs = _DEVICE = _DTYPE = None  # what the kernels are for
_FORMULA = _HEADERS = 0, ""  # the line where a text begins: launchers with their formulas; what they include
_ARGUMENTS = {}  # of a launcher's parameter, the attribute of Model that it is
_AS_WRITTEN = ""  # the digest of the formula's code as it was exported

# ------------------------------------------------------------------------------------------- host: the same for all models
_TYPES = {f"{name}_t": getattr(torch, name) for name in ("uint8", "int32", "int64")} | {"bool": torch.bool}
_TYPES |= {"value_t": _DTYPE, "output_t": _DTYPE, "accumulate_t": torch.promote_types(_DTYPE, torch.float32)}
_TYPES |= {"float": torch.float32, "double": torch.float64}
_LAUNCHERS = _re.findall(r"^EXPORT \w+ (\w+)\(([^)]*)\) {", _FORMULA[1], flags=_re.M)
_LAUNCHERS = {name: [each.split()[::-1] for each in given.split(",")] for name, given in _LAUNCHERS}
_LAUNCHERS = {name: dict(filter(None, given)) for name, given in _LAUNCHERS.items()}  # types by name
_CODE = _hashlib.sha256(_re.sub(r"//.*|/\*(?s:.*?)\*/|\s", "", _FORMULA[1]).encode()).hexdigest()[:16]
_TRAINS = {_AS_WRITTEN}  # digests of code whose gradient is right


class _Building(_contextlib.AbstractContextManager):
    """A clock while it lasts, and a compiler's first error at the cell's own line."""

    def __init__(self, name):
        start, self.end = _time.monotonic(), ""
        self.line = lambda: f"\rcompiling {name} … {_time.monotonic() - start:.1f} s{self.end}"
        _thread.start_new_thread(self.tick, ())

    def tick(self):
        while not self.end:
            print(self.line(), end="", flush=True)
            _time.sleep(0.2)

    def __exit__(self, kind, error, trace):
        self.end = "\n"
        print(self.line(), end="", flush=True)
        if found := _re.search(r"(?m)^(formula|headers)[:(](\d+)\)?:.*?error[^:]*: (.*)$", str(error)):
            line, (first, text) = int(found[2]), _FORMULA if found[1] == "formula" else _HEADERS
            code = f"{line:5} | {text.splitlines()[line - first]}"
            told = RuntimeError(f"{found[1]}, line {line} of the cell: {found[3]}\n{code}")
            told._render_traceback_ = lambda: [f"BuildError: {told}"]  # for IPython
            raise told from None


def _tf32():
    """May the library convolve float32 in TF32? By torch's newer setting where there is one: once it is set, to read the older may raise."""
    cudnn = torch.backends.cudnn
    allowed = cudnn.conv.fp32_precision == "tf32" if hasattr(cudnn, "conv") else cudnn.allow_tf32
    return allowed and cudnn.enabled and _os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


@_functools.cache
def _library(name, tf32=True):
    """The launcher `name` and what is asked of sizes, compiled if need be."""
    from torch.utils.cpp_extension import _get_build_directory, load_inline

    native = "-mcpu=native" if _os.uname().machine in ("aarch64", "arm64") else "-march=native"
    flags, cuda_flags = ["-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", native], None
    if _DEVICE == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if major < 8:
            raise RuntimeError(
                f"ModelNew can't run: the GPU is of capability {major}.{minor}, its kernels are for 8.0 and later"
            )
        flags, arch = ["-O1", "-fvisibility=hidden"], f"{major}{minor}" + "a" * (major >= 9)
        cuda_flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xcompiler=-fvisibility=hidden"]
        shared = torch.cuda.get_device_properties("cuda").shared_memory_per_block_optin
        cuda_flags += [f"-DCAPABILITY={major}{minor}", f"-DSHARED_LIMIT={shared}", f"-DTF32={int(tf32)}"]
    # The others are blank: what they alone need is not compiled.
    others = _re.compile(rf"^EXPORT void (?!{name}\b)\w+\(.*?^}}$", flags=_re.M | _re.S)
    formula = others.sub(lambda found: "\n" * found[0].count("\n"), _FORMULA[1])
    called = "".join([f"CELL({each})\n" for each in _re.findall(r"^EXPORT \w+ (\w+)", formula, flags=_re.M)])
    text = f'#line {_HEADERS[0]} "headers"\n{_HEADERS[1]}\n#line {_FORMULA[0]} "formula"\n{formula}\n{called}'
    compiled = text, flags, cuda_flags, torch.__version__, torch.backends.cpu.get_cpu_capability()
    folder = _get_build_directory(f"cell_{_hashlib.sha256(repr(compiled).encode()).hexdigest()[:16]}", False)
    built = [file for file in _os.listdir(folder) if file.endswith(".so")]
    if not built:  # under a new name: PyTorch waits for, or relies on, what an interrupted build has left
        place = _tempfile.mkdtemp("", "build_", folder)
        built = [_os.path.basename(place) + ".so"]
        sources = ([""], [text]) if _DEVICE == "cuda" else ([text], None)
        options = {"extra_cflags": flags, "extra_cuda_cflags": cuda_flags, "build_directory": place}
        with _Building(name):
            load_inline(built[0][:-3], *sources, **options, is_python_module=False, no_implicit_headers=True)
        _os.replace(_os.path.join(place, built[0]), _os.path.join(folder, built[0]))
    return _ctypes.CDLL(_os.path.join(folder, built[0]))


class _Tensor(_ctypes.Structure):
    _fields_ = [("dims", _ctypes.c_int64), ("sizes", _ctypes.c_int64 * 8), ("data", _ctypes.c_void_p)]

    @classmethod
    def from_param(cls, t):
        return cls(t.dim(), (*t.shape,), t.data_ptr() if t.numel() else None)


def _launcher(name, build=None):
    return _launcher_for(name, build or name, _DEVICE == "cuda" and _tf32())


@_functools.cache
def _launcher_for(name, build, tf32):
    """The launcher `name` as a function of a dict: its arguments, by name. It adds its outputs: of these shapes, else of so many elements as
    the function <name>_size says."""
    kinds, C = _LAUNCHERS[name], _ctypes
    dtypes = {each: _TYPES[kind[:-1].partition("<")[2]] for each, kind in kinds.items() if kind[-1] == ">"}
    numbers = {"double": C.c_double, "int64_t": C.c_int64, "bool": C.c_bool, "cudaStream_t": C.c_void_p}
    types = [numbers.get(kind, _Tensor) for kind in kinds.values()]
    address = C.c_void_p.in_dll(_library(build, tf32), f"cell_{name}").value
    run = C.CFUNCTYPE(C.c_char_p, C.c_void_p, *types)(address)

    def value(given, each):
        if each not in dtypes:  # a number, or one that is asked for
            return given[each] if each in given else _launcher_for(each, build, tf32)(given)
        t = given[each].to(dtypes[each]).contiguous()
        return t.clone() if t.data_ptr() % 16 else t

    def call(given, shapes=()):
        for out in [each for each, kind in kinds.items() if kind[:4] == "Out<"]:
            shape = shapes[out] if out in shapes else _launcher_for(f"{out}_size", build, tf32)(given)
            given[out] = given["x"].new_empty(shape, dtype=dtypes[out])
        given["stream"] = torch.cuda.current_stream().cuda_stream if _DEVICE == "cuda" else 0
        values = [value(given, each) for each in kinds]
        if problem := run(C.addressof(result := C.c_int64()), *values):
            raise RuntimeError(f"{name}: {problem.decode()}")
        return result.value

    return call


def _run(given, saving):
    """Adds to what is given all that forward makes."""
    name = "forward_saving" if saving and "forward_saving" in _LAUNCHERS else "forward"
    if "v" in _LAUNCHERS[name]:  # the library convolves
        given["v"] = torch.ops.aten.convolution(given["x"], given["weight"], None, *_CONVOLUTION)
    shapes = {} if saving else dict.fromkeys(_LAUNCHERS[name], 0)
    _launcher(name)(given, shapes | {"y": _result(given["x"].shape)})
    return given


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers, names, *tensors):
        given = _run(dict(zip(names, tensors)) | numbers, saving=True)
        y, ctx.names, ctx.given = given.pop("y"), names, given
        ctx.kept = [name for name, t in given.items() if isinstance(t, torch.Tensor)]
        ctx.save_for_backward(*[given.pop(name) for name in ctx.kept])
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        if _CODE not in _TRAINS and not ctx.given["checked"]:
            raise RuntimeError("the formula was edited: edit its gradient and Model, too, and call check()")
        given = dict(zip(ctx.kept, ctx.saved_tensors)) | ctx.given | {"dy": dy}
        needs = dict(zip(ctx.names, ctx.needs_input_grad[2:]))
        shapes = {name: t.shape for name, t in given.items() if name in ctx.kept}
        shapes |= {name: 0 for name in ("x", "weight") if not needs.get(name)}
        shapes = {f"{d}{n}": shape for n, shape in shapes.items() for d in ("d", "d_")}
        made = {}  # by launcher, whether each of its outputs is wanted
        for name in filter(_re.compile("backward").match, _LAUNCHERS):
            outputs = [each for each, kind in _LAUNCHERS[name].items() if kind[:4] == "Out<"]
            made[name] = {each: shapes.get(each, 1) != 0 for each in outputs}
        for name, own in made.items():
            if not any([_better(other, own) for other in [{}, *made.values()]]):
                _launcher(name)(given, shapes)
        found = {name: given.get(f"d{name}", given.get(f"d_{name}")) for name in ctx.kept}
        if found.get("v") is not None:
            operands = found["v"], given["x"], given["weight"], None, *_CONVOLUTION
            both = torch.ops.aten.convolution_backward(*operands, [needs["x"], needs["weight"], False])
            found["x"], found["weight"], _ = both
        return None, None, *[found[n].to(given[n].dtype) if need else None for n, need in needs.items()]


def _settings(path, module):
    """What the kernels take for granted of a module."""
    found = {key: value for key, value in vars(module).items() if key[0] != "_" and key != "training"}
    if path:
        found |= {"class": type(module), "forward": getattr(module.forward, "__func__", module.forward)}
        kinds = "forward", "forward_pre", "backward", "backward_pre"
        found["hooks"] = any([getattr(module, f"_{kind}_hooks") for kind in kinds])
    return found


def _state(module):
    """Its own parameters' and buffers' names."""
    return {name for own in (module._parameters, module._buffers) for name, t in own.items() if t is not None}


def _better(other, own):
    """Has the launcher `other` all that is wanted of `own`, and more of it, or less that is not?"""
    more, all_own = ({name for name, wanted in outputs.items() if wanted} for outputs in (other, own))
    return all_own <= more and (all_own != more or len(other) < len(own))


def _compared(model, tensors, numbers):
    """What the kernels take for granted: what it is, how it is, how it was when they were written."""
    watched = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    yield "torch.func or forward-mode AD", watched, False
    yield "autocast", torch.is_autocast_enabled(_DEVICE), False
    yield "hooks on all modules", bool(nn.modules.module._has_any_global_hook()), False
    modules = dict(model.named_modules())
    for path, expected in _MODULES.items():
        if (found := _settings(path, modules.get(path, model))) != expected:
            for key in expected.keys() - _FREE.get(path, ()):
                yield f"{path}.{key}".lstrip("."), found.get(key), expected[key]
    for name, t in numbers.items():
        yield _ARGUMENTS[name], "a number" if isinstance(t, (int, float)) and t == t else t, "a number"
    for name, (dtype, shape) in _SHAPES.items():
        t, what = tensors.get(name), _ARGUMENTS.get(name, name)
        yield f"{what}'s class", type(t) in (torch.Tensor, nn.Parameter) or type(t), True
        yield what, (t.dtype, [*t.shape[name == "x" :]]), (dtype, shape)
    for path, expected in _STATE.items():
        yield f"what {path} has of tensors", _state(modules[path]), expected
    yield "x's batch", len(tensors["x"]) or "empty", len(tensors["x"])
    devices = {t.device for t in tensors.values()}
    yield "the device of all", tensors["x"].device.type if len(devices) == 1 else devices, _DEVICE


class ModelNew(Model):
    """Model by the kernels above. Where they can't stand for it, a call raises RuntimeError and says why."""

    def forward(self, x):
        given = {"x": x} | {name: get(self) for name, get in _GETTERS.items()}
        tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
        numbers = {name: t for name, t in given.items() if name not in tensors}
        for what, found, expected in _compared(self, tensors, numbers):
            if found != expected:
                raise RuntimeError(f"ModelNew can't run: {what} is {found}, its kernels are for {expected}")
        for p in _DROPOUT:
            if not 0 <= numbers[p] <= 1:
                raise ValueError(f"dropout probability has to be between 0 and 1, but got {numbers[p]}")
            numbers[p] *= self.get_submodule(_ARGUMENTS[p].rpartition(".")[0]).training
            seed = torch.empty(int(numbers[p] > 0), dtype=torch.int64, device=x.device).random_()
            numbers |= {"seed": seed, "number": 0}
        numbers["checked"] = "checked" in vars(self)
        with torch.cuda.device_of(x):
            if torch.is_grad_enabled() and any([t.requires_grad for t in tensors.values()]):
                return _Function.apply(numbers, [*tensors], *tensors.values())
            return _run(tensors | numbers, saving=False)["y"]


def check(batch_size=2):
    """Compares y and gradients with Model's: an error above twice Model's raises. Then an edited formula trains."""
    kinds = (ModelNew, _DTYPE), (Model, _DTYPE), (Model, torch.float64)
    models = [each(*get_init_inputs()).to(_DEVICE, dtype).eval() for each, dtype in kinds]
    models[0].checked = True
    for same in zip(*[model.parameters() for model in models]):
        value = same[0] * (1 + torch.randn_like(same[0]) / 4) + torch.randn_like(same[0]) / 10
        [p.data.copy_(value) for p in same]
    x, found = torch.randn_like(get_inputs(batch_size, _DEVICE)[0].to(_DTYPE)), []
    dy, names = torch.randn_like(models[1](x)), [f"{name}.grad" for name, _ in models[0].named_parameters()]
    for model in models:
        inputs = [x.to(next(model.parameters()).dtype, copy=True).requires_grad_(), *model.parameters()]
        y = model(inputs[0])
        found.append([y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))])
    for name, *both, exact in zip(["y", "x.grad", *names], *found):
        ours, theirs, size = [float((t.double() - exact).norm()) for t in both] + [float(exact.norm())]
        print(f"{name}: error {ours:.1e}, Model's {theirs:.1e}, of {size:.1e}")
        if not ours <= 2 * theirs + 1e-6 * size:
            raise AssertionError(f"{name} is not Model's: its error is {ours:.1e}, Model's {theirs:.1e}")
    _TRAINS.add(_CODE)


with torch.device("meta"):
    _MADE = Model(*get_init_inputs()).to(_DTYPE)  # without memory
_result = _functools.cache(lambda shape: _MADE(torch.empty(shape, dtype=_DTYPE, device="meta")).shape)
_GETTERS = {name: _operator.attrgetter(path) for name, path in _ARGUMENTS.items()}
_TENSORS = {name: get(_MADE) for name, get in _GETTERS.items() if isinstance(get(_MADE), torch.Tensor)}
_SHAPES = {name: (_DTYPE, [*t.shape]) for name, t in _TENSORS.items()}
_SHAPES = {"x": (_DTYPE, [*get_inputs(batch_size=1)[0].shape[1:]]), **_SHAPES}
_MODULES = {path: _settings(path, module) for path, module in _MADE.named_modules()}
_STATE = {path: _state(module) for path, module in _MADE.named_modules() if path}
_WHOLE = {name for kinds in _LAUNCHERS.values() for name, kind in kinds.items() if kind == "int64_t"}
_OWN = [path.rpartition(".") for name, path in _ARGUMENTS.items() if name not in _WHOLE]  # what may change
_FREE = {path: {last for owner, _, last in _OWN if owner == path} for path in _MODULES}
_DROPOUT = [name for name, path in _ARGUMENTS.items() if path == "p" or path[-2:] == ".p"]  # its probability
_CONV = [each for each in _MADE.modules() if isinstance(each, nn.modules.conv._ConvNd)]
_SETTINGS = _operator.attrgetter("stride", "padding", "dilation", "transposed", "output_padding", "groups")
_CONVOLUTION = _CONV and _SETTINGS(_CONV[0])
