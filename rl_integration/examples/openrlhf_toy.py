"""GRPO with OpenRLHF on a toy task, in minutes on a CPU and without a download.

    s3r-openrlhf setup
    python rl_integration/examples/openrlhf_toy.py out/toy --steps 25

The policy is a random Llama of two layers over the words t0 … t63. A response's reward is its share of even words,
about one half at first. Further arguments go to `s3r-openrlhf`; TensorBoard shows out/toy/tensorboard.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

VOCAB = 64
CONTEXT = 512
PROMPTS_PER_STEP, SAMPLES = 4, 4
# Budgets below the context's length, so that drafts are sparse.
SERVER = "--max-total-tokens 8000 --max-running-requests 16 --s3r-min-budget 8 --s3r-recent-window 4"
REWARD = '''
def reward_func(queries, prompts, labels):
    """Share of even words in the response."""
    words = queries[0].split()[len(prompts[0].split()):]
    share = sum(int(word[1:]) % 2 == 0 for word in words) / len(words)
    return {"rewards": share, "scores": share, "extra_logs": {}}
'''


def write(folder: Path, prompts: int, prompt_words: int = 6, seed: int = 0) -> None:
    """Write the model, `prompts` prompts and the reward function into `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1").save_pretrained(
        folder / "model"
    )
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=1,
        # The difference between two bfloat16 computations grows with the logits.
        initializer_range=0.1,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    # t0 and t1 have meanings of their own.
    ids = torch.randint(2, VOCAB, (prompts, prompt_words)).tolist()
    with (folder / "prompts.jsonl").open("w") as out:
        for row in ids:
            print(json.dumps({"input": " ".join(f"t{i}" for i in row), "label": ""}), file=out)
    (folder / "reward.py").write_text(REWARD)


def arguments(toy: Path, out: Path, steps: int, new_tokens: int = 16) -> list[str]:
    """Arguments of `s3r-openrlhf` for `steps` steps of what `write` put into `toy`, with results in `out`."""
    flags = {
        "s3r.server_args": SERVER,
        "actor.model_name_or_path": toy / "model",
        "actor.num_gpus_per_node": 1,
        "actor.adam.lr": 1e-2,
        "actor.lr_scheduler": "constant",
        "reward.remote_url": toy / "reward.py",
        "data.prompt_dataset": toy / "prompts.jsonl",
        "data.max_samples": PROMPTS_PER_STEP * steps,
        "data.input_key": "input",
        "data.label_key": "label",
        "data.max_len": CONTEXT,
        "rollout.batch_size": PROMPTS_PER_STEP,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.max_new_tokens": new_tokens,
        "rollout.micro_batch_size": 8,
        "train.batch_size": PROMPTS_PER_STEP * SAMPLES,
        "train.micro_batch_size": 8,
        "algo.advantage.estimator": "group_norm",
        # Also logs vllm_kl, the difference between the server's logprobs and the trainer's.
        "algo.advantage.is_correction_level": "token",
        "algo.kl.init_coef": 0,
        "vllm.num_engines": 1,
        "vllm.sync_backend": "gloo",
        "ds.attn_implementation": "eager",
        "ds.zero_stage": 2,
        "ckpt.output_dir": out / "model",
        "ckpt.path": out / "checkpoints",
        "logger.tensorboard_dir": out / "tensorboard",
    }
    return [f"--{name}={value}" for name, value in flags.items()]


def main() -> int:
    """Write the task and train."""
    from s3r_sglang.rl_integration.openrlhf import cli

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=25)
    args, further = parser.parse_known_args()
    folder = args.folder.absolute()
    write(folder, PROMPTS_PER_STEP * args.steps)
    sys.argv = ["s3r-openrlhf", *arguments(folder, folder, args.steps), *further]
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
