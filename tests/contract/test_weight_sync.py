"""The transaction and every transport of conf/weight_sync, on engines that are plain objects."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from engine_rig import chunks_of
from safetensors.torch import load_file

from rlpost.cluster.workers import WorkerGroup
from rlpost.engines.base import Stage, WeightChunk, WeightFile
from rlpost.errors import EngineError, WeightSyncError
from rlpost.fingerprint import fingerprint
from rlpost.validation import Section, import_target
from rlpost.weight_sync.transaction import WeightSync, WeightSyncConfig

OPTIONS = sorted((Path(__file__).parents[2] / "conf" / "weight_sync").glob("*.yaml"))


class LocalWorker:
    """A Worker whose object lives here. Records calls; may fail or hang in one method."""

    def __init__(self, rank: int, target: Any) -> None:
        self.rank, self.target = rank, target
        self.role = "engine"
        self.calls: list[str] = []
        self.fails_in = ""

    def __repr__(self) -> str:
        return f"{self.role}[{self.rank}]"

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        self.calls.append(method)
        await asyncio.sleep(0)
        if method == self.fails_in:
            raise EngineError(f"no {method} today")
        return getattr(self.target, method)(*args)


class PlainTrainer:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def export_weights(self, dtype: str, stage: Stage) -> list[WeightChunk]:
        cast = {name: value.to(getattr(torch, dtype)) for name, value in self.tensors.items()}
        return chunks_of(cast, stage)


class PlainEngine:
    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.version = 0
        self.paused = False
        self.bad_kernels: list[str] = []

    def pause(self, mode: str) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def load_weights(self, chunks: list[WeightChunk]) -> None:
        assert self.paused
        for chunk in chunks:
            if isinstance(chunk.buffer, WeightFile):
                self.weights |= load_file(chunk.buffer.path)
                continue
            for spec in chunk.specs:
                dtype = getattr(torch, spec.dtype)
                size = int(np.prod(spec.shape)) * dtype.itemsize
                data = torch.from_numpy(chunk.buffer[spec.offset : spec.offset + size].copy())
                self.weights[spec.name] = data.view(dtype).view(spec.shape)

    def fingerprints(self, names: list[str]) -> dict[str, int]:
        return {name: fingerprint(self.weights[name]) for name in names}

    def verify_kernels(self) -> list[str]:
        return self.bad_kernels

    def commit(self, version: int) -> None:
        self.version = version


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layer.{row}.weight": torch.randn(6, 5) for row in range(8)}


def group(trainer: PlainTrainer) -> WorkerGroup:
    worker: Any = LocalWorker(0, trainer)
    return WorkerGroup("actor", [worker])


def sync_of(option: Path, **changes: Any) -> WeightSync:
    folder = tempfile.gettempdir() + "/rlpost-test"
    values = yaml.safe_load(option.read_text().replace("${output_dir}", folder))
    values.pop("_target_")
    transport = import_target(values["transport"].pop("_target_"), ["rlpost."])
    values["transport"] = Section("", transport, transport.Config(**values["transport"]))
    return WeightSync(WeightSyncConfig(**{**values, "dtype": "float32", **changes}))


@pytest.fixture(autouse=True)
def plain_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.cluster.store.put", lambda value: value)


@pytest.fixture(params=OPTIONS, ids=lambda path: path.stem)
def option(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def engines() -> list[Any]:
    return [LocalWorker(rank, PlainEngine()) for rank in range(2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_push_delivers_every_tensor_and_the_version(
    option: Path, engines: list[Any], dtype: str
) -> None:
    sync = sync_of(option, dtype=dtype)
    seconds = await sync.push(3, group(PlainTrainer(weights())), engines, full=True)
    for engine in engines:
        assert engine.target.version == 3 and not engine.target.paused
        for name, tensor in weights().items():
            assert torch.equal(engine.target.weights[name], tensor.to(getattr(torch, dtype)))
    phases = ["prepare", "pause", "transfer", "verify", "commit", "resume", "total"]
    assert list(seconds) == phases


async def test_phases_come_in_order(option: Path, engines: list[Any]) -> None:
    await sync_of(option).push(1, group(PlainTrainer(weights())), engines, full=False)
    order = ["pause", "load_weights", "fingerprints", "commit", "resume"]
    assert engines[0].calls == engines[1].calls == order


async def test_rotating_verification_sees_every_tensor_in_turn(
    option: Path, engines: list[Any]
) -> None:
    sync = sync_of(option, verify="rotating", verify_fraction=0.25)
    seen: list[str] = []
    engines[0].target.fingerprints = lambda names: (
        seen.extend(names) or PlainEngine.fingerprints(engines[0].target, names)
    )
    for version in range(4):
        await sync.push(version, group(PlainTrainer(weights())), engines, full=False)
    assert sorted(seen) == sorted(weights())


async def test_a_flipped_bit_on_one_engine_fails_the_push_by_name(
    option: Path, engines: list[Any]
) -> None:
    sync = sync_of(option, verify="full")
    good_load = engines[1].target.load_weights

    def bad_load(chunks: list[WeightChunk]) -> None:
        good_load(chunks)
        engines[1].target.weights["layer.5.weight"].view(torch.int32)[2, 3] ^= 1

    engines[1].target.load_weights = bad_load
    with pytest.raises(WeightSyncError, match=r"verify failed on engine\[1\].*layer\.5\.weight"):
        await sync.push(1, group(PlainTrainer(weights())), engines, full=False)
    assert engines[1].target.paused and engines[1].target.version == 0


async def test_kernels_on_other_values_fail_a_full_push(option: Path, engines: list[Any]) -> None:
    engines[0].target.bad_kernels = ["lm_head"]
    with pytest.raises(WeightSyncError, match=r"verify failed on engine\[0\].*lm_head"):
        await sync_of(option).push(0, group(PlainTrainer(weights())), engines, full=True)


async def test_engines_with_old_weights_go_on_after_a_failed_pause(
    option: Path, engines: list[Any]
) -> None:
    engines[1].fails_in = "pause"
    with pytest.raises(WeightSyncError, match=r"pause failed on engine\[1\]"):
        await sync_of(option).push(1, group(PlainTrainer(weights())), engines, full=False)
    assert not engines[0].target.paused and engines[0].target.version == 0


async def test_uncommitted_engines_stay_paused_and_are_named(
    option: Path, engines: list[Any]
) -> None:
    engines[0].fails_in = "load_weights"
    with pytest.raises(WeightSyncError, match=r"left paused: engine\[0\], engine\[1\]"):
        await sync_of(option).push(1, group(PlainTrainer(weights())), engines, full=False)
    assert engines[0].target.paused and engines[1].target.paused


async def test_engines_keep_generating_while_the_trainer_prepares(
    option: Path, engines: list[Any]
) -> None:
    class BadTrainer(PlainTrainer):
        def export_weights(self, dtype: str, stage: Stage) -> list[WeightChunk]:
            raise EngineError("no export")

    with pytest.raises(WeightSyncError, match="prepare failed on actor"):
        await sync_of(option).push(1, group(BadTrainer({})), engines, full=False)
    assert engines[0].calls == []


async def test_ranks_that_export_nothing_fail_the_push(option: Path, engines: list[Any]) -> None:
    with pytest.raises(WeightSyncError, match="exported any weights"):
        await sync_of(option).push(1, group(PlainTrainer({})), engines, full=False)
