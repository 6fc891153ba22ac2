"""Run SGLang on a machine without a GPU: the `sgl_kernel` stand-in and the server arguments a CPU needs."""

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

STANDIN = Path(__file__).resolve().parent / "standin"

# Keyword arguments of `sglang.srt.server_args.ServerArgs`. torch_native is the only attention backend of
# SGLang that needs no compiled kernel; grammar and overlap scheduling need a device.
SERVER_ARGS: dict[str, object] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    # Otherwise an idle scheduler polls with all of a core, which a trainer on the same machine needs.
    "sleep_on_idle": True,
}


def has_gpu() -> bool:
    """Whether PyTorch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False)


def prepare(environ: MutableMapping[str, str] = os.environ) -> dict[str, object]:
    """Set up `environ` for SGLang on a CPU and return the server arguments to use there.

    Must run before the first import of `sglang` in this process, which imports `sgl_kernel`; child processes
    inherit the set-up through PYTHONPATH. Variables that the user has set keep their value.

    Raises:
        RuntimeError: the compiled `sgl_kernel` is already imported.
    """
    loaded = getattr(sys.modules.get("sgl_kernel"), "__file__", None)
    if environ is os.environ and loaded and STANDIN not in Path(loaded).parents:
        raise RuntimeError("prepare() must run before sgl_kernel is imported; call it at the program's start")
    search = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(STANDIN) not in search:
        environ["PYTHONPATH"] = os.pathsep.join([str(STANDIN), *search])
    environ["SGLANG_USE_CPU_ENGINE"] = "1"
    environ.setdefault("OMP_NUM_THREADS", "1")
    environ.setdefault("HF_HUB_OFFLINE", "1")
    if environ is os.environ and str(STANDIN) not in sys.path:
        sys.path.insert(0, str(STANDIN))
    return dict(SERVER_ARGS)
