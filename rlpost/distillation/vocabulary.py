"""Student and teacher must speak of the same token by the same id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpost.errors import ConfigError


def check_vocabularies(student: Path, teachers: Mapping[str, Path], k: int | None) -> None:
    """Compares the folders of student and teachers (by role); `k` is the size of a top-k support.

    Raises ConfigError.
    """
    size = vocab_size(student)
    problems = [
        line for name, folder in teachers.items() for line in differences(student, name, folder)
    ]
    if k is not None and k > size:
        problems.append(
            f"distillation.k ({k}) is more than the {size} tokens of the vocabulary of {student}; "
            "lower it, or choose distillation=full"
        )
    if problems:
        raise ConfigError(problems)


def differences(student: Path, name: str, teacher: Path) -> list[str]:
    """One line if the two vocabularies differ, else none; `name` is the teacher's role."""
    size, other = vocab_size(student), vocab_size(teacher)
    if size != other:
        return [
            f"{name}: its vocabulary has {other} ids ({teacher}), the student's {size} "
            f"({student}); choose a teacher of the same family"
        ]
    ours, theirs = tokens(student), tokens(teacher)
    unlike = sorted(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
    if not unlike:
        return []
    token = unlike[0]
    return [
        f"{name}: {len(unlike)} tokens of {teacher} have other ids than in the student's "
        f"{student}, such as {token!r}: {theirs.get(token)} and {ours.get(token)}; choose a "
        "teacher with the student's tokenizer"
    ]


def vocab_size(folder: Path) -> int:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"])


def tokens(folder: Path) -> dict[str, int]:
    """Token -> id, added tokens included."""
    from transformers import AutoTokenizer

    return dict(AutoTokenizer.from_pretrained(folder).get_vocab())
