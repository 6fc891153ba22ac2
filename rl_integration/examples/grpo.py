"""GRPO in plain PyTorch and Transformers against a running S3R server.

    s3r serve --model-path MODEL --port 30000
    python -m s3r_sglang.rl_integration.examples.grpo --url http://127.0.0.1:30000 --model MODEL

Without data it rewards even token ids; with `--data` (a file of `s3r data prepare`) right answers. A step samples
complete groups from the server, takes policy-gradient steps on the advantages within each group, and sends the
weights back. On a GPU, trainer and server may share one: weights then travel as CUDA IPC handles, and `--sleep`
makes the server give its memory back during the update (start it with --enable-memory-saver).

compare.py runs this with and without S3R and shows where the time goes.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from s3r_sglang.rl_integration.client import PlacedGroup, RolloutClient
from s3r_sglang.rl_integration.correction import SparseCorrection
from s3r_sglang.rl_integration.examples.objective import (
    Sample,
    advantages,
    batch,
    policy_logprobs,
    policy_loss,
)
from s3r_sglang.rl_integration.examples.tasks import EvenTokens, Mathematics, Task
from s3r_sglang.rl_integration.weights import WeightSender
from transformers import AutoModelForCausalLM

# What the server gives back during the update. CUDA graphs stay: they are small and expensive to capture.
SLEEP_TAGS = {"none": [], "kv": ["kv_cache"], "all": ["kv_cache", "weights"]}


class Stopwatch:
    """Seconds by name, GPU work included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Trainer:
    """The policy, its optimizer, and the server that samples from it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        self.model.to(self.device)  # type: ignore[arg-type]
        if self.device.type == "cuda":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate)
        self.correction = SparseCorrection() if args.correction == "sparse-rl" else None
        self.client, self.sender = RolloutClient(args.url), WeightSender(args.url)
        self.task: Task = EvenTokens(self.model.config.vocab_size)
        if args.data:
            self.task = Mathematics(args.data, even=args.reward == "even")

    def send_weights(self, version: str) -> None:
        """Send the weights in the precision in which the server computes."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        named = self.model.named_parameters()
        self.sender.send(((name, tensor.detach().to(dtype)) for name, tensor in named), version)

    def step(self, number: int) -> dict[str, Any]:
        """One step of training; returns its measurements."""
        args, watch = self.args, Stopwatch()
        with watch("rollout"):
            groups = self.rollout(number)
        with watch("reward"):
            rewards = torch.tensor(self.task.rewards(groups))
        with watch("sleep"):
            self.occupation("release", SLEEP_TAGS[args.sleep])
        free = torch.cuda.mem_get_info()[0] / 2**30 if self.device.type == "cuda" else None
        with watch("update"):
            measured = self.update(samples(groups), advantages(rewards).flatten())
        with watch("wake"):
            self.occupation("resume", [tag for tag in SLEEP_TAGS[args.sleep] if tag == "weights"])
        with watch("sync"):
            self.send_weights(f"step-{number + 1}")
        with watch("wake"):
            self.occupation("resume", [tag for tag in SLEEP_TAGS[args.sleep] if tag == "kv_cache"])
        responses = [response for group in groups for response in group.responses]
        accepted = [group.accept_length for group in groups if group.accept_length]
        tokens = sum(len(response.token_ids) for response in responses)
        return {
            "step": number,
            "reward": rewards.mean().item(),
            **measured,
            "accept_length": sum(accepted) / len(accepted) if accepted else None,
            "response_tokens": tokens,
            "truncated": sum(response.truncated for response in responses) / len(responses),
            "tokens_per_second": tokens / watch.seconds["rollout"],
            "free_gib_during_update": free,
            "seconds": watch.seconds,
        }

    def rollout(self, number: int) -> list[PlacedGroup]:
        """Complete groups, sampled from the weights of this step; anything else ends the run."""
        args = self.args
        sampling = {"max_new_tokens": args.max_new_tokens, "temperature": 1.0, "ignore_eos": args.ignore_eos}
        prompts = self.task.prompts(number, args.prompts)
        seed = None if args.seed is None else args.seed + number
        result = self.client.rollout(prompts, args.group_size, sampling, seed=seed)
        if result.errors or result.weight_versions != {f"step-{number}"}:
            raise SystemExit(f"step {number}: {result.errors or result.weight_versions}")
        return result.groups

    def occupation(self, what: str, tags: Sequence[str]) -> None:
        """Let the server release or resume the memory of `tags`."""
        if not tags:
            return
        if what == "release":
            self.optimizer.zero_grad(set_to_none=True)
        elif self.device.type == "cuda":
            torch.cuda.empty_cache()
        # Groups are answered before the scheduler has put their last batch away.
        url = f"{self.args.url}/{what}_memory_occupation" + ("?wait=true" if what == "release" else "")
        httpx.post(url, json={"tags": list(tags)}, timeout=300).raise_for_status()

    def update(self, sampled: list[Sample], advantage: torch.Tensor) -> dict[str, float]:
        """One pass over the responses, an optimizer step for every `--mini-batch` of them.

        Returns:
            mismatch, kl: largest difference between the sampler's logprobs and the trainer's, and the mean of the
            differences, over the first mini-batch, whose policy is the one that sampled; gradient norms; with a
            correction its statistics.
        """
        measured: dict[str, list[float]] = {}
        size = self.args.mini_batch or len(sampled)
        dense = self.dense_logprobs(sampled) if self.correction else None
        for start in range(0, len(sampled), size):
            chosen = range(start, min(start + size, len(sampled)))
            tokens = sum(len(sampled[i].response) for i in chosen)
            # Alike lengths together, for less padding.
            order = sorted(chosen, key=lambda i: len(sampled[i].prompt) + len(sampled[i].response))
            for at in range(0, len(order), self.args.micro_batch):
                rows = order[at : at + self.args.micro_batch]
                found = self.accumulate(
                    [sampled[i] for i in rows],
                    advantage[rows],
                    tokens,
                    [dense[i] for i in rows] if dense else None,
                )
                for name, value in found.items():
                    if start == 0 or name not in ("mismatch", "kl"):
                        measured.setdefault(name, []).append(value)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            measured.setdefault("grad_norm", []).append(norm.item())
        of_all: dict[str, Any] = {
            "mismatch": max,
            "kl": sum,
            "grad_norm": max,
            "max_weight": max,
            "min_weight": min,
        }
        return {
            name: of_all[name](values) if name in of_all else sum(values) / len(values)
            for name, values in measured.items()
        }

    def accumulate(
        self, rows: list[Sample], advantage: torch.Tensor, tokens: int, dense: list[list[float]] | None
    ) -> dict[str, float]:
        """Add the gradient of some responses of a mini-batch that has `tokens` response tokens."""
        data = batch(rows, self.device)
        logprobs = self.logprobs(data.input_ids)
        old, weights, found = data.sampled, None, {}
        if dense is not None and self.correction:
            replaced = [Sample(s.prompt, s.response, values) for s, values in zip(rows, dense, strict=True)]
            old = batch(replaced, self.device).sampled
            weights = self.correction.weights(old, data.sampled, data.mask)
            found = self.correction.statistics(old, data.sampled, data.mask)
        column = advantage.to(self.device)[:, None]
        clip = (self.args.clip[0], self.args.clip[1])
        policy_loss(logprobs, old, data.mask, column, clip=clip, weights=weights, tokens=tokens).backward()
        difference = (data.sampled - logprobs.detach())[data.mask]
        return found | {"mismatch": difference.abs().max().item(), "kl": difference.sum().item() / tokens}

    def logprobs(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[N, T - 1], computed in bfloat16 on a GPU, as the server does."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            return policy_logprobs(self.model, input_ids)

    @torch.no_grad()
    def dense_logprobs(self, sampled: list[Sample]) -> list[list[float]]:
        """Logprobs of every response's tokens under the policy before the update."""
        found = []
        for sample in sampled:
            data = batch([sample], self.device)
            found.append(self.logprobs(data.input_ids)[data.mask].tolist())
        return found


def samples(groups: list[PlacedGroup]) -> list[Sample]:
    """All responses of all groups, in order."""
    return [
        Sample(list(group.prompt_token_ids), list(response.token_ids), list(response.logprobs))
        for group in groups
        for response in group.responses
    ]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--url", default="http://127.0.0.1:30000")
    add("--model", required=True, help="the folder that the server was started with")
    add("--data", type=Path, help="file of `s3r data prepare`; without it, even token ids are rewarded")
    add(
        "--reward",
        choices=("answer", "even"),
        default="answer",
        help="of responses to the problems of --data",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--steps", type=int, default=20)
    add("--prompts", type=int, default=8, help="per step")
    add("--group-size", type=int, default=8)
    add("--max-new-tokens", type=int, default=16)
    add("--ignore-eos", action="store_true", help="all responses have --max-new-tokens tokens")
    add(
        "--learning-rate",
        type=float,
        default=1e-2,
        help="of AdamW; the default is for a tiny random model, one that was trained takes about 1e-6",
    )
    add("--clip", type=float, nargs=2, default=(0.2, 0.28))
    add("--mini-batch", type=int, default=0, help="responses per optimizer step; 0: all of a step")
    add("--micro-batch", type=int, default=64, help="responses per forward")
    add("--sleep", choices=SLEEP_TAGS, default="none", help="what the server gives back during the update")
    add(
        "--correction",
        choices=("none", "sparse-rl"),
        default="none",
        help="for a server of --s3r-mode direct",
    )
    add("--seed", type=int, help="of the responses; a server without speculation takes none")
    return result


def main() -> None:
    """Train; prints one JSON line per step."""
    args = parser().parse_args()
    trainer = Trainer(args)
    trainer.send_weights("step-0")
    for number in range(args.steps):
        print(json.dumps(trainer.step(number)), flush=True)


if __name__ == "__main__":
    main()
