"""The command that writes one model for one device as one file:

python export.py NAME -o cell.py                    # one of the repository's problems
python export.py my_model.py --device cuda -o cell.ipynb
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import models
from inline_kernels.export import cell_of, notebook


def main(arguments: list[str] | None = None) -> int:
    parser, arguments = (
        argparse.ArgumentParser(description="Write a model as one file."),
        arguments or sys.argv[1:],
    )
    names = ", ".join(models.PROBLEMS)
    parser.add_argument("model", metavar="NAME|FILE", help=f"out of {names}; or a Python file with Model, get_inputs and get_init_inputs, "
        "which is executed, in a child process")  # fmt: skip
    parser.add_argument("--variant", help="fused or epilogue; default: the most fused")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: what torch sees")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: the standard output")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in that child process
    options = parser.parse_args(arguments)
    if options.model not in models.PROBLEMS and not options.here:
        return abs(
            subprocess.run([sys.executable, str(Path(__file__).resolve()), *arguments, "--here"]).returncode
        )
    try:
        text = cell_of(options.model, options.device, options.variant)
    except (KeyError, ValueError) as error:
        print(f"export.py: {error.args[0]}", file=sys.stderr)
        return 1
    if options.output:
        text = notebook(text) if options.output.suffix == ".ipynb" else text
        options.output.write_text(text, encoding="utf-8")
    else:
        sys.stdout.reconfigure(encoding="utf-8")
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
