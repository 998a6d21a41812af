"""Rows with a bar each, for a terminal."""

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

_BAR = 16


def bar_grid(rows: Iterable[tuple[Sequence[str], float]], plain: bool) -> Table:
    """A name, figures, and a bar that is full at 1; `plain`: in ASCII."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    for (name, *figures), part in rows:
        while len(grid.columns) <= len(figures):
            grid.add_column(justify="right")
        grid.add_row(
            name, *figures, Text(("#" if plain else "█") * round(_BAR * min(1.0, part)), style="cyan")
        )
    return grid
