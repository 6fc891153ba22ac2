"""Set-up of every process of a run: stand-ins for what is not installed, and PyTorch without a GPU.

Ray runs `prepare_worker` in each of its workers before anything of ours or OpenRLHF's is unpickled there.
"""

import importlib.util
import sys
from pathlib import Path

STANDINS = Path(__file__).resolve().parent / "standin"


def installed(package: str) -> bool:
    """Whether the real `package` is installed, whatever stand-ins are on the search path."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None and STANDINS not in Path(spec.origin).parents


def prepare_worker() -> None:
    """Put stand-ins for vllm and flash_attn on the search path where they are missing; adapt to a CPU."""
    for package in ("vllm", "flash_attn"):
        if importlib.util.find_spec(package) is None:
            sys.path.append(str(STANDINS / f"for_{package}"))
    if not has_gpu():
        _run_without_cuda()


def has_gpu() -> bool:
    """Whether PyTorch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


class _CPU(str):
    """Answer of `torch.cuda.current_device` on a CPU: a device for `.to()`, and the number 0 in "cuda:{…}"."""

    def __format__(self, spec: str) -> str:
        return "0"


def _run_without_cuda() -> None:
    """Let OpenRLHF's calls of torch.cuda do nothing; DeepSpeed chooses its CPU accelerator by itself."""
    import torch

    setattr(torch.cuda, "current_device", lambda: _CPU("cpu"))  # noqa: B010
    for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
