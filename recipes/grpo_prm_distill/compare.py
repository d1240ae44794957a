"""Four ways to train the same student, over seeds: held-out accuracy against generated tokens.

    python recipes/grpo_prm_distill/compare.py --seeds 1 2 3 --steps 72

Runs that are already there (outputs/compare/<way>/<seed>) are not run again. Writes curves.png and
prints the table of the README. Accuracy is sampled at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RUNS = ROOT / "outputs" / "compare"
TARGET = 0.9
GRPO = ["+recipe=grpo_chain", "rollout.max_response_tokens=32", "trainer.optimizer.lr=1.0e-4"]
WAYS = {  # each at the rate that suited it best of those tried
    "GRPO": GRPO,
    "GRPO + PRM": [*GRPO, "prm=verifier"],
    "OPD (student top-k)": ["+recipe=opd_chain"],
    "GRPO + PRM + distillation": ["+recipe=grpo_prm_distill"],
}
SAME = [
    "train_batch_size=128",
    "trainer.data_parallel_size=2",
    "eval.interval=4",
    "eval.num_prompts=512",
    "eval.temperature=1.0",
]
Curve = list[tuple[int, float]]  # (generated tokens so far, held-out accuracy)


def folder_of(way: str, seed: int) -> Path:
    return RUNS / way.lower().replace(" ", "_").replace("+", "and") / str(seed)


def run(way: str, seed: int, steps: int) -> None:
    folder = folder_of(way, seed)
    if (folder / "checkpoints").exists():
        return
    settings = [f"seed={seed}", f"num_steps={steps}"]
    command = [sys.executable, "launch.py", *WAYS[way], *SAME, *settings]
    print(f"{way}, seed {seed} ...", flush=True)
    with (RUNS / "log.txt").open("a") as log:
        subprocess.run(
            [*command, f"hydra.run.dir='{folder}'"],
            cwd=ROOT,
            check=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def curve_of(folder: Path) -> Curve:
    tokens, curve = 0, []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        tokens += int(row.get("perf/generated_tokens", 0))
        if "eval/chain_sum/accuracy" in row:
            curve.append((tokens, row["eval/chain_sum/accuracy"]))
    return curve


def tokens_to_target(curve: Curve) -> int | None:
    return next((tokens for tokens, accuracy in curve if accuracy >= TARGET), None)


def table(curves: dict[str, list[Curve]]) -> str:
    rows = ["| way | before | after | thousand tokens to 0.9, by seed | mean |", "|" + " --- |" * 5]
    for way, seeds in curves.items():
        needed = [tokens_to_target(curve) for curve in seeds]
        known = [tokens for tokens in needed if tokens is not None]
        mean = f"{statistics.mean(known) / 1000:.0f}" if len(known) == len(needed) else "-"
        shown = ", ".join("never" if n is None else f"{n / 1000:.0f}" for n in needed)
        first = statistics.mean(curve[0][1] for curve in seeds)
        last = statistics.mean(curve[-1][1] for curve in seeds)
        rows.append(f"| {way} | {first:.3f} | {last:.3f} | {shown} | {mean} |")
    return "\n".join(rows)


def plot(curves: dict[str, list[Curve]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for index, (way, seeds) in enumerate(curves.items()):
        for row, curve in enumerate(seeds):
            tokens, accuracy = zip(*curve, strict=True)
            thousands = [count / 1000 for count in tokens]
            axes.plot(thousands, accuracy, color=f"C{index}", label=None if row else way, lw=1)
    axes.axhline(TARGET, color="grey", lw=0.5)
    axes.set_xlabel("generated tokens, thousands")
    axes.set_ylabel("held-out accuracy, temperature 1")
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "curves.png", dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=72)
    options = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for way in WAYS:
            run(way, seed, options.steps)
    curves = {way: [curve_of(folder_of(way, s)) for s in options.seeds] for way in WAYS}
    print(table(curves))
    plot(curves)


if __name__ == "__main__":
    main()
