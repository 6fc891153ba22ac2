"""Other trainers: TRL trains against a server; verl's configuration is composed by Hydra and taken by SGLang."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from s3r_sglang.rl_integration import recipes
from s3r_sglang.rl_integration.client import RolloutError
from s3r_sglang.rl_integration.recipes.trl import S3RRollouts
from s3r_sglang.rl_integration.weights import WeightSender
from support import LOGPROB_TOLERANCE, dense_logprobs, stats

RECIPES = Path(recipes.__path__[0])
VERL = "0.9.1"
GROUP = 4


def settings(**changes):
    """What S3RRollouts reads of a GRPOConfig."""
    fields = {"max_completion_length": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
    fields |= {"repetition_penalty": 1.0, "generation_kwargs": None}
    return SimpleNamespace(args=SimpleNamespace(**fields | changes), state=SimpleNamespace(global_step=0))


@pytest.mark.parametrize("change", [{"repetition_penalty": 1.1}, {"generation_kwargs": {"top_p": 0.5}}])
def test_what_trl_asks_for_and_s3r_cannot_do_is_refused_before_anything_is_sampled(change):
    with pytest.raises(RolloutError, match=f"does not support {next(iter(change))}="):
        S3RRollouts("http://127.0.0.1:9")(["t2"], settings(**change))


@pytest.mark.slow
def test_trl_trains_on_rollouts_of_its_current_policy(server, model, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rollouts, seen = S3RRollouts(server.url, seed=1), []

    def checked(prompts, trainer):
        """Every rollout: whole groups of each prompt, with the logprobs of the policy that is trained."""
        result = rollouts(prompts, trainer)
        tokenizer = trainer.processing_class
        for prompt, ids in zip(prompts, result["prompt_ids"], strict=True):
            assert tokenizer(prompt).input_ids == ids
        prompt, completion = result["prompt_ids"][-1], result["completion_ids"][-1]
        dense = dense_logprobs(trainer.model, prompt, completion)
        assert result["logprobs"][-1] == pytest.approx(dense, abs=LOGPROB_TOLERANCE)
        seen.append((stats(server)["weight_version"], len({tuple(ids) for ids in result["completion_ids"]})))
        return result

    def even(completion_ids, **_):
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model[0]),
        reward_funcs=even,
        args=trl.GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=3, logging_steps=1,
            num_generations=GROUP, per_device_train_batch_size=2 * GROUP, max_completion_length=8,
            learning_rate=1e-2, report_to=[], save_strategy="no", beta=0.0, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"t{n} t{n + 7} t3"} for n in range(4, 20)]),
        processing_class=AutoTokenizer.from_pretrained(model[0]),
        rollout_func=checked,
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        WeightSender(server.url).send_path(model[0], "first")
    assert [version for version, _ in seen] == ["step-0", "step-1", "step-2"]
    assert all(distinct > GROUP for _, distinct in seen)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 3
    assert rewards[0] == pytest.approx(0.5, abs=0.25)
    assert rollouts.accept_length > 1


@pytest.fixture(scope="module")
def verl(tmp_path_factory):
    """Folder with Hydra and verl's sources; neither Ray nor a GPU is needed to compose a configuration.

    Apart from this environment, because Hydra's parser needs another release of ANTLR than math-verify.
    """
    folder = tmp_path_factory.mktemp("verl")
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv on the PATH, as `make test` has it")
    for packages in (["hydra-core==1.3.8"], ["--no-deps", f"verl=={VERL}"]):
        command = [uv, "pip", "install", "--quiet", "--target", str(folder), *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"verl's sources cannot be had: {done.stderr[-300:]}")
    return folder


def compose(verl, *overrides):
    """verl's rollout configuration under our recipe, as Hydra makes it."""
    code = (
        "import json, sys; from hydra import compose, initialize_config_dir; from omegaconf import OmegaConf\n"
        "with initialize_config_dir(sys.argv[1], version_base=None):\n"
        "    config = compose('verl', overrides=sys.argv[2:])\n"
        "print(json.dumps(OmegaConf.to_container(config.actor_rollout_ref.rollout, resolve=False)))"
    )
    sources = f"hydra.searchpath=[file://{verl / 'verl/trainer/config'}]"
    done = subprocess.run(
        [sys.executable, "-c", code, str(RECIPES), sources, *overrides],
        env={**os.environ, "PYTHONPATH": str(verl)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_verl_composes_the_recipe_and_sglang_takes_its_arguments(verl, model):
    rollout = compose(verl, "actor_rollout_ref.rollout.engine_kwargs.sglang.s3r_budget_ratio=0.1")
    assert (rollout["name"], rollout["calculate_log_probs"]) == ("sglang", True)
    arguments = rollout["engine_kwargs"]["sglang"]
    # As on this machine; on a GPU they stay as they are.
    code = (
        "import json, sys; from s3r_sglang import cpu; cpu.prepare()\n"
        "import s3r_sglang.rl_integration.recipes.verl; from sglang.srt.server_args import ServerArgs\n"
        "from s3r_sglang.config import config_of\n"
        "print(config_of(ServerArgs(**json.loads(sys.argv[1]) | cpu.SERVER_ARGS)).model_dump_json())"
    )
    given = json.dumps({"model_path": str(model[0]), **arguments})
    done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    effective = json.loads(done.stdout.splitlines()[-1])
    assert (effective["budget_ratio"], effective["min_budget"], effective["draft_length"]) == (0.1, 192, 6)


@pytest.mark.slow
def test_every_argument_that_verl_gives_exists_in_this_sglang(verl):
    """verl pins another SGLang; what it builds ServerArgs from is one dictionary in its source."""
    from sglang.srt.server_args import ServerArgs

    source = verl / "verl/workers/rollout/sglang_rollout/async_sglang_server.py"
    given = set()
    for node in ast.walk(ast.parse(source.read_text())):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == "args" and isinstance(node.value, ast.Dict):
            given |= {key.value for key in node.value.keys if key is not None}
        elif isinstance(target, ast.Subscript) and getattr(target.value, "id", None) == "args":
            given.add(target.slice.value)
    assert {"model_path", "mem_fraction_static", "enable_memory_saver"} <= given
    # The last for prefill and decode on different machines, which S3R refuses anyway.
    assert given - set(ServerArgs.__dataclass_fields__) == {"disaggregation_decode_tp"}
