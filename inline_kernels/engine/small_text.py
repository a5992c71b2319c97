"""The text of a pass over small values: a block of threads makes those of a sample, of a channel, or all, and merges planes' parts of sums."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from .graph import Node
from .naming import TYPES, Names, total_of
from .pass_text import PassText, Scope, in_one_line
from .passes import PARTS, Key, Program, Small, Unsupported, of_positions

_SLICES = 32  # of a sample's channels, among blocks of a pass over small values, at most


class SmallText(PassText):
    def __init__(self, name: str, program: Program, names: Names, number: int):
        super().__init__(name, program, names, number)
        self.slices, self.over_all_channels, self.groups = 1, False, set()
        self.fresh: dict[Key, str] = {}  # of the planes' merged, those of this loop's turn

    def lines(self, each: Small) -> list[str]:
        index = {"sample": "n", "channel": "c"}.get(each.mode)
        body = [f"const int64_t {index} = block.index;"] if index else []
        self.made = set(self.targets)
        done: set[Key] = set()
        pending = list(self.targets)
        while pending:
            first = self._loop_of(pending[0], each.mode)
            together: list[Key] = []
            for key in pending:
                known = {*done, *together} if self._of_own_lanes(key, first) else done
                needs = self.program.small_needs(key)
                waits = [need for need in needs if need in self.made and need not in known]
                if self._loop_of(key, each.mode) == first and not waits:
                    together.append(key)
            self.made -= done
            body += self._loop(together, first)
            done |= set(together)
            pending = [key for key in pending if key not in together]
        if (
            each.mode == "sample"
            and self._loop_of(each.targets[0], each.mode) == "c"
            and self._may_be_sliced(body)
        ):
            body = [line.replace("block.each(C,", "block.each_channel(C,", 1) for line in body]
        used = [line for line in body if not line.startswith("const int64_t")]
        if index and not re.search(rf"\b{index}\b", "\n".join(used)):
            body.pop(0)
        return self._struct("Block", "const Block& block", body)

    def _may_be_sliced(self, body: Sequence[str]) -> bool:
        """May blocks share a sample's channels? Where all that a value is made of is of its group. Sets `slices`, how many at most."""
        heads = [line for line in body if line.startswith("block.each(")]
        if (
            self.program.on_cpu
            or self.over_all_channels
            or not all(h.startswith("block.each(C,") for h in heads)
        ):
            return False
        common = math.gcd(*self.groups) or _SLICES
        self.slices = max(n for n in range(1, _SLICES + 1) if common % n == 0)
        return self.slices > 1

    def _of_own_lanes(self, key: Key, axis: str) -> bool:
        """Are of values made in the same loop, along this axis, only those of its own turn read, which its lanes have?"""
        reducing = [
            n for n in self.program._inside(key.node) if n.op in ("sum", "group", "variance", "pick", "take")
        ]
        own = [n for n in reducing if n.op != "variance" and of_positions(n)]
        return key.what == "value" and (not axis or own == reducing)

    def _loop_of(self, key: Key, mode: str) -> str:
        """Over what a block's loop runs: "n", "c" or one turn."""
        space = self.program.arrays[key].space
        if mode == "one" and space.n and space.c:
            raise Unsupported("values of all samples' channels in one block")
        if mode == "sample":
            return "c" if space.c else ""
        if mode == "channel":
            return "n" if space.n else ""
        return "n" if space.n else "c" if space.c else ""

    def _loop(self, keys: list[Key], axis: str) -> list[str]:
        scope = Scope("small", "", "", "n", "c", [], None)
        self.fresh.clear()
        writes = []  # behind all that is read: no read waits for another's result
        for key in keys:
            array = self.program.arrays[key]
            to = self.pointer(array, written=True)
            at = f"{to} + {self.index(array.space, scope)}" if self.index(array.space, scope) != "0" else to
            if key.what == "value":
                text = scope.known[key.node] = self.value(key.node, scope)
            else:
                text = self.fresh[key] = self._merged(key, scope)
            writes.append(f"lanes.write({at}, {text});")
        scope.lines += writes
        count = self.number(axis.upper()) if axis else "1"
        head = f"block.each({count}, [&](int64_t{' ' + axis if axis else ''}, const auto& lanes) {{"
        return [head, *[f"  {line}" for line in scope.lines], "});"]

    def _merged(self, key: Key, scope: Scope) -> str:
        """A plane's parts together. Of moments the mean or m2; of a maximum the value or the place."""
        array = self.program.arrays[Key(PARTS[key.what], key.node)]
        parts, at_once = self.number(f"parts_{array.parts}"), key in self.program.of_all_samples
        index = scope.c if at_once else self.index(key.source.space._replace(level=""), scope)
        first = f"({index}) * {parts}" if " " in index else f"{index} * {parts}"
        name, samples = self.pointer(array), ""
        if at_once:  # how many, and how far apart
            samples = f", {self.number('N')}, {self.number('C')} * {parts}"
        if key.what == "sum":
            merged = f"lanes.merge({name} + {first}, {parts}{samples})"
            scope.lines.append(f"const double {total_of(key)} = {merged};")
            scope.known[key.node] = total_of(key)
            return total_of(key)
        known = f"{'plane' if PARTS[key.what] == 'moments' else 'largest'}{key.node.id}"
        line = f"const {TYPES[array.kind]} {known} = lanes.merge({name} + {first}, {parts}{samples});"
        if line not in scope.lines:
            scope.lines.append(line)
        return f"{known}.{key.what}"

    def _read_merged(self, key: Key, scope: Scope) -> str:
        if scope.kind == "small" and key in self.fresh:
            return self.fresh[key]
        array = self.program.arrays[key]
        return f"{self.pointer(array)}[{self.index(array.space, scope)}]"

    def _reduction(self, node: Node, scope: Scope) -> str:
        if of_positions(node):
            (merged, *_), of = self.program.merged(node), node.args[0]
            if merged.what != "mean":
                return self._read_merged(merged, scope)
            count = f"double({self._count('s', of.space.level)})"
            if Key("mean", of) in self.program.of_all_samples:
                count += f" * double({self.number('N')})"
            if node.op == "sum":
                return f"{count} * {self._read_merged(Key('mean', of), scope)}"
            return self._variance(node, scope, count)
        if node.op == "sum" and node.attr == "n" and of_positions(node.args[0]):
            if self.program.merged(node.args[0])[0] in self.program.of_all_samples:
                return self._reduction(node.args[0], scope)
        if node.op in ("sum", "group"):
            return self._lanes_sum([node.attr], scope, lambda inner: self.value(node.args[0], inner))
        if node.op == "variance":
            return self._variance(node, scope, "")
        if node.op in ("pick", "take"):
            self.over_all_channels = True
        if node.op == "pick":
            inner = self._lanes(scope, "c")
            term = self.value(node.args[0], inner)
            body = in_one_line([*inner.lines, f"return {term};"])
            word = "largest" if node.attr[1] > 0 else "smallest"
            return f"lanes.{word}({self.number('C')}, [&](int64_t c) {{ {body} }})"
        if node.op == "take":
            inner = self._lanes(scope, "c")
            place = self.value(node.args[1], scope)
            term = self.value(node.args[0], inner)
            body = in_one_line([f"const int64_t c = {place};", *inner.lines, f"return {term};"])
            return f"[&] {{ {body} }}()"
        raise Unsupported(f"{node.op} {node.attr} of small values")

    def _lanes(self, scope: Scope, axis: str) -> Scope:
        return Scope("lanes", "", "", "n", "c", [], scope, axis=axis)

    def _variance(self, node: Node, scope: Scope, count: str) -> str:
        """Of means and second moments of planes (Chan), or of small values, about the mean of all."""
        of, mean = node.args
        merged = ("s", "n") if Key("m2", of) in self.program.of_all_samples else ("s",)
        steps = [step for step in node.attr if step not in merged]

        def term(inner: Scope) -> str:
            about = self.value(mean, inner)
            if not count:
                return f"math::square({self.value(of, inner)} - {about})"
            own = f"{self._read_merged(Key('mean', of), inner)} - {about}"
            return f"{self._read_merged(Key('m2', of), inner)} + {count} * math::square({own})"

        total = term(scope) if not steps else self._lanes_sum(steps, scope, term)
        counts = [self._count("group", s) if isinstance(s, int) else self.number(s.upper()) for s in steps]
        divisor = " * ".join([count] * bool(count) + [f"double({each})" for each in counts])
        return f"({total}) / ({divisor})"

    def _lanes_sum(self, steps: list, scope: Scope, term) -> str:
        self.over_all_channels |= "c" in steps
        self.groups |= {step for step in steps if isinstance(step, int)}
        if len(steps) == 1:
            axis = "c" if isinstance(steps[0], int) else steps[0]
            inner = self._lanes(scope, axis)
            text = term(inner)
            lines = in_one_line([*inner.lines, f"return {text};"])
            if isinstance(steps[0], int):
                size = f"({self.number('C')} / {steps[0]})"
                own = f"{scope.c} / {size} * {size}"
                return f"[&] {{ const int64_t first = {own}; return lanes.sum({size}, [&](int64_t i) {{ const int64_t c = first + i; {lines} }}); }}()"
            return f"lanes.sum({self.number(axis.upper())}, [&](int64_t {axis}) {{ {lines} }})"
        if set(steps) <= {"n", "c"}:
            inner = self._lanes(scope, "n")
            inner = self._lanes(inner, "c")
            text = term(inner)
            lines = in_one_line([*inner.parent.lines, *inner.lines, f"return {text};"])
            N, C = self.number("N"), self.number("C")
            return (
                f"lanes.sum({N} * {C}, [&](int64_t i) {{ const int64_t n = i / {C}, c = i % {C}; {lines} }})"
            )
        raise Unsupported(f"statistics over {steps}")
