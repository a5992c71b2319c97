"""Rewriting by facts: each rule does what it is for, and value and gradients stay what they were."""

from __future__ import annotations

import pytest
import torch

from benchmarks.level2 import PROBLEMS
from fuzz_engine import random_program
from inline_kernels.engine.algebra import bounds, factored, reordered
from inline_kernels.engine.capture import capture
from inline_kernels.engine.graph import BY_CHANNEL, ELEMENTS, ONE, Facts, Graph, order
from reference_graph import Sizes, evaluate

N, C, POSITIONS = 2, 4, (9, 7)


@pytest.fixture
def graph():
    return Graph(dimensions=2)


def z_of(graph):
    return graph.leaf("z", ELEMENTS, "z")


def check_equal(before, after, sizes):
    """Value and the adjoints of all leaves, on random values."""
    graph = before.graph
    dy = graph.leaf("dy", before.space, "dy")
    leaves = [n for n in order([before]) if n.op == "leaf"]
    given = {n.attr[0]: torch.randn(sizes.shape(n.space), dtype=torch.float64) for n in (*leaves, dy)}
    for name, value in given.items():
        if name.endswith("running_var"):
            given[name] = value.abs()
    found = []
    for y in (before, after):
        adjoints = graph.adjoints(y, dy, leaves)
        roots = [a if a is not None else graph.const(0.0) for a in adjoints]
        values = evaluate([y, *roots], given, sizes)
        found.append([v.expand(sizes.shape(n.space)) for v, n in zip(values, [y, *leaves], strict=True)])
    for got, want in zip(found[1], found[0], strict=True):
        assert (got - want).norm() <= 1e-8 * max(want.norm(), 1e-2 * found[0][0].norm(), 0.1)


def at_elements(y):
    return {n.op for n in order([y]) if n.space.level == "e" and n.op not in ("leaf", "pick")}


def rewritten(y):
    (after,) = reordered([y])
    check_equal(y, after, Sizes(y.graph, N, C, POSITIONS))
    return after


@pytest.mark.parametrize("sign", [1, -1])
def test_monotone_functions_come_after_a_pool(graph, sign):
    w = graph.level("e", (2, 3))
    bias = graph.leaf("bias", BY_CHANNEL, "parameter")
    u = (z_of(graph) + bias).apply("tanh") * -2.0
    after = rewritten(graph.extreme(w, (1.0 - u).apply("clamp", -0.5, 2.5) + bias, sign))
    assert at_elements(after) == set()
    # By channels, what varies with the channel stays before.
    assert at_elements(rewritten(graph.extreme("c", u.apply("exp"), sign))) == {
        "add",
        "take",
        "exp",
        "mul",
        "tanh",
    }


def test_the_sign_of_a_factor_is_seen_at_the_call(graph):
    w = graph.level("e", (2, 2))
    scale, gamma = graph.leaf("scale", ONE, "scalar"), graph.leaf("gamma", BY_CHANNEL, "parameter")
    z = z_of(graph)
    for sign in (1, -1):
        after = rewritten(graph.extreme(w, (z.apply("tanh") * scale + 1.0) * gamma - gamma, sign))
        assert at_elements(after) == {"neg", "where"}
    alone = graph.extreme(w, z.apply("mish") * scale, 1)
    assert reordered([alone]) == [alone], "nothing is gained"
    # A norm's slope has its weight's sign: the pool needs no statistics.
    mean = graph.mean(z, ("s",))
    norm = (z - mean) * (graph.variance(z, mean, ("s",)) + 1e-5).apply("rsqrt") * gamma
    pooled = graph.extreme(w, norm, 1)
    (index,) = (n for n in order([rewritten(pooled)]) if n.op == "pick")
    assert Facts([index], keeps=False).level[index.id] == 0


@pytest.mark.parametrize("picked", [False, True])
@pytest.mark.parametrize("steps", [("s",), ("s", "n"), ("s", 2)], ids=["instance", "batch", "group"])
def test_a_gradient_is_centred_before_it_is_divided_by_a_deviation(graph, steps, picked):
    """Else what is left of dy when its means are taken off is lost in the rounding of dy / σ."""
    z, gamma = z_of(graph), graph.leaf("gamma", BY_CHANNEL, "parameter")
    mean = graph.mean(z, steps)
    rstd = (graph.variance(z, mean, steps) + 1e-5).apply("rsqrt")
    y = ((z - mean) * rstd * gamma).apply("clamp", -1.0, 1.0)
    y = graph.extreme("c", y * gamma, 1) if picked else y
    adjoints = graph.adjoints(y, graph.leaf("dy", y.space, "dy"), [z, gamma])
    roots = factored(adjoints)
    sizes, nodes = Sizes(graph, N, C, POSITIONS), order(adjoints)
    given = {
        n.attr[0]: torch.randn(sizes.shape(n.space), dtype=torch.float64) for n in nodes if n.op == "leaf"
    }
    for got, want in zip(evaluate(roots, given, sizes), evaluate(adjoints, given, sizes)):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    centred, factor = roots[0].args
    assert roots[0].op == "mul" and factor is rstd
    of_dy = Facts(roots, keeps=True).of_dy
    for node in order([centred]):
        if node.op == "mul" and node.space.level and node.id in of_dy:
            assert rstd not in node.args and not any(a.op == "take" and a.args[0] is rstd for a in node.args)
    # Deviations are from the mean as it is, not as it is rounded.
    exactly = [n for n in order(roots) if n.op == "rest" or any(a.op == "rest" for a in n.args)]
    assert exactly
    # No more is computed at positions, and one sum less over them: what is left when parameters are taken out is the same.
    before, after = [nodes, [n for n in order(roots) if n not in exactly]]
    assert sum(bool(n.space.level) for n in after) <= sum(bool(n.space.level) for n in before)
    of_positions = [sum(n.op == "sum" and n.attr == "s" for n in each) for each in (before, after)]
    assert of_positions[1] == of_positions[0] - 1


def test_what_only_some_terms_have_stays(graph):
    z, x, dy = z_of(graph), graph.leaf("x", ELEMENTS, "input"), graph.leaf("dy", ELEMENTS, "dy")
    a, b = graph.mean(z, ("s",)), graph.mean(z * z, ("s",))
    for root in (
        dy * a + x,
        dy * a + dy * b,
        graph.sum("s", dy * x),
        graph.group(dy * a, 2),
        (dy * a).apply("exp"),
    ):
        assert factored([root]) == [root]
    assert factored([dy * a * b + x * b])[0] is (dy * a + x) * b
    assert factored([dy * a - x * a])[0] is (dy - x) * a
    by_channel = graph.leaf("by_channel", BY_CHANNEL, "parameter")
    assert factored([dy * by_channel - x * by_channel])[0] is dy * by_channel - x * by_channel
    assert factored([graph.sum("s", dy * x * by_channel)])[0] is graph.sum("s", dy * x) * by_channel
    assert factored([graph.sum("c", dy * by_channel)])[0] is graph.sum("c", dy * by_channel)
    small = graph.sum("s", dy) * a  # which no position is multiplied for
    assert factored([z * (small * b) + small * b])[0] == z * (small * b) + small * b


def test_the_maximum_of_a_valley_is_at_an_end(graph):
    w = graph.level("e", (2, 2))
    after = rewritten(graph.extreme(w, (z_of(graph) - 0.5).apply("hardswish"), 1))
    assert at_elements(after) == set()
    least = graph.extreme(w, z_of(graph).apply("mish"), -1)
    assert reordered([least]) == [least]


def test_a_mean_behind_a_norm_needs_no_pass(graph):
    z, gamma = z_of(graph), graph.leaf("gamma", BY_CHANNEL, "parameter")
    u = z.apply("hardswish")
    mean = graph.mean(u, ("s", 2))
    normalised = (u - mean) * (graph.variance(u, mean, ("s", 2)) + 1e-5).apply("rsqrt") * gamma + gamma
    y = graph.sum("s", normalised) / graph.count("s", "e")
    moved = rewritten(y)
    assert [Facts([each], keeps=False).level[each.id] for each in (y, moved)] == [2, 1]
    # A sum that no earlier one gives is left as it is.
    plain = graph.sum("s", z.apply("tanh") + gamma)
    assert reordered([plain]) == [plain]


def test_bounds_leave_out_what_can_t_happen(graph):
    z = z_of(graph)
    t = z.apply("tanh")
    assert bounds(t * 2.0 - 1.0) == (-3.0, 1.0) and bounds(1.0 / (t + 2.0)) == (1 / 3, 1.0)
    assert bounds(t / t) == (-float("inf"), float("inf")) and bounds(-t.apply("relu")) == (-1.0, 0.0)
    assert "hardswish" not in at_elements(rewritten(t.apply("hardswish")))
    assert at_elements(rewritten(z.apply("relu").apply("leaky_relu", 0.1).apply("relu"))) == {"relu"}
    assert at_elements(rewritten(t.apply("clamp", -1.5, 1.5))) == {"tanh"}
    for kept in (t.apply("clamp", -1.0, 1.0), (t * 3.0).apply("hardswish"), (t + 1.0).apply("relu")):
        assert reordered([kept]) == [kept]


@pytest.mark.parametrize("number", PROBLEMS)
def test_the_33(number):
    torch.manual_seed(number)
    problem = PROBLEMS[number]
    model = problem.small_model()
    (segment,) = capture(model, True, len(problem.small_input_shape)).segments
    z = model.conv(torch.randn(problem.small_input_shape))
    (after,) = reordered(segment.outputs)
    check_equal(segment.outputs[0], after, Sizes(segment.graph, z.shape[0], z.shape[1], z.shape[2:]))
    rewritten_ones = {7, 23, 24, 27, 35, 43, 82, 85, 92}
    assert (after is not segment.outputs[0]) == (number in rewritten_ones)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed):
    model, x = random_program(seed)
    (segment,) = capture(model, model.training, x.dim()).segments
    z = model.conv(x)
    (after,) = reordered(segment.outputs)
    check_equal(segment.outputs[0], after, Sizes(segment.graph, z.shape[0], z.shape[1], z.shape[2:]))
