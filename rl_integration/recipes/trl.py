"""Rollouts for TRL's GRPOTrainer from S3R servers, through its `rollout_func`.

    GRPOTrainer(model, reward_funcs=…, args=GRPOConfig(…), rollout_func=S3RRollouts("http://127.0.0.1:30000"))

The servers get the policy's weights before the first rollout of every optimiser step, on the CPU as bytes and on
a GPU as CUDA IPC handles, so trainer and servers share the machine.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from s3r_sglang.rl_integration.client import RolloutClient, RolloutError
from s3r_sglang.rl_integration.weights import WeightSender


class S3RRollouts:
    """A `rollout_func` of TRL 1.16: one response for each prompt it is given, whole groups by one request each.

    Args:
        urls: base URL of one or several servers of the model that is trained.
        api_key, admin_api_key: SGLang's keys, for rollouts and for weights.
        seed: makes a run reproducible.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        seed: int | None = None,
    ) -> None:
        self._client = RolloutClient(urls, api_key=api_key)
        self._sender = WeightSender(urls, api_key=admin_api_key or api_key)
        self._seed = seed
        self._calls = 0
        self._sent: str | None = None
        self.accept_length: float | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Sample responses.

        Args:
            prompts: texts, chats or token ids; TRL repeats each as often as its group has members, in a row.
            trainer: TRL's GRPOTrainer, whose policy and sampling parameters count.

        Returns:
            "prompt_ids" and "completion_ids", lists of token ids, and "logprobs", a float for each completion
            token; one entry per prompt, in order.

        Raises:
            RolloutError: a group failed, or was not sampled from the weights that were sent.
        """
        sampling = _sampling(trainer)
        version = self._send(trainer)
        runs = [(prompt, len(list(run))) for prompt, run in itertools.groupby(prompts)]
        results: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        accept_lengths = []
        for group in self._groups(runs, sampling, version):
            for response in group.responses:
                results["prompt_ids"].append(group.prompt_token_ids)
                results["completion_ids"].append(response.token_ids)
                results["logprobs"].append(response.logprobs)
            accept_lengths.append(group.accept_length or 1.0)
        self.accept_length = sum(accept_lengths) / len(accept_lengths)
        return results

    def _send(self, trainer: Any) -> str:
        version = f"step-{trainer.state.global_step}"
        if version != self._sent:
            if trainer.accelerator.num_processes > 1:
                raise RolloutError("S3RRollouts sends weights from one process; this trainer has several.")
            model = trainer.accelerator.unwrap_model(trainer.model)
            self._sender.send(model.named_parameters(), version)
            self._sent = version
        return version

    def _groups(self, runs: list[tuple[Any, int]], sampling: dict[str, Any], version: str) -> list[Any]:
        """One group per run, in order; runs of one length share a rollout, and so does nearly every batch."""
        groups: list[Any] = [None] * len(runs)
        for size in sorted({size for _, size in runs}):
            chosen = [(index, prompt) for index, (prompt, of) in enumerate(runs) if of == size]
            requests = [{"id": index, **_form(prompt)} for index, prompt in chosen]
            self._calls += 1
            seed = None if self._seed is None else self._seed + self._calls
            rollout = self._client.rollout(requests, size, sampling, seed=seed)
            if rollout.errors or rollout.weight_versions != {version}:
                raise RolloutError(f"{version}: {rollout.errors or rollout.weight_versions}")
            for group in rollout.groups:
                groups[int(group.prompt_id)] = group
        return groups


def _form(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return {"token_ids": prompt} if prompt and isinstance(prompt[0], int) else {"messages": prompt}


def _sampling(trainer: Any) -> dict[str, Any]:
    args = trainer.args
    for name, neutral in (("repetition_penalty", 1.0), ("generation_kwargs", None)):
        value = getattr(args, name)
        if value not in (neutral, {}):
            raise RolloutError(f"S3RRollouts does not support {name}={value!r}: leave it out.")
    return {
        "max_new_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or -1,
        "min_p": args.min_p or 0.0,
    }
