"""GRPO in plain PyTorch and Transformers against a running S3R server, on a toy task that needs no data.

    s3r serve --model-path MODEL --port 30000
    python rl_integration/examples/grpo.py --url http://127.0.0.1:30000 --model MODEL

The task: answer with even token ids; a response's reward is their share. A step samples complete groups from the
server, takes one policy-gradient step on the advantages within each group, and sends the weights back.
"""

import argparse
import json

import torch
from s3r_sglang.rl_integration.client import PlacedGroup, RolloutClient
from s3r_sglang.rl_integration.weights import WeightSender
from transformers import AutoModelForCausalLM


def reward(token_ids: list[int]) -> float:
    """Share of even token ids."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """[P, G] rewards, normalised within each group (arXiv 2402.03300, section 4.1.2)."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)


def batch(groups: list[PlacedGroup], prompts: dict[str, list[int]]) -> tuple[torch.Tensor, ...]:
    """All responses, padded at the end.

    Returns:
        input_ids [N, T]; mask [N, T - 1], true where the next token is the response's; the server's logprobs of
        these tokens [N, T - 1] float32, zero elsewhere.
    """
    rows = [(prompts[group.prompt_id], response) for group in groups for response in group.responses]
    length = max(len(prompt) + len(response.token_ids) for prompt, response in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length - 1, dtype=torch.bool)
    sampled = torch.zeros(len(rows), length - 1)
    for row, (prompt, response) in enumerate(rows):
        ids = torch.tensor(prompt + response.token_ids)
        span = slice(len(prompt) - 1, len(ids) - 1)
        input_ids[row, : len(ids)] = ids
        mask[row, span] = True
        sampled[row, span] = torch.tensor(response.logprobs)
    return input_ids, mask, sampled


def policy_logprobs(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """[N, T - 1] float32 logprobs of each next token, at temperature 1."""
    logits = model(input_ids=input_ids).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(2, input_ids[:, 1:, None])[..., 0]


def policy_loss(
    logprobs: torch.Tensor,
    sampled: torch.Tensor,
    mask: torch.Tensor,
    advantage: torch.Tensor,
    clip: float = 0.2,
) -> torch.Tensor:
    """Clipped surrogate, averaged over response tokens; its ratio is against the policy that sampled."""
    ratio = torch.exp(torch.where(mask, logprobs - sampled, 0.0))
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(surrogate * mask).sum() / mask.sum()


def train(args: argparse.Namespace) -> None:
    """Run the loop; prints one JSON line per step."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    client, sender = RolloutClient(args.url), WeightSender(args.url)
    vocab = model.config.vocab_size
    prompts = {f"p{n}": [(7 * n + 3 * i + 2) % vocab for i in range(8)] for n in range(args.prompts)}
    requests = [{"id": name, "token_ids": ids} for name, ids in prompts.items()]
    sender.send(model.named_parameters(), "step-0")
    for step in range(args.steps):
        sampling = {"max_new_tokens": args.max_new_tokens, "temperature": 1.0}
        rollout = client.rollout(requests, args.group_size, sampling, seed=step)
        if rollout.errors or rollout.weight_versions != {f"step-{step}"}:
            raise SystemExit(f"step {step}: {rollout.errors or rollout.weight_versions}")
        rewards = torch.tensor([[reward(r.token_ids) for r in group.responses] for group in rollout.groups])
        input_ids, mask, sampled = batch(rollout.groups, prompts)
        logprobs = policy_logprobs(model, input_ids)
        policy_loss(logprobs, sampled, mask, advantages(rewards).view(-1, 1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sender.send(model.named_parameters(), f"step-{step + 1}")
        mismatch = (logprobs.detach() - sampled)[mask].abs().max().item()
        accept_lengths = [group.accept_length for group in rollout.groups if group.accept_length]
        accept = sum(accept_lengths) / max(1, len(accept_lengths))
        row = {"step": step, "reward": rewards.mean().item(), "mismatch": mismatch, "accept_length": accept}
        print(json.dumps(row), flush=True)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", required=True, help="the folder that the server was started with")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
