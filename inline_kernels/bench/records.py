"""A run's rows together with what they were measured on: what benchmarks/results/ keeps.

A record is a JSON file: the machine (GPU, driver, CPU, threads, torch, CUDA), the commit and whether the tree had changes, a hash of
the sources, the command, and `rows`, which compare.py describes.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from inline_kernels.loader.toolchain import cpu_name

ROOT = Path(__file__).resolve().parents[2]


def record(rows: list[dict]) -> dict:
    """The rows of one run together with what they were measured on."""
    gpu, (script, *arguments) = torch.cuda.is_available(), sys.argv
    if Path(script).resolve().is_relative_to(ROOT):
        script = str(Path(script).resolve().relative_to(ROOT))
    commit = output_of("git", "rev-parse", "HEAD") or None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", script, *arguments]),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": driver(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "allow_tf32": allows_tf32(),
        "commit": commit,
        "dirty": bool(output_of("git", "status", "--porcelain")) if commit else None,
        "sources": sources(),
        "rows": rows,
    }


def write(path: Path, rows: list[dict], **about) -> None:
    """about: what else is known of the whole run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | record(rows), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def driver() -> str | None:
    """The GPU driver's version."""
    drivers = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return drivers.split("\n")[0] or None


def allows_tf32() -> bool:
    """May a GPU's convolutions run TF32? By torch's newer setting where there is one: once it is set, reading
    the older may raise."""
    library = torch.backends.cudnn
    allowed = library.conv.fp32_precision == "tf32" if hasattr(library, "conv") else library.allow_tf32
    return allowed and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


def sources() -> str:
    """A hash of the code that a record depends on, to tell it where there is no git."""
    folders = (ROOT.glob("*.py"), (ROOT / "inline_kernels").rglob("*.py"), (ROOT / "kernels").rglob("*.*"))
    paths = sorted(path for paths in folders for path in paths)
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in paths)).hexdigest()[:16]


def output_of(*command: str) -> str:
    """What a command prints, or nothing."""
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
        return run.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
