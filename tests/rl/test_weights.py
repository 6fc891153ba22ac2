"""Weight updates in all three ways, the snapshot rule, and sleep and wake, on a real server."""

import concurrent.futures
import shutil
import threading
import time

import httpx
import pytest
import torch
from s3r_sglang.rl_integration.weights import (
    DistributedSender,
    WeightSender,
    WeightSyncError,
    buckets,
    serialize,
)
from s3r_testing import free_port, wait_until
from safetensors.torch import load_file, save_file
from support import (
    LOGPROB_TOLERANCE,
    SAMPLING,
    dense_greedy,
    dense_logprobs,
    groups,
    prompt,
    rollout,
    stats,
)

from s3r_sglang.server.gate import MIXED

pytestmark = pytest.mark.slow

LONG = {"prompts": [{**prompt(3), "max_new_tokens": 300}], "group_size": 4}


def greedy(server, number=0):
    """Greedy continuation of the same prompt every time, so that stale prefix KV would show."""
    (group,) = groups(server, prompts=[prompt(number)], sampling={**SAMPLING, "temperature": 0.0})
    assert group["responses"][0]["token_ids"] == group["responses"][1]["token_ids"]
    return group["responses"][0]["token_ids"], group


def greedy_of(model, number=0):
    """What `greedy` gives for a server with the weights of `model`."""
    return dense_greedy(model, prompt(number)["token_ids"])


def send_path(server, folder, model, version):
    WeightSender(server.url).send_path(folder, version)


def send_tensors(server, folder, model, version):
    # Buckets smaller than the model: several requests in one session.
    WeightSender(server.url, bucket_bytes=20_000).send(model.named_parameters(), version)


def send_distributed(server, folder, model, version):
    sender = DistributedSender(
        server.url, address="127.0.0.1", port=free_port(), backend="gloo", bucket_bytes=20_000
    )
    try:
        sender.send(model.named_parameters(), version)
    finally:
        sender.close()


@pytest.fixture
def fresh(server, model):
    """The shared server with the weights it started with, before and after."""
    WeightSender(server.url).send_path(model[0], "first")
    yield server
    WeightSender(server.url).send_path(model[0], "first")


@pytest.mark.parametrize("send", [send_path, send_tensors, send_distributed])
def test_new_weights_are_what_is_sampled_from_and_what_drafts(fresh, model, other_model, send):
    assert greedy(fresh)[0] == greedy_of(model[1])
    tau = groups(fresh, group_size=8, seed=1)[0]["accept_length"]
    for version, (folder, weights) in {"second": other_model, "third": model, "fourth": other_model}.items():
        updates = stats(fresh)["weight_updates"]
        send(fresh, folder, weights, version)
        tokens, group = greedy(fresh)
        assert tokens == greedy_of(weights)
        assert group["weight_version"] == version
        assert group["weight_updates"] > updates
        sampled = groups(fresh, group_size=8, seed=1)[0]
        response = sampled["responses"][7]
        dense = dense_logprobs(weights, prompt(0)["token_ids"], response["token_ids"])
        assert response["logprobs"] == pytest.approx(dense, abs=LOGPROB_TOLERANCE)
        # A drafter left behind would agree with another model at chance: one token in 64.
        assert sampled["accept_length"] > 0.75 * tau


def test_the_requests_by_which_slime_updates_a_paused_server(fresh, other_model):
    """No session of ours: pause and abort, flush, broadcast in one request per bucket, continue."""
    sender = DistributedSender(fresh.url, address="127.0.0.1", port=free_port(), backend="gloo")
    parameters = [(name, weight.detach()) for name, weight in other_model[1].named_parameters()]
    body = {
        "names": [name for name, _ in parameters],
        "dtypes": ["float32"] * len(parameters),
        "shapes": [list(weight.shape) for _, weight in parameters],
        "group_name": "s3r_weights",
        "flush_cache": False,
        "weight_version": "second",
    }
    try:
        for path in ("pause_generation", "flush_cache"):
            httpx.post(f"{fresh.url}/{path}", json={}, timeout=60).raise_for_status()
        update, result = background(
            lambda: httpx.post(f"{fresh.url}/update_weights_from_distributed", json=body, timeout=60)
        )
        for _, weight in parameters:
            torch.distributed.broadcast(weight.contiguous(), src=0, group=sender._group)
        update.join()
        assert result[0].status_code == 200, result[0].text
        httpx.post(f"{fresh.url}/continue_generation", json={}, timeout=60).raise_for_status()
    finally:
        sender.close()
    tokens, group = greedy(fresh)
    assert tokens == greedy_of(other_model[1])
    assert group["weight_version"] == "second"


def test_ipc_without_a_checkpoint_engine_is_refused_and_changes_nothing(fresh, model):
    """Its handles are of CUDA devices, so this is as far as a CPU goes; the update itself is SGLang's."""
    body = {"zmq_handles": {"GPU-0": "ipc:///nowhere"}, "weight_version": "second"}
    response = httpx.post(f"{fresh.url}/update_weights_from_ipc", json=body, timeout=60)
    assert response.status_code == 400, response.text
    assert response.json()["message"].startswith("IPC weight update failed")
    tokens, group = greedy(fresh)
    assert tokens == greedy_of(model[1])
    assert group["weight_version"] == "first"


def test_prefix_kv_is_dropped_even_if_the_trainer_does_not_ask(fresh, other_model):
    groups(fresh, group_size=1)
    body = {"model_path": str(other_model[0]), "flush_cache": False, "weight_version": "second"}
    assert httpx.post(f"{fresh.url}/update_weights_from_disk", json=body, timeout=60).status_code == 200
    assert greedy(fresh)[0] == greedy_of(other_model[1])


def background(call):
    result = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    return thread, result


@pytest.mark.parametrize(
    "path", ["/update_weights_from_disk", "/s3r/weights/begin", "/release_memory_occupation"]
)
def test_groups_in_flight_refuse_the_change_with_their_number(fresh, other_model, path):
    thread, result = background(lambda: rollout(fresh, **LONG))
    wait_until(lambda: stats(fresh)["groups_in_flight"] == 1)
    body = {"model_path": str(other_model[0]), "weight_version": "second"} if "update" in path else {}
    response = httpx.post(f"{fresh.url}{path}", json=body, timeout=60)
    assert response.status_code == 409, response.text
    assert "1 groups are in flight" in response.text
    thread.join()
    assert result[0].json()["groups"][0]["weight_version"] == "first"
    assert groups(fresh)[0]["weight_version"] == "first"


def test_a_waiting_update_holds_new_groups_back(fresh, other_model):
    old, old_result = background(lambda: rollout(fresh, **LONG))
    wait_until(lambda: stats(fresh)["groups_in_flight"] == 1)
    body = {"model_path": str(other_model[0]), "weight_version": "second"}
    update, update_result = background(
        lambda: httpx.post(f"{fresh.url}/update_weights_from_disk?wait=true", json=body, timeout=300)
    )
    wait_until(lambda: stats(fresh)["status"] == "updating")
    late, late_result = background(lambda: rollout(fresh))
    wait_until(lambda: stats(fresh)["groups_held"] == 1)
    for thread in (old, update, late):
        thread.join()
    assert update_result[0].status_code == 200
    assert old_result[0].json()["groups"][0]["weight_version"] == "first"
    assert late_result[0].json()["groups"][0]["weight_version"] == "second"


def plain_greedy(server, number):
    """Greedy continuation by SGLang's own endpoint."""
    body = {
        "input_ids": prompt(number)["token_ids"],
        "sampling_params": {**SAMPLING, "temperature": 0.0},
    }
    response = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return number, response.json()["output_ids"]


def test_updates_between_plain_requests_wait_for_them_and_mix_no_weights(fresh, model, other_model):
    """SGLang's scheduler asserts that it is idle and ends otherwise: the last batch outlives the last response."""
    folders, done, answers = [other_model[0], model[0]] * 3, threading.Event(), []

    def ask(number):
        while not done.is_set():
            answers.append(plain_greedy(fresh, number))

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(ask, number) for number in range(3)]
        for folder in folders:
            body = {"model_path": str(folder)}
            update = httpx.post(f"{fresh.url}/update_weights_from_disk", json=body, timeout=120)
            assert update.status_code == 200, update.text
            time.sleep(0.1)
        done.set()
        for client in clients:
            client.result()
    policies = {n: [greedy_of(weights, n) for _, weights in (model, other_model)] for n in range(3)}
    used = [policies[number].index(tokens) for number, tokens in answers]
    assert set(used) == {0, 1}


def test_a_paused_engine_with_requests_takes_no_weights(fresh, other_model):
    body = {"input_ids": [2, 3], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    thread, result = background(lambda: httpx.post(f"{fresh.url}/generate", json=body, timeout=300))
    wait_until(lambda: stats(fresh)["engine"][0]["num_running_reqs"] == 1)
    httpx.post(f"{fresh.url}/pause_generation", json={"mode": "in_place"}, timeout=60).raise_for_status()
    update = {"model_path": str(other_model[0])}
    refused = httpx.post(f"{fresh.url}/update_weights_from_disk", json=update, timeout=60)
    assert (refused.status_code, "holds unfinished requests" in refused.text) == (409, True)
    httpx.post(f"{fresh.url}/continue_generation", json={}, timeout=60).raise_for_status()
    thread.join()
    assert len(result[0].json()["output_ids"]) == 400
    assert groups(fresh)[0]["weight_version"] == "first"


def test_groups_that_come_while_the_engine_is_paused_are_sampled_from_the_weights_that_come_meanwhile(
    fresh, other_model
):
    httpx.post(f"{fresh.url}/pause_generation", json={}, timeout=60).raise_for_status()
    late, result = background(lambda: rollout(fresh))
    wait_until(lambda: stats(fresh)["groups_held"] == 1)
    assert httpx.get(f"{fresh.url}/s3r/ready", timeout=60).json() == {"status": "paused"}
    body = {"model_path": str(other_model[0]), "weight_version": "second", "abort_all_requests": True}
    started = time.monotonic()
    httpx.post(f"{fresh.url}/update_weights_from_disk", json=body, timeout=60).raise_for_status()
    assert time.monotonic() - started < 8, "it waited for a group that was not in the engine"
    httpx.post(f"{fresh.url}/continue_generation", json={}, timeout=60).raise_for_status()
    late.join()
    assert result[0].json()["groups"][0]["weight_version"] == "second"


def test_an_update_aborts_the_groups_of_an_engine_that_was_paused_by_retracting_them(fresh, other_model):
    thread, result = background(lambda: rollout(fresh, **LONG))
    wait_until(lambda: stats(fresh)["engine"][0]["num_running_reqs"] == 4)
    httpx.post(f"{fresh.url}/pause_generation", json={"mode": "retract"}, timeout=60).raise_for_status()
    body = {"model_path": str(other_model[0]), "weight_version": "second"}
    refused = httpx.post(f"{fresh.url}/update_weights_from_disk?wait=true", json=body, timeout=60)
    assert (refused.status_code, "the engine is paused, so call" in refused.text) == (409, True)
    body["abort_all_requests"] = True
    httpx.post(f"{fresh.url}/update_weights_from_disk", json=body, timeout=60).raise_for_status()
    thread.join()
    assert result[0].json()["groups"][0]["type"] == "error"
    httpx.post(f"{fresh.url}/continue_generation", json={}, timeout=60).raise_for_status()
    assert groups(fresh)[0]["weight_version"] == "second"


def test_nothing_is_sampled_from_weights_that_are_partly_new(fresh, other_model):
    session = httpx.post(f"{fresh.url}/s3r/weights/begin", timeout=60).json()["session"]
    late, result = background(lambda: rollout(fresh))
    wait_until(lambda: stats(fresh)["groups_held"] == 1)
    refused = httpx.post(f"{fresh.url}/generate", json={"input_ids": [2, 3]}, timeout=60)
    assert refused.status_code == 503
    assert "being updated" in refused.json()["error"]["message"]
    assert httpx.get(f"{fresh.url}/s3r/ready", timeout=60).status_code == 503
    httpx.post(
        f"{fresh.url}/update_weights_from_disk", json={"model_path": str(other_model[0])}, timeout=60
    ).raise_for_status()
    wrong = httpx.post(f"{fresh.url}/s3r/weights/commit", json={"session": "x"}, timeout=60)
    assert (wrong.status_code, result) == (409, [])
    commit = {"session": session, "weight_version": "second"}
    httpx.post(f"{fresh.url}/s3r/weights/commit", json=commit, timeout=60).raise_for_status()
    late.join()
    assert result[0].json()["groups"][0]["weight_version"] == "second"


def test_a_failed_update_keeps_groups_out_until_a_whole_one(fresh, model):
    sender = WeightSender(fresh.url)
    with pytest.raises(WeightSyncError, match="update_weights_from_disk answered 400"):
        sender.send_path("/nonexistent", "broken")
    assert stats(fresh)["status"] == "updating"
    sender.send_path(model[0], "whole")
    assert groups(fresh)[0]["weight_version"] == "whole"


def post(server, path, **body):
    return httpx.post(f"{server.url}/{path}_memory_occupation", json=body, timeout=60).status_code


def test_a_sleeping_server_says_so_and_wakes_up_the_same(fresh, model):
    expected = greedy(fresh)[0]
    assert [post(fresh, "release"), post(fresh, "release"), post(fresh, "release", tags=["kv_cache"])] == [
        200
    ] * 3
    assert httpx.get(f"{fresh.url}/health", timeout=60).status_code == 200
    assert httpx.get(f"{fresh.url}/health_generate", timeout=60).status_code == 503
    assert httpx.get(f"{fresh.url}/s3r/ready", timeout=60).json() == {"status": "asleep"}
    for path in ("s3r/rollout", "generate", "v1/completions"):
        body = {"prompts": [prompt(0)], "group_size": 1} if path == "s3r/rollout" else {"prompt": "t2"}
        response = httpx.post(f"{fresh.url}/{path}", json=body, timeout=60)
        assert response.status_code == 503
        assert "call /resume_memory_occupation first" in response.json()["error"]["message"]
    update = {"model_path": str(model[0])}
    refused = httpx.post(f"{fresh.url}/update_weights_from_disk", json=update, timeout=60)
    assert (refused.status_code, "weights are released" in refused.text) == (409, True)
    assert post(fresh, "resume", tags=["weights"]) == 200
    assert httpx.post(f"{fresh.url}/update_weights_from_disk", json=update, timeout=60).status_code == 200
    assert stats(fresh)["sleeping"] == ["cuda_graph", "kv_cache"]
    assert rollout(fresh).status_code == 503
    assert [post(fresh, "resume"), post(fresh, "resume"), post(fresh, "resume", tags=["weights"])] == [
        200
    ] * 3
    assert greedy(fresh)[0] == expected


def test_resuming_what_was_never_released_is_harmless(fresh):
    assert post(fresh, "resume") == 200
    assert post(fresh, "release", tags=["kv"]) == 400
    assert len(groups(fresh)) == 1


def test_a_server_with_plain_requests_in_progress_does_not_go_to_sleep(fresh):
    body = {"input_ids": [2, 3], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    thread, result = background(lambda: httpx.post(f"{fresh.url}/generate", json=body, timeout=300))
    wait_until(lambda: stats(fresh)["engine"][0]["num_running_reqs"] == 1)
    assert post(fresh, "release") == 409
    thread.join()
    assert result[0].status_code == 200
    time.sleep(0.1)
    assert post(fresh, "release") == 200
    assert post(fresh, "resume") == 200


def test_buckets_keep_every_tensor_once_and_their_size():
    tensors = [(str(n), torch.zeros(n)) for n in (10, 5, 5, 30, 1)]
    parts = list(buckets(iter(tensors), 4 * 20))
    assert [[name for name, _ in part] for part in parts] == [["10", "5", "5"], ["30"], ["1"]]


def test_a_refused_broadcast_is_reported_at_once(fresh, model):
    """The trainer must not sit in a collective operation that the server never joins."""
    sender = DistributedSender(fresh.url, address="127.0.0.1", port=free_port(), backend="gloo")
    post(fresh, "release", tags=["weights"])
    try:
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match="weights are released"):
            sender.send(model[1].named_parameters(), "second")
        # The server alone still has the group: a name that is taken in this process too is refused here, sooner.
        torch.distributed.destroy_process_group(sender._group)
        with pytest.raises(WeightSyncError, match="init_weights_update_group"):
            DistributedSender(fresh.url, address="127.0.0.1", port=free_port(), backend="gloo")
        assert time.monotonic() - started < 60
    finally:
        post(fresh, "resume")
        leave = {"group_name": "s3r_weights"}
        httpx.post(f"{fresh.url}/destroy_weights_update_group", json=leave, timeout=60).raise_for_status()


def named(model, prefix=""):
    return [(prefix + name, weight.detach()) for name, weight in model.named_parameters()]


def test_names_that_the_model_does_not_have_are_refused(fresh, model, other_model):
    """SGLang skips them and succeeds: the trainer would get samples of the old weights under a new label."""
    with pytest.raises(
        WeightSyncError, match=r"answered 400: .*no parameter 'module\.model\.embed_tokens\.weight'"
    ):
        WeightSender(fresh.url).send(named(other_model[1], "module."), "wrapped")
    assert stats(fresh)["status"] == "updating"
    WeightSender(fresh.url).send(named(other_model[1]), "second")
    tokens, group = greedy(fresh)
    assert (tokens, group["weight_version"]) == (greedy_of(other_model[1]), "second")


def test_a_wrong_shape_or_group_does_not_end_the_server(fresh, model):
    name, weight = "model.norm.weight", model[1].model.norm.weight.detach()
    with pytest.raises(WeightSyncError, match=r"answered 400: .*Nothing has been changed"):
        WeightSender(fresh.url).send([(name, weight[:3])], "short")
    WeightSender(fresh.url).send(named(model[1]), "first")
    body = {"names": [], "dtypes": [], "shapes": [], "group_name": "never-joined"}
    response = httpx.post(f"{fresh.url}/update_weights_from_distributed", json=body, timeout=60)
    assert (response.status_code, "never-joined" in response.text) == (400, True)
    garbage = {"serialized_named_tensors": ["bm90IGEgcGlja2xl"]}
    assert httpx.post(f"{fresh.url}/update_weights_from_tensor", json=garbage, timeout=60).status_code == 400
    assert greedy(fresh)[0] == greedy_of(model[1])


def send_bucket(server, bucket):
    """One of SGLang's own requests, outside a session of ours."""
    body = {"serialized_named_tensors": [serialize(bucket)], "weight_version": "second"}
    return httpx.post(f"{server.url}/update_weights_from_tensor", json=body, timeout=60)


def refusals(server):
    """What the endpoints that would sample say: (status, sentence)."""
    answers = [
        rollout(server),
        httpx.post(f"{server.url}/generate", json={"input_ids": [2, 3]}, timeout=60),
        httpx.get(f"{server.url}/s3r/ready", timeout=60),
    ]
    return {(answer.status_code, answer.json()["error"]["message"]) for answer in answers}


def test_an_update_that_fails_half_way_without_a_session_stops_sampling_until_a_whole_one(fresh, other_model):
    tensors = named(other_model[1])
    assert send_bucket(fresh, tensors[:5]).status_code == 200
    wrong = send_bucket(fresh, [*tensors[5:9], ("model.norm.weight", torch.zeros(3))])
    assert (wrong.status_code, "send all of them again" in wrong.text) == (400, True)
    assert refusals(fresh) == {(503, MIXED)}
    assert stats(fresh)["status"] == "mixed"
    assert httpx.get(f"{fresh.url}/health", timeout=60).status_code == 200
    # The rest alone does not make them whole: what was sent before the failure may be old.
    assert send_bucket(fresh, tensors[5:]).status_code == 200
    assert refusals(fresh) == {(503, MIXED)}
    assert send_bucket(fresh, tensors[:5]).status_code == 200
    tokens, group = greedy(fresh)
    assert (tokens, group["weight_version"]) == (greedy_of(other_model[1]), "second")


@pytest.mark.parametrize("fault", ["half of the tensors", "half of the bytes"])
def test_a_folder_that_its_trainer_has_not_finished_is_refused(fresh, model, other_model, tmp_path, fault):
    shutil.copytree(other_model[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    if fault == "half of the bytes":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        tensors = load_file(file)
        save_file({name: tensors[name] for name in sorted(tensors)[::2]}, file, {"format": "pt"})
    body = {"model_path": str(tmp_path)}
    refused = httpx.post(f"{fresh.url}/update_weights_from_disk", json=body, timeout=60)
    assert refused.status_code == 400, refused.text
    if fault == "half of the tensors":
        assert "The folder has no weights for" in refused.text
        assert refusals(fresh) == {(503, MIXED)}
    else:
        assert greedy(fresh)[0] == greedy_of(model[1])
    body["model_path"] = str(other_model[0])
    httpx.post(f"{fresh.url}/update_weights_from_disk", json=body, timeout=60).raise_for_status()
    assert greedy(fresh)[0] == greedy_of(other_model[1])


def test_a_session_with_a_failed_update_is_not_committed(fresh, model):
    """Its label would name the old weights, or a mixture."""
    session = httpx.post(f"{fresh.url}/s3r/weights/begin", timeout=60).json()["session"]
    assert send_bucket(fresh, [("model.norm.wight", torch.zeros(32))]).status_code == 400
    commit = {"session": session, "weight_version": "second"}
    refused = httpx.post(f"{fresh.url}/s3r/weights/commit", json=commit, timeout=60)
    assert (refused.status_code, "begin a new session" in refused.text) == (409, True)
    assert stats(fresh)["weight_version"] == "first"
    WeightSender(fresh.url).send(named(model[1]), "third")
    assert greedy(fresh)[1]["weight_version"] == "third"


def test_of_two_senders_at_once_the_later_wins_and_the_other_is_told(fresh, model, other_model):
    """Else the last bucket of the one would be labelled as the other's, with no error on either side."""

    def overtaken():
        yield from named(other_model[1])[:5]
        WeightSender(fresh.url).send(named(model[1]), "later")
        yield from named(other_model[1])[5:]

    with pytest.raises(WeightSyncError, match=r"409: .*another one took over"):
        WeightSender(fresh.url, bucket_bytes=1).send(overtaken(), "earlier")
    tokens, group = greedy(fresh)
    assert (tokens, group["weight_version"]) == (greedy_of(model[1]), "later")


@pytest.mark.parametrize(
    "path", ["s3r/weights/begin", "release_memory_occupation", "update_weights_from_disk"]
)
def test_a_change_that_nobody_waits_for_any_more_does_not_happen(fresh, other_model, path):
    old, old_result = background(lambda: rollout(fresh, **LONG))
    wait_until(lambda: stats(fresh)["groups_in_flight"] == 1)
    body = {"model_path": str(other_model[0])} if "update" in path else {}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{fresh.url}/{path}?wait=true", json=body, timeout=httpx.Timeout(30, read=0.3))
    wait_until(lambda: stats(fresh)["status"] == "ready", seconds=15)
    assert stats(fresh)["groups_in_flight"] == 1, "the group ended before its update was given up"
    old.join()
    assert groups(fresh)[0]["weight_updates"] == old_result[0].json()["groups"][0]["weight_updates"]
    assert stats(fresh)["status"] == "ready"


def test_an_update_that_waits_while_the_engine_goes_to_sleep_is_refused(fresh, other_model):
    """On a GPU it would write to memory that is gone."""
    old, _ = background(lambda: rollout(fresh, **LONG))
    wait_until(lambda: stats(fresh)["groups_in_flight"] == 1)
    sleep, slept = background(
        lambda: httpx.post(f"{fresh.url}/release_memory_occupation?wait=true", json={}, timeout=300)
    )
    wait_until(lambda: stats(fresh)["status"] == "updating")
    body = {"model_path": str(other_model[0])}
    update, updated = background(
        lambda: httpx.post(f"{fresh.url}/update_weights_from_disk?wait=true", json=body, timeout=300)
    )
    for thread in (old, sleep, update):
        thread.join()
    assert slept[0].status_code == 200, slept[0].text
    assert (updated[0].status_code, "weights are released" in updated[0].text) == (409, True)
    assert [post(fresh, "resume"), post(fresh, "resume")] == [200, 200]
    assert groups(fresh)[0]["weight_version"] == "first"
