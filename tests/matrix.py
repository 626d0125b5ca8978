"""The suite over versions of Python and torch: one virtual environment a pair, one table.

``make test-matrix`` runs it; ``python tests/matrix.py --help`` lists what can be left out. It needs
nothing but the Pythons, found on PATH or in pyenv. An environment that is there is used again.
"""

from __future__ import annotations

import argparse
import datetime
import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")
# Outcomes of a pair that this machine does not have; no fault of the suite's.
NO_PYTHON, NO_TORCH = "no such Python here", "does not install"
# What pytest counts in its last line that says how a run went.
COUNTED = ("passed", "failed", "errors", "error", "skipped")


@dataclass(frozen=True)
class Cell:
    """How the suite went on one pair of versions."""

    python: str
    torch: str
    outcome: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if any suite failed, or none could be run."""
    options = parsed(arguments)
    cells = []
    for python in options.python:
        for torch in options.torch:
            print(f"== Python {python}, torch {torch}", flush=True)
            outcome = run(python, torch, options)
            print(f"== Python {python}, torch {torch}: {outcome}", flush=True)
            cells.append(Cell(python, torch, outcome))
    print(table(cells, datetime.date.today()))
    ran = [cell.outcome for cell in cells if cell.outcome not in (NO_PYTHON, NO_TORCH)]
    return 0 if ran and all(map(succeeded, ran)) else 1


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="3.N")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="2.N.M")
    parser.add_argument("--extra", default="test", help="extra of qkvpass to install")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-matrix")
    parser.add_argument(
        "pytest", nargs="*", default=["-n", "2"], help="for pytest, after --; by default the suite"
    )
    return parser.parse_args(arguments)


def run(python: str, torch: str, options: argparse.Namespace) -> str:
    """Make the environment of one cell if need be, and run pytest in it."""
    interpreter = find_python(python)
    if interpreter is None:
        return NO_PYTHON
    folder = options.folder / f"py{python}-torch{torch}"
    own = folder / "bin" / "python"
    if not own.exists():
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
    wanted = [f"torch=={torch}", "--editable", f"{ROOT}[{options.extra}]"]
    installed = subprocess.run([own, "-m", "pip", "install", "--quiet", *wanted])
    if installed.returncode:
        return NO_TORCH
    command = [own, "-m", "pytest", "-q", *options.pytest]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(process.stdout)
    return summary(process.stdout)


def find_python(version: str) -> str | None:
    """An interpreter of ``version`` ("3.12") that starts."""
    named = shutil.which(f"python{version}")
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    kept = sorted(glob.glob(f"{root}/versions/{version}.*/bin/python"))
    return next(filter(starts, [*([named] if named else []), *reversed(kept)]), None)


def starts(interpreter: str) -> bool:
    # pyenv's shims are on PATH for versions that are switched off, too.
    done = subprocess.run([interpreter, "-c", ""], stderr=subprocess.DEVNULL)
    return done.returncode == 0


def summary(output: str) -> str:
    """The counts of pytest's last line, as "12 passed, 1 skipped"."""
    lines = [line for line in output.splitlines() if re.search(r" in [\d.]+s", line)]
    counts = re.findall(rf"(\d+) ({'|'.join(COUNTED)})\b", lines[-1]) if lines else []
    return ", ".join(f"{number} {name}" for number, name in counts) or "did not finish"


def succeeded(outcome: str) -> bool:
    return "passed" in outcome and not re.search("failed|error", outcome)


def table(cells: Iterable[Cell], date: datetime.date) -> str:
    """The cells in Markdown, a row for each Python and a column for each torch."""
    found = {(cell.python, cell.torch): cell.outcome for cell in cells}
    pythons = list(dict.fromkeys(python for python, _ in found))
    torches = list(dict.fromkeys(torch for _, torch in found))
    rows = [
        ["Python", *(f"torch {torch}" for torch in torches)],
        ["---"] * (1 + len(torches)),
        *([python, *(found[python, torch] for torch in torches)] for python in pythons),
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", f"{date.isoformat()}, {sys.platform}"])


if __name__ == "__main__":
    sys.exit(main())
