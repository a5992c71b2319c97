"""How a launcher calls a mainloop with the sinks of a pass (sinks.py): for each mainloop the lines that plan it, and those that launch it."""

from __future__ import annotations

from collections.abc import Sequence

from .passes import Unsupported


def local(struct: str) -> str:
    """The name of a struct's value in the launcher."""
    return "conv::Identity{}" if struct.startswith("conv::") else struct.lower()


def _each(number: int, sinks: Sequence, stored: str = "conv::each_value<{}>") -> str:
    """The sinks' results one by one; what is stored by that function."""
    found = []
    for sink in sinks:
        tail, name = local(sink.tail), sink.array.name
        if sink.kind == "store":
            found.append(f"{stored.format(sink.element)}(values, {name}, {tail})")
        elif sink.kind == "channels":
            given = f"values, pointer<{sink.element}>({name}), {tail}, {local(sink.after)}, partial_{number}, blocks_{number}"
            found.append(f"reduce::each_position<{sink.reduction}>({given})")
        else:
            found.append(f"reduce::each_part<{sink.what}>(values, {name}, {tail}, parts_{number})")
    return f"conv::all_of({', '.join(found)})"


def _type(sink, space: str, store: str, taking: str = "") -> str:
    """taking: in place of `store` where it takes what another sink left."""
    if sink.kind == "store":
        return (taking if sink.takes else store).format(sink.element, sink.tail)
    if sink.kind == "channels":
        return f"{space}Channels<{sink.element}, {sink.reduction}, {sink.tail}, {sink.after}>"
    return f"{space}Positions<{sink.what}, {sink.tail}{', true' * sink.leaves}>"


def _value(number: int, sink, kind: str) -> str:
    tail, name = local("conv::Identity" if sink.takes else sink.tail), sink.array.name
    if sink.kind == "channels":
        return f"{kind}{{{name}, {tail}, {local(sink.after)}, partial_{number}}}"
    return f"{kind}{{{name}, {tail}}}"


def narrow2d(number: int, sinks: Sequence) -> tuple[list[str], list[str]]:
    strips, taking = "store::Strips<{0}, {1}>", "store::Strips<{0}, conv::Identity, false>"
    types = [_type(sink, "reduce::", strips, taking) for sink in sinks]
    planned = [
        f'static_assert(conv::narrow2d::kShared<Tile, {", ".join(types)}> <= SINKS_SHARED, "as it is planned");',
        f"const int64_t parts_{number} = geometry.tiles() * int64_t(geometry.strips);",
    ]
    given = ", ".join(_value(number, *each) for each in zip(sinks, types))
    return planned, [f"conv::narrow2d::exact<Tile>(x, weight, {_each(number, sinks)}, stream, {given});"]


def narrow3d(number: int, sinks: Sequence) -> tuple[list[str], list[str]]:
    stored = [sink for sink in sinks if sink.kind == "store"]

    def types(vectors: str) -> list[str]:
        runs, beside = f"store::Runs<{{1}}, {{0}}, {vectors}>", "store::Beside<{1}, {0}>"  # one has room
        taking = f"store::Runs<conv::Identity, {{0}}, {vectors}, false, false>"
        return [_type(s, "reduce::narrow3d::", beside if s in stored[1:] else runs, taking) for s in sinks]

    def launched(vectors: str) -> str:
        given = ", ".join(_value(number, *each) for each in zip(sinks, types(vectors)))
        return f"conv::narrow3d::exact(planes_{number}, {_each(number, sinks)}, stream, {given});"

    storage = f"conv::narrow3d::SharedStorage<Conv, {', '.join(types('true'))}, conv::narrow3d::Doubt>"
    planned = [
        f"const auto planes_{number} = conv::narrow3d::convolution<Conv>(x, weight, sizeof({storage}), true, N);",
        f"const int64_t parts_{number} = planes_{number}.slots();",
    ]
    if not stored:
        return planned, [launched("true")]
    fits = f"store::vectors_fit_runs(pointer<{stored[0].element}>({stored[0].array.name}), planes_{number})"
    return planned, [f"if ({fits}) {launched('true')}", f"else {launched('false')}"]


def wide(number: int, sinks: Sequence) -> tuple[list[str], list[str]]:
    """Of two sinks one that stores is what wide.cuh calls `keep`."""
    kept = [sink for sink in sinks if sink.kind == "store"][: len(sinks) - 1]
    sink, *more = [sink for sink in sinks if sink not in kept]
    if more:
        raise Unsupported("two sinks that store nothing")
    kind, keep = "store::Nothing", "store::Nothing{}"
    for each in kept:
        kind = f"conv::KeptRows<Build, {each.element}, {each.tail}>"
        keep = f"conv::kept_rows<Build, {each.element}>({each.array.name}, {local(each.tail)})"
    if sink.kind == "store":
        planned, out = [], f"conv::rows_of<Build, {sink.element}>({sink.array.name})"
    else:
        in_channels = sink.kind == "channels"
        to = (
            f"reduce::WideChannels<{sink.reduction}>"
            if in_channels
            else f"reduce::WidePositions<{sink.what}>"
        )
        planned = [
            f"using Loop_{number} = conv::ForwardMainloop<Build, {sink.tail}, {kind}, {to}>;",
            f"constexpr int64_t tile_{number} = Loop_{number}::kBySm90 ? 128 : 64;",
            f"const int64_t parts_{number} = e_H * ((e_W + tile_{number} - 1) / tile_{number});",
        ]
        out = f"{to}{{{f'partial_{number}' if in_channels else sink.array.name}}}"
    exact = f"[&](const conv::Doubts& doubts) {{ conv::exact(doubts, N, {_each(number, sinks)}, stream); }}"
    given = f"x, weight, {local(sink.tail)}, {keep}, {out}, largest, stream, {exact}"
    return planned, [f"conv::wide<Build>({given});"]


def stream(number: int, sinks: Sequence) -> tuple[list[str], list[str]]:
    def out(sink) -> str:
        if sink.kind == "store":
            return f"store::Positions<{sink.element}, RESULTS_LAST, ROUNDS_RESULT>{{{sink.array.name}}}"
        if sink.kind == "channels":
            return f"reduce::StreamChannels<{sink.reduction}>{{partial_{number}}}"
        return f"reduce::StreamPositions<{sink.what}>{{{sink.array.name}, int(parts_{number})}}"

    *more, last = sinks
    besides = "true" if more or last.kind != "store" else "Operands::kSplit"
    planned = [
        f"constexpr int columns_{number} = conv::stream_columns<Filter, {besides}>(COLUMNS);",
        f"const int64_t parts_{number} = conv::stream_parts(e_D * e_H * e_W, columns_{number});",
    ]
    of_more = [
        f"conv::Sunk<{each.tail}, decltype({out(each)})>{{{local(each.tail)}, {out(each)}}}" for each in more
    ]
    each = _each(number, sinks, "conv::each_stored<{}, RESULTS_LAST, ROUNDS_RESULT>")
    behind = f"[&](const conv::Doubts& doubts) {{ conv::exact(doubts, N, {each}, stream); }}"
    given = f"x, weight, walk, {local(last.tail)}, {out(last)}, {(*of_more, 'conv::NoSink{}')[0]}, largest, stream, {behind}"
    kind = "Filter, Operands, COLUMNS, CLUSTER, LEAD, SHARED_LIMIT, LAST, FOLDED"
    return planned, [f"conv::stream<{kind}>({given});"]
