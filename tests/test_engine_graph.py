"""The graph: nodes are shared, rewrites are exact, adjoints are autograd's, facts are what they say."""

from __future__ import annotations

import pytest
import torch

from inline_kernels.engine.graph import BY_CHANNEL, ELEMENTS, NONLINEAR, ONE, Facts, Graph, down_to, order
from reference_graph import Sizes, evaluate

N, C, POSITIONS = 3, 4, (5, 7)


@pytest.fixture
def graph():
    return Graph(dimensions=2)


def z_of(graph):
    return graph.leaf("z", ELEMENTS, "z")


def random_leaves(graph, roots, sizes, requires_grad=False):
    leaves = {}
    for node in order(roots):
        if node.op == "leaf":
            leaves[node.attr[0]] = torch.randn(sizes.shape(node.space), dtype=torch.float64)
    return leaves


def check_adjoints(graph, y, wanted):
    """Against autograd through the interpreter's own operations."""
    dy = graph.leaf("dy", y.space, "dy")
    sizes = Sizes(graph, N, C, POSITIONS)
    leaves = random_leaves(graph, [y, dy], sizes)
    adjoints = graph.adjoints(y, dy, wanted)
    got = evaluate([a for a in adjoints if a is not None], leaves, sizes)
    tracked = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    (value,) = evaluate([y], tracked, sizes)
    value.expand(sizes.shape(y.space)).backward(leaves["dy"])
    for node, gradient in zip([w for w, a in zip(wanted, adjoints) if a is not None], got):
        want = tracked[node.attr[0]].grad
        torch.testing.assert_close(gradient.expand(want.shape), want, rtol=1e-9, atol=1e-9)


def test_equal_nodes_are_one(graph):
    z = z_of(graph)
    assert (z + 1.0) is (z + 1.0)
    assert (z + 1.0) is not (z + 2.0)
    assert graph.const(0.0) is not graph.const(-0.0)
    assert (1.0 + z) is (z + 1.0)


def test_what_must_not_be_simplified(graph):
    z = z_of(graph)
    assert (z * 0.0).op == "mul", "NaN and infinities stay"
    assert (z + 0.0).op == "add", "-0.0 becomes 0.0"
    assert (z / 3.0).op == "div"
    assert (z / 2.0).op == "mul" and (z * 1.0) is z and (z - 0.0) is z and (-z).apply("neg") is z


def test_levels_are_named_by_what_they_are(graph):
    a, b = graph.level("e", (2, 2)), graph.level("e", (2, 3))
    assert (a, b) == ("w", "v") and graph.level("e", [2, 2]) == a
    with pytest.raises(ValueError, match="positive"):
        graph.level("e", (2, 0))
    assert graph.level("e", (2, 2), (2, 2), (0, 0)) == a and graph.levels[a].is_apart
    overlapping, padded = graph.level("e", (2, 2), (1, 2)), graph.level("e", (2, 2), padding=(1, 0))
    assert len({a, b, overlapping, padded}) == 4
    assert not graph.levels[overlapping].is_apart and not graph.levels[padded].is_apart
    with pytest.raises(ValueError, match="stride of 2 positive"):
        graph.level("e", (2, 2), (0, 1))
    with pytest.raises(ValueError, match="at most half"):
        graph.level("e", (3, 2), padding=(2, 0))
    with pytest.raises(ValueError, match="meet"):
        graph.sum(a, z_of(graph)) + z_of(graph)


OVERLAPPING = (
    ((3, 2), (2, 1), (1, 0)),
    ((2, 3), (1, 1), (0, 1)),
    ((2, 1), (3, 2), (0, 0)),
    ((3, 3), (1, 2), (1, 1)),
)


@pytest.mark.parametrize("axis", ["c", "s", [(2, 3)], [(None, 1)], *OVERLAPPING], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_extremes_stay_sparse(graph, axis, sign):
    axis = axis if isinstance(axis, str) else graph.level("e", *axis)
    bias = graph.leaf("bias", BY_CHANNEL, "parameter")
    u = (z_of(graph) + bias).apply("tanh") * bias
    y = graph.extreme(axis, u, sign) * 3.0
    check_adjoints(graph, y, [z_of(graph), bias])
    (dz,) = graph.adjoints(y, graph.leaf("dy", y.space, "dy"), [z_of(graph)])
    assert dz.op == "put" and Facts([dz], keeps=True).degree[dz.id] == 0


@pytest.mark.parametrize("steps", [("s",), ("s", "n"), ("s", 2), ("c",), ("s", "c")])
def test_norms(graph, steps):
    gamma = graph.leaf("gamma", BY_CHANNEL, "parameter")
    z = z_of(graph)
    mean = graph.mean(z, steps)
    y = (z - mean) * (graph.variance(z, mean, steps) + 1e-5).apply("rsqrt") * gamma
    check_adjoints(graph, y, [z, gamma])


def test_sums_and_windows(graph):
    z, bias = z_of(graph), graph.leaf("bias", BY_CHANNEL, "parameter")
    w = graph.level("e", (2, 2))
    rows = graph.level("e", (None, 1))
    means = graph.sum(w, z * bias) / graph.count("window", w)
    column = graph.upsample(graph.sum(rows, z.apply("exp")), rows)
    check_adjoints(graph, graph.sum("s", means.apply("tanh")) + bias, [z, bias])
    check_adjoints(graph, z / column + graph.sum("c", z), [z])
    check_adjoints(graph, graph.sum("c", graph.sum("s", graph.sum("n", z * z))), [z])


@pytest.mark.parametrize("windows", OVERLAPPING, ids=str)
def test_windows_that_overlap(graph, windows):
    z, w = z_of(graph), graph.level("e", *windows)
    check_adjoints(graph, graph.sum(w, z * z) / graph.count("window", w), [z])
    top = graph.extreme(w, z.apply("tanh"), 1)
    (dz,) = graph.adjoints(top, graph.leaf("dy", top.space, "dy"), [z])
    sizes = Sizes(graph, N, C, POSITIONS)
    leaves = random_leaves(graph, [top, dz], sizes)
    upsampled = graph.upsample(graph.leaf("dy", top.space, "dy"), w)
    sums = [dz, graph.total("s", dz), upsampled, graph.total("s", upsampled)]
    at_windows = graph.make("put", *dz.args, space=dz.space)
    sums += [at_windows, graph.total(w, at_windows), graph.take(dz.args[1], at_windows)]
    plain, of_plain, even, of_even, put, in_windows, taken = evaluate(sums, leaves, sizes)
    torch.testing.assert_close(plain.sum((2, 3), keepdim=True), of_plain)
    torch.testing.assert_close(even.sum((2, 3), keepdim=True), of_even)
    index = evaluate([dz.args[1]], leaves, sizes)[0].flatten(2)
    torch.testing.assert_close(put.flatten(2).gather(2, index).reshape(taken.shape), taken)
    every = evaluate([graph.make("sum", at_windows, attr=w, space=top.space)], leaves, sizes)[0]
    torch.testing.assert_close(every, in_windows)


def test_a_detached_value_has_its_path_s_adjoint(graph):
    z = z_of(graph)
    y = graph.detach(z.apply("exp"), path=z * 5.0)
    dy = graph.leaf("dy", y.space, "dy")
    (dz,) = graph.adjoints(y, dy, [z])
    assert dz is dy * 5.0
    assert graph.adjoints(graph.detach(z), dy, [z]) == [None]


def test_facts_of_a_norm(graph):
    z = z_of(graph)
    mean = graph.mean(z, ("s",))
    y = ((z - mean) * (graph.variance(z, mean, ("s",)) + 1e-5).apply("rsqrt")).apply("relu")
    dy = graph.leaf("dy", y.space, "dy")
    (dz,) = graph.adjoints(y, dy, [z])
    assert Facts([y], keeps=False).level[y.id] == 1, "one pass ends before"
    backward = Facts([dz], keeps=True)
    assert backward.level[dz.id] == 1
    assert backward.degree[dz.id] == 1 and backward.affine(dz) is not None
    kept = [backward.is_kept(node) for node in down_to([dz], backward.is_kept)]
    assert kept.count("small") == 2 and "window" not in kept


def test_facts_of_pointwise_tails(graph):
    z = z_of(graph)
    dy = graph.leaf("dy", ELEMENTS, "dy")
    for name, degree, want in (("relu", 0, {"mask"}), ("mish", NONLINEAR, {None}), ("neg", 0, set())):
        (dz,) = graph.adjoints(z.apply(name), dy, [z])
        facts = Facts([dz], keeps=True)
        assert facts.degree[dz.id] == degree and facts.level[dz.id] == 0
        kept = down_to([dz], lambda node: node is z or facts.is_kept(node))
        assert {facts.is_kept(node) for node in kept} == want, "None: z itself"


def test_affine_parts(graph):
    z, dy = z_of(graph), graph.leaf("dy", ELEMENTS, "dy")
    scale = graph.leaf("scale", ONE, "scalar")
    (dz,) = graph.adjoints(z * z * scale, dy, [z])
    facts = Facts([dz], keeps=True)
    assert facts.degree[dz.id] == 1 and facts.affine(dz) is None, "dy is not small"
    small = z * scale - dy
    assert Facts([small], keeps=True).affine(small) == (-dy, scale)
