"""The folders of the models that a run uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rlpost.config import RoleConfig, RunConfig, Section, build
from rlpost.distillation.vocabulary import check_vocabularies
from rlpost.models.small import prepare_small
from rlpost.roles import served_prm, teacher_roles, trainer_roles


def prepare_models(config: RunConfig) -> dict[str, Path]:
    """Role -> folder of its model, downloaded, converted or trained if it is not there yet."""
    prepared = small_or_whole(config)
    folders: list[tuple[Section, Path]] = []
    paths: dict[str, Path] = {}
    # The actor's is read by engines and for its tokenizer, also where nothing is trained.
    roles = {"actor": RoleConfig(config.model, config.trainer)} | trainer_roles(config)
    teachers = {} if config.debug.only == "rollout" else teacher_roles(config)
    for role, parts in (roles | teachers).items():
        known = [folder for model, folder in folders if model == parts.model]
        paths[role] = known[0] if known else prepared(parts.model)
        folders.append((parts.model, paths[role]))
    if served := served_prm(config):
        known = [folder for model, folder in folders if model == served.model]
        paths["prm"] = known[0] if known else prepared(served.model)
    return paths


def small_or_whole(config: RunConfig) -> Callable[[Section], Path]:
    """What makes a model's folder: the model itself, or a small random one of its kind."""
    cache_dir = Path(config.output_dir) / "models"
    if config.debug.small_models:
        return lambda model: prepare_small(build(model), cache_dir)
    return lambda model: build(model).prepare(cache_dir)


def check_teachers(config: RunConfig, paths: Mapping[str, Path]) -> None:
    """What only the models' folders tell. Raises ConfigError."""
    if config.distillation is not None and config.debug.only != "rollout":
        k = getattr(config.distillation.config, "k", None)
        check_vocabularies(paths["actor"], {name: paths[name] for name in teacher_roles(config)}, k)
