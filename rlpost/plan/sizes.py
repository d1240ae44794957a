"""The sizes of every model of a run, before any of them is there."""

from __future__ import annotations

from typing import Any

from rlpost.config import RunConfig, Section, build
from rlpost.models.shape import ModelShape, shape_of
from rlpost.models.small import settings_when_small
from rlpost.roles import engine_roles, served_prm, teacher_roles, trainer_roles


def model_sections(config: RunConfig) -> dict[str, Section]:
    """Role -> model, of trainers, teachers and engines."""
    found = {role: parts.model for role, parts in trainer_roles(config).items()}
    found |= {role: parts.model for role, parts in teacher_roles(config).items()}
    found |= dict.fromkeys(engine_roles(config), config.model)
    served = served_prm(config)
    return found if served is None else found | {"prm": served.model}


def shapes(config: RunConfig) -> dict[str, ModelShape | None]:
    """None: not known until the model is there. Raises ConfigError, ModelError."""
    known: list[tuple[Section, ModelShape | None]] = []
    found: dict[str, ModelShape | None] = {}
    for role, section in model_sections(config).items():
        same = [shape for other, shape in known if other == section]
        found[role] = same[0] if same else _shape(section, small=config.debug.small_models)
        known.append((section, found[role]))
    return found


def _shape(section: Section, *, small: bool) -> ModelShape | None:
    model = build(section)
    ask: Any = getattr(model, "settings", lambda: None)
    settings = settings_when_small(model) if small else ask()
    return None if settings is None else shape_of(settings)
