"""A real model over HTTP: nine weight updates, three by each way, between rollouts of 16 prompts x 4 responses."""

import shutil

import pytest
import torch
from s3r_sglang.rl_integration.client import RolloutClient
from s3r_sglang.rl_integration.weights import DistributedSender, WeightSender
from support import Server, dense_greedy, dense_logprobs, free_port

from s3r_sglang import models

pytestmark = pytest.mark.slow

# float32, 30 layers; verification runs other shapes than the dense prefill it is compared with.
TOLERANCE = 1e-3
BUCKET_BYTES = 64 << 20
SAMPLING = {"max_new_tokens": 6, "ignore_eos": True}
TOPICS = (
    "the tides", "a prime number", "how bread rises", "the moons of Jupiter", "a binary tree", "why leaves fall",
    "the speed of light", "a haiku", "sorting a list", "the Rhine", "a violin", "gravity", "the number zero",
    "a lighthouse", "photosynthesis", "the colour blue",
)  # fmt: skip
PROMPTS = [
    {"id": topic, "prompt": f"Write two short and simple sentences about {topic} for somebody new to it."}
    for topic in TOPICS
]


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """{"first", "second"}: (folder, transformers model) of SmolLM2 and of what some training made of it."""
    from transformers import AutoModelForCausalLM

    try:
        folder = models.fetch("smollm2")
    except models.FetchError as error:
        if str(error).startswith("could not fetch"):
            pytest.skip(str(error))
        raise
    other = tmp_path_factory.mktemp("second") / "model"
    shutil.copytree(folder, other)
    first = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    second = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in second.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight)
    second.save_pretrained(other)
    return {"first": (folder, first), "second": (other, second)}


@pytest.fixture(scope="module")
def server(policies, tmp_path_factory):
    """A server of the first policy; draft steps read about half of these short contexts."""
    flags = ["--s3r-min-budget", "16", "--s3r-recent-window", "8", "--s3r-prompt-queries", "8"]
    flags += ["--max-running-requests", "32", "--mem-fraction-static", "0.3"]
    server = Server(policies["first"][0], tmp_path_factory.mktemp("smollm2"), *flags)
    try:
        yield server.wait()
    finally:
        server.kill()


def rollout(server, prompts=PROMPTS, size=4, temperature=1.0):
    sampling = {**SAMPLING, "temperature": temperature}
    return RolloutClient(server.url).rollout(prompts, size, sampling, seed=1)


def greedy(server):
    """[(prompt, response)] of two prompts, as token ids."""
    groups = rollout(server, PROMPTS[:2], 1, temperature=0.0).groups
    return [(group.prompt_token_ids, group.responses[0].token_ids) for group in groups]


def send_path(server, folder, model, version):
    WeightSender(server.url).send_path(folder, version)


def send_tensors(server, folder, model, version):
    WeightSender(server.url, bucket_bytes=BUCKET_BYTES).send(model.named_parameters(), version)


def send_distributed(server, folder, model, version):
    sender = DistributedSender(
        server.url, address="127.0.0.1", port=free_port(), backend="gloo", bucket_bytes=BUCKET_BYTES
    )
    try:
        sender.send(model.named_parameters(), version)
    finally:
        sender.close()


def check(result, version, model, prompts=16, size=4):
    """Complete, ordered, of one version, with the logprobs of a dense prefill; returns the mean accept length."""
    assert result.errors == []
    assert result.weight_versions == {version}
    assert [group.prompt_id for group in result.groups] == list(TOPICS[:prompts])
    for group in result.groups:
        assert [response.index for response in group.responses] == list(range(size))
        assert {len(response.token_ids) for response in group.responses} == {SAMPLING["max_new_tokens"]}
        assert {len(response.logprobs) for response in group.responses} == {SAMPLING["max_new_tokens"]}
    for group in result.groups[::5]:
        response = group.responses[-1]
        dense = dense_logprobs(model, group.prompt_token_ids, response.token_ids)
        assert response.logprobs == pytest.approx(dense, abs=TOLERANCE)
    return sum(group.accept_length for group in result.groups) / len(result.groups)


def test_nine_updates_in_three_ways_between_whole_rollouts(server, policies):
    prompts = [prompt for prompt, _ in greedy(server)]
    expected = {
        name: [(prompt, dense_greedy(model, prompt, SAMPLING["max_new_tokens"])) for prompt in prompts]
        for name, (_, model) in policies.items()
    }
    assert expected["first"] != expected["second"]
    assert greedy(server) == expected["first"]
    tau = check(rollout(server, PROMPTS[:4], 8), "default", policies["first"][1], prompts=4, size=8)
    step = 0
    for send in (send_path, send_tensors, send_distributed):
        for name in ("second", "first", "second"):
            step += 1
            version = f"step-{step}"
            send(server, *policies[name], version)
            assert greedy(server) == expected[name]
            whole = step % 3 == 0
            result = rollout(server) if whole else rollout(server, PROMPTS[:2], 2)
            accept_length = check(result, version, policies[name][1], *((16, 4) if whole else (2, 2)))
            # Two policies agree on far fewer drafts than a policy with itself.
            assert accept_length > 0.85 * tau
        # The next way begins with weights other than it sends.
        WeightSender(server.url).send_path(policies["first"][0], "back")
