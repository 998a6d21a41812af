"""The commands that plan: what multiplexing would give, before anything is changed. None of them imports torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jigsawrl.cli_help import Command
from jigsawrl.errors import JigsawError

if TYPE_CHECKING:
    from jigsawrl.simulator.from_config import Scene

File = Annotated[Path, typer.Argument(metavar="FILE", help="Run file (YAML), with one pipeline or several.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="a.b=c ...", help="Settings that replace those in FILE.")
]
Workers = Annotated[
    int | None, typer.Option(metavar="N", help="Number of accelerators.", rich_help_panel="What if")
]
HardwareName = Annotated[
    str | None,
    typer.Option(metavar="H", help="Their kind: h100, h200, a100, h20, h800.", rich_help_panel="What if"),
]
ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="Measured workloads: a built-in profile, or a file of 'jigsaw fit'.",
        rich_help_panel="What if",
    ),
]
Seed = Annotated[
    int | None, typer.Option(metavar="S", min=0, help="Draws other lengths.", rich_help_panel="What if")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.", rich_help_panel="Output")]


def add_to(app: typer.Typer) -> None:
    """Makes these commands of `jigsaw`."""
    app.command(
        cls=Command,
        epilog="jigsaw simulate examples/simulate/run.yaml -- two pipelines on the GPUs of one, in seconds\n"
        "jigsaw simulate mix.yaml --policy serial --workers 16 --hardware h200 -- the same, otherwise\n"
        "jigsaw simulate mix.yaml pipelines.math.steps=20 --out sim -- and write event log, timeline and picture\n"
        "jigsaw simulate mix.yaml --profile mine.json -- with what your own runs took (jigsaw fit)\n"
        "jigsaw simulate cluster.yaml trace.yaml -- jobs that come to a cluster and go, and what its nodes cost",
    )(simulate)
    app.command(
        cls=Command,
        epilog="jigsaw compare mix.yaml --policies serial,jigsaw -- run it under both, and see what sharing gives\n"
        "jigsaw compare examples/simulate/run.yaml --simulate -- every policy, side by side, nothing is run\n"
        "jigsaw compare mix.yaml --simulate --policies serial,jigsaw --out sim -- two of them, with a picture",
    )(compare)
    app.command(
        cls=Command,
        epilog="jigsaw fit logs/ -- every log in the folder, into logs.json\n"
        "jigsaw fit train.log --hardware h200 --out mine.json -- one of verl's console logs\n"
        "jigsaw simulate mix.yaml --profile mine.json -- what multiplexing would give these runs",
    )(fit)


def simulate(
    file: File,
    overrides: Overrides = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="P", help="Who runs where; jigsaw if not given.", rich_help_panel="What if"),
    ] = None,
    workers: Workers = None,
    hardware: HardwareName = None,
    profile: ProfileName = None,
    seed: Seed = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write event log, timeline, picture and report.", rich_help_panel="Output"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say how long a run file's pipelines would take, and why.

    Nothing is trained and no GPU is needed: lengths and costs are measured ones, or carried over, or a prior, and
    the output says which. With a cluster file and a trace, the jobs of the trace come to the cluster and go, and the
    output says what its nodes cost and whether every job took at most its max_slowdown.
    """
    from jigsawrl.config.cluster import holds_pools

    if holds_pools(file):
        from jigsawrl.cli_cluster import simulate_trace

        others = {"--policy": policy, "--workers": workers, "--hardware": hardware}
        simulate_trace(file, overrides or [], seed, as_json, {**others, "--profile": profile, "--out": out})
        return
    scene, chosen = _scene(file, overrides, policy, workers, hardware, profile, seed)
    from jigsawrl.cli_output import answer
    from jigsawrl.simulator.compare import alone_seconds
    from jigsawrl.simulator.compare import simulate as simulated
    from jigsawrl.simulator.outputs import (
        SIMULATION_FILES,
        check_out,
        simulation_document,
        write_simulation,
    )
    from jigsawrl.simulator.tables import FateTable, SceneTable
    from jigsawrl.telemetry.picture import Lines
    from jigsawrl.telemetry.report import ReportTable

    if out is not None:
        check_out(out, SIMULATION_FILES)
    with _progress() as say:
        say(chosen)
        run = simulated(scene, chosen, alone_seconds(scene))
    if out is not None:
        write_simulation(scene, run, out)
    figures = ReportTable(run.report, f"{scene.config.name}: {chosen}")
    parts = SceneTable(scene), figures, FateTable(run), Lines(run.log.columns)
    answer(as_json, simulation_document(scene, run), parts, out, ", ".join(SIMULATION_FILES))


def compare(
    file: File,
    overrides: Overrides = None,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="Simulate every one of them.", rich_help_panel="What if")
    ] = False,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Which policies; if not given, all, and of real runs serial,concurrent,rollmux,jigsaw.",
            rich_help_panel="What if",
        ),
    ] = None,
    workers: Workers = None,
    hardware: HardwareName = None,
    profile: ProfileName = None,
    seed: Seed = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write a picture and the figures; real runs go there too, or into runs/NAME-compare.",
            rich_help_panel="Output",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Hold policies against each other on the same pipelines.

    They are run for real, under one policy after another, or, in seconds and on any machine, simulated.
    """
    if not simulated:
        only = {"--hardware": hardware, "--seed": seed}
        for option in (name for name, value in only.items() if value is not None):
            raise JigsawError(f"{option}: is for simulated runs; add --simulate, or leave it out")
        from jigsawrl.cli_compare import compare_for_real
        from jigsawrl.config.pipelines import load_mix

        mix = load_mix(file, overrides or [], {"workers": workers, "profile": profile})
        raise typer.Exit(compare_for_real(mix, _policies(policies), out, as_json))
    scene, _ = _scene(file, overrides, None, workers, hardware, profile, seed)
    from jigsawrl.cli_compare import ComparisonTable
    from jigsawrl.cli_output import answer
    from jigsawrl.policies.named import POLICIES
    from jigsawrl.simulator.compare import compared
    from jigsawrl.simulator.outputs import COMPARISON_FILES, check_out, comparison_document, write_comparison
    from jigsawrl.simulator.tables import SceneTable

    named = _policies(policies) or list(POLICIES)
    if out is not None:
        check_out(out, COMPARISON_FILES)
    with _progress() as say:
        found = compared(scene, named, say)
    if out is not None:
        write_comparison(scene, found, out)
    parts = SceneTable(scene), ComparisonTable(found)
    answer(as_json, comparison_document(scene, found), parts, out, ", ".join(COMPARISON_FILES))


def fit(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER ...", help="Folders of traces or of verl's console logs, or logs."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to; if not given, NAME.json.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="H", help="What was measured on; if not given, as the runs say, or h100."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="N", help="Name of the profile; if not given, the folder's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Turn logs of your own runs into a profile, to plan with.

    The profile holds their lengths and what they cost on this hardware, and no data of theirs. The output says what
    was believed of every log, and warns of what is hard to believe; a log that cannot be used is named and left out.
    """
    from jigsawrl.config.messages import require
    from jigsawrl.graph.fit import fit_traces
    from jigsawrl.graph.hardware import HARDWARE
    from jigsawrl.graph.profile import write_profile
    from jigsawrl.graph.runs import read_runs
    from jigsawrl.simulator.fitted import judge

    if hardware is not None:
        require("--hardware", hardware.lower(), list(HARDWARE))
    name = name or _named_after(sources)
    target = out or Path(f"{name}.json")
    refuse_to_overwrite(target)
    with _progress() as say:
        say(f"reading {', '.join(map(str, sources[:3]))}")
        traces, left_out = read_runs(*sources)
        profile = fit_traces(traces, name, f"measured runs in {name}", hardware)
        workloads = judge(profile, traces, hardware is not None)
    write_profile(profile, target)
    for each in workloads:
        for warning in each.warnings:
            print(f"warning: {each.name}: {_on_one_line(warning)}", file=sys.stderr)
    for reason in left_out:
        print(f"left out: {_on_one_line(reason)}", file=sys.stderr)
    if as_json:
        found = {each.name: each.as_dict() for each in workloads}
        said = {"profile": str(target.absolute()), "name": name, "hardware": profile.hardware.name}
        print(json.dumps({**said, "workloads": found, "left_out": left_out}))
        return
    from rich.console import Console

    from jigsawrl.simulator.tables import FittedTable

    console = Console()
    console.print(FittedTable(profile, workloads))
    for each in workloads:
        print(f"{each.name}:\n  {each.read}")
    console.print(
        f"written to {target}; use it with: jigsaw simulate FILE --profile {target}", highlight=False
    )
    console.print(
        f"where FILE holds, for example: pipelines: {{a: {{workload: {workloads[0].name}}}}}",
        highlight=False,
        style="dim",
    )


def _named_after(sources: list[Path]) -> str:
    """A profile's name: that of the folder or log, or of the folder that several are in."""
    whole = Path(os.path.abspath(sources[0]))
    if len(sources) > 1:
        whole = Path(os.path.commonpath([os.path.abspath(source.parent) for source in sources]))
    elif sources[0].is_file():
        whole = whole.with_name(Path(whole.name.removesuffix(".gz")).stem)
    return whole.name or "profile"


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _scene(
    file: Path,
    overrides: list[str] | None,
    policy: str | None,
    workers: int | None,
    hardware: str | None,
    profile: str | None,
    seed: int | None,
) -> tuple[Scene, str]:
    """What is to be simulated, and the policy that the file or the command line names."""
    from jigsawrl.config.pipelines import load_mix
    from jigsawrl.simulator.from_config import scene_of

    options = {"policy": policy, "workers": workers, "hardware": hardware, "profile": profile, "seed": seed}
    mix = load_mix(file, overrides or [], options)
    return scene_of(mix), mix.config.policy


def _policies(given: str | None) -> list[str]:
    """Those that are named, each once."""
    from jigsawrl.config.messages import require
    from jigsawrl.policies.named import POLICIES

    named = [] if given is None else [name.strip() for name in given.split(",")]
    for name in named:
        require("--policies", name, list(POLICIES))
    return list(dict.fromkeys(named))


def refuse_to_overwrite(target: Path) -> None:
    """A JigsawError if a profile cannot be put there, or would replace something else."""
    from jigsawrl.config.runfolder import writable_part
    from jigsawrl.graph.profile import load_profile

    if target.is_dir():
        raise JigsawError(f"{target}: is a folder; name a file with --out")
    writable_part(target.parent)
    if target.exists():
        try:
            load_profile(target.absolute())
        except JigsawError:
            raise JigsawError(f"{target}: exists and is no profile; choose another file with --out") from None


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says on a terminal's stderr what is being done."""
    from rich.console import Console

    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with console.status("simulating") as status:
        yield lambda text: status.update(f"{text} ...")
