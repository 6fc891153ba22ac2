"""What the client says when there is no server, not the right one, or a mistake in the arguments."""

import http.server
import logging
import threading

import pytest
from s3r_sglang.rl_integration import client
from s3r_sglang.rl_integration.client import RolloutClient, RolloutError

PROMPT = {"id": 1, "prompt": "a"}
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def answering():
    """Factory: base URL of an HTTP server that answers everything with one status."""
    servers = []

    def start(status):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

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


def test_waiting_is_logged_at_once_and_then_now_and_again(monkeypatch, caplog):
    monkeypatch.setattr(client, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(client, "WAITING_SECONDS", 0.2)
    with caplog.at_level(logging.WARNING), pytest.raises(RolloutError) as error:
        RolloutClient(NOBODY, recover_seconds=0.5).rollout([PROMPT, {**PROMPT, "id": 2}], 1)
    assert f"no replica was ready for 0.5 seconds ({NOBODY} does not answer" in str(error.value)
    lines = [record.getMessage() for record in caplog.records if record.name == client.__name__]
    # Two groups wait, one line speaks for both.
    assert 2 <= len(lines) <= 4
    assert lines[0].startswith("no replica is ready, waiting 0 s more: http://127.0.0.1:9 does not answer")


@pytest.mark.parametrize(("status", "advice"), [(404, "serves no rollouts"), (401, "--api-key")])
def test_what_waiting_will_not_change_is_raised_at_once(answering, status, advice):
    with pytest.raises(RolloutError, match=f"answered {status}: .*{advice}"):
        RolloutClient(answering(status), recover_seconds=60).rollout([PROMPT], 1)


def test_a_replica_that_never_was_one_ends_the_wait_for_the_others(answering):
    """The first address is dead; the probe of the second says that it serves no rollouts."""
    with pytest.raises(RolloutError, match="answered 404: it serves no rollouts"):
        RolloutClient([NOBODY, answering(404)], recover_seconds=60).rollout([PROMPT], 1)
