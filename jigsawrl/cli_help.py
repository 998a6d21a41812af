"""Help pages of the command: short sections of name and meaning, and examples, in any width."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

WIDTH = 88
Rows = list[tuple[str, str]]


class Command(TyperCommand):
    """A command whose epilog is lines of `example -- what it does`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_page(self, ctx, {}))


class Commands(TyperGroup):
    """A group of commands; its epilog as a command's."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, command.get_short_help_str(limit=WIDTH)) for name, command in commands.items() if command
        ]
        formatter.write(_page(self, ctx, {"Commands": rows}))


def _page(command: Any, ctx: Any, sections: dict[str, Rows]) -> str:
    params = command.get_params(ctx)
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [param for param in params if param.param_type_name == "option"]
    usage = " ".join([ctx.command_path, *(_usage(param) for param in arguments)])
    sections = {"Arguments": [(param.metavar, param.help or "") for param in arguments], **sections}
    for param in sorted(options, key=lambda param: param.name == "help"):
        title = getattr(param, "rich_help_panel", None) or "Options"
        sections.setdefault(title, []).append((_option(param), param.help or ""))
    examples = [tuple(line.split(" -- ")) for line in (command.epilog or "").splitlines()]
    paragraphs = [" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")]

    console = Console(highlight=False, width=min(WIDTH, Console().width))
    with console.capture() as captured:
        tail = "COMMAND" if "Commands" in sections else "[options]"
        console.print(Text.assemble(("Usage: ", "bold"), f"{usage} {tail}"))
        for paragraph in paragraphs:
            console.print(Padding(Text(paragraph), (1, 0, 0, 0)))
        width = max(len(name) for rows in sections.values() for name, _ in rows)
        for title, rows in sections.items():
            if rows:
                console.print(_section(title, rows, width))
        console.print(_examples(examples))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _usage(argument: Any) -> str:
    return argument.metavar if argument.required else f"[{argument.metavar}]"


def _option(option: Any) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    return f"{names} {option.metavar}" if option.metavar else names


def _section(title: str, rows: Rows, width: int) -> Group:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(width=width, style="cyan", no_wrap=True)
    table.add_column()
    for name, meaning in rows:
        table.add_row(Text(name), Text(meaning))
    return Group(Text(f"\n{title}", style="bold"), Padding(table, (0, 0, 0, 2)))


def _examples(examples: list[tuple[str, ...]]) -> Group:
    lines = [Text("\nExamples", style="bold")]
    for command, meaning in examples:
        lines += [Text(f"  {command}", style="cyan"), Text(f"      {meaning}", style="dim")]
    return Group(*lines)
