"""The one place where CPU and CUDA differ for Megatron-Core.

On a CPU, Megatron's modules (and only they) see a facade of torch whose `cuda` namespace and
factory functions work on the CPU. The facade costs nothing per operation and works in every thread;
a `TorchFunctionMode` would slow each call down and is thread-local. Plain torch of the rest of the
process is left as it is, except that `Tensor.cuda()` and `Tensor.type()` answer callers inside
Megatron differently.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from rlpost.memory import process_memory

_CORE = "megatron.core"
_CPU = torch.device("cpu")
_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "eye", "rand", "randn"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
)


def has_cuda() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else _CPU


def dist_backend() -> Literal["nccl", "gloo"]:
    return "nccl" if has_cuda() else "gloo"


def set_device(local_rank: int) -> None:
    """Selects the GPU of this rank; Ray shows a worker only its own, hence the modulo."""
    if has_cuda():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def set_num_threads(num_threads: int) -> None:
    """Threads of torch's CPU operators in this process."""
    torch.set_num_threads(num_threads)


def synchronize() -> None:
    """Waits until queued device work is done, so that a clock read afterwards is true."""
    if has_cuda():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Gives freed memory back to the device."""
    gc.collect()
    if has_cuda():
        torch.cuda.empty_cache()


def memory() -> dict[str, float]:
    """`rss_bytes`, `rss_peak_bytes` and, on a GPU, `device_bytes`, `device_peak_bytes`."""
    readings = process_memory()
    if has_cuda():
        readings["device_bytes"] = float(torch.cuda.memory_allocated())
        readings["device_peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return readings


def prepare() -> None:
    """Makes Megatron-Core usable on this machine's device. Call once per process, before building.

    Without Transformer Engine, Megatron 0.16.1 misses one name on every device; the facade is
    installed only where there is no CUDA.
    """
    moe_utils = importlib.import_module(f"{_CORE}.transformer.moe.moe_utils")
    moe_utils.__dict__.setdefault("te_general_gemm", None)
    if not has_cuda() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        _install_facade()


class _NoStream:
    """Stands for CUDA streams and events: on a CPU everything has already happened."""

    def record_event(self, event: Any = None) -> _NoStream:
        return self

    def wait(self, *args: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait


def _copy_of(module: types.ModuleType, **replacements: Any) -> types.ModuleType:
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update(module.__dict__, **replacements)
    return copy


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """`factory` with device="cuda" read as the CPU, and without pinned memory."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _build_facade() -> types.ModuleType:
    stream = _NoStream()
    cuda = _copy_of(
        torch.cuda,
        current_device=lambda: _CPU,
        synchronize=lambda *_: None,
        manual_seed=torch.manual_seed,
        get_rng_state=_get_rng_state,
        set_rng_state=_set_rng_state,
        Stream=lambda *_, **__: stream,
        Event=lambda *_, **__: stream,
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
        stream=lambda _: contextlib.nullcontext(),
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _copy_of(torch, cuda=cuda, **factories)


class _Finder(importlib.abc.MetaPathFinder):
    """Gives the facade to Megatron modules that are imported later."""

    def __init__(self, facade: types.ModuleType) -> None:
        self._facade = facade

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_CORE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                _swap_torch(module, self._facade)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _swap_torch(module: types.ModuleType, facade: types.ModuleType) -> None:
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = facade


def _install_facade() -> None:
    facade = _build_facade()
    random = importlib.import_module(f"{_CORE}.tensor_parallel.random")
    sys.meta_path.insert(0, _Finder(facade))
    for name, module in list(sys.modules.items()):
        if name.startswith(_CORE) and module is not None:
            _swap_torch(module, facade)
    random.__dict__.update(_get_cuda_rng_state=_get_rng_state, _set_cuda_rng_state=_set_rng_state)
    # It warns on each random operation that the CPU generator has moved; here it is the generator.
    logging.getLogger(f"{_CORE}.tensor_parallel.random").setLevel(logging.ERROR)
    _patch_tensor()
    _patch_moe_and_checkpointing()


def _caller_is_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(_CORE)


def _patch_tensor() -> None:
    real_type, real_cuda = torch.Tensor.type, torch.Tensor.cuda

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizers compare `param.type()` with "torch.cuda.FloatTensor".
        answer = real_type(self, *args, **kwargs)
        if not args and not kwargs and _caller_is_megatron():
            return answer.replace("torch.", "torch.cuda.")
        return answer

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _caller_is_megatron() else real_cuda(self, *args, **kwargs)

    setattr(torch.Tensor, "type", type_)  # noqa: B010, the type checker forbids plain assignment
    setattr(torch.Tensor, "cuda", cuda)  # noqa: B010


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _patch_moe_and_checkpointing() -> None:
    for name in ("moe_utils", "token_dispatcher"):
        # The original converts CUDA tensors only, and all-to-all refuses tensors as split sizes.
        module = importlib.import_module(f"{_CORE}.transformer.moe.{name}")
        module.__dict__["maybe_move_tensor_to_cpu"] = _to_cpu
    writer = importlib.import_module(f"{_CORE}.dist_checkpointing.strategies.filesystem_async")
    # Instead of a spawned Manager process, which re-imports __main__ and takes 6 to 9 s.
    writer.__dict__["_results_queue"] = torch.multiprocessing.get_context("fork").Queue()
