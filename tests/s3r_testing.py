"""What tests of several folders share: random models of two layers, and server processes."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import torch


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Return once `condition` holds; fail the test if that takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"the condition did not come true within {seconds:g} seconds")
        time.sleep(0.05)


def random_llama(seed: int = 0, **changes):
    """A float32 Llama of transformers with two layers, whose distributions are not flat.

    Args:
        changes: fields of its `LlamaConfig` that differ.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # SGLang's CUDA kernels for rotary embeddings begin at 64; a CPU is done sooner with 16.
        "head_dim": 64 if torch.cuda.is_available() else 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).float().eval()


def write_word_tokenizer(folder: Path, vocab_size: int = 64, chat_template: str | None = None) -> None:
    """Write a tokenizer of the words t0, t1, …; t1 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def server_process(
    command: Sequence[str], port: int, log: Path, ready: str = "/health_generate", seconds: float = 600
) -> Iterator[tuple[subprocess.Popen, str]]:
    """Run a server in a process group of its own; yields (process, address) once `ready` answers 200.

    Its log is shown if it does not come up. What is left of the group at the end is killed.
    """
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + seconds
        while not _answers(f"{url}{ready}"):
            assert process.poll() is None, log.read_text()
            if time.monotonic() > deadline:
                pytest.fail(log.read_text())
            time.sleep(0.5)
        yield process, url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def _answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=60).status_code == 200
    except httpx.TransportError:
        return False
