"""What the user sees of a build: its progress while it lasts, and its first error at the source's own line.

On a terminal and in a notebook progress is one line that is rewritten; in a log it is the line's first and last state.
"""

from __future__ import annotations

import contextlib
import html
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


class BuildError(RuntimeError):
    """A kernel could not be built. The message starts with the first error, at the source's own line.

    `log` is all that the compiler said and `log_path` the file that holds it ("" where no compiler ran).
    """

    def __init__(self, message: str, log: str = "", log_path: str = ""):
        super().__init__(message)
        self.log, self.log_path, self._log_is_shown = log, log_path, False

    def _repr_html_(self) -> str:
        style = "background: #fdecee; color: #8c0018; padding: 0.5em"  # its own background: pages are light or dark
        return f'<pre style="{style}">{html.escape(str(self))}</pre>{self._log_html()}'

    def _log_html(self) -> str:
        """The whole log, folded."""
        log = f"<details><summary>the compiler's log</summary><pre>{html.escape(self.log)}</pre></details>"
        return log if self.log else ""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback through this module; above it, in a notebook, the log."""
        if in_notebook() and self.log and not self._log_is_shown:  # IPython asks twice
            from IPython.display import HTML, display

            self._log_is_shown = True
            display(HTML(self._log_html()))
        return [f"BuildError: {self}"]


def at_line(origin: str, text: str, line: int, column: int | None, message: str) -> str:
    """`message` at a place of `text`, with the line and a caret under the column."""
    lines = text.splitlines()
    place = f"{origin}:{line}" + (f":{column}" if column else "")
    if not 0 < line <= len(lines):
        return f"{place}: error: {message}"
    caret = f"\n{'':5} | {' ' * (column - 1)}^" if column else ""
    return f"{place}: error: {message}\n{line:5} | {lines[line - 1].expandtabs()}{caret}"


GCC_ERROR = re.compile(
    r"^(?P<file>.+?):(?P<line>\d+):(?:(?P<column>\d+):)? (?:fatal )?error: (?P<message>.*)$", re.M
)
NVCC_ERROR = re.compile(
    r"^(?P<file>.+?)\((?P<line>\d+)\): (?:catastrophic )?error(?: #\S+)?: (?P<message>.*)\n(?P<code>.*)\n(?P<caret> *)\^",
    re.M,
)
NOTE = re.compile(r"^(?P<file>.+?):(?P<line>\d+):(?:(?P<column>\d+):)? ", re.M)


def first_error(log: str, text_of: Callable[[str], str | None]) -> str:
    """The first error of a compiler's log at its place in the user's source, and how many follow."""
    errors = sorted([*GCC_ERROR.finditer(log), *NVCC_ERROR.finditer(log)], key=re.Match.start)
    if not errors:
        lines = [
            line for line in log.splitlines() if re.search(r"error|Error: |fatal|undefined|ninja:", line)
        ]
        return "\n".join(lines[:3] or log.splitlines()[-3:])
    error = errors[0]
    message, groups = error["message"], error.groupdict()
    if text_of(error["file"]) is None:  # inside a library's header: say where the user's source led there
        place = next((note for note in NOTE.finditer(log) if text_of(note["file"]) is not None), None)
        if place:
            message, groups = f"{message} (in {error['file']}:{error['line']})", place.groupdict()
    text, line = text_of(groups["file"]), int(groups["line"])
    if text is None:  # a library's: its line may hold a macro that does not fit
        with contextlib.suppress(OSError):
            text = Path(groups["file"]).read_text(encoding="utf-8", errors="replace")
    text = text or ""
    column = int(groups["column"]) if groups.get("column") else None
    if groups.get("caret") is not None and 0 < line <= len(text.splitlines()):
        # nvcc prints the line, shifted, with a caret: find that column in the line itself.
        shown, own = groups["code"], text.splitlines()[line - 1]
        shift = len(own.expandtabs()) - len(own.expandtabs().lstrip()) - (len(shown) - len(shown.lstrip()))
        column = (
            len(groups["caret"]) + shift + 1 if shown.split() == own.split() else None
        )  # it expands macros
    more = f"\nand {len(errors) - 1} more" if len(errors) > 1 else ""
    return at_line(groups["file"], text, line, column, message) + more


def in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


class Status:
    """A line about one build while it lasts: rewritten in place on a terminal and in a notebook, its ends alone in a log."""

    _all: list[Status] = []
    _printing = threading.Lock()

    def __init__(self, what: str, estimate: float | None):
        self.what = what
        self.estimate = f" of about {estimate:.0f} s" if estimate else ""
        self.state = "compiling"
        self.notebook = in_notebook()
        self.handle = None

    def line(self) -> str:
        return f"{self.what}: {self.state}, {time.monotonic() - self.start:.1f} s"

    def __enter__(self) -> Status:
        self.start = time.monotonic()
        self.finished = threading.Event()
        self._all.append(self)
        self._print(
            f"{self.what}: {self.state}{self.estimate.replace(' of', ',', 1)} ...",
            last=not sys.stderr.isatty(),
        )
        if self.notebook or sys.stderr.isatty():
            threading.Thread(target=self._tick, daemon=True).start()
        return self

    def _tick(self) -> None:
        while not self.finished.wait(0.2):
            lines = (
                [self.line() + self.estimate]
                if self.notebook
                else [each.line() + each.estimate for each in self._all]
            )
            self._print(" | ".join(lines))

    def say(self, state: str) -> None:
        """The next state; a log gets a line of its own."""
        if state != self.state:
            self.state = state
            self._print(f"{self.what}: {state}", last=not sys.stderr.isatty())

    def _print(self, text: str, last: bool = False) -> None:
        with self._printing:
            if self.notebook:
                from IPython.display import display

                content = {"text/plain": f"inline_loader: {text}"}
                if self.handle is None:
                    self.handle = display(content, raw=True, display_id=True)
                else:
                    self.handle.update(content, raw=True)
            elif sys.stderr.isatty():
                width = shutil.get_terminal_size().columns - 1
                print(f"\r\033[K{text[:width]}", end="\n" if last else "", file=sys.stderr, flush=True)
            elif last:
                print(f"inline_loader: {text}", file=sys.stderr, flush=True)

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.finished.set()
        self._all.remove(self)
        if kind or self.state == "compiling":
            self.state = (
                "built" if kind is None else "failed" if issubclass(kind, Exception) else "interrupted"
            )
        self._print(self.line(), last=True)
