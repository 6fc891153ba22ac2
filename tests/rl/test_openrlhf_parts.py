"""The parts of the OpenRLHF integration that need neither OpenRLHF nor a server."""

import asyncio
import contextlib
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from s3r_sglang.rl_integration.client import PlacedGroup, Rollout, RolloutError
from s3r_sglang.rl_integration.openrlhf import compat, environment, options
from s3r_sglang.rl_integration.openrlhf.engine import VERSION_KEY, GroupFailedError, RolloutEngine
from s3r_sglang.rl_integration.openrlhf.metrics import Totals, summary
from s3r_sglang.rl_integration.openrlhf.runtime import STANDINS
from s3r_sglang.rl_integration.openrlhf.sampling import output_of, sampling_of
from s3r_sglang.rl_integration.openrlhf.server import ServerError, ServerProcess
from s3r_testing import wait_until

from s3r_sglang.server.protocol import GroupError, Response

# ---- flags


def test_ours_are_split_from_openrlhfs():
    ours, theirs = options.parse(
        [
            "--actor.adam.lr",
            "1e-5",
            "--s3r.restarts",
            "0",
            "--s3r.server_args=--tp 2 --s3r-min-budget 8",
            "--x",
        ]
    )
    assert (ours.restarts, ours.mode, ours.weight_sync, ours.correction) == (0, "exact", True, None)
    assert ours.server_args == ["--tp", "2", "--s3r-min-budget", "8"]
    assert theirs == ["--actor.adam.lr", "1e-5", "--x"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--s3r.restart", "1"], "unknown flag --s3r.restart; did you mean --s3r.restarts?"),
        (["--s3r-min-budget", "8"], "--s3r-min-budget is a flag of the server: give it in --s3r.server_args"),
        (["--s3r.mode", "sparse"], "invalid choice"),
        (["--s3r.bucket_mib", "0"], "argument --s3r.bucket_mib: must be positive"),
        (["--s3r.restarts", "-1"], "argument --s3r.restarts: must not be negative"),
        (["--s3r.correction", "sparse-rl"], "only rollouts of --s3r.mode direct need a correction"),
    ],
)
def test_wrong_flags_get_one_sentence(argv, message, capsys):
    with pytest.raises(SystemExit):
        options.parse(argv)
    assert message in capsys.readouterr().err


def test_the_engines_python_must_exist(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    ours, _ = options.parse([])
    with pytest.raises(environment.SetupError, match=r"give --s3r\.engine_python"):
        environment.with_engine(ours)
    ours, _ = options.parse(["--s3r.engine_python", "/nowhere/python"])
    with pytest.raises(environment.SetupError, match="/nowhere/python does not exist"):
        environment.with_engine(ours)
    (tmp_path / environment.RECORD).write_text(json.dumps({"engine_python": sys.executable}))
    ours, _ = options.parse([])
    assert environment.with_engine(ours).engine_python == sys.executable


def supported():
    """Arguments of OpenRLHF as far as `require_supported` looks at them, all supported on a CPU."""
    spaces = {
        "algo": SimpleNamespace(advantage=SimpleNamespace(is_correction_level="token")),
        "data": SimpleNamespace(max_images_per_prompt=0),
        "ds": SimpleNamespace(
            lora=SimpleNamespace(rank=0),
            load_in_4bit=False,
            tensor_parallel_size=1,
            packing_samples=False,
            attn_implementation="eager",
            enable_sleep=False,
        ),
        "rollout": SimpleNamespace(top_p=1.0),
        "train": SimpleNamespace(
            partial_rollout_enable=False,
            full_determinism_enable=False,
            colocate_all=False,
            async_enable=False,
        ),
        "vllm": SimpleNamespace(
            num_engines=1, sync_with_ray=False, sync_backend="gloo", tensor_parallel_size=1
        ),
    }
    return SimpleNamespace(**spaces)


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        ("vllm.num_engines", None, "--vllm.num_engines"),
        ("ds.lora.rank", 8, "LoRA"),
        ("ds.load_in_4bit", True, "quantised"),
        ("data.max_images_per_prompt", 1, "image"),
        ("train.partial_rollout_enable", True, "partial_rollout"),
        ("vllm.sync_with_ray", True, "sync_with_ray"),
        ("train.full_determinism_enable", True, "full_determinism"),
        ("ds.tensor_parallel_size", 2, "tensor-parallel training"),
        ("ds.packing_samples", True, "flash-attn"),
        ("ds.attn_implementation", "flash_attention_2", "give sdpa or eager"),
        ("ds.enable_sleep", True, "--ds.enable_sleep without a GPU"),
        ("rollout.top_p", 0.9, "--rollout.top_p"),
        ("vllm.sync_backend", "mpi", "neither nccl nor gloo"),
    ],
)
def test_what_is_not_tested_is_refused_by_name(path, value, name):
    args = supported()
    compat.require_supported(args)
    *parents, leaf = path.split(".")
    place = args
    for parent in parents:
        place = getattr(place, parent)
    setattr(place, leaf, value)
    with pytest.raises(compat.UnsupportedError, match=name):
        compat.require_supported(args)


# ---- sampling parameters and outputs


@pytest.fixture
def params(monkeypatch):
    """The stand-in's SamplingParams, as OpenRLHF fills it."""
    monkeypatch.syspath_prepend(str(STANDINS / "for_vllm"))
    import vllm

    yield lambda **changes: vllm.SamplingParams(
        **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 16, "min_tokens": 1}
        | {"skip_special_tokens": False, "logprobs": 1}
        | changes
    )
    sys.modules.pop("vllm")


def test_sampling_parameters_keep_their_meaning(params):
    sampling = sampling_of(params(temperature=0.6, top_p=0.9, top_k=0, max_tokens=7, stop="x"))
    assert sampling.model_dump() == {
        "max_new_tokens": 7,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "stop": ["x"],
        "stop_token_ids": [],
        "ignore_eos": False,
        "skip_special_tokens": False,
    }


@pytest.mark.parametrize(("name", "value"), [("min_tokens", 2), ("logprobs", 5), ("presence_penalty", 0.5)])
def test_what_the_service_lacks_is_refused(params, name, value):
    asked = params()
    setattr(asked, name, value)
    with pytest.raises(ValueError, match=name):
        sampling_of(asked)


def response(index, tokens, finish="stop", rounds=1):
    return Response(
        index=index,
        token_ids=tokens,
        text="text",
        logprobs=[-float(token) for token in tokens],
        finish_reason=finish,
        truncated=finish == "length",
        rounds=rounds,
        accept_length=len(tokens) / rounds,
    )


def test_outputs_have_vllms_form():
    (completion,) = output_of(response(0, [3, 1], "length"), logprobs=True).outputs
    assert (completion.token_ids, completion.finish_reason) == ([3, 1], "length")
    assert [pair[token].logprob for pair, token in zip(completion.logprobs, [3, 1], strict=True)] == [
        -3.0,
        -1.0,
    ]
    assert output_of(response(0, [3]), logprobs=False).outputs[0].logprobs is None


# ---- the engine


def group(version="0", tokens=((5, 1), (6, 1)), **changes):
    fields = {
        "prompt_id": "prompt",
        "prompt_index": 0,
        "prompt_tokens": 2,
        "responses": [response(i, list(ids)) for i, ids in enumerate(tokens)],
        "weight_version": version,
        "weight_updates": 1,
        "seed": None,
        "accept_length": 2.0,
        "acceptance_by_position": [0.5, 0.25],
        "replica": "http://a",
        "attempts": 1,
    }
    known = {name: value for name, value in (fields | changes).items() if name in PlacedGroup.model_fields}
    return PlacedGroup.model_construct(**known)


class Server:
    """ServerProcess without a process."""

    url, api_key = "http://a", "key"

    def __init__(self):
        self.lives, self.alive = 0, False

    async def start(self):
        self.lives, self.alive = self.lives + 1, True

    async def died(self, life):
        return self.lives != life or not self.alive

    def tail(self):
        return "the log"


class Client:
    """AsyncRolloutClient that answers from a list and raises exceptions in it; "lost": the server has died."""

    def __init__(self, server, answers):
        self.server, self.answers, self.asked = server, answers, []

    async def rollout(self, prompts, size, sampling):
        self.asked.append((prompts[0]["token_ids"], size))
        await asyncio.sleep(0)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            self.server.alive = "lost" not in str(answer)
            raise answer
        if isinstance(answer, GroupError):
            return Rollout([], [answer])
        return Rollout([answer], [])

    async def stats(self):
        return []


class Executor:
    """Single-turn, like OpenRLHF's: one call for tokens, then a reward."""

    def __init__(self, reward=1.0):
        self.reward = reward

    async def execute(self, *, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images):
        output = await llm_engine.generate([7, 8], sampling_params)
        return {"observation_tokens": [7, 8, *output.outputs[0].token_ids], "reward": self.reward}


def engine_with(monkeypatch, answers, *, reward=1.0, restarts=1, single_turn=True):
    """(engine at version 0, its client, number of weight requests), without processes."""
    server = Server()
    client = Client(server, answers)
    monkeypatch.setattr(
        "s3r_sglang.rl_integration.openrlhf.engine.AsyncRolloutClient", lambda *args, **kwargs: client
    )
    engine = RolloutEngine(server, Executor(reward), single_turn=single_turn, rewards=True, restarts=restarts)
    sent = []

    class Broadcast:
        @staticmethod
        async def remote():
            sent.append(server.lives)
            await engine.set_version(0)

    asyncio.run(engine.set_trainers([SimpleNamespace(broadcast_to_vllm=Broadcast)]))
    return engine, client, sent


def generate(engine, params, samples=2):
    return asyncio.run(engine.generate_responses("p", "l", params(), 64, None, samples))


def test_the_samples_of_a_prompt_are_one_group_in_its_order(monkeypatch, params):
    engine, client, sent = engine_with(monkeypatch, [group()])
    results = generate(engine, params)
    assert client.asked == [([7, 8], 2)]
    assert [result["observation_tokens"] for result in results] == [[7, 8, 5, 1], [7, 8, 6, 1]]
    assert [result["extra_logs"] for result in results] == [{VERSION_KEY: 0.0}] * 2
    # A server that has never got the trainer's weights asks for them before it samples.
    assert sent == [1]
    assert engine.get_num_unfinished_requests() == 0


def test_an_agents_turns_are_groups_of_their_own(monkeypatch, params):
    engine, client, _ = engine_with(
        monkeypatch, [group(tokens=[(5, 1)]), group(tokens=[(6, 1)])], single_turn=False
    )
    assert len(generate(engine, params)) == 2
    assert client.asked == [([7, 8], 1), ([7, 8], 1)]


def test_a_lost_server_is_restarted_gets_the_weights_and_samples_the_group_again(monkeypatch, params):
    engine, client, sent = engine_with(monkeypatch, [RolloutError("lost"), group()])
    assert len(generate(engine, params)) == 2
    assert client.asked == [([7, 8], 2)] * 2
    assert sent == [1, 2]
    totals = asyncio.run(engine.take_totals())
    assert (totals.restarts, totals.groups, totals.responses, totals.tokens) == (1, 1, 2, 4)
    assert asyncio.run(engine.take_totals()) == Totals()


@pytest.mark.parametrize(
    ("answers", "options", "error", "message"),
    [
        (
            [group(version="3")],
            {},
            GroupFailedError,
            "sampled from weights '3', and the trainer is at step 0",
        ),
        ([group(version="initial")], {}, GroupFailedError, "sampled from weights 'initial'"),
        ([group(tokens=[(5, 1)])], {}, GroupFailedError, "1 responses instead of 2"),
        ([RolloutError("answered 400: too long")], {}, GroupFailedError, "too long"),
        ([group()], {"reward": None}, GroupFailedError, "no reward for a response to 'p'"),
        ([RolloutError("lost")] * 2, {"restarts": 1}, ServerError, "died again after 1 restarts"),
        (
            [GroupError(prompt_id="prompt", prompt_index=0, message="aborted")],
            {},
            GroupFailedError,
            "could not complete a group: aborted",
        ),
    ],
)
def test_an_incomplete_or_foreign_group_stops_the_run(monkeypatch, params, answers, options, error, message):
    engine, _, _ = engine_with(monkeypatch, list(answers), **options)
    with pytest.raises(error, match=message):
        generate(engine, params)


def test_a_group_that_sees_the_loss_late_is_sampled_again_too(monkeypatch, tmp_path):
    """By then another group has had the server restarted."""
    monkeypatch.setattr("s3r_sglang.rl_integration.openrlhf.server.DEATH_SECONDS", 0.6)
    server = ServerProcess("", "exact", "cpu", [], "", None, 0, "", tmp_path / "log", 1.0, lives=1)
    server._process = subprocess.Popen(["sleep", "60"])

    async def restarted_meanwhile():
        waiting = asyncio.create_task(server.died(1))
        await asyncio.sleep(0.1)
        server.lives = 2
        return await waiting

    try:
        assert asyncio.run(restarted_meanwhile())
        assert not asyncio.run(server.died(2))
    finally:
        server.stop()
    assert asyncio.run(server.died(2))


def test_in_asynchronous_training_a_lost_server_ends_the_run(monkeypatch, params):
    """There the weights have moved on, and nobody is asked for them."""
    engine, _, _ = engine_with(monkeypatch, [RolloutError("lost"), group()])
    asyncio.run(engine.ready())
    asyncio.run(engine.set_version(0))
    asyncio.run(engine.set_trainers([]))
    with pytest.raises(GroupFailedError, match="no weights of the trainer"):
        generate(engine, params)


# ---- the checkpoint of a run that stops


class Loop:
    """OpenRLHF's controller of synchronous training, reduced to its order of calls."""

    def __init__(self, fails, save_steps):
        self.fails = fails
        self.args = SimpleNamespace(ckpt=SimpleNamespace(save_steps=save_steps))
        self.saved, self.closed = [], []
        self.tensorboard_logger, self.wandb_logger = (
            SimpleNamespace(close=lambda: self.closed.append(1)),
            None,
        )

    def fit(self, global_step=0):
        while True:
            self.reach("rollout", global_step + 1)
            _, global_step = self.train_step([], global_step)
            self.save_logs_and_checkpoints(global_step, {"a": 1}, {"global_step": global_step})
            self.reach("evaluation", global_step)

    def train_step(self, samples, global_step):
        self.reach("update", global_step + 1)
        return {}, global_step + 1

    def save_logs_and_checkpoints(self, global_step, logs_dict=None, client_states=None):
        if global_step % self.args.ckpt.save_steps == 0:
            self.reach("checkpoint", global_step)
            self.saved.append(client_states["global_step"])

    def reach(self, *place):
        if place in self.fails:
            raise ServerError(str(place))


@pytest.fixture
def checkpoint(monkeypatch):
    """The module, with `Loop` for OpenRLHF's controller."""
    source = ModuleType("openrlhf.trainer.ppo_trainer")
    source.PPOTrainer = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=Loop))
    for name in ("openrlhf", "openrlhf.trainer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, source.__name__, source)
    name = "s3r_sglang.rl_integration.openrlhf.checkpoint"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name)


@pytest.mark.parametrize(
    ("fails", "save_steps", "saved"),
    [
        ([("rollout", 3)], math.inf, [2]),
        ([("evaluation", 3)], math.inf, [3]),
        # Saved already.
        ([("rollout", 3)], 2, [2]),
        # The weights may be those of no step or of one whose prompts the state does not have behind it.
        ([("update", 4)], 2, [2]),
        ([("rollout", 1)], math.inf, []),
        # What stopped the run is reported, not what followed from it.
        ([("rollout", 3), ("checkpoint", 2)], math.inf, []),
    ],
)
def test_a_run_that_stops_saves_its_last_whole_step_once(checkpoint, fails, save_steps, saved):
    loop = checkpoint.S3RTrainer(fails, save_steps)
    with pytest.raises(ServerError, match=re.escape(str(fails[0]))):
        loop.fit()
    assert (loop.saved, loop.closed) == (saved, [1])


def test_only_a_checkpoint_of_this_run_is_told(checkpoint, tmp_path):
    assert checkpoint.latest(tmp_path, 0.0) is None
    note = tmp_path / "_actor" / "latest"
    note.parent.mkdir()
    note.write_text("global_step8\n")
    assert checkpoint.latest(tmp_path, 0.0) == tmp_path / "_actor" / "global_step8"
    assert checkpoint.latest(tmp_path, note.stat().st_mtime + 1) is None


# ---- metrics


def test_a_steps_summary_adds_servers_up():
    first, second = Totals(busy=2.0), Totals(busy=4.0)
    first.add(group(accept_length=2.0))
    second.add(group(accept_length=4.0, acceptance_by_position=[1.0, 0.5]))
    second.observe({"acceptance": [{"kv": {"utilization": 0.5, "paused": 3, "limit": 160}}]})
    second.observe({"acceptance": [{"kv": {"utilization": 0.2, "paused": 1, "limit": 112}}, None]})
    assert summary([first, second], gpus=2, sync_seconds=0.25) == {
        "s3r/rollout_seconds": 4.0,
        "s3r/sync_seconds": 0.25,
        "s3r/tokens": 8.0,
        "s3r/tokens_per_second_per_gpu": 1.0,
        "s3r/groups": 2.0,
        "s3r/server_restarts": 0.0,
        "s3r/kv_utilization_peak": 0.5,
        "s3r/kv_paused_peak": 3.0,
        "s3r/kv_limit": 112.0,
        "s3r/accept_length": 3.0,
        "s3r/acceptance_1": 0.75,
        "s3r/acceptance_2": 0.375,
    }
    assert "s3r/accept_length" not in summary([Totals()], 1, 0.0)


# ---- the server's life

SERVE = """
import os, sys
import s3r_sglang.rl_integration.openrlhf.serve as serve
sys.argv = ["serve", "exact", "cuda", str(os.getppid())]
serve.command = lambda *_: (["sh", "-c", {shell!r}], dict(os.environ))
sys.exit(serve.main())
"""


def serve(tmp_path, shell):
    """(command of a `serve` whose server is `shell`, mark of its processes, its environment)."""
    script = tmp_path / "serve.py"
    script.write_text(SERVE.format(shell=shell))
    environ = {**os.environ, "S3R_TEST_OWNER": str(tmp_path)}
    return [sys.executable, str(script)], f"S3R_TEST_OWNER={tmp_path}", environ


def test_a_server_does_not_outlive_its_owner(tmp_path):
    """The owner is killed, so it cannot tell anybody."""
    words, mark, environ = serve(tmp_path, "sleep 600 & wait")
    parent = f"import subprocess; subprocess.Popen({words}, start_new_session=True).wait()"
    owner = subprocess.Popen([sys.executable, "-c", parent], env=environ)
    try:
        # Owner, serve, its server and the server's child.
        wait_until(lambda: len(marked(mark)) == 4, 60)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_until(lambda: not marked(mark), 30)


def test_what_a_dead_server_leaves_behind_is_ended(tmp_path):
    words, mark, environ = serve(tmp_path, "sleep 600 & exit 3")
    assert subprocess.run(words, env=environ, timeout=60, check=False).returncode == 3
    assert not marked(mark)


def marked(mark):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environ:
            if mark.encode() in environ.read():
                found.append(int(name))
    return found
