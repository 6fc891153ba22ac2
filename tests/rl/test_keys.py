"""API keys: SGLang's user key opens rollouts, its admin key weights; the page and nothing else is open."""

import httpx
import pytest
from s3r_sglang.rl_integration.client import RolloutClient, RolloutError
from s3r_sglang.rl_integration.weights import WeightSender, WeightSyncError
from support import SAMPLING, prompt

pytestmark = pytest.mark.slow

OPEN = {("GET", "/s3r/")}
USER = {("POST", "/s3r/rollout"), ("GET", "/s3r/stats"), ("GET", "/s3r/ready")}
ADMIN = {("GET", "/s3r/weights"), ("POST", "/s3r/weights/begin"), ("POST", "/s3r/weights/commit")}


def status(server, method, path, key):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.request(method, f"{server.url}{path}", headers=headers, content=b"", timeout=60).status_code


@pytest.mark.parametrize(("method", "path"), sorted(OPEN | USER | ADMIN))
def test_each_route_opens_to_its_key_alone(locked, method, path):
    keys = (None, "wrong", "user-key", "admin-key")
    allowed = {key for key in keys if status(locked, method, path, key) != 401}
    if (method, path) in OPEN:
        assert allowed == {None, "wrong", "user-key", "admin-key"}
    else:
        assert allowed == {"user-key" if (method, path) in USER else "admin-key"}
    if path == "/s3r/weights/begin":
        WeightSender(locked.url, api_key="admin-key").send_path(locked.model, "first")


def test_every_route_is_in_these_lists(locked):
    headers = {"Authorization": "Bearer user-key"}
    paths = httpx.get(f"{locked.url}/openapi.json", headers=headers, timeout=60).json()["paths"]
    described = {
        (method.upper(), path) for path in paths if path.startswith("/s3r") for method in paths[path]
    }
    assert described == USER | ADMIN


def test_client_and_sender_take_their_keys(locked, model):
    rollout = RolloutClient(locked.url, api_key="user-key").rollout([prompt(0)], 2, SAMPLING)
    assert len(rollout.groups[0].responses) == 2
    with pytest.raises(RolloutError, match="401"):
        RolloutClient(locked.url).rollout([prompt(0)], 2, SAMPLING)
    WeightSender(locked.url, api_key="admin-key").send(model[1].named_parameters(), "second")
    rollout = RolloutClient(locked.url, api_key="user-key").rollout([prompt(0)], 2, SAMPLING)
    assert rollout.weight_versions == {"second"}
    with pytest.raises(WeightSyncError, match="401"):
        WeightSender(locked.url, api_key="user-key").send_path(model[0], "third")
