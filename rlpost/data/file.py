"""Prompts from a JSONL or Parquet file. A malformed row is an error, never skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.data.order import row_at
from rlpost.errors import DataError
from rlpost.types import Prompt

if TYPE_CHECKING:
    import pyarrow.parquet as parquet
else:
    from rlpost.lazy import LazyModule

    parquet = LazyModule("pyarrow.parquet")

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class FileSourceConfig:
    path: str
    name: str
    prompt_key: str
    answer_key: str | None
    completion_key: str | None
    id_key: str | None
    metadata_keys: list[str]

    def __post_init__(self) -> None:
        if Path(self.path).suffix not in SUFFIXES:
            raise ValueError(f"path ({self.path}) must end in {' or '.join(SUFFIXES)}")


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row. `content` is the prompt: text, or chat turns."""

    row_id: str
    content: str | tuple[Mapping[str, str], ...]
    answer: str
    completion: str | None
    metadata: Mapping[str, Any]


class FileSource:
    """All rows of the file, checked and held in memory. Raises DataError at the first bad row."""

    Config = FileSourceConfig

    def __init__(self, config: FileSourceConfig, *, seed: int) -> None:
        """`seed` orders the prompts."""
        self._config = config
        self._seed = seed
        self._rows = [self._row(place, raw) for place, raw in read_rows(Path(config.path))]
        if not self._rows:
            raise DataError(f"{config.path} holds no rows")
        self._require_unique_ids()

    @property
    def name(self) -> str:
        return self._config.name

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, epoch: int, index: int) -> Prompt:
        row = self._rows[row_at(self._seed, epoch, index, len(self._rows))]
        return Prompt(
            f"{self.name}/{row.row_id}",
            epoch=epoch,
            index=index,
            text=row.content if isinstance(row.content, str) else None,
            messages=None if isinstance(row.content, str) else row.content,
            answer=row.answer,
            completion=row.completion,
            metadata=row.metadata,
        )

    def _row(self, place: str, raw: Mapping[str, Any]) -> Row:
        config = self._config
        answer = "" if config.answer_key is None else _scalar(place, raw, config.answer_key)
        number = place.rsplit(" ", 1)[-1]
        return Row(
            row_id=number if config.id_key is None else _scalar(place, raw, config.id_key),
            content=_content(place, raw, config.prompt_key),
            answer=answer,
            completion=_completion(place, raw, config.completion_key),
            metadata={key: _field(place, raw, key) for key in config.metadata_keys},
        )

    def _require_unique_ids(self) -> None:
        seen: set[str] = set()
        for row in self._rows:
            if row.row_id in seen:
                raise DataError(
                    f"{self._config.path}: field {self._config.id_key!r} holds {row.row_id!r} "
                    "twice; ids must be unique, or set id_key: null to take row numbers"
                )
            seen.add(row.row_id)


def read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, row), where place is "<path>, line 17". Raises DataError."""
    if not path.is_file():
        raise DataError(f"{path} is not a file (working directory: {Path.cwd()})")
    return _jsonl(path) if path.suffix == ".jsonl" else _parquet(path)


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{place}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{place}: a JSON object is wanted, got {type(row).__name__}")
            yield place, row


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, line {number}", row


def _field(place: str, raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise DataError(f"{place}: field {key!r} is missing; the row has {sorted(raw)}")
    return raw[key]


def _scalar(place: str, raw: Mapping[str, Any], key: str) -> str:
    value = _field(place, raw, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{place}: field {key!r} must be a string or number, got {value!r}")
    return str(value)


def _completion(place: str, raw: Mapping[str, Any], key: str | None) -> str | None:
    if key is None:
        return None
    value = _field(place, raw, key)
    if not isinstance(value, str) or not value:
        raise DataError(f"{place}: field {key!r} must be a non-empty string, got {value!r}")
    return value


def _content(place: str, raw: Mapping[str, Any], key: str) -> str | tuple[Mapping[str, str], ...]:
    value = _field(place, raw, key)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_turn(turn) for turn in value):
        return tuple({"role": turn["role"], "content": turn["content"]} for turn in value)
    raise DataError(
        f"{place}: field {key!r} must be a non-empty string or a list of "
        f'{{"role": ..., "content": ...}} turns of text, got {value!r}'
    )


def _is_turn(turn: Any) -> bool:
    return (
        isinstance(turn, dict)
        and turn.keys() == {"role", "content"}
        and all(isinstance(value, str) for value in turn.values())
    )
