"""Weights from a trainer's GPU, sent by a process that has no SGLang, as OpenRLHF's has none.

`pytest tests/rl/test_weights_gpu.py -m gpu`; NCCL takes a second GPU, since members of a group have one each.
"""

import subprocess
import sys

import pytest
import torch
from support import SAMPLING, dense_logprobs, free_port, groups, prompt, stats

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The server computes in half precision; other weights give logprobs that differ by one and more.
HALF_TOLERANCE = 0.03

TRAINER = """
import sys
import torch
from s3r_sglang.rl_integration.weights import DistributedSender, WeightSender
from transformers import AutoModelForCausalLM

url, folder, way, port = sys.argv[1:]
device = "cuda:1" if way == "nccl" else "cuda:0"
torch.cuda.set_device(device)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
if way == "ipc":
    sender = WeightSender(url, bucket_bytes=20_000)
else:
    sender = DistributedSender(url, address="127.0.0.1", port=int(port), backend="nccl", bucket_bytes=20_000)
sender.send(model.named_parameters(), "second")
torch.cuda.synchronize()
sender.close()
assert "sglang" not in sys.modules
"""


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_a_trainer_without_sglang_sends_from_its_gpu(server, model, other_model, tmp_path, way):
    if way == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    words = [sys.executable, str(script), server.url, str(other_model[0]), way, str(free_port())]
    for asleep in (False, True):
        # OpenRLHF's colocated order: weights back, new weights, then the KV pool.
        if asleep:
            post(server, "release", [])
            post(server, "resume", ["weights"])
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        if asleep:
            assert stats(server)["sleeping"] == ["cuda_graph", "kv_cache"]
            post(server, "resume", [])
        (group,) = groups(server, sampling=SAMPLING)
        assert group["weight_version"] == "second"
        for response in group["responses"]:
            dense = dense_logprobs(other_model[1], prompt(0)["token_ids"], response["token_ids"])
            assert response["logprobs"] == pytest.approx(dense, abs=HALF_TOLERANCE)


def post(server, action, tags):
    import httpx

    body = {"tags": tags} if tags else {}
    answer = httpx.post(f"{server.url}/{action}_memory_occupation?wait=true", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
