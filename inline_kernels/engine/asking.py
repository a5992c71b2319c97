"""What a forward asks of a value's type while it is traced: who asks, and by which words.

A proxy is no tensor, and says nothing of what it stands for. Where the user's code calls isinstance or hasattr, the frame's current instruction
says so, and what of; other ways to tell a proxy from a tensor are found in the code before it runs (`obstacle`).
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import itertools
import linecache
import operator
import sys
from typing import Any

import torch
from torch import fx

_OURS, _PYTHONS = {"torch", "inline_kernels"}, {"numpy", *sys.stdlib_module_names}
_CONTAINERS = {*dir(dict), *dir(list), *dir(str)}  # tensors don't have what only those have


def asker(frame) -> Any:
    """The user's frame that asks, through Python's own; torch.is_tensor's; or None: it is torch's or ours."""
    while frame is not None:
        if _home(frame) in _OURS and frame.f_code.co_name != "__instancecheck__":
            return frame if frame.f_code is torch.is_tensor.__code__ else None
        if is_users(frame):
            return frame
        frame = frame.f_back
    return None


def is_users(frame) -> bool:
    return _home(frame) not in _OURS | _PYTHONS


def is_pythons(frame) -> bool:
    return _home(frame) in _PYTHONS


def _home(frame) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def classes(frame) -> list[type] | None:
    """Those that isinstance is called with there, none where that isn't to be seen; None: something else asks, as what C++ does with arguments."""
    if frame.f_code is torch.is_tensor.__code__:
        return [torch.Tensor]
    if "isinstance" not in frame.f_code.co_names:
        return None
    call = _call(frame)
    if call is None:
        return []
    if getattr(call.func, "id", "") != "isinstance":
        return None
    try:
        return _classes(_valued(call.args[1], frame))
    except (LookupError, AttributeError, TypeError):
        return []


def asks_for(frame, name: str) -> bool:
    """Does hasattr, or getattr with a default, ask there for an attribute that may be missing?"""
    if not {"hasattr", "getattr"} & {*frame.f_code.co_names}:
        return False
    call = _call(frame)
    return call is None or (getattr(call.func, "id", ""), len(call.args)) in (("hasattr", 2), ("getattr", 3))


def surely_lacks(kind: type, name: str) -> bool | None:
    """Have values of that type no attribute of that name? None: an object may have been given one."""
    if hasattr(kind, name):
        return False
    return True if name in _CONTAINERS or not issubclass(kind, torch.Tensor) else None


def may_answer(asked: list[type], kind: type, proxy: type) -> bool:
    """Does isinstance answer for a proxy as for a value of that type, once its __class__ is that? Old types of torch's look into the tensor."""
    old = type(torch.FloatTensor)
    return bool(asked) and not any(
        isinstance(each, old) or issubclass(proxy, each) and not issubclass(kind, each) for each in asked
    )


_NO_CALL = ast.Call(ast.Constant(None), [], [])


def _call(frame) -> ast.Call | None:
    """The call that the frame is at, or one of nothing; None where that isn't to be seen: before Python 3.11, or without the source."""
    if not hasattr(frame.f_code, "co_positions"):
        return None
    first, last, start, end = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if None in (first, last, start, end):
        return None
    lines = [
        line.encode()
        for line in linecache.getlines(frame.f_code.co_filename, frame.f_globals)[first - 1 : last]
    ]
    if len(lines) != last - first + 1:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        found = ast.parse(b"".join(lines).decode().strip(), mode="eval").body
    except SyntaxError:
        return _NO_CALL
    return found if isinstance(found, ast.Call) else _NO_CALL


def _valued(node: ast.expr, frame) -> Any:
    """Of a name, attributes, and several of these."""
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if node.id in names:
                return names[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(_valued(node.value, frame), node.attr)
    if isinstance(node, ast.Tuple):
        return tuple(_valued(each, frame) for each in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return operator.or_(_valued(node.left, frame), _valued(node.right, frame))
    raise LookupError


def _classes(value: Any) -> list[type]:
    value = getattr(value, "__args__", value) if not isinstance(value, type) else value
    if isinstance(value, tuple):
        return [each for some in value for each in _classes(some)]
    if not isinstance(value, type):
        raise TypeError
    return [value]


# ---- what can't be seen once it runs
# Where they are called, which NULL says from Python 3.11 on.
_SEEN = {"isinstance", "hasattr"} if sys.version_info >= (3, 11) else set()


# What a proxy has and a tensor hasn't; tracing.py sees to the method keys.
_PROXYS = {*dir(fx.Proxy), "node", "tracer"} - {*dir(torch.Tensor), "keys"}


@functools.lru_cache(4096)
def obstacle(code) -> str | None:
    """What in a function's code may tell a proxy from what it stands for unseen; or None."""
    found = [
        each
        for each in dis.get_instructions(code)
        if each.opname not in ("CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG")
    ]
    for i, each in enumerate(found):
        if each.opname.startswith("MATCH_"):
            return "matches patterns"
        if each.argval == "__class__" and found[i - 1].argval != "self" and found[i + 1].argval != "__name__":
            return "reads __class__"
        if each.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        if each.argval == "callable" or each.argval in _SEEN and "NULL" not in each.argrepr:
            return f"names {each.argval}"
        if each.argval == "type" and not _is_harmless(found[i + 1 : i + 4]):
            return "compares type(…)"
    if {"hasattr", "getattr"} & {*code.co_names} and (asked := _PROXYS & {*filter(_is_text, code.co_consts)}):
        return f"asks for {min(asked)}"
    names = [each.argval for each in found if each.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    if "dtype" in names and any(_compares_attributes(found[i - 1], each) for i, each in enumerate(found)):
        return "compares dtypes by `is`"
    return None


def _is_harmless(behind: list) -> bool:
    """Is type called of self, or is its name all that is asked for?"""
    if (
        len(behind) < 3
        or not behind[0].opname.startswith("LOAD_FAST")
        or not behind[1].opname.startswith("CALL")
    ):
        return False
    return behind[0].argval == "self" or (behind[2].opname, behind[2].argval) == ("LOAD_ATTR", "__name__")


def _is_text(constant: object) -> bool:
    return isinstance(constant, str)


def _compares_attributes(before, instruction) -> bool:
    return instruction.opname == "IS_OP" and before.opname == "LOAD_ATTR"
