"""Fuzz targets: run files, mixes, cluster and jobs files, overrides, profiles, logs, and folders of runs."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import sqlite3
from pathlib import Path
from typing import Any

from fuzzing.check import Case, Target
from fuzzing.values import SNIPPETS, TEXTS, as_json, as_yaml, damaged, damaged_bytes, nasty, snippet
from jigsawrl.api import check_task
from jigsawrl.cli import main
from jigsawrl.cluster.from_config import scene_of as cluster_scene
from jigsawrl.cluster.plan import outcome_document, plan, scheduler_of
from jigsawrl.cluster.simulation import ClusterSimulation
from jigsawrl.config import files, load_run_file
from jigsawrl.config.cluster import TermsConfig, holds_pools, load_cluster_file, load_jobs_file
from jigsawrl.config.pipelines import holds_pipelines, load_mix
from jigsawrl.config.runfolder import check_mix_folder, check_run_folder
from jigsawrl.config.started import as_started
from jigsawrl.daemon.ledger import FILE, GroupEntry, Ledger
from jigsawrl.daemon.status import document
from jigsawrl.errors import JigsawError
from jigsawrl.graph.fit import fit_traces
from jigsawrl.graph.profile import load_profile, write_profile
from jigsawrl.graph.runs import read_runs
from jigsawrl.runtime.control import ask
from jigsawrl.runtime.replay import other_python, replayed
from jigsawrl.simulator.compare import alone_seconds
from jigsawrl.simulator.compare import simulate as simulated
from jigsawrl.simulator.fitted import judge
from jigsawrl.simulator.from_config import scene_of
from jigsawrl.simulator.outputs import simulation_document
from jigsawrl.telemetry.runreport import run_report

Tree = dict[str, Any]

SUMS: Tree = {
    "name": "sums",
    "seed": 3,
    "steps": 3,
    "deterministic": False,
    "device": "cpu",
    "workers": 1,
    "threads": None,
    "model": {
        "path": "tiny",
        "tiny": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "warmup_steps": 2},
    },
    "task": {"kind": "arithmetic", "max_number": 20, "operations": ["+", "-"], "size": 64},
    "rollout": {"prompts_per_step": 4, "samples": 2, "max_tokens": 8, "max_prompt_tokens": 16, "stop": ["x"]},
    "algorithm": {"advantage": "grpo", "minibatches": 2, "overlong": {"buffer": 4}, "dynamic_sampling": {}},
    "trainer": {"lr": 1e-3, "betas": [0.9, 0.99], "warmup_steps": 1},
    "checkpoint": {"every": 2, "keep": 1},
    "telemetry": {"tensorboard": False},
}
DATA: Tree = {
    "steps": 2,
    "task": {
        "kind": "data",
        "path": "rows.jsonl",
        "prompt": "question",
        "reward": {
            "path": "judge.py:right",
            "timeout": 3.0,
            "processes": 1,
            "params": {"a": [1, {"b": None}]},
        },
    },
    "rollout": {"prompts_per_step": 2, "samples": 4, "date": "2026-11-19", "stop_token_ids": [3]},
    "model": {"lora": {"rank": 4, "targets": ["q_proj"]}, "tiny": {"warmup_steps": 0}},
}
GAME: Tree = {
    "task": {
        "kind": "calculator",
        "latency": 0.01,
        "latency_jitter": 0.1,
        "max_turns": 3,
        "env_timeout": 5.0,
    },
    "algorithm": {"advantage": "gae", "loss": "ppo", "kl_coef": 0.1, "kl_in": "reward", "clip_low": None},
    "rollout": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "kv_cache_tokens": 4096},
}
MIX: Tree = {
    "name": "mix",
    "seed": 1,
    "policy": "jigsaw",
    "workers": 4,
    "hardware": "h100",
    "memory": 60.0,
    "profile": "h100-traces",
    "pipelines": {
        "a": {"workload": "gsm8k_qwen3-4b", "steps": 2, "priority": 1, "max_slowdown": 2.0},
        "b": {"run": "sums.yaml", "steps": 2, "arrival": 3.0, "deadline": 100.0, "tp": 1},
    },
}
POOLED: Tree = {
    "workers": 4,
    "policy": "rollmux",
    "pools": {"rollout": 2, "training": 2, "link": 20.0},
    "pipelines": {
        "a": {"run": "sums.yaml", "rollout_workers": [0, 1]},
        "b": {"run": "game.yaml", "steps": 2},
    },
}
CLUSTER: Tree = {
    "name": "two-pools",
    "quantile": 0.8,
    "max_group": 3,
    "link": 20,
    "profile": "h100-traces",
    "kinds": {
        "mine": {
            "flops": 400,
            "memory_bandwidth": 2.0,
            "device_memory": 80,
            "price": 2.0,
            "host_memory": 200.0,
        }
    },
    "pools": {
        "rollout": {
            "kind": "h20",
            "runs": "rollout",
            "nodes": 4,
            "gpus": 8,
            "host_memory": 1000.0,
            "price": 1.5,
        },
        "training": {"kind": "mine", "runs": "training", "nodes": 3},
        "cores": {"kind": "cpu", "runs": "both", "nodes": 2, "cores": 1},
    },
}
JOBS: Tree = {
    "jobs": {
        "math": {"model": "Qwen2.5-7B", "max_tokens": 8192, "steps": 4, "max_slowdown": 1.6, "tenant": "x"},
        "agent": {
            "model": "Qwen3-4B",
            "turns": 4,
            "tool_seconds": 20,
            "steps": 3,
            "arrival": 1,
            "drift": 0.5,
        },
        "given": {
            "rollout": 150,
            "training": 90,
            "spread": 0.1,
            "rollout_memory": 250,
            "priority": 1,
            "deadline": 40,
        },
        "wide": {
            "rollout": 50.0,
            "rollout_worst": 80.0,
            "training": 40.0,
            "rollout_nodes": 2,
            "training_nodes": 2,
        },
    },
    "failures": {"a-gpu": {"node": "rollout-0", "at": 1, "hours": 4}},
}
STEP_LINE = (
    "(TaskRunner pid=3125) step:{} - actor/pg_loss:-1.7e-08 - response_length/mean:290.1 - "
    "response_length/max:4096.0 - response_length/min:12.0 - prompt_length/mean:104.2 - num_turns/mean:2.0 - "
    "timing_s/gen:59.0 - timing_s/old_log_prob:12.2 - timing_s/ref:18.2 - timing_s/update_actor:35.6 - "
    "timing_s/step:129.0 - perf/total_num_tokens:403763 - perf/throughput:391.2"
)
COMMAND_LINE = (
    "+ python3 -m verl.trainer.main_ppo data.train_batch_size=256 actor_rollout_ref.rollout.n=4 "
    "actor_rollout_ref.model.path=/models/Qwen3-4B trainer.n_gpus_per_node=8 trainer.nnodes=1"
)
TRACED: Tree = {
    "gsm8k_qwen3-4b": {
        "steps": [
            {
                "step": number,
                "timing_s/gen": 20.0,
                "timing_s/old_log_prob": 5.0,
                "timing_s/update_actor": 12.0,
                "timing_s/step": 44.5,
                "prompt_length/mean": 80.0,
                "response_length/mean": 25.0,
                "num_turns/mean": 2.0,
                "perf/total_num_tokens": 840.0,
            }
            for number in (1, 2)
        ],
        "sequences_per_step": 8,
        "lengths": "a.lengths.csv",
        "forwards": "a.forwards.csv",
        "tool_seconds": [{"time_s": 13.4, "turn": 1, "step": 1}],
    }
}
FORWARDS = (
    "mode,batch_size,prefill_tokens,avg_seq_len,forward_time_ms\nEXTEND,2,81,71.5,19.1\nDECODE,4,0,90,4.1\n"
)
LENGTHS = "step,response_tokens\n" + "".join(f"{step},{10 + 5 * i}\n" for step in (1, 2) for i in range(8))
T = 1.7e9
EVENTS: list[Tree] = [
    {"t": T, "event": "start", "name": "night", "workers": 2, "policy": "jigsaw", "python": "3.11.7"},
    {"t": T, "event": "start", "pipeline": "sums", "step": 0, "solo": 4.0},
    {"t": T, "event": "start", "pipeline": "b", "step": 0},
    {"t": T, "event": "action", "action": "start", "pipeline": "sums"},
    {"t": T, "event": "predicted", "pipeline": "sums", "phase": "rollout", "step": 1, "seconds": 4.0},
    {"t": T + 4, "event": "substage", "substage": "decode", "pipeline": "sums", "worker": 0, "step": 1}
    | {"t0": T, "t1": T + 4, "tokens": 400, "share": 0.5},
    {"t": T + 5, "event": "phase", "pipeline": "sums", "phase": "rollout", "step": 1, "t0": T, "t1": T + 5},
    {"t": T + 6, "event": "died", "pipeline": "b", "process": "actor of worker 1", "reason": "signal 9"},
    {"t": T + 7, "event": "recovered", "pipeline": "b", "step": 1},
    {"t": T + 8, "event": "pause", "pipeline": "b"},
    {"t": T + 9, "event": "resume", "pipeline": "b"},
    {"t": T + 10, "event": "step", "pipeline": "sums", "step": 1, "tokens": 400},
    {"t": T + 10, "event": "finished", "pipeline": "sums", "step": 1},
    {"t": T + 11, "event": "end"},
]
ROWS: list[Tree] = [
    {
        "step": step,
        "reward/mean": 0.5,
        "reward/errors": 0,
        "response_length/clip_ratio": 0.1,
        "perf/tokens": 99,
    }
    for step in (1, 2)
]


def run_file(rng: random.Random, folder: Path) -> Case:
    """As `jigsaw run --dry-run`."""
    write_whole_files(folder)
    path = folder / "run.yaml"
    path.write_bytes(as_yaml(rng, damaged(rng, rng.choice((SUMS, SUMS, DATA, GAME)))))
    return lambda: _resolved(path, [])


def overrides(rng: random.Random, folder: Path) -> Case:
    """Settings from the command line, as the shell hands them over: any bytes but null."""
    write_whole_files(folder)
    keys = [
        *_keys(SUMS),
        *_keys(DATA),
        *_keys(GAME),
        "",
        ".",
        "a..b",
        "task.x.y",
        "name.x",
        "\udcff",
        "[",
        "1",
    ]
    given = []
    for _ in range(rng.randint(1, 3)):
        value = rng.choice(
            (snippet(rng), str(nasty(rng)), rng.choice(TEXTS), json.dumps(nasty(rng), default=str))
        )
        text = f"{rng.choice(keys)}{rng.choice(('=', '=', '=', '==', ' = ', ''))}{value}"
        if rng.random() < 0.3:
            text = damaged_bytes(rng, text.encode("utf-8", "surrogateescape")).decode(
                "utf-8", "surrogateescape"
            )
        given.append(text.replace("\0", ""))
    path = folder / rng.choice(("sums.yaml", "data.yaml", "game.yaml"))
    return lambda: _resolved(path, given)


def mix_file(rng: random.Random, folder: Path) -> Case:
    """As `jigsaw simulate`, whose small simulations are run."""
    write_whole_files(folder)
    path = folder / "mix.yaml"
    path.write_bytes(as_yaml(rng, damaged(rng, rng.choice((MIX, MIX, POOLED)), 1)))
    given = [] if rng.random() < 0.9 else [f"{rng.choice([*_keys(MIX)])}={snippet(rng)}".replace("\0", "")]

    def case() -> object:
        if holds_pools(path):
            return None
        mix = load_mix(path, given, {"seed": 1})
        scene = scene_of(mix)
        return json.dumps(
            simulation_document(scene, simulated(scene, mix.config.policy, alone_seconds(scene)))
        )

    return case


def cluster_files(rng: random.Random, folder: Path) -> Case:
    """As `jigsaw plan` and `jigsaw simulate` with a cluster file."""
    cluster, jobs = folder / "cluster.yaml", folder / "jobs.yaml"
    first = rng.random() < 0.5
    cluster.write_bytes(as_yaml(rng, damaged(rng, CLUSTER, 1)) if first else _yaml(CLUSTER))
    jobs.write_bytes(_yaml(JOBS) if first else as_yaml(rng, damaged(rng, JOBS, 1)))

    def case() -> None:
        holds_pools(cluster)
        scene = cluster_scene(load_cluster_file(cluster), load_jobs_file(jobs))
        json.dumps(plan(scene).as_dict())
        if all(job.steps < 1000 for job in scene.jobs):
            runs = [
                ClusterSimulation(scheduler_of(scene), scene.jobs, seed=0, failures=scene.failures).run()
                for _ in range(2)
            ]
            json.dumps(outcome_document(scene, *runs))

    return case


def profile_file(rng: random.Random, folder: Path) -> Case:
    """A profile that `jigsaw fit` or `jigsaw profile` made, and a simulation with it."""
    write_whole_files(folder)
    tree = _profile(folder)
    path = folder / "mine.json"
    path.write_bytes(as_json(rng, damaged(rng, tree, 1)))
    mix = {**MIX, "profile": "mine.json", "hardware": None}

    def case() -> object:
        known = load_profile(path)
        (folder / "mix.yaml").write_bytes(_yaml(mix))
        scene = scene_of(load_mix(folder / "mix.yaml"))
        write_profile(known, folder / "again.json")
        return json.dumps(simulation_document(scene, simulated(scene, "jigsaw", alone_seconds(scene))))

    return case


def logs_to_fit(rng: random.Random, folder: Path) -> Case:
    """Folders of traces, and console logs, as `jigsaw fit` reads them."""
    source = folder / "logs"
    source.mkdir()
    if rng.random() < 0.5:
        lines = "\n".join([COMMAND_LINE, *(STEP_LINE.format(step) for step in (1, 2, 3))]) + "\n"
        (source / "gsm8k_qwen3-4b.log").write_bytes(damaged_bytes(rng, lines.encode()))
    else:
        index, lengths, forwards = json.dumps(TRACED).encode(), LENGTHS.encode(), FORWARDS.encode()
        match rng.choice(("index", "index", "lengths", "forwards")):
            case "index":
                index = as_json(rng, damaged(rng, TRACED))
            case "lengths":
                lengths = damaged_bytes(rng, lengths)
            case _:
                forwards = damaged_bytes(rng, forwards)
        (source / "workloads.json").write_bytes(index)
        (source / "a.lengths.csv").write_bytes(lengths)
        (source / "a.forwards.csv").write_bytes(forwards)

    def case() -> None:
        traces, _ = read_runs(source)
        profile = fit_traces(traces, "mine", "measured runs", None)
        judge(profile, traces, False)
        write_profile(profile, folder / "mine.json")
        load_profile(folder / "mine.json")

    return case


def events_and_metrics(rng: random.Random, folder: Path) -> Case:
    """As `jigsaw report` and `jigsaw replay` on a damaged run folder."""
    run = folder / "run"
    (run / "sums").mkdir(parents=True)
    events, rows = _lines(EVENTS), _lines(ROWS)
    if rng.random() < 0.7:
        events = _damaged_lines(rng, EVENTS)
    else:
        rows = _damaged_lines(rng, ROWS)
    (run / "events.jsonl").write_bytes(events)
    (run / rng.choice(("sums/metrics.jsonl", "metrics.jsonl"))).write_bytes(rows)

    def case() -> None:
        made = run_report(run)
        made.write()
        json.dumps(made.as_dict())
        list(made.notes())

    return case


def replayed_events(rng: random.Random, folder: Path) -> Case:
    """A log of decisions, as `jigsaw replay` reads it."""
    run = folder / "run"
    run.mkdir()
    start = {**EVENTS[0], "hardware": {"name": "cpu", "flops": 1e12}, "pipelines": ["sums"]}
    turn = {
        "t": T,
        "event": "turn",
        "at": 0.0,
        "heard": [["over", "sums"]],
        "decides": True,
        "everyone": False,
    }
    (run / "events.jsonl").write_bytes(_damaged_lines(rng, [start, *EVENTS[1:4], turn, *EVENTS[4:]]))
    (run / "config.yaml").write_bytes(as_yaml(rng, damaged(rng, MIX, 1)))

    def case() -> None:
        list(replayed(run))
        other_python(run)

    return case


def resumed_folder(rng: random.Random, folder: Path) -> Case:
    """A run folder whose own files are damaged, as `jigsaw run --resume` and `jigsaw pause` meet it."""
    write_whole_files(folder)
    out = folder / "out"
    out.mkdir()
    several = rng.random() < 0.5
    kept = as_yaml(rng, damaged(rng, MIX if several else SUMS, 1))
    (out / "config.yaml").write_bytes(kept)
    (out / "control.json").write_bytes(as_json(rng, damaged(rng, {"socket": "jigsawrl-nobody", "pid": 1}, 1)))
    (out / "events.jsonl").write_bytes(_damaged_lines(rng, EVENTS))
    whole = folder / "whole.yaml"
    whole.write_bytes(_yaml(MIX))

    def case() -> None:
        with contextlib.suppress(JigsawError):  # nobody answers
            ask(out, do="pause", pipeline="a")
        if several:
            check_mix_folder(load_mix(whole).config, out, True)
        else:
            config = load_run_file(folder / "sums.yaml")
            check_run_folder(config, out, True)
            as_started(config, out, out / "events.jsonl", True, lambda line: None)

    return case


def ledger_file(rng: random.Random, folder: Path) -> Case:
    """A cluster's folder whose database is damaged, as `jigsaw cluster status` and `submit` meet it."""
    write_whole_files(folder)
    own = folder / "cluster"
    own.mkdir()
    path = own / FILE
    path.write_bytes(_ledger(folder))
    if rng.random() < 0.7:
        tables = {
            "cluster": ("config", "dollars", "groups"),
            "nodes": ("name", "broken"),
            "groups": ("jobs", "price"),
        }
        tables["jobs"] = (
            "name",
            "run",
            "terms",
            "submitted",
            "state",
            "reason",
            "step",
            "spent",
            "grp",
            "rollout",
        )
        tables["events"] = ("at", "kind", "job", "text")
        table = rng.choice(list(tables))
        odd = (None, -1, "x", "{}", b"\xff", "[" * 9999, 1e308, 2**62, '{"task": 3}', "")
        db = sqlite3.connect(path)
        with contextlib.suppress(sqlite3.Error):
            db.execute(f"UPDATE {table} SET {rng.choice(tables[table])} = ?", [rng.choice(odd)])
            db.commit()
        db.close()
    else:
        path.write_bytes(damaged_bytes(rng, path.read_bytes()))
    return lambda: json.dumps(document(own))


def command_line(rng: random.Random, folder: Path) -> Case:
    """The whole command, with arguments that make no sense. Nothing that is whole is run."""
    write_whole_files(folder)
    (folder / "binary.yaml").write_bytes(rng.randbytes(300))
    (folder / "empty.yaml").write_bytes(b"")
    (folder / "snippet.yaml").write_text(rng.choice(SNIPPETS))
    (folder / "folder").mkdir()
    (folder / "folder" / "x").write_text("x")
    places = [
        folder / each for each in ("nothing", "binary.yaml", "empty.yaml", "snippet.yaml", "folder", "")
    ]
    nowhere = ["/dev/null", "/dev/zero", "", "x" * 300, "a\nb", "\udcff", "/proc/self/mem", "sums.yaml/x"]
    wrong = lambda: str(rng.choice([*places, *nowhere]))
    number = lambda: rng.choice(("-1", "0", "1e9", "x", "", "9" * 30, "nan", "inf", "-inf", "1.5", "٣"))
    whole = str(folder / rng.choice(("sums.yaml", "mix.yaml", "data.yaml")))
    simulated = ["--workers", "--seed", "--hardware", "--profile", "--policy", "--out"]
    choices: list[list[str]] = [
        ["run", wrong(), "--dry-run"],
        ["run", whole, "--dry-run", f"{rng.choice(_keys(SUMS))}={snippet(rng)}"],
        ["run", wrong(), "--out", wrong()],
        ["simulate", str(folder / "mix.yaml"), rng.choice(simulated), rng.choice((number(), wrong()))],
        ["simulate", wrong(), wrong()],
        ["compare", str(folder / "mix.yaml"), "--simulate", rng.choice(("--policies", *simulated)), wrong()],
        ["plan", wrong(), wrong()],
        ["plan", str(folder / "cluster.yaml"), wrong(), f"{rng.choice(_keys(CLUSTER))}={snippet(rng)}"],
        ["fit", wrong(), "--out", wrong()],
        ["fit", str(folder / "folder"), "--hardware", wrong()],
        ["profile", wrong(), "--steps", number(), "--out", wrong()],
        ["report", wrong()],
        ["replay", wrong()],
        ["pause", wrong(), wrong()],
        ["resume", wrong(), wrong()],
        ["cancel", wrong(), wrong()],
        ["submit", wrong(), wrong(), "--steps", number()],
        ["submit", str(folder / "folder"), whole, "--max-slowdown", number(), "--deadline", number()],
        ["cluster", "start", wrong(), "--out", wrong()],
        ["cluster", "status", wrong()],
        ["fetch", wrong()],
        [rng.choice(TEXTS)],
        ["run"],
        ["run", whole, "--steps", "3"],
    ]
    arguments = [each.replace("\0", "") for each in rng.choice(choices)]

    def case() -> None:
        said = io.StringIO()
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                main(arguments)
            except SystemExit as end:
                code = end.code or 0
        text = said.getvalue().rstrip("\n")
        if code == 2:
            assert text.startswith("jigsaw: "), text
            raise JigsawError(text)
        assert code in (0, 1), (code, text)

    return case


def _resolved(path: Path, given: list[str]) -> None:
    if holds_pipelines(path):
        return
    config = load_run_file(path, given)
    if config.task.kind in ("arithmetic", "data", "calculator") and getattr(config.task, "size", 0) < 10_000:
        check_task(config)
    files.remarks(config)
    again = path.with_name("again.yaml")
    again.write_text(config.to_yaml(), encoding="utf-8")
    assert load_run_file(again) == config


MORE = (("cluster", CLUSTER), ("jobs", JOBS))


def write_whole_files(folder: Path) -> None:
    """Run files, mixes, a cluster and its jobs, and what they point to."""
    for name, tree in (
        ("sums", SUMS),
        ("data", DATA),
        ("game", GAME),
        ("mix", MIX),
        ("pooled", POOLED),
        *MORE,
    ):
        (folder / f"{name}.yaml").write_bytes(_yaml(tree))
    (folder / "rows.jsonl").write_text(
        '{"question": "1+1", "answer": "2"}\n{"question": "2+2", "answer": "4"}\n'
    )
    (folder / "judge.py").write_text(
        "def right(data_source, solution_str, ground_truth, extra_info, **kw):\n    return 1\n"
    )


def _yaml(tree: Tree) -> bytes:
    return json.dumps(tree).encode()


def _keys(tree: Tree, prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        found.append(f"{prefix}{key}")
        found += _keys(value, f"{prefix}{key}.") if isinstance(value, dict) else []
    return found


def _lines(records: list[Tree]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _damaged_lines(rng: random.Random, records: list[Tree]) -> bytes:
    """One record is damaged, or they are in disorder, or the bytes are."""
    records = copy.deepcopy(records)
    match rng.choice(("tree", "tree", "tree", "order", "bytes")):
        case "tree":
            at = rng.randrange(len(records))
            records[at] = damaged(rng, records[at])
        case "order":
            rng.shuffle(records)
        case _:
            return damaged_bytes(rng, _lines(records))
    return b"".join(json.dumps(record, default=str).encode() + b"\n" for record in records)


_LEDGER: list[bytes] = []


def _ledger(folder: Path) -> bytes:
    """The database of a cluster with a job, made once."""
    if not _LEDGER:
        (folder / "c.yaml").write_bytes(
            _yaml({"pools": {"all": {"kind": "cpu", "runs": "both", "nodes": 1}}})
        )
        ledger = Ledger.make(folder / "whole", load_cluster_file(folder / "c.yaml"))
        ledger.submit("sums", load_run_file(folder / "sums.yaml"), TermsConfig())
        with ledger.change():
            ledger.save_broken(["all-0"], [])
            ledger.save_groups([GroupEntry(1, 1.0, ("all-0",), ("all-0",), ("sums",))], 1)
        ledger.close()
        _LEDGER.append((folder / "whole" / FILE).read_bytes())
    return _LEDGER[0]


_PROFILE: list[Tree] = []


def _profile(folder: Path) -> Tree:
    """A small profile, made once."""
    if not _PROFILE:
        path = folder / "small.json"
        known = load_profile("h100-traces")
        write_profile(known, path)
        tree = json.loads(path.read_text())
        tree["workloads"] = {"gsm8k_qwen3-4b": tree["workloads"]["gsm8k_qwen3-4b"]}
        entry = tree["workloads"]["gsm8k_qwen3-4b"]
        entry["quantiles"] = entry["quantiles"][:2]
        _PROFILE.append(tree)
    return _PROFILE[0]


TARGETS: list[Target] = [
    run_file,
    overrides,
    mix_file,
    cluster_files,
    profile_file,
    logs_to_fit,
    events_and_metrics,
    replayed_events,
    resumed_folder,
    ledger_file,
    command_line,
]
