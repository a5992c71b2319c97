"""A problem as one file: what it may hold, that it computes what the reference does where nothing of ours can be imported, and that an edit
of the formula is what runs. Here are the cells of the variant `epilogue`; those of fused kernels have what test_cell.py asks for.
"""

import ast
import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import inline_loader
from inline_kernels.export import export
from inline_kernels.export import kernels as export_kernels
from inline_kernels.export import layout as export_layout
from inline_kernels.export import python as export_python
from inline_kernels.loader import units

ROOT = Path(__file__).resolve().parent.parent
NAMES = list(export.models.PROBLEMS)
DEVICES = "cpu", "cuda"
PUBLIC = {"Model", "ModelNew", "get_inputs", "get_init_inputs", "get_model"}
KERNELS = re.compile(r'r"""\n.*?"""', flags=re.S)
FORMULA = "THE FORMULA"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def of_cells(names: str, *devices: str):
    """A cell takes seconds to write, so all tests of one run in the same process."""
    group = pytest.mark.xdist_group
    values = {f"{name}-{device}": (name, device) for device in devices for name in NAMES}
    count = len(names.split(","))
    return pytest.mark.parametrize(
        names, [pytest.param(*value[:count], marks=group(key)) for key, value in values.items()]
    )


each_cell = of_cells("name, device", *DEVICES)

# Of the formula's line on a CPU, for the problems of this repository: a text in it, and what makes it another formula.
EDITS = {
    "conv2d_min_add_multiply": ("+ bias)", "- bias)"),
    "conv3d_multiply_instancenorm_clamp_multiply_max": ("* channel.m", "* channel.m + 1"),
    "conv3d_groupnorm_min_clamp_dropout": ("return clamp(", "return 2 * clamp("),
    "conv2d_groupnorm_scale_maxpool_clamp": ("clamp(", "1 + clamp("),
}

cell = functools.lru_cache(None)(lambda name, device: export.cell(name, device=device, variant="epilogue"))


def besides(text: str) -> str:
    """The file without the kernels' text."""
    return KERNELS.sub("''", text)


# ------------------------------------------------------------------------------------------------------- what a file holds


@each_cell
def test_defines_five_names_and_private_ones(name, device):
    defined = set()
    for node in ast.parse(cell(name, device)).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        else:  # it does nothing but define
            assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    assert {each for each in defined if not each.startswith("_")} == PUBLIC | {"torch", "nn"}


@each_cell
def test_short_and_plain(name, device):
    text = cell(name, device)
    assert len(besides(text).splitlines()) <= export.LINES
    assert text.count(FORMULA) == 2, "once in the kernels, once at the top"
    assert '#include "' not in text and text.startswith('"""y = ')
    kinds = {type(node) for node in ast.walk(ast.parse(text))}
    assert not kinds & {ast.Try, ast.Pass, ast.Global, ast.AsyncFunctionDef}
    assert not re.search(
        r"\b(pass|try|print|open|exec|eval|threading|_?sys\.(path|modules))\b", besides(text)
    )
    assert not re.search(r"\bpass\b", text)


@each_cell
def test_is_plain_python_for_ipython(name, device):
    manager = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager
    assert manager().transform_cell(cell(name, device)) == cell(name, device)


# What KernelBench looks for in a solution's text, comments taken off (its kernel_static_checker.py): errors of any kind.
FORBIDDEN = {
    "fallback": r"\btry\s*:|\bexcept\s*:|\bexcept\s+\w+|\bpass\b",
    "clock": r"(?:torch\.cuda\.(?:Event(?:\.\w+)?|synchronize)|time\.(?:perf_counter|time))\s*=",
    "thread": r"threading|multiprocessing|concurrent\.futures|(?:Thread|Process)PoolExecutor",
    "lazy tensor": r"_make_subclass|class\s+\w+.*\((?:torch\.)?Tensor\)|torch\.Tensor\.__new__",
    "stream": r"cuda\.Stream\s*\(|with\s+torch\.cuda\.stream|\.(?:wait|record)_stream\s*\(",
}


@each_cell
def test_static_rules(name, device):
    code = "\n".join(re.split("#|//", line)[0] for line in cell(name, device).split("\n"))
    assert {rule for rule, pattern in FORBIDDEN.items() if re.search(pattern, code)} == set()
    assert "load_inline" in code and (device == "cpu" or "__global__" in code)


def test_the_rules_bite():
    samples = {
        "fallback": "try:\n", "clock": "time.time = f", "thread": "import threading", "lazy tensor": "class A(Tensor):",
        "stream": "s = torch.cuda.Stream()",
    }  # fmt: skip
    assert (
        all(re.search(FORBIDDEN[rule], text) for rule, text in samples.items())
        and samples.keys() == FORBIDDEN.keys()
    )


@each_cell
def test_kernels_are_those_of_the_repository(name, device):
    """The lines of a source and of the headers that it includes; a header stands once in what is compiled together."""
    texts = "\n".join(KERNELS.findall(cell(name, device)))
    problem = export.models.PROBLEMS[name]
    suffix = "cu" if device == "cuda" else "cpp"
    sources = [problem.kernels / f"{stem}.{suffix}" for stem in (f"{name}_load", name)]
    source = next(each for each in sources if each.is_file())
    pending, seen = [source], set()
    while pending:
        path = pending.pop()
        seen.add(path)
        lines = path.read_text(encoding="utf-8").splitlines()
        names = [found for line in lines for found in re.findall(r'#include "([^"]+)"', line)]
        own = [source.parent / each for each in names]
        included = [path if path.exists() else inline_loader.KERNELS / each for path, each in zip(own, names)]
        pending += [each for each in included if each not in seen]
        code = [
            line for line in lines if "{" in line and not re.search(r"\bpass\b|The formula of|#include", line)
        ]
        missing = [line for line in code if line not in texts]
        assert not missing, (path.name, missing)
        ours = path.is_relative_to(inline_loader.KERNELS)
        title = str(path.relative_to(inline_loader.KERNELS)) if ours else path.name
        counts = [text.count(f" {title}\n") for text in KERNELS.findall(cell(name, device))]
        assert max(counts) == 1, f"{path.name} is nowhere twice"


def test_a_header_that_hangs_on_a_source_s_own_macro_is_not_shared(tmp_path):
    launcher = "// The formula of a.\n// The gradient of a.\nEXPORT void {}(float* y, int64_t n, cudaStream_t stream) {{}}\n"
    (tmp_path / "size.cuh").write_text("#ifndef SIZE\n#define SIZE 1\n#endif\nconstexpr int kSize = SIZE;\n")
    (tmp_path / "user.cuh").write_text('#include "size.cuh"\nconstexpr int kTwice = 2 * kSize;\n')
    (tmp_path / "other.cuh").write_text("constexpr int kOther = 1;\n")
    includes = '#include "other.cuh"\n#include "user.cuh"\n'
    (tmp_path / "a.cu").write_text(includes + launcher.format("f"))
    (tmp_path / "b.cu").write_text("#define SIZE 2\n" + includes + launcher.format("g"))
    texts = export_kernels.kernels(["a", "b"], "cuda", tmp_path)
    assert "kOther =" in texts[""] and not {"kSize =", "kTwice ="} & set(re.findall(r"k\w+ =", texts[""]))
    assert (
        texts["b"].index("#define SIZE 2") < texts["b"].index("kSize = SIZE") < texts["b"].index("kTwice =")
    )
    assert "kTwice =" in texts["a"]


# ------------------------------------------------------------------------------------------------------------ that it runs


def prepared(model, ties):
    """Nothing random in it; of dropout all elements tie, or some do."""
    if hasattr(model, "dropout"):
        model.eval()
        model.min_value = 0.25
        if ties:
            with torch.no_grad():
                model.norm.weight.zero_(), model.norm.bias.fill_(0.25)
    return model


def results(model, x, dy):
    """y and the gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy.to(y.dtype))
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def all_results(model, get_inputs, device):
    """Of inputs that hang on the seed alone, twice."""
    found = []
    for ties in (False, True):
        torch.manual_seed(4)
        [x] = get_inputs(batch_size=2, device=device)
        model.zero_grad()
        found.append(results(prepared(model, ties), x, torch.randn_like(model(x))))
    return found


RUN = """
import json, os, sys
import torch

NAME, DEVICE, EDIT, EXPECTED = json.loads(sys.argv[1])
text = open("cell.py", encoding="utf-8").read()


def pasted(text):
    namespace = {"__name__": "__main__"}
    before = list(sys.path), set(sys.modules)
    exec(text, namespace)
    assert sys.path == before[0] and not [each for each in set(sys.modules) - before[1] if "." not in each and each in ("models", "operators")]
    return namespace


names = pasted(text)
torch.manual_seed(3)
reference = names["Model"](*names["get_init_inputs"]())
torch.manual_seed(3)
model = names["get_model"](device=DEVICE)
for (name, p), (other, q) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
    assert name == other and torch.equal(p, q.cpu())
assert len(names["get_inputs"].__defaults__) == 2 and isinstance(model, names["ModelNew"])
for theirs, ours in zip(torch.load(EXPECTED), all_results(model, names["get_inputs"], DEVICE), strict=True):
    for number, (right, found) in enumerate(zip(theirs, ours, strict=True)):
        assert torch.equal(found, right.to(found)) and found.dtype == right.dtype, (number, float((found - right).abs().max()))
[x] = names["get_inputs"](batch_size=2, device=DEVICE)
y = model(x)
with torch.no_grad():
    assert torch.equal(model(x), y), "without a gradient"
if hasattr(model, "dropout"):
    model.train()
    with torch.no_grad():
        y = model(x)
    kept = float((y != 0).float().mean())
    assert abs(kept - 0.8) < 0.01 and torch.allclose(y[y != 0], torch.tensor(0.25 / 0.8, device=DEVICE))
    torch.manual_seed(9)
    first, second = model(x), model(x)
    torch.manual_seed(9)
    with torch.no_grad():
        assert torch.equal(model(x), first) and not torch.equal(first, second), "the mask follows the seed"
    model.eval()

messages = {}
for what, bad in {
    "sizes": lambda: model(x[..., 1:]),
    "dtype": lambda: model.double()(x.double()),
    "autocast": lambda: torch.autocast(DEVICE, dtype=torch.bfloat16).__enter__() and model.float()(x),
}.items():
    try:
        bad()
    except RuntimeError as error:
        messages[what] = str(error)
torch.set_autocast_enabled(DEVICE, False)
model.float()
assert messages.keys() == {"sizes", "dtype", "autocast"}, messages
assert all(text.startswith("ModelNew can't run: ") for text in messages.values()), messages

if EDIT:
    old, new = EDIT
    before = model(x).detach()
    lines = text.split("\\n")
    at = next(i for i, line in enumerate(lines) if "// THE FORMULA" in line) + 1
    assert old in lines[at], lines[at]
    edited = pasted("\\n".join([*lines[:at], lines[at].replace(old, new), *lines[at + 1 :]]))
    changed = prepared(edited["get_model"](device=DEVICE), False)
    changed.load_state_dict(model.state_dict())
    y = changed(x)
    assert not torch.allclose(y, before), "the edit is what runs"
    try:
        y.sum().backward()
    except RuntimeError as error:
        assert "edit the lines" in str(error), str(error)
    else:
        raise AssertionError("trained by the gradient of another formula")
    again = pasted(text)["get_model"](device=DEVICE)
    again.load_state_dict(model.state_dict())
    assert torch.equal(prepared(again, False)(x), before), "and the old text again"
    broken = pasted("\\n".join([*lines[:at], lines[at] + " nonsense;", *lines[at + 1 :]]))
    try:
        broken["get_model"](device=DEVICE)(x)
    except RuntimeError as error:
        assert f"cell:{at + 1}" in str(error) or f"cell({at + 1})" in str(error), str(error)[-2000:]
    else:
        raise AssertionError("nonsense compiled")
assert sorted(os.listdir(".")) == ["cell.py", "run.py"], "no files but the build"
print("fine")
"""


def run(folder, name: str, device: str, edit) -> None:
    """Runs the cell in a fresh process in an empty folder, where nothing of ours can be imported. Its results are those of the
    repository's model, bit for bit."""
    (folder / "empty").mkdir()
    problem = export.models.PROBLEMS[name]
    torch.manual_seed(3)
    torch.save(
        all_results(problem.get_model(device=device), problem.get_inputs, device), folder / "expected.pt"
    )
    (folder / "empty" / "cell.py").write_text(cell(name, device), encoding="utf-8")
    helpers = map(inspect.getsource, (prepared, results, all_results))
    (folder / "empty" / "run.py").write_text("\n\n".join(["import torch", *helpers, RUN]), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"TORCH_EXTENSIONS_DIR": str(folder / "builds")}
    command = [sys.executable, "run.py", json.dumps([name, device, edit, str(folder / "expected.pt")])]
    done = subprocess.run(command, cwd=folder / "empty", env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr[-3000:]


@of_cells("name", "cpu")
def test_runs_alone(name, tmp_path):
    run(tmp_path, name, "cpu", EDITS.get(name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_runs_alone_on_a_gpu(name, tmp_path):
    run(tmp_path, name, "cuda", None)


@of_cells("name", "cuda")
def test_says_that_it_is_for_another_device(name):
    namespace = {}
    exec(cell(name, "cuda"), namespace)
    with pytest.raises(RuntimeError, match="ModelNew can't run: x is on cpu, its kernels are for cuda"):
        namespace["get_model"]()(*namespace["get_inputs"](batch_size=1))


# ----------------------------------------------------------------------------------------------- what the kernels can't compute


def with_idle_launchers(text: str, found: dict) -> dict:
    """The names of a cell whose launchers do nothing: decisions alone, without a build. found: the builds it asks for, by name, each
    with its macros."""
    namespace = {}
    exec(text, namespace)
    names = re.findall(r"^EXPORT void (\w+)", text, flags=re.M)
    launchers = SimpleNamespace(**dict.fromkeys(names, lambda *arguments: None))

    def load(name, *x, **defines):
        found[name] = defines
        return launchers

    namespace["_load"] = load
    return namespace


def set_to(path: str, value):
    """A deviation: this attribute of a model becomes `value`."""
    *owner, last = path.split(".")
    return lambda model: setattr(model.get_submodule(".".join(owner)), last, value)


def put(path: str, make):
    """A deviation: make(what stands there) in the place of a submodule."""
    return lambda model: setattr(model, path, make(model.get_submodule(path)))


HOOKS = "forward_", "forward_pre_", "full_backward_", "full_backward_pre_"


def hooked(path: str, register: str):
    return lambda model: getattr(model.get_submodule(path), register)(lambda *given: None)


def kept_as(layer, **changes):
    """A layer of the same class, as a second model would be built with."""
    known = {"in_channels", "out_channels", "kernel_size", "num_groups", "num_channels", "num_features"}
    given = {key: value for key, value in vars(layer).items() if key in known}
    return type(layer)(**{**given, **changes})


def deviations(name: str) -> dict:
    """What makes a model another one than the kernels compute, each by itself."""
    problem = export.models.PROBLEMS[name]
    layers, dim = problem.ModelNew.submodules, len(problem.input_shape) - 2
    found = {
        "stride": set_to("conv.stride", (2,) * dim),
        "a stride of its own": put("conv", lambda conv: kept_as(conv, stride=2)),
        "padding": set_to("conv.padding", (1,) * dim),
        "a padding of its own": put("conv", lambda conv: kept_as(conv, padding="same")),
        "dilation": set_to("conv.dilation", (2,) * dim),
        "padding mode": set_to("conv.padding_mode", "reflect"),
        "another class": put("conv", lambda conv: torch.nn.Identity()),
        "no bias": set_to("conv.bias", None),
        "built without a bias": put("conv", lambda conv: kept_as(conv, bias=False)),
        "inner forward": set_to("conv._conv_forward", lambda x, weight, bias: x),
        "parametrization": lambda model: torch.nn.utils.parametrize.register_parametrization(
            model.conv, "weight", torch.nn.Identity()
        ),
    }
    for layer in layers:
        found |= {
            f"{layer}: forward": set_to(f"{layer}.forward", lambda x: x),
            **{f"{layer}: {kind}": hooked(layer, f"register_{kind}hook") for kind in HOOKS},
        }
    for constant, kind in problem.ModelNew.constants.items():
        if kind is float:
            found[f"{constant}: NaN"] = set_to(constant, float("nan"))
            found[f"{constant}: text"] = set_to(constant, "0.5")
            found[f"{constant}: a parameter"] = set_to(constant, torch.tensor(0.5, requires_grad=True))
    if norm := next((each for each, kind in layers.items() if kind is torch.nn.GroupNorm), None):
        found["groups"] = set_to(f"{norm}.num_groups", 4)
        found["no affine"] = put(norm, lambda norm: kept_as(norm, affine=False))
        found["no weight"], found["no shift"] = set_to(f"{norm}.weight", None), set_to(f"{norm}.bias", None)
    if "instance_norm" in layers:
        found["affine"] = put("instance_norm", lambda norm: kept_as(norm, affine=True))
        found["statistics"] = put("instance_norm", lambda norm: kept_as(norm, track_running_stats=True))
        found["tracking"] = set_to("instance_norm.track_running_stats", True)
        found["a weight"] = set_to("instance_norm.weight", torch.nn.Parameter(torch.ones(16)))
    if "maxpool" in layers:
        changes = {
            "stride": 2,
            "padding": 1,
            "ceil_mode": True,
            "dilation": 2,
            "return_indices": True,
            "kernel_size": 3,
        }
        found |= {f"pool: {key}": set_to(f"maxpool.{key}", value) for key, value in changes.items()}
    if "dropout" in layers:
        found["dropout: 2"] = set_to("dropout.p", 2.0)
        found["dropout: 2, not training"] = lambda model: set_to("dropout.p", 2.0)(model.eval())
    return found


@of_cells("name", "cpu")
def test_asks_at_each_call_whether_the_kernels_can_run(name):
    """Whatever a model was when it ran, and whoever ran before: what only eager can compute is refused, as ModelNew says."""
    namespace = with_idle_launchers(cell(name, "cpu"), {})
    [x] = namespace["get_inputs"](batch_size=1)
    plain, silent = namespace["get_model"](), []
    plain(x), plain.eval()(x)
    for what, deviate in deviations(name).items():
        used, fresh = namespace["get_model"](), namespace["get_model"]()
        used(x), used.eval()(x), used.train()
        for model in (used, fresh):
            deviate(model)
            try:
                model(x)
                silent.append(what)
            except RuntimeError as error:
                assert str(error).startswith("ModelNew can't run: "), what
    assert not silent
    plain(x)


@of_cells("name", "cpu")
def test_asks_at_each_call_what_stands_around_the_model(name, monkeypatch):
    namespace = with_idle_launchers(cell(name, "cpu"), {})
    [x] = namespace["get_inputs"](batch_size=1)
    model = namespace["get_model"]()
    with torch.no_grad():
        model(x)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="can't run: there are hooks on all modules"):
        model(x)
    handle.remove()
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="can't run: torch.func and forward-mode AD"):
            model(torch.autograd.forward_ad.make_dual(x, x))
    with torch.no_grad(), pytest.raises(RuntimeError, match="can't run: torch.func and forward-mode AD"):
        torch.func.vmap(model)(x[None])
    with torch.no_grad():
        model(x)
    kind = export.models.PROBLEMS[name].ModelNew.submodules["conv"]
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    with torch.no_grad(), pytest.raises(RuntimeError, match="can't run: conv has another forward"):
        model(x)


@of_cells("name", "cuda")
def test_a_torch_without_the_newer_setting_of_tf32(name, monkeypatch):
    """2.8 has no such getter: the older setting counts."""
    namespace = {}
    exec(cell(name, "cuda"), namespace)
    found = []
    for allowed in (True, False):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed), monkeypatch.context() as older:
            older.delattr(torch._C, "_get_fp32_precision_getter", raising=False)
            found.append(namespace["_described"](torch.ones(1))[-1])
    assert found == [(True, True), (True, False)]


# ------------------------------------------------------------------------------------------------------------ edited formulas


def below(text: str, mark: str) -> list[int]:
    """The lines below those with this mark, counted from 0."""
    return [i + 1 for i, line in enumerate(text.split("\n")) if f"// {mark}:" in line]


def edited(text: str, edits: dict) -> str:
    """`text` with each of these lines as its function makes it."""
    return "\n".join([edits.get(i, str)(line) for i, line in enumerate(text.split("\n"))])


@each_cell
def test_an_edited_formula_trains_with_an_edited_gradient_alone(name, device, monkeypatch):
    """Backward raises, and names the lines."""
    text = cell(name, device)
    [formula], gradient = below(text, "THE FORMULA"), below(text, "THE GRADIENT")
    another, longer = (lambda line: line + " another();"), (lambda line: line + "\n    another();")
    remark = lambda line: line.replace(" ", "  ") + "  // as it was /* here */"  # noqa: E731
    for edits in ({formula: remark}, {formula: another, gradient[-1]: another}, {gradient[0]: another}):
        train(with_idle_launchers(edited(text, edits), {}), device, monkeypatch)
    for edits in ({formula: another}, {formula: longer}, {formula: another, gradient[0]: remark}):
        changed = edited(text, edits)
        with pytest.raises(RuntimeError, match="formula has been edited, but not its gradient") as raised:
            train(with_idle_launchers(changed, {}), device, monkeypatch)
        named = [int(each) - 1 for each in re.findall(r"\d+", str(raised.value))]
        assert sorted(named) == below(changed, "THE GRADIENT")


def test_gradients_of_an_edited_formula_and_gradient(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    text = cell(NAMES[0], "cpu")
    signs = {
        "return (minimum(v + conv_bias, constant) + bias)": "return (minimum(v + conv_bias, constant) - bias)",
        "outer += gradient": "outer -= gradient",
        "outer[j] +=": "outer[j] -=",
    }
    for old, new in signs.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    exec(text, namespace := {})
    model, [x] = namespace["get_model"](), namespace["get_inputs"](batch_size=1)
    model(x).sum().backward()
    found = [model.bias.grad.clone(), model.conv.bias.grad.clone()]
    model.zero_grad()
    expected = (model.conv(x).clamp(max=model.constant_value) - model.bias) * model.scaling_factor
    assert torch.allclose(model(x), expected, atol=1e-5)
    expected.sum().backward()
    for ours, theirs in zip(found, (model.bias.grad, model.conv.bias.grad)):
        assert torch.allclose(ours, theirs, rtol=1e-4)


# --------------------------------------------------------------------------------------------------------------- the builds


def train(namespace: dict, device: str, monkeypatch, capability=(9, 0), shared=227 << 10) -> None:
    """Forward and backward of a cell whose launchers do nothing; on a GPU that isn't there."""
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], shared_memory_per_block_optin=shared, multi_processor_count=132,
        L2_cache_size=50 << 20,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    generator = SimpleNamespace(initial_seed=lambda: 3, get_offset=lambda: 8, set_offset=[12].index)
    monkeypatch.setattr(torch.cuda, "default_generators", {None: generator})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    place, batch_size = ("meta", 4) if device == "cuda" else (device, 1)
    model = namespace["get_model"](device=place)
    [x] = namespace["get_inputs"](batch_size=batch_size, device=place)
    if place == "meta":
        namespace["_obstacles"] = lambda *arguments: iter(())
    model(x.requires_grad_()).sum().backward()
    assert x.grad.shape == x.shape and all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@of_cells("name", "cuda")
def test_nvcc_compiles_what_the_cell_holds(name, tmp_path, monkeypatch):
    found = {}
    namespace = with_idle_launchers(cell(name, "cuda"), found)
    train(namespace, "cuda", monkeypatch)
    assert found.keys() == namespace["_BUILDS"].keys(), "every text is built, and nothing else"
    for build, defines in found.items():
        macros = "".join(f"#define {key} {value}\n" for key, value in defines.items())
        source = tmp_path / f"{build}.cu"
        source.write_text(macros + "".join(text for _, text in namespace["_BUILDS"][build]), encoding="utf-8")
        original = tmp_path / "original.cu"
        original.write_text(f'{macros}#include "{export.models.PROBLEMS[name].kernels / build}.cu"\n')
        same = machine_code(source) == machine_code(original)
        assert same, f"{build}: another code than the repository's source gives"


def machine_code(source: Path) -> list[str]:
    """What nvcc makes of each kernel of a CUDA source, in PTX, in any order, without the names of kernels and places."""
    include = f"{torch.__path__[0]}/include"
    command = [NVCC, "-ptx", "-arch=sm_90a", "-std=c++17", "--expt-relaxed-constexpr", "-DEXPORT="]
    command += [f"-I{each}" for each in (include, f"{include}/torch/csrc/api/include", inline_loader.KERNELS)]
    found = source.with_suffix(".ptx")
    done = subprocess.run([*command, "-o", str(found), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = re.findall(r"\.entry.*?\n\}\n", found.read_text(), flags=re.S)
    assert kernels
    return sorted(re.sub(r"\b_Z\w+|\$\w+", "name", kernel) for kernel in kernels)


COMPILER = """#!/bin/sh
case "$SIGNAL $*" in [A-Z]*" -c "*) kill -$SIGNAL $VICTIM; exit 1;; esac
exec c++ "$@"
"""
BUILD = """
import os, sys

names = {"__name__": "__main__"}
exec(open("cell.py", encoding="utf-8").read(), names)
model, [x] = names["get_model"](), names["get_inputs"](batch_size=1)
os.environ["VICTIM"] = str(os.getpid())
for signal in sys.argv[1:]:
    os.environ["SIGNAL"] = signal
    try:
        model(x)
    except (KeyboardInterrupt, RuntimeError) as error:
        print(type(error).__name__)
os.environ["SIGNAL"] = ""
print(tuple(model(x).shape))
"""


def test_an_interrupted_build_is_begun_anew(tmp_path):
    """Whether the notebook's process is killed, the cell is interrupted, or the compiler fails."""
    (tmp_path / "cell.py").write_text(cell(NAMES[0], "cpu"), encoding="utf-8")
    (tmp_path / "c++").write_text(COMPILER)
    (tmp_path / "c++").chmod(0o755)
    places = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "builds"), "CXX": str(tmp_path / "c++")}

    def build(*signals):
        command = [sys.executable, "-c", BUILD, *signals]
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **places}, capture_output=True, text=True, timeout=120
        )

    assert build("KILL").returncode == -9
    done = build("INT", "CONT")
    assert done.stdout.splitlines() == ["KeyboardInterrupt", "RuntimeError", "(1, 128, 126, 126)"], (
        done.stderr[-2000:]
    )


def test_flags_are_the_loader_s(monkeypatch):
    """The same optimisation, whoever builds."""
    name, given = NAMES[0], {}
    namespace = {}
    exec(cell(name, "cpu"), namespace)

    def load_inline(name, sources, cuda, **options):
        given.update(options)
        raise InterruptedError

    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", load_inline)
    with pytest.raises(InterruptedError):
        namespace["get_model"]()(*namespace["get_inputs"](batch_size=1))
    assert given["extra_cflags"] == list(units.unit_of(name, None, "cpu", {}).cflags)


# ---------------------------------------------------------------------------------------------------------------- the command


def test_command(tmp_path):
    def call(*arguments):
        command = [sys.executable, "export.py", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")

    done = call(NAMES[0])
    assert done.stdout == export.cell(NAMES[0], device="cuda", variant="fused")
    done = call(NAMES[0], "--device", "cpu", "-o", str(tmp_path / "a.py"))
    assert done.returncode == 0 and (tmp_path / "a.py").read_text(encoding="utf-8") == cell(NAMES[0], "cpu")
    done = call("nonsense")
    assert done.returncode == 1 and done.stderr.startswith("export.py: expected one of")
    done = call(NAMES[0], "--device", "cpu", "--variant", "fused")
    assert done.returncode == 1 and done.stderr.startswith("export.py: there is no fused variant of")


@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes(name):
    """Other cells than the defaults can be written, too."""
    text = cell(name, "cuda")
    assert FORMULA in text and "_fused" not in besides(text)
    halves = export.cell(name, device="cuda", variant="epilogue", dtype=torch.float16)
    assert "torch.float16" in besides(halves) and "half_t" in besides(halves)
    assert len(besides(text).splitlines()) <= export.LINES


# ------------------------------------------------------------------------------------------------------------- the functions


def doubled(a, times=2):
    return [each * times for each in a]


def outer(a, size, flag):
    """What is asked here: one of both. The rest is left out."""
    width = size[1]
    if flag:
        return doubled(a, times=1 + width)
    return doubled(a, 3)


def caller(a, size):
    return outer(a, (size, 4), False), outer(a, (size, 5), FLAG)


FLAG = True


def program(**bound) -> dict[str, str]:
    """What `caller` reaches, as text."""
    bound = {(__name__, name): value for name, value in bound.items()}
    definitions = export_python.Program(lambda module: module == __name__, bound, {}).build(caller)
    definitions = export_layout.tidied(definitions, "_caller")
    return {name: export_layout.source_of(node, docstrings=True) for name, node in definitions.items()}


def test_a_parameter_is_known_where_all_calls_agree():
    found = program()
    assert found["_caller"].endswith("return (_outer(a, (size, 4), False), _outer(a, (size, 5), True))")
    assert '"""What is asked here."""' in found["_outer"], "the first sentence, up to a colon"
    assert "if flag:" in found["_outer"] and "size" in found["_outer"]
    found = program(FLAG=False)
    assert found["_caller"].endswith("return (_doubled(a), _doubled(a))") and "each * 3" in found["_doubled"]


def test_what_is_known_is_computed():
    program = export_python.Program(
        lambda module: module == __name__, {}, {caller: {"size": export_python.Value(7)}}
    )
    program.build(caller)
    assert "size" not in ast.unparse(program.definitions["_caller"].body[-1])
    calls = {
        "sum(range(4))": "6",
        "time.time()": "time.time()",
        "x + 0": "x",
        "y and 1 < 2": "y",
        "y or 'no'": "y or 'no'",
    }
    for text, expected in calls.items():
        names = SimpleNamespace(__globals__={"__name__": __name__, "time": __import__("time")})
        specialiser = export_python._Specialiser(program, names)
        specialiser.local = {"x", "y"}
        node = specialiser.visit(ast.parse(text, mode="eval").body)
        written = ast.unparse(export_python._Writer(program).visit(node))
        assert written.replace("_time", "time") == expected


def test_a_branch_that_needs_what_a_cell_cannot_hold_raises():
    text = "def f(x):\n    if x:\n        return THING\n    return 1"
    exec(text, names := {"THING": object(), "__name__": __name__})
    names["f"].source = text
    definitions = export_python.Program(lambda module: module == __name__, {}, {}).build(names["f"])
    assert f"raise RuntimeError({export_python.NOT_HERE!r})".replace("'", '"') in ast.unparse(
        definitions["_f"]
    ).replace("'", '"')
    names["f"].source = "def f(x):\n    return THING"
    with pytest.raises(export_python.Missing, match="THING"):
        export_python.Program(lambda module: module == __name__, {}, {}).build(names["f"])


def test_others_functions_are_written_as_where_they_are_found():
    """A module may have one under a name of its own; what is found nowhere by its name, a method of some value, can't be written."""

    def written(value):
        text = "def f(x):\n    return OURS(x)"
        exec(text, names := {"OURS": value, "__name__": __name__})
        names["f"].source = text
        definitions = export_python.Program(lambda module: module == __name__, {}, {}).build(names["f"])
        return ast.unparse(definitions["_f"].body[-1])

    assert written(getattr(torch._C, "_get_cudnn_enabled", None)) == "return torch._C._get_cudnn_enabled(x)"
    assert written(os.path.basename) == f"return _{os.path.__name__}.basename(x)"
    assert written(len) == "return len(x)"
    for value in (
        [].append,
        functools.partial(len),
        SimpleNamespace(__name__="basename", __module__="posixpath"),
    ):
        with pytest.raises(export_python.Missing, match="OURS"):
            written(value)
