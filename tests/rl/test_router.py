"""sglang-router in front of a server: SGLang's own endpoints go through it, groups go to replicas directly."""

import contextlib
import subprocess
import sys
import time

import httpx
import pytest
from s3r_sglang.rl_integration.client import RolloutClient, RolloutError
from support import SAMPLING, free_port, prompt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def router(server, tmp_path_factory):
    """Address of a router with the shared server as its worker."""
    pytest.importorskip("sglang_router")
    port, log = free_port(), tmp_path_factory.mktemp("router") / "log"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", server.url]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 180
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/readiness", timeout=5).status_code == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def test_plain_requests_go_through_with_their_seeds_and_statistics(server, router):
    params = {**SAMPLING, "n": 3, "sampling_seed": 5}
    body = {"input_ids": prompt(0)["token_ids"], "sampling_params": params, "return_logprob": True}
    through, direct = (
        httpx.post(f"{url}/generate", json=body, timeout=120).json() for url in (router, server.url)
    )
    assert [r["output_ids"] for r in through] == [r["output_ids"] for r in direct]
    assert all(r["meta_info"]["s3r_rounds"] > 0 for r in through)


def test_a_refusal_keeps_its_status_and_sentence(router):
    body = {"input_ids": [2, 3], "sampling_params": {**SAMPLING, "frequency_penalty": 0.5}}
    response = httpx.post(f"{router}/generate", json=body, timeout=120)
    assert response.status_code == 400
    assert "does not support frequency_penalty" in response.text


def test_groups_do_not_and_the_client_says_so(server, router):
    with pytest.raises(RolloutError, match="404"):
        RolloutClient(router).rollout([prompt(0)], 2, SAMPLING)
    assert len(RolloutClient(server.url).rollout([prompt(0)], 2, SAMPLING).groups) == 1
