"""What two ranks compute with each tiny model under each parallel layout.

Both ranks go through every layout in one pair of processes, since starting them takes longest.
Each rank leaves a dict at `folder`/rank<r>.pt: (layout, model) -> facts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LENGTHS = (7, 1, 22)
# layout -> (tensor parallel, pipeline parallel, options, models)
LAYOUTS: dict[str, tuple[int, int, dict[str, Any], tuple[str, ...]]] = {
    "tp1": (1, 1, {}, ("llama", "llama3_rope", "qwen2", "qwen3", "qwen3_moe")),
    "tp2": (2, 1, {}, ("llama", "qwen2", "qwen3")),
    "tp2_sequence": (2, 1, {"sequence_parallel": True}, ("qwen2", "qwen3_moe")),
    "pp2": (1, 2, {}, ("llama", "qwen2", "qwen3", "qwen3_moe")),
}


def token_ids() -> torch.Tensor:
    return torch.randint(0, 101, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def run_rank(rank: int, folder: str) -> None:
    from megatron.core import parallel_state

    from rlpost.trainers.megatron import device, model

    device.prepare()
    device.set_num_threads(1)
    dist.init_process_group(
        device.dist_backend(), init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    facts: dict[Any, Any] = {"plain_torch": _plain_torch()}
    for layout, (tp, pp, options, names) in LAYOUTS.items():
        model.init_parallel(tp=tp, pp=pp, seed=1)
        for name in names:
            facts[layout, name] = _facts(Path(folder) / name, options, layout)
        parallel_state.destroy_model_parallel()
    torch.save(facts, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def _plain_torch() -> dict[str, str]:
    """How torch answers a caller outside Megatron once Megatron is prepared."""
    tensor = torch.zeros(1)
    facts = {"type": tensor.type()}
    try:
        tensor.cuda()
    except (AssertionError, RuntimeError) as error:
        facts["cuda"] = type(error).__name__
    return facts


def _facts(path: Path, options: dict[str, Any], layout: str) -> dict[str, Any]:
    from rlpost.trainers.megatron import converter, hf_io, model

    config, reader = hf_io.read_config(path), hf_io.HfReader(path)
    stage = model.build_model(config, dtype=torch.float32, options=options, vocab_multiple=8)
    converter.load_hf(stage, config, reader.get_tensor)
    exported = dict(converter.export_hf(stage, config, torch.float32))
    facts: dict[str, Any] = {
        "exported": sorted(exported),
        "inexact": [n for n, t in exported.items() if not torch.equal(t, reader.get_tensor(n))],
        "logits": _pipeline_logits(stage, config.vocab_size),
    }
    if layout == "tp1":
        facts["alone"] = _logits_one_by_one(stage, config.vocab_size)
    if layout in ("tp1", "tp2"):
        facts["gradient_norm"] = _gradient_norm(stage, config.vocab_size)
    return facts


@torch.no_grad()
def _pipeline_logits(stage: Any, vocab_size: int) -> torch.Tensor | None:
    """[T, vocab] on the last stage, through Megatron's own schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from rlpost.trainers.megatron import model

    def step(batches: Any, part: Any) -> Any:
        hidden = model.forward_packed(part, next(batches), LENGTHS)
        return hidden, lambda out, non_loss_data: full_logits(stage, out[0], vocab_size)

    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([token_ids()]),
        model=[stage.eval()],
        num_microbatches=1,
        seq_length=1,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return outputs[0] if outputs else None


@torch.no_grad()
def _logits_one_by_one(stage: Any, vocab_size: int) -> torch.Tensor:
    from rlpost.trainers.megatron import model

    hidden = [model.forward_packed(stage, ids, [len(ids)])[0] for ids in token_ids().split(LENGTHS)]
    return full_logits(stage, torch.cat(hidden), vocab_size)


def _gradient_norm(stage: Any, vocab_size: int) -> float:
    """Over the parameters that Megatron's clipping counts on each tensor-parallel rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    from rlpost.trainers.megatron import model

    hidden = model.forward_packed(stage.train(), token_ids(), LENGTHS)[0]
    full_logits(stage, hidden, vocab_size).log_softmax(-1)[:, 0].sum().backward()
    counted = [p for p in stage.parameters() if param_is_not_tensor_parallel_duplicate(p)]
    square = torch.stack([p.grad.square().sum() for p in counted]).sum()
    dist.all_reduce(square, group=parallel_state.get_tensor_model_parallel_group())
    return math.sqrt(square.item())


def full_logits(stage: Any, hidden_T: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[T, H] of the trainer's model -> logits [T, vocab_size], collective over tensor parallel."""
    from megatron.core.tensor_parallel import mappings

    from rlpost.trainers.megatron.model import output_weight

    copied = mappings.copy_to_tensor_model_parallel_region(hidden_T)
    shard = copied @ output_weight(stage).t()
    logits: torch.Tensor = mappings.gather_from_tensor_model_parallel_region(shard)
    return logits[:, :vocab_size]
