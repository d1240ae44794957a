"""What `launch.py --help` prints: read from conf/, without composing a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

CONF = Path(__file__).parent.parent / "conf"
HEAD = """usage: python launch.py [+recipe=NAME] [group=option ...] [key=value ...] [flags]

A run is conf/config.yaml plus one option of each group; docs/configuration.md lists every key.

  python launch.py +recipe=grpo_chain                  run a recipe
  python launch.py +recipe=grpo_chain plan=true        check it and print its plan, start nothing
  python launch.py +recipe=grpo_chain debug=fast       two quick steps of it
  python launch.py +recipe=grpo_chain algorithm=dapo trainer.optimizer.lr=1e-4
  python launch.py +recipe=grpo_chain tracking=[mlflow,tensorboard]
  python launch.py -m +recipe=grpo_chain seed=1,2,3    a sweep

  group=option        choose an option; ~group switches an optional group off
  group.key=value     set a key; +group.key=value adds one where any key may stand
  --cfg job           print the configuration that these overrides make; --resolve fills ${...} in
  -m                  a sweep over the values that are listed with commas
  --config-dir DIR    a folder with groups and options of your own
  -cp DIR -cn rerun   run the saved run in folder DIR once more
  --info              where each part of the configuration comes from
  --hydra-help        Hydra's own flags and groups

Completion, in a shell where .venv is activated: eval "$(python launch.py -sc install=bash)"
Exit codes: 0 finished, 1 the run failed, 2 the configuration is wrong, 130 interrupted.

groups and their options:
"""
FLAGS = ("--help", "-h")


def asks_for_help(arguments: Sequence[str]) -> bool:
    return any(argument in FLAGS for argument in arguments)


def help_text(conf: Path = CONF) -> str:
    return HEAD + "\n".join(group_lines(conf))


def group_lines(conf: Path) -> Iterator[str]:
    """`  loop          async, fully_async, sync`"""
    groups = [folder for folder in conf.iterdir() if folder.is_dir() and folder.name != "hydra"]
    for folder in sorted(groups):
        options = sorted(file.stem for file in folder.glob("*.yaml"))
        if options:
            yield f"  {folder.name:<14}{', '.join(options)}"
