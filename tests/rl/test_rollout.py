"""`/s3r/rollout` on a real server: complete groups, exact logprobs, refusals, disconnects, back-pressure."""

import concurrent.futures
import json
import threading

import httpx
import pytest
from s3r_testing import wait_until
from support import LOGPROB_TOLERANCE, SAMPLING, dense_logprobs, groups, prompt, rollout, stats

pytestmark = pytest.mark.slow


def test_groups_are_complete_ordered_and_carry_the_dense_policys_logprobs(server, model):
    prompts = [prompt(n, length=10 + n) for n in range(16)]
    result = groups(server, prompts=prompts, group_size=8, seed=3, sampling={**SAMPLING, "temperature": 0.8})
    assert [group["prompt_id"] for group in result] == [p["id"] for p in prompts]
    for number, group in enumerate(result):
        assert (group["type"], group["prompt_index"], group["prompt_tokens"]) == (
            "group",
            number,
            10 + number,
        )
        assert [response["index"] for response in group["responses"]] == list(range(8))
        assert len({tuple(response["token_ids"]) for response in group["responses"]}) == 8
        assert 1 <= group["accept_length"] <= 7
        assert len(group["acceptance_by_position"]) == 6
    for group in result[::5]:
        for response in group["responses"]:
            assert len(response["token_ids"]) == 24
            assert (response["finish_reason"], response["truncated"]) == ("length", True)
            assert response["text"].split() == [f"t{token}" for token in response["token_ids"] if token > 1]
            ids = prompts[group["prompt_index"]]["token_ids"]
            dense = dense_logprobs(model[1], ids, response["token_ids"], 0.8)
            assert response["logprobs"] == pytest.approx(dense, abs=LOGPROB_TOLERANCE)


def test_a_seed_reproduces_a_response_whatever_the_group_size_and_the_batch(server):
    body = {"prompts": [prompt(0), prompt(1)], "seed": 5}
    four = groups(server, **body, group_size=4)
    two = groups(server, **body, group_size=2)
    single = groups(server, prompts=[{**prompt(1), "seed": four[1]["seed"]}], group_size=1)
    tokens = [[r["token_ids"] for r in group["responses"]] for group in (four[0], four[1])]
    assert [[r["token_ids"] for r in group["responses"]] for group in two] == [t[:2] for t in tokens]
    assert [r["token_ids"] for r in single[0]["responses"]] == tokens[1][:1]
    assert groups(server, **body | {"seed": 6})[0]["responses"][0]["token_ids"] != tokens[0][0]


def test_the_three_forms_of_a_prompt_are_the_same_prompt(server):
    forms = [
        {"id": 1, "token_ids": [2, 9, 3], "seed": 1, "metadata": {"answer": [1, "a"]}},
        {"id": 2, "prompt": "t2 t9 t3", "seed": 1},
        {"id": 3, "messages": [{"role": "user", "content": "t9"}], "seed": 1},
    ]
    result = groups(server, prompts=forms)
    assert [group["prompt_tokens"] for group in result] == [3, 3, 3]
    assert [group["prompt_token_ids"] for group in result] == [[2, 9, 3]] * 3
    assert [group["metadata"] for group in result] == [{"answer": [1, "a"]}, None, None]
    first, *others = ([r["token_ids"] for r in group["responses"]] for group in result)
    assert others == [first, first]


def test_limits_of_a_prompt_and_stop_tokens(server):
    limited = {**prompt(0), "max_new_tokens": 3}
    responses = groups(server, prompts=[limited, prompt(1)], seed=1)
    assert [len(r["token_ids"]) for group in responses for r in group["responses"]] == [3, 3, 24, 24]
    stop = responses[1]["responses"][0]["token_ids"][2]
    stopped = groups(
        server,
        prompts=[limited, prompt(1)],
        seed=1,
        sampling={"max_new_tokens": 24, "stop_token_ids": [stop]},
    )
    end = stopped[1]["responses"][0]
    assert (end["finish_reason"], end["truncated"], end["token_ids"][-1]) == ("stop", False, stop)
    assert len(end["token_ids"]) == len(end["logprobs"]) <= 3


def test_a_stop_string_may_stand_alone(server):
    free = groups(server, prompts=[prompt(0)], seed=1, group_size=1)[0]["responses"][0]
    third = free["text"].split()[2]
    for stop in (third, [third]):
        sampling = {"max_new_tokens": 24, "stop": stop}
        end = groups(server, prompts=[prompt(0)], seed=1, group_size=1, sampling=sampling)[0]["responses"][0]
        assert (end["finish_reason"], end["truncated"]) == ("stop", False)
        assert end["token_ids"] == free["token_ids"][: len(end["token_ids"])]
        assert len(end["token_ids"]) <= 3


def test_streamed_groups_come_one_by_one(server):
    prompts = [{**prompt(0), "max_new_tokens": 400}, {**prompt(1), "max_new_tokens": 2}]
    body = {"prompts": prompts, "group_size": 2, "sampling": SAMPLING, "stream": True}
    arrivals = []
    with httpx.stream("POST", f"{server.url}/s3r/rollout", json=body, timeout=300) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        for line in response.iter_lines():
            arrivals.append((json.loads(line)["prompt_id"], stats(server)["groups_in_flight"]))
    assert arrivals == [("p1", 1), ("p0", 0)]


def test_every_group_is_one_line_whatever_its_id(server):
    """httpx splits lines where Unicode ends them, too."""
    names = ["a\nb", "c\u2028d", "e\x85f", "g\u2029h", "i\x1ej\r\n"]
    prompts = [{**prompt(n), "id": name, "max_new_tokens": 1} for n, name in enumerate(names)]
    body = {"prompts": prompts, "group_size": 1, "stream": True}
    with httpx.stream("POST", f"{server.url}/s3r/rollout", json=body, timeout=300) as response:
        lines = [json.loads(line) for line in response.iter_lines()]
    assert sorted(line["prompt_id"] for line in lines) == sorted(names)


MALFORMED = {
    "not JSON": (b"{", "Invalid JSON"),
    "invalid UTF-8": (b'{"prompts": "\xff\xfe"}', "Invalid JSON"),
    "empty": (b"", "Invalid JSON"),
    "a list": (b"[]", "must be an object"),
    "NaN": (b'{"prompts":[{"id":1,"prompt":"t2"}],"group_size":1,"sampling":{"temperature":NaN}}', ""),
    "huge": (b'{"x": "' + b"a" * 1_100_000 + b'"}', "larger than 1000000 bytes"),
    "no prompts": ({"prompts": []}, "prompts: List should have at least 1 item"),
    "prompts missing": ({"prompts": None}, "prompts: must be a valid"),
    "prompt not an object": ({"prompts": ["t2"]}, "prompts.0"),
    "no id": ({"prompts": [{"prompt": "t2"}]}, "prompts.0.id"),
    "id of a wrong type": ({"prompts": [{"id": 1.5, "prompt": "t2"}]}, "prompts.0.id"),
    "same id": ({"prompts": [{"id": 1, "prompt": "t2"}] * 2}, "the id 1 occurs twice"),
    "no form": ({"prompts": [{"id": 1}]}, "exactly one of prompt, messages and token_ids"),
    "two forms": ({"prompts": [{"id": 1, "prompt": "t2", "token_ids": [2]}]}, "exactly one of"),
    "empty text": ({"prompts": [{"id": 1, "prompt": ""}]}, "prompts.0.prompt"),
    "blank text": ({"prompts": [{"id": 1, "prompt": "  "}]}, "prompts.0: the prompt has no tokens"),
    "empty token_ids": ({"prompts": [{"id": 1, "token_ids": []}]}, "prompts.0.token_ids"),
    "negative token": ({"prompts": [{"id": 1, "token_ids": [-1]}]}, "prompts.0.token_ids.0"),
    "token out of range": ({"prompts": [{"id": 1, "token_ids": [64]}]}, "token id 64 is outside"),
    "token 2**40": ({"prompts": [{"id": 1, "token_ids": [2**40]}]}, "prompts.0.token_ids.0"),
    "token as text": ({"prompts": [{"id": 1, "token_ids": ["2"]}]}, "prompts.0.token_ids.0"),
    "no messages": ({"prompts": [{"id": 1, "messages": []}]}, "prompts.0.messages"),
    "message without role": ({"prompts": [{"id": 1, "messages": [{"content": "t2"}]}]}, "messages.0.role"),
    "template refuses": (
        {"prompts": [{"id": 1, "messages": [{"role": "tool", "content": "t2"}]}]},
        "the chat template refuses the messages",
    ),
    "too long": ({"prompts": [{"id": 1, "token_ids": [2] * 500}]}, "500 prompt tokens and 24 new ones"),
    "too many new": ({"sampling": {"max_new_tokens": 512}}, "do not fit"),
    "group of none": ({"group_size": 0}, "group_size: must be greater than or equal to 1"),
    "group of text": ({"group_size": "8"}, "group_size: must be a valid integer"),
    "group of true": ({"group_size": True}, "group_size: must be a valid integer"),
    "group too large": ({"group_size": 100_000}, "group_size: must be less than or equal to 1024"),
    "unknown field": ({"groupsize": 8}, "unknown field 'groupsize'; did you mean 'group_size'?"),
    "unknown sampling": ({"sampling": {"beam_width": 2}}, "sampling: unknown field 'beam_width'; known: "),
    "misspelt sampling": (
        {"sampling": {"temprature": 1.0}},
        "sampling: unknown field 'temprature'; did you mean",
    ),
    "stop of a wrong type": ({"sampling": {"stop": 3}}, "sampling.stop"),
    "empty stop": ({"sampling": {"stop": ""}}, "sampling.stop.0"),
    "metadata as text": (
        {"prompts": [{"id": 1, "prompt": "t2", "metadata": "a"}]},
        "prompts.0.metadata: must be an object",
    ),
    "a key twice": (
        b'{"prompts":[{"id":1,"prompt":"t2"}],"group_size":1,"group_size":2}',
        "'group_size' occurs twice",
    ),
    "a key of a prompt twice": (
        b'{"prompts":[{"id":1,"prompt":"t2","metadata":{"a":1,"\\u0061":2}}],"group_size":1}',
        "The key 'a' occurs twice in one object.",
    ),
    "NaN in metadata": (
        b'{"prompts":[{"id":1,"prompt":"t2","metadata":{"a":[{"b":NaN}]}}],"group_size":1}',
        "prompts.0.metadata: holds nan",
    ),
    "too large a number in metadata": (
        b'{"prompts":[{"id":1,"prompt":"t2","metadata":{"a":1e999}}],"group_size":1}',
        "prompts.0.metadata: holds inf",
    ),
    "nested too deep": (
        b'{"prompts":[{"id":1,"prompt":"t2","metadata":{"a":' + b"[" * 5000 + b"]" * 5000 + b"}}]}",
        "Invalid JSON: recursion limit exceeded",
    ),
    "an id of 5,000 digits": (b'{"prompts":[{"id":1' + b"0" * 5000 + b"}]}", "Invalid JSON: number out of"),
    "temperature below 0": ({"sampling": {"temperature": -1.0}}, "sampling.temperature"),
    "top_p above 1": ({"sampling": {"top_p": 1.5}}, "sampling.top_p"),
    "top_k 0": ({"sampling": {"top_k": 0}}, "top_k must be -1 (off) or at least 1"),
    "ignored stop": (
        {"sampling": {"ignore_eos": True, "stop_token_ids": [3]}},
        "ignore_eos makes SGLang ignore stop_token_ids",
    ),
    "negative seed": ({"seed": -1}, "seed"),
    "seed 2**63": ({"seed": 2**63}, "seed"),
    "more groups than the queue": ({"prompts": [prompt(n, 1) for n in range(65)]}, "at most 64 groups"),
}


def counts(server):
    totals = stats(server)["totals"]
    return totals["groups"], totals["errors"]


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case)
def test_malformed_requests_get_a_sentence_and_no_group_is_sampled(server, case):
    body, sentence = MALFORMED[case]
    if not isinstance(body, bytes):
        body = json.dumps({"prompts": [prompt(0)], "group_size": 1, "sampling": SAMPLING} | body).encode()
    before = counts(server)
    response = httpx.post(f"{server.url}/s3r/rollout", content=body, timeout=60)
    assert response.status_code == (413 if case == "huge" else 400), response.text
    message = response.json()["error"]["message"]
    assert sentence in message
    assert message.endswith((".", "?"))
    assert "\n" not in message
    assert len(message) < 300
    assert counts(server) == before
    assert len(groups(server, group_size=1)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_groups(server, stream):
    prompts = [{**prompt(n), "max_new_tokens": 450} for n in range(8)]
    body = {"prompts": prompts, "group_size": 8, "sampling": SAMPLING, "stream": stream}
    before = stats(server)["totals"]["groups"]

    def ask():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/s3r/rollout", json=body, timeout=httpx.Timeout(30, read=1.0))

    threading.Thread(target=ask).start()
    wait_until(lambda: stats(server)["groups_in_flight"] == 8)
    # 28,800 tokens would take minutes; that the engine is idle so soon is the abort.
    wait_until(lambda: stats(server)["groups_in_flight"] == 0, seconds=15)
    assert stats(server)["totals"]["groups"] == before
    wait_until(lambda: all(load["num_running_reqs"] == 0 for load in stats(server)["engine"]), seconds=15)
    assert len(groups(server)) == 1


def test_a_group_that_loses_a_response_is_one_error(server):
    """Someone else's abort ends the engine's requests; what was finished of the group is not returned."""
    prompts = [{**prompt(0), "max_new_tokens": 450}, {**prompt(1), "max_new_tokens": 2}]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(groups, server, prompts=prompts, group_size=4)
        wait_until(lambda: stats(server)["groups_in_flight"] == 1)
        httpx.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=60).raise_for_status()
        aborted, complete = asked.result()
    assert set(aborted) == {"type", "prompt_id", "prompt_index", "message"}
    assert (aborted["type"], aborted["prompt_id"], complete["type"]) == ("error", "p0", "group")
    assert "abort" in aborted["message"].lower()
    assert stats(server)["groups_in_flight"] == 0


def test_beyond_the_queue_clients_are_told_when_to_retry(server):
    """64 groups fit; of 3 requests with 30 groups each, one has to wait outside."""
    body = {"prompts": [{**prompt(n), "max_new_tokens": 60} for n in range(30)], "group_size": 1}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        responses = list(pool.map(lambda _: rollout(server, **body), range(3)))
    assert sorted(response.status_code for response in responses) == [200, 200, 429]
    refused = next(response for response in responses if response.status_code == 429)
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert "of 64 groups are in progress" in refused.json()["error"]["message"]
    served = [r.json()["groups"] for r in responses if r.status_code == 200]
    assert all(len(result) == 30 and {g["type"] for g in result} == {"group"} for result in served)


def test_stats_count_what_clients_got(server):
    before = stats(server)["totals"]
    groups(server, prompts=[prompt(0), prompt(1)], group_size=3)
    now = stats(server)
    assert (now["status"], now["groups_in_flight"], now["groups_held"]) == ("ready", 0, 0)
    gained = {key: now["totals"][key] - before[key] for key in ("groups", "responses", "tokens", "errors")}
    assert gained == {"groups": 2, "responses": 6, "tokens": 6 * 24, "errors": 0}
    assert now["acceptance"][0]["rounds"] > 0
    assert now["engine"][0]["max_total_num_tokens"] == 20000


def metric(server, name):
    lines = httpx.get(f"{server.url}/metrics", timeout=60, follow_redirects=True).text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_prometheus_counts_the_same(server):
    groups(server)
    names = ('s3r_groups_total{type="group"}', "s3r_rollout_tokens_total")
    before = [metric(server, name) for name in names]
    groups(server, prompts=[prompt(0), prompt(1)], group_size=3)
    assert [metric(server, name) - old for name, old in zip(names, before, strict=True)] == [2, 6 * 24]
    assert metric(server, "s3r_groups_in_flight") == 0


def test_the_openapi_description_has_the_request(server):
    description = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    content = description["paths"]["/s3r/rollout"]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    assert schema["required"] == ["prompts", "group_size"]
    assert schema["properties"]["prompts"]["items"]["properties"]["id"]
    assert "$ref" not in json.dumps(schema)
