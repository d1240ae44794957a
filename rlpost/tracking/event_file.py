"""TensorBoard's event file, written with the parts of its package that need no torch."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpost.tracking.background import Row
from rlpost.tracking.base import RunStatus

TEXT_SUFFIXES = (".yaml", ".txt", ".diff")
TEXT_LENGTH = 100_000  # characters of a file that are shown


class EventFile:
    """Scalars for rows, text for artefacts that can be read; on disk when a call returns."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("wb"))
        self._write(time.time(), file_version="brain.Event:2")
        self._writer.flush()

    def log(self, rows: Sequence[Row]) -> None:
        """A metric without a value (NaN) has no point in its curve."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            values = [
                Summary.Value(tag=name, simple_value=float(value))
                for name, value in row.metrics.items()
                if not math.isnan(value)
            ]
            self._write(row.time_ms / 1000, step=row.step, summary=Summary(value=values))
        self._writer.flush()

    def artifact(self, path: Path) -> None:
        """A folder is shown file by file, under its name."""
        within = path.is_dir()
        for file in sorted(path.iterdir()) if within else [path]:
            if file.suffix in TEXT_SUFFIXES:
                text = file.read_text(errors="replace")[:TEXT_LENGTH]
                tag = f"{path.name}/{file.stem}" if within else file.name
                self._text(tag, f"```\n{text}\n```")  # Markdown, so that lines stay lines

    def end(self, status: RunStatus) -> None:
        self._text("status", status)
        self._writer.close()

    def _text(self, tag: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        plugin = SummaryMetadata.PluginData(plugin_name="text")
        value = Summary.Value(
            tag=tag,
            metadata=SummaryMetadata(plugin_data=plugin),
            tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
        )
        self._write(time.time(), summary=Summary(value=[value]))
        self._writer.flush()

    def _write(self, wall_time: float, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=wall_time, **fields).SerializeToString())
