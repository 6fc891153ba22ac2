"""Sleep, wake and graph recapture on a GPU, where memory really goes and CUDA graphs hold addresses."""

import httpx
import pytest
import torch
from support import SAMPLING, groups, prompt, stats

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# 2 layers x K and V x 2 heads x 64 x 2 bytes = 1 KiB a token.
POOL_TOKENS = 4_000_000
POOL_BYTES = POOL_TOKENS * 1024


@pytest.fixture(scope="module")
def sleeper(start):
    """A server whose KV pool is large enough to be seen, with graphs of sizes that batches of 3 pad up to."""
    flags = ["--max-total-tokens", str(POOL_TOKENS), "--dtype", "bfloat16", "--enable-memory-saver"]
    flags += [
        "--cuda-graph-bs-decode",
        "1",
        "4",
        "32",
        "--sampling-backend",
        "pytorch",
        "--grammar-backend",
        "none",
    ]
    return start(*flags, env={"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}).wait()


def post(server, path, **body):
    response = httpx.post(f"{server.url}/{path}", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response


def sampled(server):
    """Tokens and mean accept length of greedy and seeded groups; three responses fill no graph."""
    result = groups(server, prompts=[prompt(0), prompt(1)], group_size=3, seed=1)
    result += groups(server, prompts=[prompt(2)], group_size=3, sampling={**SAMPLING, "temperature": 0.0})
    tokens = [response["token_ids"] for group in result for response in group["responses"]]
    return tokens, sum(group["accept_length"] for group in result) / len(result)


def free_bytes():
    return torch.cuda.mem_get_info()[0]


def load(server, folder, **options):
    post(server, "update_weights_from_disk", model_path=str(folder), **options)


@pytest.mark.parametrize(
    "tags", [["kv_cache"], ["kv_cache", "cuda_graph"], ["kv_cache", "cuda_graph", "weights"]]
)
def test_sleep_gives_memory_back_and_wakes_to_the_same_responses(sleeper, model, tags):
    expected, awake = sampled(sleeper), free_bytes()
    post(sleeper, "release_memory_occupation", tags=tags)
    assert free_bytes() - awake > 0.9 * POOL_BYTES
    assert httpx.get(f"{sleeper.url}/health", timeout=60).status_code == 200
    if "weights" in tags:
        post(sleeper, "resume_memory_occupation", tags=["weights"])
        load(sleeper, model[0])
    post(sleeper, "resume_memory_occupation")
    assert abs(free_bytes() - awake) < 0.05 * POOL_BYTES
    assert stats(sleeper)["status"] == "ready"
    assert sampled(sleeper) == expected


def test_recaptured_graphs_draft_and_verify_with_the_new_weights(sleeper, model, other_model):
    first = sampled(sleeper)
    load(sleeper, other_model[0])
    other = sampled(sleeper)
    assert other[0] != first[0]
    for folder, expected in ((model[0], first), (other_model[0], other), (model[0], first)):
        load(sleeper, folder, recapture_cuda_graph=True)
        assert sampled(sleeper) == expected
