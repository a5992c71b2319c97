"""The command that writes one problem for one device as one file: python export.py NAME --device cuda -o cell.py"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import models
from inline_kernels.export import VARIANTS, cell


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a problem as one file.")
    parser.add_argument("name", metavar="NAME", help=f"out of {', '.join(models.PROBLEMS)}")
    parser.add_argument("--variant", choices=VARIANTS, help="default: fused on a GPU, epilogue on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: the standard output")
    arguments = parser.parse_args()
    try:
        text = cell(arguments.name, device=arguments.device, variant=arguments.variant)
    except (KeyError, ValueError) as error:
        sys.exit(f"export.py: {error.args[0]}")
    if arguments.output:
        Path(arguments.output).write_text(text, encoding="utf-8")
    else:
        sys.stdout.reconfigure(encoding="utf-8")
        print(text, end="")


if __name__ == "__main__":
    main()
