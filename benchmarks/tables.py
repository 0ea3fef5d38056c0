"""Tables that a benchmark prints in Markdown, a row as soon as it is known, and keeps as JSON where a file is named."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


class Tables:
    """One after the other. The file is whole after every row: what a killed run has found is there."""

    def __init__(self, options: argparse.Namespace):
        """Args: options: those of the command, of which `json` is the file, or None."""
        self._file: Path | None = options.json
        self._told: dict[str, Any] = {"options": vars(options) | {"json": str(options.json)}, "tables": [], "notes": []}

    def begin(self, *columns: str, words: int = 1) -> None:
        """Begins a table whose first columns are words and whose others are numbers."""
        if self._told["tables"]:
            print()
        self._told["tables"].append({"columns": columns, "rows": []})
        print(f"| {' | '.join(columns)} |\n|{'---|' * words}{'---:|' * (len(columns) - words)}", flush=True)

    def row(self, *cells: object) -> None:
        """A row of the table that was begun last."""
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        self._told["tables"][-1]["rows"].append([_number(cell) for cell in cells])
        self._write()

    def note(self, line: str) -> None:
        """A line of text."""
        print(line, flush=True)
        self._told["notes"].append(line.strip())
        self._write()

    def _write(self) -> None:
        if self._file:
            self._file.write_text(json.dumps(self._told, default=str))


def with_json(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Gives a command the flag that names the file."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="is written too: the same tables")
    return parser


def _number(cell: object) -> object:
    try:
        return float(cell)  # type: ignore[arg-type]
    except ValueError:
        return cell
