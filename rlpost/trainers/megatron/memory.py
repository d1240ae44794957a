"""What one rank allocates, by arithmetic; needs no torch.

Letters: T tokens of a micro-batch, H hidden size, F width of the MLP, V rows of the vocabulary on
this rank, P parameters on this rank, b bytes of an element.

With the distributed optimizer (optimizer.py): P x b weights, P x 4 gradient buffer, and, cut over
the data-parallel ranks, two Adam moments and, where weights are not float32 themselves, a float32
copy of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpost.memory import MIB, WorkerMemory
from rlpost.models.base import Dtype
from rlpost.models.shape import DTYPE_BYTES, Cut, Head, ModelShape

if TYPE_CHECKING:
    from rlpost.trainers.base import RankTask
    from rlpost.trainers.megatron.role import MegatronRoleConfig

PROCESS_BYTES = 490 * MIB  # Python, torch, Megatron-Core and Ray, as measured on a CPU
CONTEXT_BYTES = 2048 * MIB  # of CUDA and NCCL on the device
# For each parameter, on the host of the rank that gathers a checkpoint, as measured.
SAVE_BYTES = 32
CHUNK_BYTES = 64 * MIB  # of weights that are exported together


def cut_of(config: MegatronRoleConfig, rank: int) -> Cut:
    """Ranks are numbered over tensor, then data, then pipeline parallelism."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    stage = rank // (tp * config.data_parallel_size)
    return Cut(tp, pp, stage, config.make_vocab_size_divisible_by)


def rank_memory(config: MegatronRoleConfig, task: RankTask, head: Head) -> WorkerMemory:
    """Weights, gradients and optimizer are exact, what a micro-batch needs is estimated."""
    shape, cut = task.shape, cut_of(config, task.rank)
    element = DTYPE_BYTES[task.dtype]
    num_parameters = shape.num_parameters(head, cut)
    tokens = tokens_at_once(config, task)
    parts = {"weights": num_parameters * element}
    if task.teacher is not None:
        parts["weights"] += task.teacher.num_parameters("logits", cut) * element
    if task.trained:
        copies = 8 if task.dtype == "float32" else 12
        parts["gradients"] = num_parameters * 4
        parts["optimizer"] = num_parameters * copies // config.data_parallel_size
    parts["activations"] = activations(config, task, cut, tokens) * element
    if head == "logits" and cut.is_last:
        parts["logits"] = logits(config, task, cut, tokens)
    if task.exports:
        parts["weight_sync"] = 2 * min(CHUNK_BYTES, num_parameters * element)
    on_gpu = config.num_gpus_per_rank > 0
    if on_gpu:
        parts["context"] = CONTEXT_BYTES
    host_parts = {"process": PROCESS_BYTES}
    if task.trained and gathers(config, task.rank):
        host_parts["save"] = num_parameters * SAVE_BYTES
    return WorkerMemory(parts, host_parts, on_gpu)


def gathers(config: MegatronRoleConfig, rank: int) -> bool:
    """Whether the rank is the first of its data-parallel group: it gets the others' state."""
    return rank // config.tensor_model_parallel_size % config.data_parallel_size == 0


def tokens_at_once(config: MegatronRoleConfig, task: RankTask) -> int:
    """T: the budget, but at least one longest sample and no more than all of a rank's."""
    budget = max(config.micro_batch_tokens, task.longest_tokens)
    return min(budget, task.longest_tokens * max(1, task.num_samples))


def activations(config: MegatronRoleConfig, task: RankTask, cut: Cut, tokens: int) -> int:
    """Elements kept for the backward pass; without one, those of a single layer.

    A pipeline's first stage holds as many micro-batches as there are stages, the last one only one.
    """
    shape, options = task.shape, config.megatron
    layers = len(shape.layers(cut)) if task.trained else 1
    whole = layer_elements(shape, cut, sequence_parallel=bool(options.get("sequence_parallel")))
    in_flight = cut.pp - cut.stage if task.trained else 1
    if options.get("recompute_granularity") == "full":
        return tokens * (in_flight * layers * shape.hidden_size + whole)
    return tokens * in_flight * layers * whole


def layer_elements(shape: ModelShape, cut: Cut, *, sequence_parallel: bool) -> int:
    """Of one layer and token: inputs and outputs of both norms; projections, queries and keys
    before and after norm and rotation, attention twice; both halves of the MLP, gate and product.
    """
    residual = 4 * shape.hidden_size // (cut.tp if sequence_parallel else 1)
    heads = 2 * (shape.q + 2 * shape.kv) + 2 * shape.q
    heads += shape.q + shape.kv if shape.head_norms else 0
    wide = 4 * shape.intermediate_size
    if shape.num_experts:
        wide = shape.experts_per_token * (4 * shape.expert_size + 2 * shape.hidden_size)
    return residual + (heads + wide) // cut.tp


def logits(config: MegatronRoleConfig, task: RankTask, cut: Cut, tokens: int) -> int:
    """Bytes of a chunk's logits, probabilities and gradient, and of the gradient of the head."""
    chunk = min(getattr(config, "logprobs_chunk_tokens", tokens), tokens)
    rows = -(-task.shape.vocab_size // cut.tp)
    head_gradient = 2 * rows * task.shape.hidden_size * 4 if task.trained else 0
    models = 2 if task.teacher is not None else 1
    return models * 3 * chunk * rows * 4 + head_gradient


def checkpoint_bytes(shape: ModelShape, dtype: Dtype, head: Head) -> int:
    """Of a trained role on disk: weights, float32 weights and two moments, Hugging Face folder."""
    return shape.num_parameters(head) * (2 * DTYPE_BYTES[dtype] + 12)
