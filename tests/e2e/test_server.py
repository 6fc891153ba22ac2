"""`s3r serve` as a user runs it: a server process with SmolLM2, the OpenAI client, and `/generate`."""

import math
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from s3r_testing import server_process

pytestmark = pytest.mark.slow

MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "Name the capital of France and of Italy."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory, smollm2, unused_port):
    """(process, address) of a running server; its log is shown if it does not come up."""
    log = tmp_path_factory.mktemp("server") / "log"
    command = [str(Path(sys.executable).with_name("s3r")), "serve"]
    command += ["--model-path", str(smollm2), "--served-model-name", MODEL, "--port", str(unused_port)]
    command += ["--max-total-tokens", "20000", "--max-running-requests", "16", "--mem-fraction-static", "0.3"]
    command += ["--s3r-budget-ratio", "0.1", "--s3r-recent-window", "48", "--enable-metrics"]
    with server_process(command, unused_port, log) as running:
        yield running


@pytest.fixture(scope="module")
def url(server):
    return server[1]


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=300, max_retries=0)


def generate(url, **body):
    return httpx.post(f"{url}/generate", json=body, timeout=300)


def test_chat(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=40, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert "Paris" in choice.message.content
    assert choice.finish_reason in ("stop", "length")
    for entry in choice.logprobs.content:
        # Greedy: the sampled token is the most probable one.
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
        assert len(entry.top_logprobs) == 2
    assert len(choice.logprobs.content) == answer.usage.completion_tokens <= 40


def test_streamed_chat_equals_the_whole(client):
    params = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**params)
    chunks = [
        chunk.choices[0] for chunk in client.chat.completions.create(**params, stream=True) if chunk.choices
    ]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].finish_reason == whole.choices[0].finish_reason
    assert len(chunks) > 3


def test_completions_with_several_samples(client):
    result = client.completions.create(
        model=MODEL, prompt="Once upon a time", n=3, temperature=1.0, max_tokens=20, logprobs=1
    )
    assert len({choice.text for choice in result.choices}) == 3
    assert sorted(choice.index for choice in result.choices) == [0, 1, 2]
    for choice in result.choices:
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) <= 20
        assert all(math.isfinite(value) and value <= 0 for value in choice.logprobs.token_logprobs)


def test_completion_seed_reproduces(client):
    params = {"model": MODEL, "prompt": "The weather", "temperature": 1.0, "max_tokens": 16, "seed": 17}
    first, second = (client.completions.create(**params).choices[0].text for _ in "ab")
    other = client.completions.create(**{**params, "seed": 18}).choices[0].text
    assert first == second != other


def test_stop_string(client):
    params = {"model": MODEL, "prompt": "1, 2, 3, 4, 5,", "temperature": 0, "max_tokens": 40}
    counted = client.completions.create(**params).choices[0].text
    assert " 8" in counted
    stopped = client.completions.create(**params, stop=[" 8"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == counted.split(" 8")[0]


REFUSED = [
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"extra_body": {"repetition_penalty": 1.2}},
    {"extra_body": {"min_tokens": 4}},
    {"extra_body": {"regex": "[a-z]+"}},
    {"response_format": {"type": "json_object"}},
]


@pytest.mark.parametrize("params", REFUSED, ids=lambda params: next(iter(params.get("extra_body", params))))
def test_inexact_features_are_refused_and_the_server_goes_on(client, params):
    request = {"model": MODEL, "messages": QUESTION, "max_tokens": 8}
    with pytest.raises(openai.BadRequestError, match=r"does not support .*: leave it out"):
        client.chat.completions.create(**request, **params)
    assert client.chat.completions.create(**request, temperature=0).usage.completion_tokens == 8


def test_generate_reports_acceptance_and_the_effective_configuration(url):
    text = "The quick brown fox jumps over the lazy dog. " * 30
    sampling = {"temperature": 1.0, "max_new_tokens": 48, "ignore_eos": True}
    before = counters(url)
    response = generate(url, text=text, sampling_params=sampling, return_logprob=True).json()
    meta = response["meta_info"]
    assert meta["completion_tokens"] == 48 == len(meta["output_token_logprobs"])
    assert 1 <= meta["s3r_accept_length"] <= 7
    # The first token comes from the prefill; the last block may have been cut.
    assert 0 <= 1 + meta["s3r_rounds"] * meta["s3r_accept_length"] - 48 < 7
    grown = {name: value - before[name] for name, value in counters(url).items()}
    assert grown["s3r_rounds_total"] == meta["s3r_rounds"]
    assert grown["s3r_draft_tokens_total"] == 6 * meta["s3r_rounds"]
    info = httpx.get(f"{url}/server_info", timeout=60).json()
    config = info["internal_states"][0]["s3r"]["config"]
    assert (config["budget_ratio"], config["recent_window"], config["draft_length"]) == (0.1, 48, 6)
    assert info["speculative_algorithm"] == "SELF_SPARSE"


def counters(url) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=60, follow_redirects=True).text.splitlines()
    names = ("s3r_rounds_total", "s3r_draft_tokens_total")
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)) for name in names
    }


def test_client_that_hangs_up_leaves_the_server_working(client, url):
    with httpx.stream(
        "POST",
        f"{url}/generate",
        json={
            "text": "Tell me a long story.",
            "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True},
            "stream": True,
        },
        timeout=300,
    ) as response:
        next(response.iter_lines())
    assert client.completions.create(model=MODEL, prompt="Hello", max_tokens=5).usage.completion_tokens == 5
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if httpx.post(f"{url}/flush_cache", timeout=60).status_code == 200:
            return
        time.sleep(0.5)
    pytest.fail("the abandoned request kept running")


def test_server_dies_cleanly(server):
    """Last: SIGTERM ends the server and all its processes."""
    process, url = server
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) >= 3
    os.kill(process.pid, signal.SIGTERM)
    process.wait(60)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health", timeout=5)
