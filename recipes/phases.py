"""Where the seconds of a step go: by phase, for recipes and loops, and what overlap saves.

    python recipes/phases.py table --recipes grpo_chain ppo_chain --loops sync async fully_async
    python recipes/phases.py overlap

`overlap` gives the engine and the trainer one core each and slows generation down until it costs
as much as training does, with a model of 9 million random weights: a step of the tiny one is so
short that the driver's own work shows. The bound is the slower of the two, alone: as the sync run
has them.
Medians over the steps after the first three. Other work on the machine spoils the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "outputs" / "phases"
RECIPES = sorted(path.stem for path in (ROOT / "conf" / "recipe").glob("*.yaml"))
LOOPS = ("sync", "async", "fully_async")
WARM_UP = 3  # steps left out: caches fill, allocators grow
PHASES = {
    "step": "time/step_s",
    "wait": "time/wait_s",
    "generate": "time/generate_s",
    "passes": "time/logprobs_s",
    "train": "time/train_s",
    "weight sync": "time/weight_sync_s",
}
ONE_CORE_EACH = [
    "trainer.data_parallel_size=1",
    "+cluster.cores.engine=[0]",
    "+cluster.cores.rollout=[0]",
    "+cluster.cores.actor=[1]",
    "+engine.vllm.max_num_seqs={seqs}",
]
OVERLAP_MODEL = [
    "model=tiny_init",
    "model.num_layers=4",
    "model.hidden_size=512",
    "model.intermediate_size=1024",
    "train_batch_size=96",
]
Medians = dict[str, float]  # metric -> seconds


def run(name: str, *overrides: str, steps: int) -> list[Medians]:
    """The steps of one run, the first ones left out."""
    folder = RUNS / f"{name.replace(' ', '_')}_{time.time_ns()}"
    print(f"{name} ...", file=sys.stderr, flush=True)
    command = [
        sys.executable,
        str(ROOT / "launch.py"),
        *overrides,
        f"num_steps={steps + WARM_UP}",
        "num_epochs=null",
        "tracking=none",
        f"hydra.run.dir='{folder}'",
    ]
    environment = {**os.environ, "RAY_worker_niceness": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row][WARM_UP:]


def median(rows: Sequence[Medians], metric: str) -> float | None:
    values = [row[metric] for row in rows if metric in row]
    return statistics.median(values) if values else None


def line(name: str, rows: Sequence[Medians]) -> str:
    cells = [median(rows, metric) for metric in PHASES.values()]
    return f"| {name} | " + " | ".join("" if v is None else f"{v:.3f}" for v in cells) + " |"


def header(first: str) -> str:
    return f"| {first} | " + " | ".join(PHASES) + " |\n" + "|" + " --- |" * (len(PHASES) + 1)


def table(recipes: Sequence[str], loops: Sequence[str], steps: int) -> None:
    print(header("recipe, loop"))
    for recipe in recipes:
        for loop in loops:
            name = f"{recipe} {loop}"
            evals = [] if recipe in ("sft_chain", "prm_train") else ["eval.interval=0"]
            rows = run(name, f"+recipe={recipe}", f"loop={loop}", *evals, steps=steps)
            print(line(f"{recipe}, {loop}", rows), flush=True)


def overlap(seqs: int, steps: int) -> None:
    pinned = [item.format(seqs=seqs) for item in ONE_CORE_EACH]
    print(header("loop"))
    medians: dict[str, float] = {}
    for loop in LOOPS:
        common = ("+recipe=grpo_chain", f"loop={loop}", "eval.interval=0")
        rows = run(f"overlap {loop}", *common, *OVERLAP_MODEL, *pinned, steps=steps)
        print(line(loop, rows), flush=True)
        medians[loop] = median(rows, PHASES["step"]) or 0.0
        if loop == "sync":
            work = [row[PHASES["passes"]] + row[PHASES["train"]] for row in rows]
            generate, trainer = median(rows, PHASES["generate"]) or 0.0, statistics.median(work)
    print(f"\nalone: generate {generate:.3f} s, passes and train {trainer:.3f} s")
    for loop, step in medians.items():
        print(f"{loop}: {step / max(generate, trainer):.2f} times the slower of the two")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    tables = modes.add_parser("table")
    tables.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    tables.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    overlaps = modes.add_parser("overlap")
    overlaps.add_argument("--seqs", type=int, default=3, help="sequences the engine runs at once")
    for mode in (tables, overlaps):
        mode.add_argument("--steps", type=int, default=8, help="steps that count")
    options = parser.parse_args()
    if options.mode == "table":
        table(options.recipes, options.loops, options.steps)
    else:
        overlap(options.seqs, options.steps)


if __name__ == "__main__":
    main()
