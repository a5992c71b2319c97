"""The models on a GPU under what people do with one: CUDA graphs, streams, several devices, profiles, tensors past 2³¹
elements, batches past a grid's limits, and memory that runs out.
"""

from __future__ import annotations

import copy
import itertools
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import inline_loader
import models
import numerics
from inline_kernels.bench import checks, honesty
from inline_kernels.engine import tiling
from numerics import DROPOUT, INSTANCE_NORM, MIN_ADD, POOL, every_name, results

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("most_fused")]
every_variant = pytest.mark.parametrize("variant", ["epilogue", "fused"])
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")


@pytest.fixture(autouse=True)
def leave_no_memory():
    """The tests run side by side."""
    yield
    torch.cuda.empty_cache()


def small(name, variant="epilogue", **options):
    """numerics.small, with gradients where it has them at ties alone."""
    model, x = numerics.small(name, variant, **options)
    numerics.ties(model, x)
    return model, x


def assert_close(ours, theirs, limit=1e-3):
    """Two answers of `results`, but for rounding. A gradient much smaller than the largest is all rounding."""
    largest = max(t.norm() for key, t in theirs.items() if key != "output")
    assert largest > 0, "there are gradients to compare"
    for key, value in theirs.items():
        assert (ours[key] - value).norm() <= limit * value.norm() + limit / 10 * largest * (
            key != "output"
        ), key


# ------------------------------------------------------------------------------------------------------------ CUDA graphs


def capture(run, *inputs):
    """A function of new values for `inputs` that replays one graph of run(*inputs), captured after a warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*inputs)

    def replay(*values):
        for place, value in zip(inputs, values):
            place.copy_(value)
        graph.replay()
        return tree_map(torch.clone, out)

    return replay


@every_variant
@every_name
@numerics.steady_library()
def test_graph_of_forward(name, variant):
    model, x = numerics.small(name, variant, device="cuda")
    new = numerics.twin_of(model, variant, x)
    with torch.no_grad():
        replay = capture(new, x.clone())
        for values in (x, x * 2, torch.rand_like(x)):
            assert torch.equal(replay(values), new(values))
        model.conv.weight.mul_(-1)
        assert torch.equal(replay(x), new(x)), "weights changed in place reach the graph"


@every_variant
def test_graph_draws_a_new_mask_at_each_replay(variant):
    model, x = numerics.small(DROPOUT, variant, device="cuda")
    new = numerics.twin_of(model.train(), variant, x)
    with torch.no_grad():
        replay = capture(new, x.clone())
        torch.cuda.manual_seed(7)
        masks = [replay(x) != 0 for _ in range(20)]
        assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 20
        share = torch.stack(masks).double().mean()
        assert abs(share - 0.8) < 6 * (0.16 / (20 * masks[0].numel())) ** 0.5
        torch.cuda.manual_seed(7)
        assert torch.equal(replay(x) != 0, masks[0]), "masks follow the generator"


@every_variant
@every_name
@numerics.steady_library()
def test_graphs_of_forward_and_backward(name, variant):
    """torch.cuda.make_graphed_callables, replayed with new data and new gradients."""
    model, x = small(name, variant, device="cuda")
    new = numerics.twin_of(model, variant, x)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(new), (x.clone().requires_grad_(),))
    for values in (x, torch.rand_like(x)):
        g = torch.randn_like(model(values))
        expected = results(new, values, g)
        numerics.assert_equal(results(graphed, values, g), expected)
    assert any(t.abs().max() > 0 for key, t in expected.items() if key != "output")


@every_variant
@numerics.steady_library()
def test_graph_of_a_training_pass_draws_new_masks(variant):
    """In train(): each replay's gradients are those of its own mask, which its output shows."""
    model, x = small(DROPOUT, variant, device="cuda")
    new, g = numerics.twin_of(model.train(), variant, x), torch.randn_like(model(x))
    replay = capture(lambda x: results(new, x, g), x.clone())
    masks = []
    for values in (x, x, x * 2, torch.rand_like(x)):
        ours = replay(values)
        masks.append(ours["output"] != 0)
        output, gradients, _ = checks.reference_of(model, values, "train_dx", g, masks[-1])
        assert_close(ours, {"output": output, **gradients})
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(masks, 2))


@every_name
@numerics.steady_library()
def test_graph_of_a_training_step(name):
    """Loss, gradients and optimiser in one graph: as many steps as eager's, with its gradients, to its parameters."""
    model, x = small(name, device="cuda")
    modules = [model, copy.deepcopy(numerics.twin_of(model))]
    optimisers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in modules]

    def step(index, x):
        module = modules[index]
        numerics.ties(module, x)  # a step undoes them
        optimisers[index].zero_grad(set_to_none=True)
        loss = module(x).square().mean()
        loss.backward()
        optimisers[index].step()
        return {"output": loss.detach(), **{key: p.grad for key, p in module.named_parameters()}}

    start = _flat(model)
    replay = capture(lambda x: step(1, x), x.clone())  # which takes one step
    step(0, x)
    for batch in (x, x * 0.5, torch.rand_like(x)):
        assert_close(replay(batch), step(0, batch))
    ours, theirs = _flat(modules[1]), _flat(modules[0])
    assert (ours - theirs).norm() <= 1e-2 * (theirs - start).norm()


def _flat(module):
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def test_loading_inside_a_capture_is_refused():
    """Building and loading would spoil the capture; the error says what to do, and afterwards all works."""
    source = """// in a capture
    __global__ void add_kernel(float* y, int64_t n) { if (threadIdx.x < n) y[threadIdx.x] += 1; }
    EXPORT void add(float* y, int64_t n, cudaStream_t stream) { add_kernel<<<1, 256, 0, stream>>>(y, n); }
    """
    y = torch.zeros(9, device="cuda")

    def run(y):
        inline_loader.load("add", source=source, device="cuda")(y, 9)
        return y

    with pytest.raises(
        inline_loader.BuildError,
        match="add .cuda. is not loaded yet, .* CUDA graph is captured: call .* once before",
    ):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run(y)
    replay = capture(run, y)
    assert torch.equal(replay(torch.zeros_like(y)), torch.ones_like(y))


# ------------------------------------------------------------------------------------------------------- the dropout mask


def dropping(variant, dtype=torch.float32):
    """A module in training whose gradients show its mask, as its output does, and its input."""
    model, x = small(DROPOUT, "fused", device="cuda", dtype=dtype)
    return numerics.twin_of(model.train(), variant, x), x


def mask_and_gradients(run, new, x):
    x = x.clone().requires_grad_()
    new.zero_grad()
    y = run(x)
    y.float().square().sum().backward()
    return [y != 0, x.grad, *[p.grad for p in new.parameters()]]


@every_variant
def test_dropout_draws_on_the_host(variant):
    """The generator's state moves on by one call, and no kernel runs beside ours."""
    new, x = dropping(variant)
    generator = torch.cuda.default_generators[x.device.index]
    with torch.no_grad():
        new(x)
        offset = generator.get_offset()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            new(x)
            torch.cuda.synchronize()
    assert generator.get_offset() == offset + 4
    names = [event.key for event in profile.key_averages() if event.device_type.name == "CUDA"]
    assert any(re.search(r"\b(planes|finish|apply)_kernel\b", name) for name in names), names
    assert not any("distribution" in name or "random" in name for name in names), names


@numerics.steady_library()
def test_dropout_masks_are_the_seed_s_alone():
    """In each dtype, with every variant, with gradients and without; and gradients are those of the mask."""
    found = []
    for variant in ("epilogue", "fused"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            new, x = dropping(variant, dtype)
            torch.manual_seed(11)
            mask, *gradients = mask_and_gradients(new, new, x)
            torch.manual_seed(11)
            again = mask_and_gradients(new, new, x)
            assert all(map(torch.equal, [mask, *gradients], again)) and gradients[-1].any()
            torch.manual_seed(11)
            with torch.no_grad():
                found += [mask, new(x) != 0]
                assert not torch.equal(new(x) != 0, mask), "another one at the next call"
    assert all(torch.equal(mask, found[0]) for mask in found)


@pytest.mark.parametrize("reentrant", [True, False])
@every_variant
@numerics.steady_library()
def test_checkpoint_draws_the_mask_again(variant, reentrant):
    new, x = dropping(variant)
    torch.manual_seed(5)
    expected, after = mask_and_gradients(new, new, x), new(x)
    torch.manual_seed(5)
    again = mask_and_gradients(lambda x: checkpoint(new, x, use_reentrant=reentrant), new, x)
    assert all(map(torch.equal, again, expected)) and not torch.equal(after != 0, expected[0])
    assert torch.equal(new(x), after), "computing anew leaves the generator as it was"


@every_variant
def test_dropout_between_captures_draws_on_the_host_again(variant):
    """What was decided for a module serves its calls under capture, whose replays draw on the device, and all others."""
    new, x = dropping(variant)
    with torch.no_grad():
        torch.manual_seed(7)
        calls = [new(x) for _ in range(2)]
        replay = capture(new, x.clone())
        masks = [replay(x) != 0, new(x) != 0, replay(x) != 0, new(x) != 0]
        assert not any(torch.equal(one, other) for one, other in itertools.combinations(masks, 2))
        torch.manual_seed(7)
        assert all(torch.equal(new(x), call) for call in calls)


# ------------------------------------------------------------------------------------------------------ streams and devices


@every_variant
@every_name
@numerics.steady_library()
def test_busy_side_stream(name, variant):
    """Input and gradient are written late on a side stream; what doesn't wait for them finds zeros."""
    model, x = small(name, variant, device="cuda")
    new, spoilt = numerics.twin_of(model, variant, x), x.clone()
    spoilt.view(-1)[-1] = torch.nan  # which a constant output shows, too
    for probe in (
        honesty.Probe(new, model, spoilt, "forward", None),
        honesty.Probe(new, model, x, "train_dx", torch.randn_like(model(x))),
    ):
        expected = probe.results()
        for cycles in honesty.SLEEPS:  # nobody knows how long launching takes
            found, began, returned = honesty.late_results(probe, cycles)
            if returned:
                break
        assert began and returned, "the stream was no longer busy"
        numerics.assert_equal(found, expected)


@every_variant
@every_name
@numerics.steady_library()
def test_two_streams_at_once(name, variant):
    """Kernels share no scratch memory, so calls may overlap."""
    model, x = numerics.small(name, variant, device="cuda")
    new, inputs = numerics.twin_of(model, variant, x), [x, x * 2]
    with torch.no_grad():
        expected = [new(each) for each in inputs]
        streams = [torch.cuda.Stream() for _ in inputs]
        torch.cuda.synchronize()
        answers = [[], []]
        for _ in range(50):
            for stream, each, answer in zip(streams, inputs, answers):
                with torch.cuda.stream(stream):
                    answer.append(new(each))
        torch.cuda.synchronize()
    assert all(torch.equal(t, right) for answer, right in zip(answers, expected) for t in answer)


@pytest.mark.parametrize("name", [INSTANCE_NORM, DROPOUT])
def test_threads_with_different_sizes(name):
    """Both run one build, each with another amount of shared memory, for which a kernel has one limit."""
    model, x = numerics.small(name, "fused", device="cuda")
    new, inputs = numerics.twin_of(model, "fused", x), [x, x[..., :-1].contiguous()]
    with torch.no_grad():
        expected = [new(each) for each in inputs]

    def run(call):
        with torch.no_grad():
            return torch.equal(new(inputs[call % 2]), expected[call % 2])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(1000)))


@two_gpus
@every_variant
@every_name
def test_second_gpu_while_the_first_is_current(name, variant):
    """The rule on cuda:1, in training and under compile, and the same mask as on cuda:0."""
    model, x = numerics.small(name, variant, device="cuda:1")
    new = numerics.twin_of(model, variant, x)
    assert torch.cuda.current_device() == 0 and new(x).device == x.device
    numerics.assert_rule(model, x, variant)
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
    with numerics.steady_library(), torch.no_grad():
        torch.testing.assert_close(compiled(x), new(x))
        other = numerics.twin_of(copy.deepcopy(model).to("cuda:0"), variant)
        new.train(), other.train()
        torch.cuda.manual_seed_all(3)
        assert torch.equal(new(x).cpu(), other(x.to("cuda:0")).cpu())


def _devices():
    return ["cpu", *(f"cuda:{index}" for index in range(1, torch.cuda.device_count()))]


@every_name
def test_input_on_another_device(name):
    """Eager's error."""
    model, x = numerics.small(name, device="cuda:0")
    for device in _devices():
        with pytest.raises(RuntimeError) as theirs:
            model(x.to(device))
        with pytest.raises(RuntimeError) as ours:
            numerics.twin_of(model, "auto")(x.to(device))
        assert str(ours.value) == str(theirs.value) and "cuda" in str(ours.value)


@pytest.mark.parametrize("variant", ["auto", "epilogue", "fused"])
@every_name
def test_parameter_on_another_device(name, variant):
    """Eager's error, whichever it is."""
    model, x = numerics.small(name, variant, device="cuda:0")
    new = numerics.twin_of(model, variant, x)
    for device, (key, parameter) in itertools.product(_devices(), model.named_parameters()):
        kept = parameter.data
        parameter.data = kept.to(device)
        with pytest.raises(RuntimeError) as theirs:
            model(x)
        with pytest.raises(RuntimeError) as ours:
            new(x)
        assert str(ours.value) == str(theirs.value), key
        parameter.data = kept
    assert new(x).isfinite().all()


@every_name
@numerics.steady_library()
def test_from_the_cpu_to_the_gpu_and_back(name):
    """Nothing that a call leaves behind stays on its device."""
    model, x = small(name, "fused")
    new = numerics.twin_of(model, "auto")
    before = results(new, x)
    there = results(new.to("cuda"), x.to("cuda"))
    assert all(t.is_cuda for t in there.values())
    assert_close({key: t.cpu() for key, t in there.items()}, before)
    numerics.assert_equal(results(new.to("cpu"), x), before)


# ----------------------------------------------------------------------------------------------------------- the profiler


@every_variant
@every_name
def test_profiler_shows_launchers_and_kernels(name, variant):
    model, x = numerics.small(name, variant, device="cuda")
    new = numerics.twin_of(model, variant, x)
    new(x).sum().backward()
    with torch.profiler.profile() as profile:
        new(x).sum().backward()
        torch.cuda.synchronize()
    keys = {event.key for event in profile.key_averages()}
    # Launchers are under the name of their source, a composed one's or the segment's, and the build's key.
    source = name if variant == "fused" else "tail_conv"
    forward, backward = (
        rf"{source}\w*_[0-9a-f]+::{kind}\w*" for kind in ("forward", r"\w*(backward|gradient)")
    )
    for launcher in (forward, backward, f"{numerics.operator_of(new, x, variant)[1].name}Backward"):
        assert any(re.fullmatch(launcher, key) for key in keys), keys
    texts = [path.read_text() for path in inline_loader.KERNELS.rglob("*.cu*")]
    kernels = {kernel for text in texts for kernel in re.findall(r"\b(\w+_kernel)\(", text)}
    assert kernels and any(re.search(rf"\b{kernel}\b", key) for kernel in kernels for key in keys), keys


TILES = """
#include "conv/narrow3d_tile.cuh"

using namespace conv::narrow3d;

EXPORT int64_t tiles(In<float> x, In<float> weight, int64_t own) {
  return convolution<Shape<float, 3, CHANNELS_OUT, 3, 3, 3>>(x, weight, int(own), false, x.size(0)).slots();
}
"""


def tiles_of_a_sample(x, weight):
    defines = {"CHANNELS_OUT": len(weight)}
    kernels = inline_loader.load("tiles", source=TILES, device="cuda", defines=defines)
    return kernels.tiles(x, weight.detach(), 3584)


@pytest.mark.parametrize("channels", [16, 32])
@pytest.mark.parametrize(
    "shape",
    [(32, 3, 16, 32, 32), (50, 3, 13, 29, 30), (2, 3, 9, 29, 30), (70, 3, 16, 32, 32), (100, 3, 16, 32, 32)],
    ids=str,
)
def test_instance_norm_meets_in_one_launch(shape, channels):
    """Where a block has a whole sample, or all blocks run at the same time; parts may be unequal. Else there are two launches."""
    model = numerics.build(INSTANCE_NORM, (3, channels, 3, (channels, 1, 1, 1), -1.0, 1.0), device="cuda")
    x = numerics.random_input(shape, device="cuda")
    numerics.assert_rule(model, x, "fused")
    new, slots = (
        numerics.twin_of(model, "fused", x),
        tiles_of_a_sample(x, model.conv.weight),
    )
    with torch.profiler.profile() as profile, torch.no_grad():
        new(x)
        torch.cuda.synchronize()
    (launched,) = [
        event.count
        for event in profile.key_averages()
        if "fused_kernel" in event.key and event.device_type.name == "CUDA"
    ]
    assert launched == (1 if slots == 1 or len(x) * slots <= tiling.device_properties(0)[2] else 2)


# ------------------------------------------------------------------------------------------------------------------- size

DEFAULT = {name: tuple(problem.init_inputs) for name, problem in models.PROBLEMS.items()}

# Constructor arguments, input and dtype; one of input, convolution and output has a little more than 2³¹ elements.
LARGE = {
    "min-add, output": (MIN_ADD, "epilogue fused", DEFAULT[MIN_ADD], (1100, 64, 128, 128), torch.float16),
    "min-add, input": (
        MIN_ADD,
        "epilogue fused",
        (128, 16, 1, 0.5, (16, 1, 1), 2.0),
        (1100, 128, 124, 126),
        torch.float16,
    ),
    "instance norm, convolution": (
        INSTANCE_NORM,
        "epilogue",
        DEFAULT[INSTANCE_NORM],
        (10700, 3, 16, 32, 32),
        torch.float16,
    ),
    "instance norm, input": (
        INSTANCE_NORM,
        "fused",
        DEFAULT[INSTANCE_NORM],
        (43700, 3, 16, 32, 32),
        torch.float32,
    ),
    "dropout, half": (DROPOUT, "epilogue fused", DEFAULT[DROPOUT], (2500, 3, 16, 64, 64), torch.float16),
    "dropout, output": (DROPOUT, "fused", DEFAULT[DROPOUT], (2500, 3, 16, 64, 64), torch.float32),
    "pool, convolution": (POOL, "epilogue", DEFAULT[POOL], (2120, 8, 128, 128), torch.float16),
    "pool, input": (POOL, "fused", DEFAULT[POOL], (16400, 8, 128, 128), torch.float16),
}


@pytest.mark.xdist_group("large")  # one after the other, for the memory's sake
@pytest.mark.parametrize(
    "case, variant",
    [(case, variant) for case, (_, variants, *_) in LARGE.items() for variant in variants.split()],
)
def test_more_elements_than_an_int_counts(case, variant):
    """Single samples, at both ends and around element 2³¹, against eager on those alone; forward, then the gradient of x."""
    name, _, arguments, shape, dtype = LARGE[case]
    if not _free_memory(40 << 30):
        pytest.skip("needs 40 GB of free GPU memory")
    model = numerics.build(name, arguments, device="cuda", dtype=dtype)
    if name == DROPOUT:
        model.min_value = 0.25  # not 0, so that what is kept can be told
        model.train()
    x = torch.empty(shape, dtype=dtype, device="cuda").uniform_()
    new = numerics.twin_of(model, variant, x)
    sizes = {
        count: 2**31 // count
        for count in (x[0].numel(), _convolved(model, x[:1]).numel())
        if count * len(x) > 2**31
    }
    samples = sorted(
        {
            0,
            len(x) // 2,
            len(x) - 1,
            *(at + step for at in sizes.values() for step in (-1, 0, 1) if at + step < len(x)),
        }
    )
    if name == DROPOUT:
        _check_large_dropout(new, x, samples)
        return _check_large_dropout_gradients(model, new, x, samples) if variant == "epilogue" else None
    with torch.no_grad():
        y = new(x)
        for i in samples:
            _assert_near(y[i : i + 1], model(x[i : i + 1]), i)
    if variant == "epilogue":
        del y
        (gradient,) = torch.autograd.grad(new(x.requires_grad_()).sum(), x)
        for i in samples:
            part = x.detach()[i : i + 1].requires_grad_()
            _assert_near(gradient[i : i + 1], torch.autograd.grad(model(part).sum(), part)[0], i, 0.2)
    assert sizes, "there is something large"


def _free_memory(size: int) -> bool:
    """Is there so much? Waits for the tests beside this one."""
    for _ in range(60):
        if torch.cuda.mem_get_info()[0] > size:
            return True
        time.sleep(1)
    return torch.cuda.get_device_properties(0).total_memory > 2 * size and pytest.fail(
        "the tests beside this one leave no memory"
    )


def _convolved(model, x):
    with torch.no_grad():
        return model.conv(x)[0]


def _assert_near(ours, theirs, sample, limit=0.02):
    distance, size = (ours.float() - theirs.float()).norm(), theirs.float().norm()
    assert distance <= limit * size, f"sample {sample}: {distance / size:.2g} of its norm away from eager's"


def _check_large_dropout(new, x, samples):
    """The results are constant but for NaN and the mask."""
    with torch.no_grad():
        for i in samples:
            x[i].view(-1)[-1] = torch.nan
        y = new(x)
        spoilt = (
            torch.cat([part.isnan().flatten(1).any(1) for part in y.split(64)]).nonzero().flatten().tolist()
        )
        assert spoilt == samples
        rest = [i for i in (1, *(at - 2 for at in samples[1:])) if i not in samples]
        kept = [y[i] != 0 for i in rest]
        assert all(abs(mask.float().mean() - 0.8) < 0.01 for mask in kept)
        assert len({tuple(mask.flatten()[:99].tolist()) for mask in kept}) == len(kept)
        assert all(
            y[i].unique().tolist() == [0, torch.tensor(0.25 / 0.8, dtype=y.dtype).item()] for i in rest
        )


def _check_large_dropout_gradients(model, new, x, samples):
    """Those of x and of the affine, a gradient coming in for `samples` alone: eager's on these, with the mask that the output shows."""
    numerics.ties(model, x)
    with torch.no_grad():  # in half the groups the convolution is zero, but not its gradient
        x.uniform_()[:, 0] = 0
        model.conv.weight[: model.norm.num_channels // 2, 0].normal_()
    affine = model.norm.weight, model.norm.bias
    model.requires_grad_(False).norm.requires_grad_()
    y = new(x.requires_grad_())
    dy = torch.zeros_like(y)
    dy[samples] = torch.randn_like(y[samples])
    dx, *ours = torch.autograd.grad(y, [x, *affine], dy)
    model.eval()
    theirs = [torch.zeros_like(t, dtype=torch.float) for t in affine]
    for i in samples:
        part, kept = x.detach()[i : i + 1].requires_grad_(), y.detach()[i : i + 1] != 0
        expected, *gradients = torch.autograd.grad(model(part), [part, *affine], dy[i : i + 1] * kept / 0.8)
        assert expected.any()
        _assert_near(dx[i : i + 1], expected, i)
        theirs = [total + gradient for total, gradient in zip(theirs, gradients)]
    for gradient, total in zip(ours, theirs):
        _assert_near(gradient, total, "all")


@every_variant
@every_name
@numerics.steady_library()
def test_more_samples_than_a_grid_dimension_counts(name, variant):
    """65 536 and more, forward and backward, against eager."""
    arguments, shape, _ = numerics.size_of(name, variant)
    model, x = numerics.build(name, arguments, device="cuda"), torch.rand(70000, *shape[1:], device="cuda")
    numerics.give_gradients(model, x)  # else there are some where rounding makes a tie
    new = numerics.twin_of(model, variant, x)
    g = torch.randn_like(model(x[:1])).expand(len(x), *model(x[:1]).shape[1:])
    assert_close(results(new, x, g), results(model, x, g), 1e-2)


@every_variant
@every_name
@numerics.steady_library()
def test_memory_that_runs_out(name, variant):
    """The error is raised at our call, and the next call works."""
    model, x = numerics.small(name, variant, device="cuda")
    new = numerics.twin_of(model, variant, x)
    expected, (_, total) = new(x), torch.cuda.mem_get_info()
    count = (512 << 20) // expected[0].nbytes  # of samples: twice what is left for their result
    large = x[:1].repeat(count, *[1] * (x.dim() - 1))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            new(large)
        assert torch.equal(new(x), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# ------------------------------------------------------------------------------------------------------------------ TF32


@pytest.mark.parametrize("draw", range(20))
def test_min_add_equals_eager_in_tf32(draw):
    """At the default size: operands are the same, only sums are rounded otherwise. Were ties rounded to even, the
    largest of 260 million differences would be 1.3e-4."""
    problem = models.PROBLEMS[MIN_ADD]
    torch.manual_seed(draw)
    model = problem.Model(*problem.get_init_inputs()).cuda().eval()
    x = torch.rand(128, *problem.get_inputs(batch_size=1)[0].shape[1:], device="cuda")
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        difference = numerics.twin_of(model, "fused", x)(x).sub_(model(x)).abs_()
    assert difference.max() <= 2e-5
