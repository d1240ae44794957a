"""Trainer ranks as plain processes, and small batches for them.

The object store is replaced by one that keeps the value in the reference; everything else is real.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlpost.algorithms.grpo import Grpo, GrpoConfig
from rlpost.cluster.rendezvous import Rendezvous
from rlpost.trainers.base import RankSpec
from rlpost.trainers.megatron.options import LrScheduleConfig, OptimizerConfig
from rlpost.trainers.megatron.rank import MegatronRank, MegatronRankConfig
from rlpost.types import BatchScalars, BatchView, SampleBlock, StoredBlock

CONF = Path(__file__).parents[1] / "conf"
VOCAB = 101
PASSES = ("old_logprobs", "ref_logprobs")


def trainer_config(*, tp: int = 1, pp: int = 1, dp: int = 1, **changes: Any) -> MegatronRankConfig:
    """conf/trainer/megatron.yaml with changes. Adam is smoothed: at its default eps the first steps
    are signs of gradients, and rounding decides those near zero."""
    values = yaml.safe_load((CONF / "trainer/megatron.yaml").read_text())
    del values["_target_"]
    values["lr_schedule"] = LrScheduleConfig(**values["lr_schedule"])
    values["optimizer"] = OptimizerConfig(**values["optimizer"] | {"adam_eps": 1e-3})
    values |= {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "data_parallel_size": dp,
        "setup_deadline_s": 100.0,
    }
    return MegatronRankConfig(**values | changes)


def grpo(**changes: Any) -> Grpo:
    values = yaml.safe_load((CONF / "algorithm/grpo.yaml").read_text())
    del values["_target_"]
    return Grpo(GrpoConfig(**values | {"kl_coef": 0.1, "entropy_coef": 0.01} | changes))


def rollouts(seed: int, num_groups: int = 3, group_size: int = 4) -> SampleBlock:
    """Random prompts of 1 to 6 tokens, responses of 1 to 12, some with environment tokens."""
    numbers = np.random.default_rng(seed)
    names, tokens, masks, groups = [], [], [], []
    for group in range(num_groups):
        prompt = numbers.integers(0, VOCAB, numbers.integers(1, 7))
        for row in range(group_size):
            response = numbers.integers(0, VOCAB, numbers.integers(1, 13))
            mask = np.concatenate([np.zeros(len(prompt), int), np.ones(len(response), int)])
            if len(response) > 4:
                mask[len(prompt) + 1 : len(prompt) + 3] = 0
            names.append(f"{group}@0#{row}")
            groups.append(f"{group}@0")
            tokens.append(np.concatenate([prompt, response]))
            masks.append(mask)
    flat_mask = np.concatenate(masks)
    guesses = -numbers.uniform(3, 6, len(flat_mask))
    return SampleBlock(
        sample_ids=tuple(names),
        lengths=np.array([len(row) for row in tokens]),
        tokens={
            "token_ids": np.concatenate(tokens),
            "loss_mask": flat_mask,
            "rollout_logprobs": np.where(flat_mask, guesses, np.nan).astype(np.float32),
        },
        scalars={"reward": numbers.uniform(0, 1, len(names))},
    )


def view_of(
    block: SampleBlock, shares: Sequence[Sequence[Sequence[int]]], extra: Sequence[Any] = ()
) -> BatchView:
    """`shares[m][d]` are row numbers for data-parallel rank d in optimizer step m."""
    loss_tokens = [int(row["loss_mask"].sum()) for _, row in block.rows()]
    ids = block.sample_ids
    return BatchView(
        step=0,
        blocks=(StoredBlock(block, block.sample_ids), *extra),
        scalars=BatchScalars(
            sample_ids=ids,
            group_ids=tuple(name.split("#")[0] for name in ids),
            rewards=tuple(block.scalars["reward"].tolist()),
            lengths=tuple(block.lengths.tolist()),
            loss_tokens=tuple(loss_tokens),
        ),
        minibatches=tuple(
            tuple(tuple(ids[row] for row in rows) for rows in step) for step in shares
        ),
    )


def with_passes(ranks: Ranks, block: SampleBlock, shares: Any) -> BatchView:
    """The view with old and reference log-probs, computed by `ranks` themselves."""
    view = view_of(block, shares)
    columns = []
    for column in PASSES:
        results = ranks.call("compute_logprobs", view, column)
        columns += [result.block for result in results if result.block is not None]
    return dataclasses.replace(view, blocks=(*view.blocks, *columns))


class Ranks:
    """World of `size` processes; `start` builds a role in them, again and again."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.size = size
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=False)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def start(
        self,
        config: Any,
        *,
        model: Path,
        algorithm: Any,
        target: type[Any] = MegatronRank,
        **changes: Any,
    ) -> list[Any]:
        """Replaces what the processes host by fresh ranks of `config`, of class `target`."""
        arguments = {"model_path": str(model), "dtype": "float32", "seed": 1, "target": target}
        if target is MegatronRank:
            arguments["temperature"] = 1.0
        (meeting,) = self._ask([(_listen, (), {})])
        specs = [RankSpec("actor", rank, self.size, meeting) for rank in range(self.size)]
        return self._ask(
            [
                (_start, (config,), {**arguments, "algorithm": algorithm, "spec": spec, **changes})
                for spec in specs
            ]
        )

    def call(self, method: str, *args: Any) -> list[Any]:
        return self._ask([(_call, (method, *args), {})] * self.size)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(rank object, *args) in every process."""
        return self._ask([(function, args, {})] * self.size)

    def _ask(self, requests: Sequence[Any]) -> list[Any]:
        """The first ranks, as many as there are requests."""
        asked = self._pipes[: len(requests)]
        for pipe, request in zip(asked, requests, strict=True):
            pipe.send(request)
        replies = []
        for rank, pipe in enumerate(asked):
            assert pipe.poll(150), f"rank {rank} did not answer"
            replies.append(pipe.recv())
        for error, _ in replies:
            if error is not None:
                raise error
        return [result for _, result in replies]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(10)
            process.terminate()


def _serve(pipe: Any, rank: int) -> None:
    store = types.ModuleType("rlpost.cluster.store")
    store.put = lambda value: value
    store.fetch_all = lambda refs, timeout_s: list(refs)
    sys.modules["rlpost.cluster.store"] = store
    hosted: Any = None
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            result = function(hosted, *args, **kwargs)
            if function is _start:
                hosted, result = result
            pipe.send((None, result))
        except Exception as error:
            pipe.send((error, None))


def _start(hosted: Any, config: Any, *, target: type[Any], **arguments: Any) -> Any:
    import torch.distributed as dist
    from megatron.core import parallel_state

    if hosted is not None:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    rank = target(config, **arguments)
    return rank, rank.setup()


def _listen(hosted: Any) -> Rendezvous:
    return Rendezvous.listening("127.0.0.1")


def _call(hosted: Any, method: str, *args: Any) -> Any:
    return getattr(hosted, method)(*args)
