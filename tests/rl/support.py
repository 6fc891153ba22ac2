"""Real servers of a tiny random Llama, one process group each, and what the tests say to them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from s3r_testing import free_port, write_word_tokenizer

from s3r_sglang import cpu

VOCAB = 64
CONTEXT = 512
SAMPLING = {"max_new_tokens": 24, "ignore_eos": True}
# The server's logprobs come from verification forwards of another batch shape; float32, two layers.
LOGPROB_TOLERANCE = 2e-4


def write_model(folder, seed=0):
    """A random float32 Llama with a tokenizer of words t0 … t63 and a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "t2 {{ m.content }} {% endfor %}t3"
    )
    write_word_tokenizer(folder, VOCAB, chat_template)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # SGLang's CUDA kernels for rotary embeddings begin at 64.
        head_dim=64 if torch.cuda.is_available() else 8,
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=1,
        dtype="float32",
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    assert json.loads((Path(folder) / "config.json").read_text())["dtype"] == "float32"
    return model


class Server:
    """A server process of its own process group."""

    def __init__(self, model, folder, *flags, env=None, port=None):
        self.model = model
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(folder) / f"server-{self.port}.log"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--port", str(self.port), "--speculative-algorithm", "self-sparse"]
        command += ["--s3r-min-budget", "8", "--s3r-recent-window", "4", "--max-total-tokens", "20000"]
        # Float32 checkpoints are served in half precision unless told not to. An idle scheduler would spin on
        # one of the two cores of a CI machine.
        # CUDA kernels for norms lack float32; half precision is the closest to it.
        command += ["--dtype", "float16" if torch.cuda.is_available() else "float32", "--sleep-on-idle"]
        if torch.cuda.is_available():
            command += [
                "--attention-backend",
                "triton",
                "--mem-fraction-static",
                "0.3",
                "--enable-memory-saver",
            ]
        else:
            for name, value in cpu.SERVER_ARGS.items():
                command += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdout=out,
                stderr=out,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def wait(self, seconds=600, key=None):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-5000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/s3r/ready", headers=headers, timeout=5).status_code == 200:
                    return self
            time.sleep(0.5)
        pytest.fail(self.log.read_text()[-5000:])

    def kill(self, sig=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, sig)
        self.process.wait(60)


def prompt(number, length=20):
    return {"id": f"p{number}", "token_ids": [2 + (number * 7 + i * 3) % 60 for i in range(length)]}


def rollout(server, **body):
    body = {"prompts": [prompt(0)], "group_size": 2, "sampling": SAMPLING, **body}
    return httpx.post(f"{server.url}/s3r/rollout", json=body, timeout=300)


def groups(server, **body):
    response = rollout(server, **body)
    assert response.status_code == 200, response.text
    return response.json()["groups"]


def stats(server):
    return httpx.get(f"{server.url}/s3r/stats", timeout=60).json()


def dense_logprobs(model, prompt_ids, token_ids, temperature=1.0):
    """Logprobs of `token_ids` after `prompt_ids` by one dense forward of transformers."""
    ids = torch.tensor([prompt_ids + token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


def dense_greedy(model, prompt_ids, new_tokens=SAMPLING["max_new_tokens"]):
    """The likeliest token after `prompt_ids`, the likeliest after that, …, by dense forwards of transformers."""
    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(new_tokens):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    return ids[len(prompt_ids) :]
