"""Runs the notebooks, all at once, and keeps their outputs.

    python notebooks/execute.py [--into FOLDER] [NOTEBOOK ...]

With a GPU the repository's notebooks themselves get the outputs, with a stamp in their metadata (GPU, driver, torch, commit), and
benchmarks/results/ladders/ the ladders of kernels that they climbed, for readers without a GPU; --into takes all of it to the same
places below another folder, build/ where there is no GPU. Sources and cell ids stay as they are.

While a cell tagged `timed` runs, the other notebooks stand still: their processes are stopped, but for compilers that they started. Not for
longer than `PATIENCE` seconds, because one of them might hold a lock that the cell waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from inline_kernels.bench import records  # noqa: E402

NOTEBOOKS = ROOT / "notebooks"
RUNGS = "application/vnd.rungs+json"  # of walkthrough.Ladder
TIMED = "timed"  # the tag
PATIENCE = 15
LARGEST = 500_000  # bytes, of a notebook with outputs
STAMP = ("date", "gpu", "driver", "cpu", "torch", "cuda", "commit")


class Client(NotebookClient):
    """Runs a notebook; a timed cell by itself."""

    running: list[Client] = []
    turn = asyncio.Lock()
    timed = 0.0  # seconds in such cells
    at = ""  # the cell that runs

    async def async_execute_cell(self, cell, *arguments, **options):
        self.at = cell.id
        if self not in Client.running:
            Client.running.append(self)
        if TIMED not in cell.metadata.get("tags", ()):
            return await super().async_execute_cell(cell, *arguments, **options)
        async with Client.turn:
            start = time.perf_counter()
            others = [client for client in Client.running if client is not self]
            send(signal.SIGSTOP, others)
            limit = asyncio.get_running_loop().call_later(PATIENCE, send, signal.SIGCONT, others)
            try:
                return await super().async_execute_cell(cell, *arguments, **options)
            finally:
                limit.cancel()
                send(signal.SIGCONT, others)
                self.timed += time.perf_counter() - start


def send(number: int, clients: list[Client]) -> None:
    """Sends a signal to the processes of notebooks."""
    for client in clients:
        if client.km and client.km.has_kernel:
            os.kill(client.km.provisioner.pid, number)


async def execute(path: Path, into: Path, stamp: dict, gate: asyncio.Semaphore, seconds: float) -> bool:
    """Runs a notebook, for so many seconds at most, and writes it, as *.failed.ipynb if it fails; did it not?"""
    notebook, wrong = nbformat.read(path, as_version=4), None
    metadata = dict(notebook.metadata)
    client = Client(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}},
        record_timing=False, store_widget_state=False,
    )  # fmt: skip
    async with gate:
        start = time.perf_counter()
        limit = asyncio.get_running_loop().call_later(seconds, send, signal.SIGKILL, [client])
        try:
            await client.async_execute()
        except CellExecutionError as error:
            wrong = str(error)
        except Exception as error:  # whatever it is, the others are to be written
            wrong = f"{type(error).__name__} in cell {client.at}: it died, or its time was over"
        finally:
            limit.cancel()
            if client in Client.running:
                Client.running.remove(client)
    ladders = tidied(notebook, metadata, stamp)
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    size = len(text.encode())
    if size > LARGEST:
        wrong = wrong or f"{size:,} bytes with outputs, {LARGEST:,} are allowed"
    took = f"{time.perf_counter() - start:.0f} s, {client.timed:.0f} of them timed"
    print(f"{path.stem}: {took}, {size:,} bytes", wrong or "", flush=True)
    _write(into / "notebooks" / (f"{path.stem}.failed.ipynb" if wrong else path.name), text)
    for name, ladder in ladders.items():
        text = json.dumps(ladder, indent=1, ensure_ascii=False) + "\n"
        _write(into / "benchmarks" / "results" / "ladders" / f"{name}.json", text)
    return not wrong


def tidied(notebook: nbformat.NotebookNode, metadata: dict, stamp: dict) -> dict[str, dict]:
    """Takes out of a notebook that has run what changes from run to run, and the ladders, which it returns by their names."""
    ladders = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if RUNGS in data:
                found = data.pop(RUNGS)
                ladders[found.pop("name")] = stamp | found
            if "image/png" in data:
                data["image/png"] = compact(data["image/png"])
            if "text" in output:  # whether a kernel was built before
                output["text"] = re.sub(r"^inline_loader: .* cached\n", "", output["text"], flags=re.M)
        cell.get("metadata", {}).pop("execution", None)
        if "outputs" in cell:
            empty = {"text/plain": ""}, ""  # a status line that was taken away
            cell.outputs = [each for each in cell.outputs if each.get("data", each.get("text")) not in empty]
    notebook.metadata = metadata | {"stamp": stamp}
    return ladders


def compact(png: str) -> str:
    """A picture in base64 with 256 colours, which takes a third of the bytes and looks the same; or as it was, if that is smaller."""
    picture, small = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
    picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    return min(png, base64.b64encode(small.getvalue()).decode(), key=len)


async def run(paths: list[Path], into: Path, jobs: int, seconds: float) -> bool:
    """Did all of the notebooks run?"""
    stamp = {key: value for key, value in records.record([]).items() if key in STAMP}
    stamp["commit"] = stamp["commit"] or os.environ.get("COMMIT")
    gate = asyncio.Semaphore(jobs)
    return all(await asyncio.gather(*[execute(path, into, stamp, gate, seconds) for path in paths]))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the notebooks and keep their outputs.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all")
    parser.add_argument("--into", type=Path, default=ROOT if torch.cuda.is_available() else ROOT / "build")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="at once")
    parser.add_argument("--seconds", type=float, default=1800, help="at most, for each")
    options = parser.parse_args()
    paths = [path.resolve() for path in options.notebooks] or sorted(NOTEBOOKS.glob("*.ipynb"))
    return int(not asyncio.run(run(paths, options.into, options.jobs, options.seconds)))


if __name__ == "__main__":
    sys.exit(main())
