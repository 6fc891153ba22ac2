"""OpenRLHF with S3R, without speculation, and with rollouts of the sparse policy as they are or corrected.

    python compare.py run --out runs --arms exact autoregressive direct corrected --seeds 1 2 3
    python compare.py report --out runs

A reward for different words and a small learning rate keep the policy stochastic, so that the sparse policy goes
on differing from the dense one. (Rewarded for even words it soon repeats one of them, and all modes agree.)

`run` needs `s3r-openrlhf setup`; it skips what is there already. `report` writes report.json and curves.png here.
"""

import argparse
import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from s3r_sglang.rl_integration.examples import openrlhf_toy

STEPS, PROMPT_WORDS, NEW_TOKENS = 24, 40, 24
# A draft step reads 4 of 41 to 64 positions, so that the sparse policy differs much.
SETTING = [
    "--s3r.server_args",
    "--max-total-tokens 8000 --max-running-requests 16 --s3r-min-budget 4 --s3r-recent-window 2",
]
SETTING += ["--actor.adam.lr", "5e-3"]
HERE = Path(__file__).parent
STEP = re.compile(r"Global step (\d+): (\{.*\})")
REWARD = f'''
def reward_func(queries, prompts, labels):
    """Number of different even words in the response, over the most that it could have."""
    words = queries[0].split()[len(prompts[0].split()):]
    share = len({{word for word in words if int(word[1:]) % 2 == 0}}) / {NEW_TOKENS}
    return {{"rewards": share, "scores": share, "extra_logs": {{}}}}
'''
# The loss of the first three has no importance weights: their ratios are clipped to 1, and vllm_kl is logged.
PLAIN = ["--algo.advantage.is_correction_mode", "clip", "--algo.advantage.is_correction_threshold", "1", "1"]
ARMS = {
    "exact": ["--s3r.mode", "exact", *PLAIN],
    "autoregressive": ["--s3r.mode", "autoregressive", *PLAIN],
    "direct": ["--s3r.mode", "direct", *PLAIN],
    "corrected": ["--s3r.mode", "direct", "--s3r.correction", "sparse-rl"],
}
# Of the numbers of a run in report.json, those that are compared between arms: means over its steps.
TESTED = ("reward", "mismatch", "gradient_norm")
METRICS = {
    "reward": "rollout/reward_mean",
    "mismatch": "vllm_kl",
    "gradient_norm": "actor_grad_norm",
    "accept_length": "s3r/accept_length",
}


def run(out: Path, arm: str, seed: int, prefix: list[str]) -> None:
    """Train once; leaves out/ARM-SEED.json, {metric: [value of each step]}."""
    result = out / f"{arm}-{seed}.json"
    if result.exists():
        return
    folder = out / f"{arm}-{seed}"
    openrlhf_toy.write(folder, openrlhf_toy.PROMPTS_PER_STEP * STEPS, PROMPT_WORDS)
    (folder / "reward.py").write_text(REWARD)
    words = openrlhf_toy.arguments(folder, folder, STEPS, NEW_TOKENS)
    words += [*SETTING, *ARMS[arm], f"--train.seed={seed}"]
    cli = [sys.executable, "-m", "s3r_sglang.rl_integration.openrlhf.cli"]
    log = folder / "run.log"
    with log.open("w") as file:
        subprocess.run([*prefix, *cli, *words], stdout=file, stderr=file, check=True)
    steps = [ast.literal_eval(text) for _, text in STEP.findall(log.read_text())]
    assert len(steps) == STEPS, log
    rows = {name: [step.get(key) for step in steps] for name, key in METRICS.items()}
    result.write_text(json.dumps(rows) + "\n")


def report(out: Path) -> None:
    """Tables of what is in `out`, and permutation tests of S3R against each other arm; one number per run."""
    import numpy as np

    paths = {arm: sorted(out.glob(f"{arm}-*.json")) for arm in ARMS}
    runs = {arm: [json.loads(path.read_text()) for path in found] for arm, found in paths.items() if found}
    numbers = {
        arm: {
            "reward": [float(np.mean(r["reward"])) for r in group],
            "reward_first_two": [float(np.mean(r["reward"][:2])) for r in group],
            "reward_last_four": [float(np.mean(r["reward"][-4:])) for r in group],
            "mismatch": [float(np.mean(np.abs(r["mismatch"]))) for r in group],
            "mismatch_smallest": [float(np.min(np.abs(r["mismatch"]))) for r in group],
            "mismatch_largest": [float(np.max(np.abs(r["mismatch"]))) for r in group],
            "gradient_norm": [float(np.mean(r["gradient_norm"])) for r in group],
            "gradient_norm_largest": [float(np.max(r["gradient_norm"])) for r in group],
        }
        for arm, group in runs.items()
    }
    against = {
        arm: {metric: permutation(numbers["exact"][metric], numbers[arm][metric]) for metric in TESTED}
        for arm, group in runs.items()
        if arm != "exact" and len(group) > 1
    }
    summary = {"runs": numbers, "exact_minus": against}
    (HERE / "report.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot(runs)
    print(json.dumps(summary, indent=2))


def permutation(one: list[float], other: list[float]) -> dict[str, float]:
    """Difference of the means, and the two-sided p of a permutation test (at least 0.1 with three runs each)."""
    import numpy as np
    from scipy import stats

    test = stats.permutation_test((one, other), lambda a, b: np.mean(a) - np.mean(b), vectorized=False)
    return {"difference": float(test.statistic), "p": float(test.pvalue)}


def plot(runs: dict[str, list[dict[str, list[float]]]]) -> None:
    """Curves of all runs, a colour per arm; thick: their mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    titles = {
        "reward": "mean reward",
        "mismatch": "|mean of rollout minus trainer logprob|",
        "gradient_norm": "gradient norm",
    }
    labels = {
        "exact": "S3R",
        "autoregressive": "no speculation",
        "direct": "direct sparse",
        "corrected": "direct sparse, corrected",
    }
    colors = {
        "exact": "tab:blue",
        "autoregressive": "tab:gray",
        "direct": "tab:red",
        "corrected": "tab:orange",
    }
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for arm, group in runs.items():
            values = np.abs([r[metric] for r in group])
            steps = np.arange(1, values.shape[1] + 1)
            axis.plot(steps, values.T, color=colors[arm], alpha=0.3, linewidth=1)
            axis.plot(steps, values.mean(0), color=colors[arm], label=labels[arm], linewidth=2)
        axis.set(xlabel="step", title=title)
    axes[1].set_yscale("log")
    axes[0].legend()
    figure.savefig(HERE / "curves.png", dpi=110)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--prefix", type=shlex.split, default=[], help="before each command, as 'nice -n 5'")
    args = parser.parse_args()
    if args.action == "report":
        report(args.out)
        return
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for arm in args.arms:
            run(args.out, arm, seed, args.prefix)


if __name__ == "__main__":
    main()
