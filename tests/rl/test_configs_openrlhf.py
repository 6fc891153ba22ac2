"""The shipped recipes, against the command line that they are for: OpenRLHF's own parser and checks, and ours."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import openrlhf_source
import pytest
from s3r_sglang.configs import recipes
from s3r_sglang.configs.recipes import RecipeError
from s3r_sglang.rl_integration.openrlhf import compat, options
from typer.testing import CliRunner

from s3r_sglang.cli import app

PARSER = Path(__file__).with_name("openrlhf_parser.py")
NAMES = ["qwen3-1.7b", "qwen3-1.7b-autoregressive", "qwen3-1.7b-direct", "qwen3-8b", "smollm2-cpu"]


def openrlhf(what, *words):
    command = [sys.executable, str(PARSER), str(openrlhf_source.find()), what, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1] if what == "parse" else done.stdout)


def namespace(value):
    if isinstance(value, dict):
        return SimpleNamespace(**{key: namespace(item) for key, item in value.items()})
    return value


def parsed(name, *overrides):
    """Both halves of the command that recipe `name` renders to, split by a shell."""
    command = recipes.load(name, overrides).command()
    script = "s3r-openrlhf() { printf '%s\\0' \"$@\"; }\n" + command
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split(
        "\0"
    )[:-1]
    assert words == recipes.load(name, overrides).arguments()
    ours, rest = options.parse(words)
    return ours, namespace(openrlhf("parse", *rest))


def test_all_recipes_are_tested():
    assert recipes.names() == NAMES


def test_the_list_of_flags_is_openrlhfs():
    shipped = json.loads((Path(recipes.__file__).parent / "openrlhf" / "flags.json").read_text())
    assert shipped == openrlhf("flags")


@pytest.mark.parametrize("name", NAMES)
def test_openrlhf_and_s3r_take_the_command(name, monkeypatch):
    ours, args = parsed(name)
    monkeypatch.setattr(compat, "has_gpu", lambda: "cpu" not in name)
    monkeypatch.setattr(compat, "installed", lambda module: False)
    compat.require_supported(args)
    (reward,) = args.reward.remote_url
    assert Path(reward).is_file()
    assert (args.data.input_key, args.data.label_key, args.data.apply_chat_template) == (
        "messages",
        "answer",
        True,
    )
    # One step's responses are a whole number of optimizer steps.
    assert args.rollout.batch_size * args.rollout.n_samples_per_prompt % args.train.batch_size == 0
    assert ours.mode == {"qwen3-1.7b-autoregressive": "autoregressive", "qwen3-1.7b-direct": "direct"}.get(
        name, "exact"
    )


@pytest.mark.parametrize(("name", "response"), [("qwen3-1.7b", 16384), ("qwen3-8b", 24576)])
def test_the_main_experiments_are_the_papers(name, response):
    """Appendix C.2."""
    ours, args = parsed(name)
    assert (args.rollout.batch_size, args.rollout.n_samples_per_prompt) == (256, 8)
    assert (args.rollout.temperature, args.rollout.top_p, args.rollout.max_new_tokens) == (1.0, 1.0, response)
    assert args.train.batch_size == 32 * 8
    assert args.actor.eps_clip_low_high == [0.2, 0.28]
    assert (args.actor.optim, args.actor.adam.lr) == ("adam", 1e-5)
    assert (args.algo.kl.init_coef, args.algo.kl.use_loss, args.actor.entropy_coef) == (0.0, False, None)
    assert args.algo.advantage.estimator == "group_norm"
    assert args.algo.advantage.is_correction_level == "off"
    assert args.algo.dynamic_filtering_enable is False
    assert args.reward.overlong_buffer_len == 4096
    assert args.actor.num_nodes * args.actor.num_gpus_per_node == 8
    assert args.eval.n_samples_per_prompt == 16
    assert args.data.max_len > args.rollout.max_new_tokens
    assert "--s3r-kv-policy aimd" in " ".join(ours.server_args)


def test_the_ablation_corrects_what_it_samples_sparsely():
    ours, args = parsed("qwen3-1.7b-direct")
    assert ours.correction == "sparse-rl"
    assert args.algo.advantage.is_correction_level == "token"


def test_overrides_and_files(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: qwen3-8b\nactor:\n  adam: {lr: 2.0e-6}\nvllm: {enable_sleep: false}\neval: {dataset: null}\n"
    )
    recipe = recipes.load(str(path), ["rollout.batch_size=64", "actor.eps_clip_low_high=[0.1, 0.3]"])
    words = recipe.arguments()
    assert words[words.index("--actor.adam.lr") + 1] == "2e-06"
    assert words[words.index("--rollout.batch_size") + 1] == "64"
    at = words.index("--actor.eps_clip_low_high")
    assert words[at + 1 : at + 3] == ["0.1", "0.3"]
    assert "--vllm.enable_sleep" not in words
    assert "--eval.dataset" not in words
    assert words[words.index("--actor.model_name_or_path") + 1] == "Qwen/Qwen3-8B"
    assert recipe.name == "mine"


FAULTS = [
    ("actor: {adm: {lr: 1.0}}", r"unknown setting 'actor.adm.lr'; did you mean 'actor.adam.lr'"),
    ("s3r: {mod: exact}", r"unknown setting 's3r.mod'; did you mean 's3r.mode'"),
    ("actor: {adam: {lr: 1e-5}}", "actor.adam.lr must be of type float, not '1e-5'"),
    ("rollout: {batch_size: 2.5}", "rollout.batch_size must be of type int"),
    ("rollout: {batch_size: true}", "rollout.batch_size must be of type int"),
    ("actor: {eps_clip_low_high: 0.2}", "takes a list"),
    ("actor: {eps_clip_low_high: [0.2]}", "takes 2 values, not 1"),
    ("train: {colocate_all: 1}", "is a switch"),
    ("algo: {advantage: {estimator: grpo}}", "must be one of gae, reinforce"),
    ("algo: {advantage: {is_correction_level: off}}", "is_correction_level must be of type str, not False"),
    ("s3r: {mode: fast}", "s3r.mode must be one of exact"),
    ("base: absent", "recipe 'absent' is neither a file nor one of"),
    ("- a list", "must hold a mapping"),
    ("a: [", "not valid YAML"),
]


@pytest.mark.parametrize(("text", "message"), FAULTS)
def test_faults_name_the_setting(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        recipes.load(str(path))


def test_a_recipe_based_on_itself_is_refused(tmp_path):
    path = tmp_path / "loop.yaml"
    path.write_text(f"base: {path}")
    with pytest.raises(RecipeError, match="based on itself"):
        recipes.load(str(path))


def test_the_command_line():
    listed = CliRunner().invoke(app, ["recipe"])
    assert listed.exit_code == 0, listed.output
    assert all(name in listed.output for name in NAMES)
    shown = CliRunner().invoke(app, ["recipe", "qwen3-8b", "--set", "rollout.batch_size=64"])
    assert "--rollout.batch_size 64 \\\n" in shown.output
    wrong = CliRunner().invoke(app, ["recipe", "qwen3-8b", "--set", "rollout.batchsize=64"])
    assert wrong.exit_code == 1
    assert "rollout.batch_size" in wrong.output
    assert CliRunner().invoke(app, ["recipe", "--set", "a=1"]).exit_code == 1
