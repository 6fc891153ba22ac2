"""One real server, started with `sglang serve`: refusals over HTTP, seeds of a group, observability."""

import sys
from pathlib import Path

import httpx
import pytest
import torch
from s3r_testing import free_port, random_llama, server_process, write_word_tokenizer

from s3r_sglang import cpu

pytestmark = pytest.mark.slow

PROMPT = {"input_ids": [5, 6, 7, 8] * 16}
SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}


def serve_command(model, port, *flags):
    sglang = Path(sys.executable).with_name("sglang")
    command = [str(sglang), "serve", "--model-path", str(model), "--port", str(port)]
    if not torch.cuda.is_available():
        for name, value in cpu.SERVER_ARGS.items():
            command += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return [*command, "--mem-fraction-static", "0.3", *flags]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    random_llama(max_position_embeddings=512, eos_token_id=1).save_pretrained(folder)
    chat_template = "{% for message in messages %}t2 {{ message.content }} {% endfor %}t3"
    write_word_tokenizer(folder, chat_template=chat_template)
    flags = "--speculative-algorithm self-sparse --s3r-min-budget 8 --s3r-recent-window 4 --enable-metrics"
    port = free_port()
    with server_process(serve_command(folder, port, *flags.split()), port, folder / "log") as (_, address):
        yield address


def generate(url, **body):
    return httpx.post(f"{url}/generate", json={**PROMPT, "sampling_params": SAMPLING, **body}, timeout=120)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            {"sampling_params": {**SAMPLING, "frequency_penalty": 0.5}},
            "does not support frequency_penalty=0.5",
        ),
        ({"sampling_params": {**SAMPLING, "min_new_tokens": 2}}, "does not support min_new_tokens=2"),
        ({"sampling_params": {**SAMPLING, "regex": "a+"}}, "does not support regex='a+'"),
        ({"sampling_params": {"temprature": 1.0}}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"return_hidden_states": True}, "not configured to return hidden states"),
        ({"return_sampling_mask": True}, "does not support return_sampling_mask"),
    ],
)
def test_generate_refuses_with_400(url, body, sentence):
    response = generate(url, **body)
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"response_format": {"type": "json_object"}}, "(response_format in the OpenAI API)"),
    ],
)
def test_openai_endpoint_refuses_with_400(url, body, sentence):
    body = {"model": "default", "prompt": "t5 t6", "max_tokens": 4, **body}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 400
    assert sentence in response.json()["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("generate", {**PROMPT, "sampling_params": {**SAMPLING, "min_new_tokens": 2}}),
        ("v1/completions", {"model": "default", "prompt": "t5 t6", "presence_penalty": 0.5}),
        (
            "v1/chat/completions",
            {"model": "default", "messages": [{"role": "user", "content": "t5"}], "presence_penalty": 0.5},
        ),
    ],
)
def test_a_refused_stream_has_status_400_and_a_served_one_has_events(url, path, body):
    refused = httpx.post(f"{url}/{path}", json={**body, "stream": True}, timeout=120)
    assert refused.status_code == 400, refused.text
    assert refused.headers["content-type"] == "application/json"
    answer = refused.json()
    # SGLang's OpenAI endpoints have a shape of their own.
    assert "does not support" in answer.get("error", answer)["message"]
    allowed = (
        {"sampling_params": SAMPLING} if path == "generate" else {"presence_penalty": 0, "ignore_eos": True}
    )
    body = {**body, **allowed}
    with httpx.stream("POST", f"{url}/{path}", json={**body, "stream": True}, timeout=120) as served:
        lines = [line for line in served.iter_lines() if line]
    assert served.headers["content-type"].startswith("text/event-stream")
    assert (served.status_code, lines[-1]) == (200, "data: [DONE]")
    assert len(lines) > 2


def test_a_refused_request_leaves_the_server_working(url):
    assert generate(url, sampling_params={**SAMPLING, "repetition_penalty": 1.5}).status_code == 400
    assert generate(url).json()["meta_info"]["completion_tokens"] == SAMPLING["max_new_tokens"]


def test_samples_of_a_group_differ_and_reproduce(url):
    params = {**SAMPLING, "n": 4, "sampling_seed": 11}
    groups = [[r["output_ids"] for r in generate(url, sampling_params=params).json()] for _ in range(2)]
    assert groups[0] == groups[1]
    assert len({tuple(ids) for ids in groups[0]}) == 4
    single = generate(url, sampling_params={**SAMPLING, "sampling_seed": 11}).json()
    assert single["output_ids"] == groups[0][0]


def test_meta_info_agrees_with_sglangs_histogram(url):
    info = generate(url).json()["meta_info"]
    histogram = info["spec_accept_histogram"]
    assert info["s3r_rounds"] == info["spec_verify_ct"] == sum(histogram)
    assert info["s3r_accept_length"] == pytest.approx(1 + info["spec_num_correct_drafts"] / sum(histogram))
    by_position = info["s3r_acceptance_by_position"]
    assert by_position == sorted(by_position, reverse=True)
    assert sum(by_position) / 6 == pytest.approx(info["spec_accept_rate"])
    assert info["s3r_budget"] == 8


def test_server_info_shows_the_effective_configuration(url):
    generate(url)
    info = httpx.get(f"{url}/server_info", timeout=60).json()
    assert info["s3r_min_budget"] == 8
    state = info["internal_states"][0]["s3r"]
    assert state["config"]["recent_window"] == 4
    assert state["rounds"] > 0
    assert state["draft_tokens"] == 6 * state["rounds"]


def metric(url, name):
    lines = httpx.get(f"{url}/metrics", timeout=60, follow_redirects=True).text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_prometheus_counts_the_rounds_of_a_request(url):
    generate(url)
    before = {
        name: metric(url, name) for name in ("s3r_rounds_total", 's3r_accepted_tokens_total{position="1"}')
    }
    info = generate(url).json()["meta_info"]
    assert metric(url, "s3r_rounds_total") - before["s3r_rounds_total"] == info["s3r_rounds"]
    first = 's3r_accepted_tokens_total{position="1"}'
    expected = info["s3r_acceptance_by_position"][0] * info["s3r_rounds"]
    assert metric(url, first) - before[first] == pytest.approx(expected)
    assert 1 <= metric(url, "s3r_accept_length") <= 7
