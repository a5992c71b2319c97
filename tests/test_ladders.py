"""A ladder of a lesson refuses what computes nothing, also where the right result is known beforehand."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

import models
import numerics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "notebooks"))
import walkthrough  # noqa: E402

AS_IN_ITS_LESSON = 0.25  # of the problem whose result is known beforehand: what it then is, by its lesson
CASES = [(name, None) for name in models.PROBLEMS] + [(numerics.DROPOUT, AS_IN_ITS_LESSON)]


@pytest.mark.parametrize("name, least", CASES)
def test_a_constant_is_no_rung(name, least, monkeypatch):
    problem = models.PROBLEMS[name]
    if least:
        arguments = (*problem.init_inputs[:4], least, *problem.init_inputs[5:])
        problem = dataclasses.replace(problem, init_inputs=arguments, cases=())
    monkeypatch.setattr(walkthrough, "status", lambda *_: print)
    monkeypatch.setattr(walkthrough.Ladder, "draw", lambda self: None)
    ladder = walkthrough.Ladder(problem, "cpu", batch=1)
    with torch.no_grad():
        size = ladder.model(ladder.x).shape

    class Cheat(problem.Model):
        """Looks at the sizes of x alone."""

        def forward(self, x):
            y = x.new_full(size, least or 0.0)
            return self.dropout(y) if least else y

    with pytest.raises(AssertionError, match="NaN" if least else "error|kept"):
        ladder.rung("Cheat", Cheat)


def test_all_rungs_stand_beside_one_eager(monkeypatch, capsys):
    """Factors are over the median of eager's times, quartiles are drawn, and a drift is said. On a GPU that can't run a rung, the recorded one is
    drawn; where all run, none is."""
    problem, drawn, said = models.PROBLEMS["conv2d_min_add_multiply"], [], []
    problem = dataclasses.replace(problem, input_shape=(1, 64, 18, 18))
    monkeypatch.setattr(walkthrough, "status", lambda *_: said.append)
    monkeypatch.setattr(walkthrough, "picture", lambda figure, **more: drawn.append(figure))
    ladder = walkthrough.Ladder(problem, "cpu", batch=1, cases=())
    for name, eager_ms in (("a", 8.0), ("b", 8.2), ("c", 10.0)):
        times = {"ms": 2.0, "low_ms": 1.6, "high_ms": 2.5, "eager_ms": eager_ms}
        monkeypatch.setattr(ladder, "_times", lambda contestant, times=times: times)
        ladder.rung(name, problem.Model)
        assert ("drifted by 25%" in capsys.readouterr().out) == (name == "c")
    assert "4.10 × eager" in said[-1]
    axis = drawn[-1].axes[0]
    assert [text.get_text() for text in axis.texts[:3]] == [
        "4.10× · 2 ms"
    ] * 3 and "eager 8.2 ms" in axis.get_title("left")
    [line, *_] = [each for each in axis.containers if hasattr(each, "has_xerr")]
    [segment] = line.lines[2][0].get_segments()
    assert segment[:, 0] == pytest.approx([8.2 / 2.5, 8.2 / 1.6]) and "quartiles" in axis.get_xlabel()

    ladder.device = "cuda"  # a GPU, which can't run the next
    monkeypatch.setattr(walkthrough, "measured", lambda device: "a GPU")
    monkeypatch.setattr(walkthrough, "_machine", lambda device: "a GPU")
    monkeypatch.setattr(ladder, "_peers", dict)
    ladder.draw()
    assert len(drawn[-1].axes) == 1
    last = ladder.recorded["rows"][-1]["name"]
    ladder.rung(last, None)
    assert said[-1] == f"{last}: this GPU can’t run it"
    assert [label.get_text() for label in drawn[-1].axes[1].get_yticklabels()] == [last]


# --------------------------------------------------------------------------- a result that is known, and what it hides

LESSON = Path(walkthrough.__file__).parent / "83_conv3d_groupnorm_min_clamp_dropout.ipynb"
PLAIN = "y[i] = tail(y[i] * channel.slope + channel.shift);"


@pytest.fixture(scope="module")
def lesson():
    """What the lesson's cells have defined as far as its ladder, which is of one sample, of a sixteenth of the size."""
    problem = models.PROBLEMS[numerics.DROPOUT]
    *sizes, depth, height, width = problem.input_shape
    problem = dataclasses.replace(problem, input_shape=(*sizes, depth, height // 4, width // 4))
    cells = {cell["id"]: cell["source"] for cell in json.loads(LESSON.read_text(encoding="utf-8"))["cells"]}
    names = {"walkthrough": walkthrough, "problem": problem, "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(walkthrough, "roofs", lambda device: {"memory": 1.0, "float32": 1.0})
        patch.setattr(walkthrough, "passes", lambda variants: None)
        patch.setattr(walkthrough, "status", lambda *_: print)
        patch.setattr(walkthrough.Ladder, "draw", lambda self: None)
        patch.setenv("LESSON_BATCH", "1")
        for each in ("passes", "choice", "paste", "paste-model", "hand", "ladder"):
            exec(cells[each], names)
        yield names


def test_a_rung_shows_what_a_known_result_hides(lesson):
    """Of a naive kernel, and of what is shipped."""
    ladder = lesson["ladder"]
    for module in (lesson["ModelNew"], ladder.problem.ModelNew.from_eager(ladder.model)):
        assert ladder.rung("naive", module)["ok"]


def test_what_computes_nothing_is_no_rung_of_a_known_result(lesson):
    """A model that has a NaN of x in its result, and no convolution nor norm; and kernels that do the same, with `parts`, without the convolution,
    or with another class's parts."""
    ladder, Honest, build = lesson["ladder"], lesson["ModelNew"], lesson["build"]

    class Cheat(ladder.problem.Model):
        def forward(self, x):
            spoilt = 0 * x.sum((1, 2, 3, 4), keepdim=True).view(-1, 1, 1, 1, 1)
            return self.dropout(
                x.new_full((len(x), 16, *(extent - 2 for extent in x.shape[2:])), 0.25) + spoilt
            )

    class CheatOfParts(Honest):
        def forward(self, x):
            return Cheat.forward(self, x)

    common, convolve, finish, frame = Honest.parts
    assert PLAIN in finish
    nothing = finish.replace(PLAIN, "y[i] = tail(0 * y[i] + tail.low);")

    class Constant(Honest):
        parts = common, convolve, nothing, frame
        kernels = build(*parts)

    class Borrowed(Honest):
        kernels = Constant.kernels

    class Unnormed(Honest):
        parts = common, convolve, finish.replace(PLAIN, "y[i] = tail(y[i]);"), frame
        kernels = build(*parts)

    for cheat, why in (
        (Cheat, "has no `parts`"), (CheatOfParts, "what the result hides"), (Constant, "what the result hides"),
        (Borrowed, "in one class"), (Unnormed, "what the result hides"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=why):
            ladder.rung(cheat.__name__, cheat)


def test_what_is_shipped_shows_by_its_gradients_that_it_computes(lesson, monkeypatch):
    ladder = lesson["ladder"]

    class Cheat(ladder.problem.ModelNew):
        """Right, and with gradients of everything, all zero, but for NaN."""

        def forward(self, x):
            touched = 0 * (x.sum((1, 2, 3, 4)) + sum(p.sum() for p in self.parameters()))
            size = len(x), 16, *(extent - 2 for extent in x.shape[2:])
            return self.dropout(x.new_full(size, 0.25) + touched.view(-1, 1, 1, 1, 1))

    monkeypatch.setattr(ladder, "problem", dataclasses.replace(ladder.problem, ModelNew=Cheat))
    with pytest.raises(AssertionError, match="gradient"):
        ladder.rung("shipped", Cheat.from_eager(ladder.model))
