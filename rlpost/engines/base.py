"""The contract of an inference engine replica. Token ids in, token ids and log-probs out.

An engine runs inside one worker process; the driver and the rollout workers call these methods
remotely. Every implementation passes tests/contract/test_engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rlpost.types import BlockRef, GenerateRequest, Generation

if TYPE_CHECKING:
    import torch

PauseMode = Literal["keep", "drain"]
WakePart = Literal["weights", "kv_cache"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where one tensor lies in a weight chunk's byte buffer. `name` is the Hugging Face name."""

    name: str
    dtype: str  # torch name: "float32", "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes, 64-byte aligned


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file that trainer and engine both see under this path."""

    path: str


@dataclass(frozen=True)
class WeightChunk:
    """Full Hugging Face tensors: one uint8 buffer in the object store, or a file."""

    specs: tuple[TensorSpec, ...]
    buffer: BlockRef | WeightFile  # a reference gives the uint8 numpy array
    fingerprints: dict[str, int]  # name -> rlpost.fingerprint of the tensor as sent


class Stage(Protocol):
    """Puts the tensors of one chunk where the engines find them; picklable, runs on the trainer."""

    def __call__(
        self, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], num_bytes: int
    ) -> BlockRef | WeightFile: ...


class Engine(Protocol):
    """One replica. Methods are coroutines; between them the engine keeps generating.

    Version: the engine labels every sampled token with the policy version that was committed when
    the token was sampled.
    """

    async def start(self) -> dict[str, float]:
        """Builds the engine. Returns phase name -> seconds. Raises EngineError."""

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Queues all requests, in order, before the engine takes its next step."""

    async def collect(self, request_ids: Sequence[str]) -> list[Generation]:
        """Waits for these requests; hands each result out once. Raises EngineError."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests; collect() then gives partial tokens with finish_reason "abort"."""

    async def pause(self, mode: PauseMode) -> None:
        """Stops stepping: `keep` at once with KV kept, `drain` after running requests are done."""

    async def resume(self) -> None: ...

    async def load_weights(self, chunks: Sequence[WeightChunk]) -> None:
        """Loads a complete set of tensors while paused. Raises WeightSyncError on a bad set."""

    async def fingerprints(self, names: Sequence[str]) -> dict[str, int]:
        """Fingerprints read back from the live model, under the Hugging Face names."""

    async def verify_kernels(self) -> list[str]:
        """Weights whose kernels compute with other values than are stored; empty is good."""

    async def commit(self, version: int) -> None:
        """Tokens sampled from now on carry `version`; drops the prefix cache.

        The context of requests under way is computed again with the new weights.
        """

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token_t | before) for t >= 1 of each sequence, at temperature 1."""

    async def sleep(self) -> None:
        """Frees what the device lets it free (KV cache; weights on a GPU) until wake()."""

    async def wake(self, part: WakePart | None = None) -> None:
        """Brings back all that sleep() freed, or one part; it generates once both parts are back.

        Where weights are loaded after a sleep, the KV cache comes last: less memory at the peak,
        and no cached entry can be older than the weights.
        """

    async def stats(self) -> dict[str, float]: ...

    async def memory(self) -> dict[str, float]:
        """What the engine's processes take of the host, see rlpost.memory.family_memory."""

    async def shutdown(self) -> None: ...
