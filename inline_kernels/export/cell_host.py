"""What an exported cell has below its kernels, one text for all models: below the line. What is above it are the cell's own names."""

import _thread
import ctypes as _ctypes
import functools as _functools
import hashlib as _hashlib
import operator as _operator
import os as _os
import re as _re
import sys as _sys  # noqa: F401, for what export.py writes
import tempfile as _tempfile
import time as _time

import torch
from torch import nn

Model = get_init_inputs = _DEVICE = _DTYPE = None  # what the kernels are for
_FORMULA = _HEADERS = 0, ""  # the line where a text begins: launchers with their formulas; what they include
_ARGUMENTS = {}  # of a launcher's parameter, the attribute of Model that it is
_GRADIENTS = {}  # of one that is a tensor, of x and of v: the launchers' name of its gradient
_SIZES, _SAMPLES, _CONVOLUTION = (
    [],
    0,
    (),
)  # of x behind the batch; that stay in cache (0: all); the library's settings
_AS_WRITTEN = ""  # the digest of the formula's code as it was exported
_CHOSEN_FOR = ""  # the GPU's capability for which our own convolutions were chosen, and TF32 if they are only as exact as that; "": there are none

# ------------------------------------------------------------------------------------------- host: the same for all models
_TYPES = {f"{name}_t": getattr(torch, name) for name in ("uint8", "int32", "int64")} | {"bool": torch.bool}
_TYPES |= dict.fromkeys(("value_t", "output_t"), _DTYPE) | {"float": torch.float32, "double": torch.float64}
_TYPES |= dict.fromkeys(("accumulate_t", "parameter_t"), torch.promote_types(_DTYPE, torch.float32))
_NUMBERS = {"double": _ctypes.c_double, "int64_t": _ctypes.c_int64, "bool": _ctypes.c_bool}
_NUMBERS |= {"cudaStream_t": _ctypes.c_void_p}
_LAUNCHERS = dict(_re.findall(r"^EXPORT \w+ (\w+)\(([^)]*)\) {", _FORMULA[1], flags=_re.M))
_LAUNCHERS = {  # types by name
    key: dict([each.split()[::-1] for each in own.split(",") if each]) for key, own in _LAUNCHERS.items()
}
_dtype_of = _functools.cache(lambda kind: _TYPES.get(kind[:-1].partition("<")[2]))
_HOOKS = [key for key in vars(nn.Module()) if _re.match("_(for|back)ward.*_hooks$", key)]
_BatchNorm = nn.modules.batchnorm._BatchNorm
_CODE = _hashlib.sha256(_re.sub(r"//.*|/\*(?s:.*?)\*/|\s", "", _FORMULA[1]).encode()).hexdigest()[:16]
_TRAINS = {_AS_WRITTEN}  # digests of code whose gradient is right


class _Building:
    """A clock while it lasts, and a compiler's first error at the cell's own line."""

    def __init__(self, name):
        start, self.end = _time.monotonic(), ""
        self.line = lambda: f"\rcompiling {name} … {_time.monotonic() - start:.1f} s{self.end}"

    def __enter__(self):
        _thread.start_new_thread(self.tick, ())

    def tick(self):
        while not self.end:
            print(self.line(), end="", flush=True)
            _time.sleep(0.2)

    def __exit__(self, kind, error, trace):
        self.end = "\n"
        print(self.line(), end="", flush=True)
        error_line = r"(?m)^(formula|headers)[:(](\d+)\)?:(?:(\d+):)?.*?error[^:]*: (.*)$"
        if found := _re.search(error_line, str(error)):
            line, (first, text) = int(found[2]), _FORMULA if found[1] == "formula" else _HEADERS
            code, caret = text.splitlines()[line - first], found[3] and f"\n{'^':>{int(found[3]) + 8}}"
            told = f"{found[1]}, line {line} of the cell: {found[4]}\n{line:5} | {code}" + (caret or "")
            error = RuntimeError(told)
            error._render_traceback_ = lambda: [f"BuildError: {told}"]  # for IPython
            raise error from None


def _tf32():
    """May the library convolve float32 in TF32? By torch's newer setting where there is one: once it is set, to read the older may raise."""
    cudnn = torch.backends.cudnn
    allowed = cudnn.conv.fp32_precision == "tf32" if hasattr(cudnn, "conv") else cudnn.allow_tf32
    return _DEVICE == "cuda" and allowed and cudnn.enabled and _os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


@_functools.cache
def _library(name, tf32=True):
    """The launcher `name` and what is asked of sizes, compiled if need be."""
    from torch.utils.cpp_extension import _get_build_directory, load_inline

    native = "-mcpu=native" if _os.uname().machine in ("aarch64", "arm64") else "-march=native"
    flags, cuda_flags = ["-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", native], None
    if _DEVICE == "cuda":
        gpu = torch.cuda.get_device_properties("cuda")
        if gpu.major < 8:
            raise RuntimeError("ModelNew can't run: its kernels are for GPUs of capability 8.0 and later")
        flags, arch = ["-O1", "-fvisibility=hidden"], f"{gpu.major}{gpu.minor}"
        macros = {"CAPABILITY": arch, "SHARED_LIMIT": gpu.shared_memory_per_block_optin, "TF32": int(tf32)}
        arch += "a" * (gpu.major >= 9)
        cuda_flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xcompiler=-fvisibility=hidden"]
        cuda_flags += [f"-D{macro}={value}" for macro, value in macros.items()]
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


@_functools.cache
def _function(name, build, tf32):
    types = [_NUMBERS.get(kind, _Tensor) for kind in _LAUNCHERS[name].values()]
    address = _ctypes.c_void_p.in_dll(_library(build, tf32), f"cell_{name}").value
    return _ctypes.CFUNCTYPE(_ctypes.c_char_p, _ctypes.c_void_p, *types)(address)


def _launch(name, given, shapes=(), build=None):
    """Runs a launcher with what is given by its parameters' names, and adds what it writes: of these shapes, else of so many elements as the
    function <name>_size says. Returns what it returns."""
    values, build, copies = [], build or name, []
    for each, kind in _LAUNCHERS[name].items():
        dtype = _dtype_of(kind)
        if each not in given and each == "stream":
            given[each] = torch.cuda.current_stream().cuda_stream
        elif dtype and each not in given:
            shape = shapes[each] if each in shapes else _launch(f"{each}_size", given, build=build)
            given[each] = given["x"].new_empty(shape, dtype=dtype)
        value = given[each] if each in given else _launch(each, given, build=build)
        if dtype and (value.dtype != dtype or not value.is_contiguous()):
            value, own = value.to(dtype, copy=True).contiguous(), value
            copies += [(own, value)] * (kind[:3] == "Out")  # running statistics
        elif kind[:3] == "In<" and value.data_ptr() % 16:
            value = value.clone()
        values.append(value)
    tf32 = given["tf32"] = given["tf32"] if "tf32" in given else _tf32()
    if problem := _function(name, build, tf32)(_ctypes.addressof(result := _ctypes.c_int64()), *values):
        raise RuntimeError(f"{name}: {problem.decode()}")
    [written.copy_(copy) for written, copy in copies]
    return result.value


def _run(given, saving):
    """What is given, and all that forward makes."""
    name = "forward_saving" if saving and "forward_saving" in _LAUNCHERS else "forward"
    x, y = given["x"], given["x"].new_empty(_result(given["x"].shape))
    step = len(x) if saving or not _SAMPLES else _SAMPLES
    for first in range(0, len(x), step):
        part, out = (t[first : first + step] for t in (x, y)) if step < len(x) else (x, y)
        made, reads_v = given | {"x": part, "y": out}, _LAUNCHERS[name].get("v", "")[:3] == "In<"
        if reads_v and "convolve" not in _LAUNCHERS:  # the library convolves
            made["v"] = torch.ops.aten.convolution(part, given["weight"], None, *_CONVOLUTION)
        elif "v" in _LAUNCHERS[name]:
            made["v"] = x.new_empty(_shape_of_v(part.shape))
            if reads_v:
                _launch("convolve", made)
        _launch(name, made, {} if saving else dict.fromkeys(_LAUNCHERS[name], 0))
    return made | {"x": x, "y": y}


@_functools.cache
def _shape_of_v(shape):
    x = torch.empty(shape, dtype=_DTYPE, device="meta")
    return torch.ops.aten.convolution(x, _GETTERS["weight"](_MADE), None, *_CONVOLUTION).shape


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers, names, *tensors):
        made = _run(dict(zip(names, tensors)) | numbers, saving=True)
        ctx.names, ctx.numbers = names, numbers
        ctx.like = {name: (made[name].shape, made[name].dtype) for name in names}
        ctx.like |= {"v": (_shape_of_v(made["x"].shape), _DTYPE)} if "v" in _GRADIENTS else {}
        kept = {name: t for name, t in made.items() if name in _KEPT and isinstance(t, torch.Tensor)}
        ctx.kept = [*kept]
        ctx.save_for_backward(*kept.values())
        return made["y"]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        if _CODE not in _TRAINS and not ctx.numbers["checked"]:
            raise RuntimeError("the formula was edited: edit its gradient and Model, too, and call check()")
        given = dict(zip(ctx.kept, ctx.saved_tensors)) | ctx.numbers | {"dy": dy}
        needs = dict(zip(ctx.names, ctx.needs_input_grad[2:]))
        shapes = {_GRADIENTS[name]: shape for name, (shape, _) in ctx.like.items() if name in _GRADIENTS}
        shapes |= {_GRADIENTS.get(name): 0 for name in ("x", "weight") if not needs[name]}
        wanted = {}  # by launcher, of its outputs
        for name in filter(_re.compile("backward").match, _LAUNCHERS):
            outputs = [each for each, kind in _LAUNCHERS[name].items() if kind[:4] == "Out<"]
            wanted[name] = {each for each in outputs if shapes.get(each, 1) != 0}, len(outputs)
        for name, (own, count) in wanted.items():
            others = [
                other for other, size in wanted.values() if own < other or own == other and size < count
            ]
            if own and not others:
                _launch(name, given, shapes)
        found = {name: given.get(_GRADIENTS.get(name)) for name in needs}
        if "v" in _GRADIENTS:
            operands = given[_GRADIENTS["v"]], given["x"], given["weight"], None, *_CONVOLUTION
            both = torch.ops.aten.convolution_backward(*operands, [needs["x"], needs["weight"], False])
            found["x"], found["weight"], _ = both
        found = [(found[name] if need else None, *ctx.like[name]) for name, need in needs.items()]
        return None, None, *[t if t is None else t.view(shape).to(dtype) for t, shape, dtype in found]


def _kind(t):
    plain = type(t) in (torch.Tensor, nn.Parameter)
    return (t.dtype, (*t.shape,)) if plain else "a number" if isinstance(t, (int, float)) and t == t else t


def _described(model, x):
    """What the kernels take for granted, by its name."""
    transformed = torch._C._are_functorch_transforms_active()
    yield "torch.func or forward-mode AD", transformed or torch.autograd.forward_ad._current_level >= 0
    capability = torch.cuda.get_device_capability(x.device) if _CHOSEN_FOR and not x.is_meta else ()
    in_tf32 = ", TF32" * (_CHOSEN_FOR[-4:] == "TF32" and _tf32())
    yield "the GPU", capability and "capability {}.{}".format(*capability) + in_tf32 or ""
    yield "autocast", torch.is_autocast_enabled(_DEVICE)
    yield "hooks on all modules", bool(nn.modules.module._has_any_global_hook())
    devices = {x.device}
    for path, module in model.named_modules():
        values, tensors = vars(module), module._parameters | module._buffers
        own = {}
        if path:
            own |= {"class": type(module), "forward": getattr(module.forward, "__func__", module.forward)}
            own["hooks"] = any([values[key] for key in _HOOKS])
        own |= {key: value for key, value in values.items() if key[0] != "_" and key != "training"} | tensors
        own |= {"tensors": (*tensors,)} if path else {}
        own |= {"training": module.training} if isinstance(module, _BatchNorm) else {}
        devices |= {t.device for t in tensors.values() if t is not None}
        for key, value in own.items():
            name = f"{path}.{key}".lstrip(".")
            yield name, _kind(value) if name in _VARYING or key in tensors else value
    yield "x", _kind(x[:1]) if x.dim() and len(x) else "without elements"
    yield "the device of all", x.device.type if len(devices) == 1 else devices


def _seen(model, x):
    """What `_described` looks at: objects that are to be the same, and what is to be equal."""
    same, alike = [], [x.dtype, x.device, x.shape[1:], bool(x.dim() and len(x)), type(x), _tf32()]
    alike += [torch._C._are_functorch_transforms_active(), torch.autograd.forward_ad._current_level]
    alike += [torch.is_autocast_enabled(_DEVICE), bool(nn.modules.module._has_any_global_hook())]
    for module in model.modules():
        values, tensors = vars(module), [*module._parameters.values(), *module._buffers.values()]
        same += [type(module), type(module).forward, *tensors]
        same += [value for key, value in values.items() if key != "_seen"]
        alike += [(t.dtype, t.device, t.shape) for t in tensors if t is not None]
        alike += [*module._parameters, *module._buffers, *[key for key in _HOOKS if values[key]]]
    return same, alike


def _checked(model, x):
    """The model's dropouts by their names, and its batch norms, where the kernels can stand for it."""
    same, alike = _seen(model, x)
    known = vars(model).get("_seen")
    if known and known[1] == alike and len(known[0]) == len(same) and all(map(_operator.is_, known[0], same)):
        return known[2:]
    dropouts = [(path, each) for path, each in model.named_modules() if isinstance(each, nn.Dropout)]
    if odd := [dropout.p for _, dropout in dropouts if not 0 <= dropout.p <= 1]:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {odd[0]}")
    found = dict(_described(model, x))
    for what, expected in _EXPECTED.items():
        if (own := found.get(what)) != expected:
            raise RuntimeError(f"ModelNew can't run: {what} is {own}, its kernels are for {expected}")
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm)]
    vars(model).pop("_seen", None)
    if all(map(_is_fixed, found.values())):  # others may change and stay the same objects
        vars(model)["_seen"] = same, alike, dropouts, norms
    return dropouts, norms


def _is_fixed(value):
    kinds = int, float, str, bytes, type(None), type, torch.dtype, torch.device, type(_is_fixed)
    return all(map(_is_fixed, value)) if isinstance(value, tuple) else isinstance(value, kinds)


class ModelNew(Model):
    """Model by the kernels above. Where they can't stand for it, a call raises RuntimeError and says why."""

    def __getstate__(self):  # without what was seen
        return {key: value for key, value in vars(self).items() if key != "_seen"}

    def forward(self, x):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"expected x to be a tensor, got a {type(x).__name__}")
        dropouts, norms = _checked(self, x)
        given = {"x": x} | {name: get(self) for name, get in _GETTERS.items()}
        [each.num_batches_tracked.add_(1) for each in norms if each.num_batches_tracked is not None]
        tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
        numbers = {name: t for name, t in given.items() if name not in tensors}
        numbers["checked"] = "checked" in vars(self)
        for path, dropout in dropouts:
            drops = dropout.training and dropout.p > 0
            numbers |= {name: dropout.p * drops for name in numbers if _ARGUMENTS.get(name) == f"{path}.p"}
            seed = torch.empty(int(drops), dtype=torch.int64, device=x.device).random_()
            numbers |= {"seed": seed, "number": 0 if drops else -1}
        with torch.cuda.device_of(x):
            if torch.is_grad_enabled() and any([t.requires_grad for t in tensors.values()]):
                return _Function.apply(numbers, [*tensors], *tensors.values())
            return _run(tensors | numbers, saving=False)["y"]


def check(batch_size=2, draws=3):
    """Compares y and gradients with Model's: an error above twice Model's raises. Then an edited formula trains."""
    kinds = (ModelNew, _DTYPE), (Model, _DTYPE), (Model, torch.float64)
    models = [each(*get_init_inputs()).to(_DEVICE, dtype) for each, dtype in kinds]
    for module in [module for model in models for module in model.modules()]:
        module.training = isinstance(module, _BatchNorm)  # nothing is dropped
    models[0].checked = True
    for same in zip(*[model.parameters() for model in models]):
        value = same[0] * (1 + torch.randn_like(same[0]) / 4) + torch.randn_like(same[0]) / 10
        [p.data.copy_(value) for p in same]
    x, found = torch.randn(batch_size, *_SIZES, dtype=_DTYPE, device=_DEVICE), []
    dy = torch.randn(_result(x.shape)).to(x)
    names = [f"{name}.grad" for name, _ in models[0].named_parameters()]
    for model in models:
        inputs = [x.to(next(model.parameters()).dtype, copy=True).requires_grad_(), *model.parameters()]
        y = model(inputs[0])
        found.append([y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype), materialize_grads=True)])
        with torch.no_grad():
            found[-1].append(model(inputs[0]))
        found[-1] += [t for t in model.buffers() if t.is_floating_point()]  # running statistics
    names += ["y without gradients", *[key for key, t in models[0].named_buffers() if t.is_floating_point()]]
    for name, *both, exact in zip(["y", "x.grad", *names], *found):
        ours, theirs, size = [float((t.double() - exact).norm()) for t in both] + [float(exact.norm())]
        print(f"{name}: error {ours:.1e}, Model's {theirs:.1e}, of {size:.1e}")
        if not ours <= 2 * theirs + 1e-6 * size:
            if draws > 1:  # a value near a bound may be rounded past it: what is wrong is so each time
                return check(batch_size, draws - 1)
            raise AssertionError(f"{name} is not Model's: its error is {ours:.1e}, Model's {theirs:.1e}")
    _TRAINS.add(_CODE)


with torch.device("meta"):
    _MADE = Model(*get_init_inputs()).to(_DTYPE)  # without memory
_result = _functools.cache(lambda shape: _MADE(torch.empty(shape, dtype=_DTYPE, device="meta")).shape)
_GETTERS = {name: _operator.attrgetter(path) for name, path in _ARGUMENTS.items()}
_KEPT = {"x", "weight"}.union(*[kinds for name, kinds in _LAUNCHERS.items() if name[:8] == "backward"])
_WHOLE = {name for kinds in _LAUNCHERS.values() for name, kind in kinds.items() if kind == "int64_t"}
_VARYING = {path for name, path in _ARGUMENTS.items() if name not in _WHOLE}  # numbers that may change
_EXPECTED = dict(_described(_MADE, torch.empty(1, *_SIZES, dtype=_DTYPE, device="meta")))
_EXPECTED |= {"the device of all": _DEVICE, "the GPU": _CHOSEN_FOR}
