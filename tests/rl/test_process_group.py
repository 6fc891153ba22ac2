"""Settings that a trainer shares with the servers whose process group it joins."""

import os

import pytest
import torch
import torch.distributed as dist
from s3r_sglang.rl_integration.process_group import share_memory_like_servers
from support import free_port

SETTING = "NCCL_CUMEM_ENABLE"


@pytest.fixture
def default_group(request):
    dist.init_process_group(request.param, init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def setting(monkeypatch):
    monkeypatch.setenv(SETTING, "")  # put back after the test, whatever it sets
    monkeypatch.delenv(SETTING)
    return monkeypatch


def test_a_trainer_without_groups_gets_the_servers_setting():
    share_memory_like_servers()
    assert os.environ[SETTING] == "0"


@pytest.mark.parametrize("default_group", ["gloo"], indirect=True)
def test_a_trainer_with_a_gloo_group_gets_it_too(default_group):
    share_memory_like_servers()
    assert os.environ[SETTING] == "0"


def test_what_the_environment_says_is_left_alone(setting):
    setting.setenv(SETTING, "1")
    share_memory_like_servers()
    assert os.environ[SETTING] == "1"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a CUDA device")
@pytest.mark.parametrize("default_group", ["nccl"], indirect=True)
def test_a_trainer_with_an_nccl_group_is_told_how_to_start(default_group):
    with pytest.raises(RuntimeError, match=f"start the trainer with {SETTING}=0"):
        share_memory_like_servers()
    assert SETTING not in os.environ
