"""What the simulator foresees against what a real run does: four pipelines on 2 cores under the look-ahead policy.

A first real run, one pipeline after the other, leaves its profile: costs, lengths and tool latencies as they were
measured (`profile.json` in its run folder). From that profile alone the simulator foresees the multiplexed run, with
the same policy object. Then the multiplexed run is made for real, several times; it starts from the same profile.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, claim, clean_stdout, figure, report, say
from four_pipelines import Four
from rich.table import Table


def main() -> None:
    options = arguments(__doc__).parse_args()
    with clean_stdout() as console, tempfile.TemporaryDirectory(prefix="jigsawrl-bench-") as scratch:
        four = Four(Path(scratch), 0.06 if options.quick else 0.5, options.seed)
        say("measuring: one pipeline after the other")
        measured = four.run("serial")
        profile = measured.out / "profile.json"
        foreseen = {
            policy: simulated(four.folder / "four.yaml", profile, policy) for policy in ("serial", "jigsaw")
        }
        runs = []
        for repetition in range(1 if options.quick else 3):
            runs.append(four.run("jigsaw", 2, f"profile={profile}"))
            say(f"repetition {repetition + 1}: {figure(runs[-1].seconds)} s")
        seconds = statistics.median(run.seconds for run in runs)
        table = Table(title="four pipelines on 2 cores: simulated and real", caption="seconds; real: medians")
        for column in ("", "simulated", "real", "off by %"):
            table.add_column(column, justify="left" if not column else "right")
        off = {"all": foreseen["jigsaw"]["seconds"] / seconds - 1}
        table.add_row("all, jigsaw", *cells(foreseen["jigsaw"]["seconds"], seconds))
        for name in runs[0].finished:
            real = statistics.median(run.finished[name] for run in runs)
            off[name] = foreseen["jigsaw"]["finished"][name] / real - 1
            table.add_row(f"  {name}", *cells(foreseen["jigsaw"]["finished"][name], real))
        table.add_row(
            "all, serial (the measured run)", *cells(foreseen["serial"]["seconds"], measured.seconds)
        )
        console.print(table)
        claims = {"makespan_error": claim(abs(off["all"]), at_most=0.10)}
        report(
            console,
            "sim_vs_real",
            options.seed,
            claims,
            quick=options.quick,
            off_by=off,
            simulated=foreseen,
            real=[run.seconds for run in runs],
            serial_real=measured.seconds,
        )


def cells(simulated: float, real: float) -> tuple[str, str, str]:
    return figure(simulated), figure(real), f"{100 * (simulated / real - 1):+.1f}"


def simulated(file: Path, profile: Path, policy: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "jigsawrl", "simulate", str(file), "--profile", str(profile)]
    done = subprocess.run(
        [*command, "--policy", policy, "--json"], capture_output=True, text=True, check=True, timeout=300
    )
    result = json.loads(done.stdout)
    finished = {name: float(each["seconds"]) for name, each in result["pipelines"].items()}
    return {"seconds": float(result["seconds"]), "finished": finished}


if __name__ == "__main__":
    main()
