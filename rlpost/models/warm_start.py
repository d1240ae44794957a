"""A model that another recipe of this project trains first: run once, then taken from the cache."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from rlpost.composition import load_beside
from rlpost.config import build
from rlpost.errors import ModelError
from rlpost.models.base import Dtype
from rlpost.models.cache import build_once, key_of, sibling
from rlpost.models.folder import checked
from rlpost.models.launcher import Launcher
from rlpost.models.small import prepare_small, settings_when_small, small_classifier

VERSIONED = ("rlpost", "torch", "transformers", "megatron-core")


@dataclass(frozen=True)
class WarmStartedModelConfig:
    recipe: Annotated[str, Field(pattern=r"^[\w/-]+$")]
    overrides: list[str]
    timeout_s: PositiveFloat
    dtype: Dtype
    max_length: PositiveInt


class WarmStartedModel:
    """The last Hugging Face export of `launch.py +recipe=<recipe> <overrides>`.

    The folder's name holds a hash of that run's whole configuration and of the libraries' versions,
    so a changed recipe trains anew and an unchanged one never does.
    """

    Config = WarmStartedModelConfig

    def __init__(self, config: WarmStartedModelConfig) -> None:
        self.config = config

    @property
    def arguments(self) -> list[str]:
        """Of the run that trains it."""
        return [f"+recipe={self.config.recipe}", *self.config.overrides]

    def settings(self) -> Mapping[str, Any] | None:
        """Training changes no sizes: those of the model that the recipe starts from."""
        settings: Mapping[str, Any] | None = build(load_beside(self.arguments).model).settings()
        return settings

    def prepare_small(self, cache_dir: Path) -> Path:
        """What its training starts from, with random weights."""
        config = load_beside(self.arguments)
        folder = prepare_small(build(config.model), cache_dir)
        classifies = getattr(config.trainer.target, "classifies", False)
        return small_classifier(folder, cache_dir) if classifies else folder

    def small_model_settings(self) -> Mapping[str, Any] | None:
        return settings_when_small(build(load_beside(self.arguments).model))

    def prepare(self, cache_dir: Path) -> Path:
        launcher = Launcher(self.arguments)
        key = key_of({"config": launcher.composed(), "versions": versions()})
        target = cache_dir.absolute() / f"{self.config.recipe.replace('/', '_')}-{key}"
        folder = build_once(target, lambda empty: self._train(launcher, target, empty))
        return checked(folder, max_length=self.config.max_length)

    def _train(self, launcher: Launcher, target: Path, folder: Path) -> None:
        """Runs the recipe beside the cache and copies its export into `folder`."""
        for left in target.parent.glob(sibling(target, "run-*").name):
            shutil.rmtree(left, ignore_errors=True)
        # Of our own: the run of a builder that was killed may write for a moment longer.
        run_dir = sibling(target, f"run-{os.getpid()}")
        run_dir.mkdir()
        print(f"[model] training {target.name} with recipe {self.config.recipe} (once)", flush=True)
        launcher.run(run_dir, timeout_s=self.config.timeout_s)
        export = last_export(run_dir)
        shutil.copytree(export, folder, dirs_exist_ok=True)


def last_export(run_dir: Path) -> Path:
    """`checkpoints/step_<highest>/hf` of a finished run. Raises ModelError."""
    found = [
        (int(match[1]), path)
        for path in (run_dir / "checkpoints").glob("step_*/hf")
        if (match := re.fullmatch(r"step_(\d+)", path.parent.name))
    ]
    if not found:
        raise ModelError(
            f"the warm start left no {run_dir}/checkpoints/step_*/hf; its recipe must save a "
            "checkpoint at the end"
        )
    return max(found)[1]


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in VERSIONED}
