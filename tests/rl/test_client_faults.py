"""What the client says when there is no server, not the right one, or a mistake in the arguments."""

import asyncio
import http.server
import logging
import socket
import threading
import time

import pytest
from s3r_sglang.rl_integration import replicas
from s3r_sglang.rl_integration.client import RolloutClient, RolloutError
from s3r_sglang.rl_integration.weights import WeightSender

PROMPT = {"id": 1, "prompt": "a"}
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def answering():
    """Factory: base URL of an HTTP server that answers everything with one status, after `seconds[method]`.

    A second request on a connection meets what one does that is sent while the server closes an idle connection.
    """
    servers = []
    body = b'{"session": "s", "success": true}'

    def start(status, **seconds):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            served = False

            def do_GET(self):
                if self.served:
                    self.close_connection = True
                    return
                self.served = True
                time.sleep(seconds.get(self.command, 0))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_):
                pass

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (([PROMPT], 0), "group_size: must be greater than or equal to 1."),
        (([PROMPT], 2, {"temprature": 1.0}), "unknown field 'temprature'; did you mean 'temperature'?"),
        (
            ([{**PROMPT, "max_tokens": 4}], 2),
            "prompts.0: unknown field 'max_tokens'; did you mean 'max_new_tokens'?",
        ),
        (([PROMPT, PROMPT], 2), "prompts: the id 1 occurs twice."),
    ],
)
def test_a_mistake_in_the_arguments_is_one_sentence_and_nothing_is_sent(arguments, fault):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        RolloutClient(NOBODY).rollout(*arguments)
    assert str(error.value).endswith(fault)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "localhost", "", "ftp://a", "http://"])
def test_an_address_that_is_no_url_is_a_mistake_too(url):
    for sender in (RolloutClient, WeightSender):
        with pytest.raises(ValueError, match=r"is no address of a server.*write http://HOST:PORT"):
            sender([NOBODY, url])
    with pytest.raises(ValueError, match="at least one URL"):
        RolloutClient([])


def test_metadata_that_json_cannot_hold_is_a_mistake_and_nothing_is_sent():
    prompts = [PROMPT, {"id": 2, "prompt": "a", "metadata": {"answer": object()}}]
    with pytest.raises(ValueError, match=r"prompts\.1\.metadata: JSON cannot hold it"):
        RolloutClient(NOBODY, recover_seconds=60).rollout(prompts, 1)


def test_a_label_without_weights_is_refused_before_anything_is_sent():
    used = iter([])
    with pytest.raises(ValueError, match="no parameters to send"):
        WeightSender(NOBODY).send(used, "step-1")


def test_inside_an_event_loop_the_other_client_is_named():
    async def notebook():
        RolloutClient(NOBODY).rollout([PROMPT], 1)

    with pytest.raises(RuntimeError, match="use AsyncRolloutClient"):
        asyncio.run(notebook())


def test_a_replica_that_freezes_is_noticed(monkeypatch):
    """It accepts connections, as the kernel does for a stopped process, and says nothing."""
    monkeypatch.setattr(replicas, "WATCH_SECONDS", 0.1)
    prompts = [{**PROMPT, "id": n} for n in range(3)]
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        url = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(RolloutError, match=r"no replica was ready for 0\.2 seconds .*ReadTimeout"):
            RolloutClient(url, silent_seconds=0.5, recover_seconds=0.2).rollout(prompts, 1)
        assert 0.5 < time.monotonic() - started < 30


def test_a_watch_that_another_group_started_meanwhile_is_not_mistaken_for_ones_own(answering, monkeypatch):
    """Another group, woken between the end of a watch and this group's waking, starts the next one."""
    monkeypatch.setattr(replicas, "WATCH_SECONDS", 0.05)

    async def status(url):
        watched = replicas.Replicas(url, None, recover_seconds=1, silent_seconds=60)
        (replica,) = watched
        post = asyncio.create_task(watched.post(replica, "{}"))
        while replica.watch is None:
            await asyncio.sleep(0.01)
        first, replica.watch = replica.watch, asyncio.create_task(asyncio.sleep(60))
        try:
            return (await post).status_code, first.result()
        finally:
            await watched.close()

    assert asyncio.run(status(answering(200, GET=0.3, POST=1))) == (200, None)


def test_no_request_uses_a_connection_that_the_server_may_be_closing(answering):
    url = answering(200)
    WeightSender(url).send_path("folder", "step-1")

    async def rollouts():
        watched = replicas.Replicas(url, None, recover_seconds=1, silent_seconds=60)
        try:
            return [(await watched.post(replica, "{}")).status_code for replica in watched for _ in "abc"]
        finally:
            await watched.close()

    assert asyncio.run(rollouts()) == [200] * 3


def test_waiting_is_logged_at_once_and_then_now_and_again(monkeypatch, caplog):
    monkeypatch.setattr(replicas, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(replicas, "WAITING_SECONDS", 0.2)
    with caplog.at_level(logging.WARNING), pytest.raises(RolloutError) as error:
        RolloutClient(NOBODY, recover_seconds=0.5).rollout([PROMPT, {**PROMPT, "id": 2}], 1)
    assert f"no replica was ready for 0.5 seconds ({NOBODY} does not answer" in str(error.value)
    lines = [record.getMessage() for record in caplog.records if record.name == replicas.__name__]
    # Two groups wait, one line speaks for both.
    assert 2 <= len(lines) <= 4
    assert lines[0].startswith("no replica is ready, waiting 0 s more: http://127.0.0.1:9 does not answer")


@pytest.mark.parametrize(("status", "advice"), [(404, "serves no rollouts"), (401, "--api-key")])
def test_what_waiting_will_not_change_is_raised_at_once(answering, status, advice):
    with pytest.raises(RolloutError, match=f"answered {status}: .*{advice}"):
        RolloutClient(answering(status), recover_seconds=60).rollout([PROMPT], 1)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_replica_that_is_not_ready_is_waited_for(answering, monkeypatch, status):
    monkeypatch.setattr(replicas, "PROBE_SECONDS", 0.02)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=rf"no replica was ready for 0\.5 seconds .*answers {status}"):
        RolloutClient(answering(status), recover_seconds=0.5).rollout([PROMPT], 1)
    assert time.monotonic() - started > 0.5


def test_a_replica_that_never_was_one_ends_the_wait_for_the_others(answering):
    """The first address is dead; the probe of the second says that it serves no rollouts."""
    with pytest.raises(RolloutError, match="answered 404: it serves no rollouts"):
        RolloutClient([NOBODY, answering(404)], recover_seconds=60).rollout([PROMPT], 1)
