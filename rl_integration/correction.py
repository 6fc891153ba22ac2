"""Sparse-RL's correction of rollouts that were sampled from the sparse policy (arXiv 2601.10079, 4.2 and 4.3).

S3R needs none of this: its responses follow the dense policy. It belongs to the ablation (arXiv 2610.13202,
section 6.3 and appendix C.5), whose rollouts come straight from the sparse policy. For the token at position t,

    w_t = dense probability / sparse probability        of the token that was sampled, under the same old weights.

A response with an anomalously small w_t at any token is rejected as a whole; the tokens of the others enter the
loss with weight w_t, outside of the clipped surrogate. The weights are the trainer's old logprobs against those
that the engine reports in mode `direct`.

No such weight makes GRPO's update that of dense rollouts: an advantage also depends on the rewards of the other
responses of the group, which were sampled sparsely (arXiv 2610.13202, appendix A.2).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

# exp(20) is 5e8; beyond, float32 sums lose the other tokens.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class SparseCorrection:
    """Weights of tokens that the sparse policy sampled.

    Attributes:
        rejection_threshold: a response is rejected if w_t is below this at any of its tokens; 0 rejects none. The
            default is that of Sparse-RL's published code.
        max_weight: upper bound of a token's weight; None leaves it as it is.
    """

    rejection_threshold: float = 1e-4
    max_weight: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rejection_threshold < 1:
            raise ValueError(f"rejection_threshold must be in [0, 1), not {self.rejection_threshold}")
        if self.max_weight is not None and self.max_weight < 1:
            raise ValueError(f"max_weight must be at least 1, not {self.max_weight}")

    def weights(self, dense: torch.Tensor, sparse: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Weight of each token: w_t, or 0 in rejected responses and outside of `mask`; carries no gradient.

        To be multiplied with the per-token loss before it is averaged; the average goes on counting rejected
        tokens, so that a rejection does not raise the weight of other responses.

        Args:
            dense, sparse: [N, T] logprobs of the sampled tokens under the two policies.
            mask: [N, T], true at response tokens.

        Returns:
            [N, T] float32.
        """
        ratio = log_ratio(dense, sparse, mask)
        weight = ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        if self.max_weight is not None:
            weight = weight.clamp(max=self.max_weight)
        return weight * mask * self.kept(ratio)[:, None]

    def kept(self, ratio: torch.Tensor) -> torch.Tensor:
        """[N] bool, which responses are not rejected, given their `log_ratio`."""
        if self.rejection_threshold == 0:
            return torch.ones(len(ratio), dtype=torch.bool, device=ratio.device)
        return ratio.amin(1) >= math.log(self.rejection_threshold)

    def statistics(self, dense: torch.Tensor, sparse: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
        """Share of rejected responses, KL(sparse, dense) per token estimated from the samples, extreme weights."""
        ratio = log_ratio(dense, sparse, mask)
        return {
            "rejected": 1 - self.kept(ratio).float().mean().item(),
            "kl": -(ratio.sum() / mask.sum().clamp(min=1)).item(),
            "min_weight": ratio.min().exp().item(),
            "max_weight": ratio.max().exp().item(),
        }


def log_ratio(dense: torch.Tensor, sparse: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N, T] float32 log w_t at response tokens, 0 elsewhere.

    Raises:
        ValueError: shapes differ, or a response token has no finite logprob.
    """
    if not dense.shape == sparse.shape == mask.shape:
        raise ValueError(f"shapes differ: {dense.shape}, {sparse.shape}, mask {mask.shape}")
    ratio = torch.where(mask.bool(), dense.detach().float() - sparse.detach().float(), 0.0)
    if not ratio.isfinite().all():
        raise ValueError("a response token has no finite logprob under one of the policies")
    return ratio


def install_openrlhf_correction(correction: SparseCorrection | None = None) -> None:
    """Correct OpenRLHF's policy loss in this process, in place of its own correction of rollout mismatch.

    OpenRLHF 0.11.2 has weights of tokens, but no rejection that would do: its statistic for a sequence is the
    geometric mean of the ratios, which a single anomalous token does not move. So its loss gets the weights, by
    settings that let all ratios pass, and the advantages of rejected responses become 0. Its filter metric is the
    share of tokens that were rejected. It needs `--algo.advantage.is_correction_level token`, without which
    OpenRLHF does not ask for the rollout's logprobs.

    Raises:
        RuntimeError: not the OpenRLHF that this was written for.
    """
    import inspect

    from openrlhf.models.loss import PolicyLoss

    if hasattr(PolicyLoss.forward, "s3r_original"):
        return
    if list(inspect.signature(PolicyLoss.forward).parameters) != _POLICY_LOSS_PARAMETERS:
        raise RuntimeError("openrlhf.models.loss.PolicyLoss.forward is not that of OpenRLHF 0.11.2")
    PolicyLoss.forward = _corrected(PolicyLoss.forward, correction or SparseCorrection())


_POLICY_LOSS_PARAMETERS = [
    "self",
    "log_probs",
    "old_log_probs",
    "advantages",
    "action_mask",
    "rollout_log_probs",
]
_POLICY_LOSS_PARAMETERS += ["dp_size", "batch_num_tokens", "global_batch_size"]


def _corrected(original: Any, correction: SparseCorrection) -> Any:
    def forward(
        self: Any,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        rollout_log_probs: torch.Tensor | None = None,
        **sizes: Any,
    ) -> tuple[torch.Tensor, ...]:
        if rollout_log_probs is None or self.is_correction_level != "token":
            raise ValueError("Sparse-RL's correction needs --algo.advantage.is_correction_level token")
        if action_mask is None:
            action_mask = torch.ones_like(old_log_probs)
        self.is_correction_gating, self.is_correction_mode = "ratio", "clip"
        self.is_correction_threshold = (0.0, correction.max_weight or math.exp(LOG_RATIO_BOUND))
        kept = correction.kept(log_ratio(old_log_probs, rollout_log_probs, action_mask))[:, None]
        # The loss is linear in the advantages as long as their signs stay: this takes the responses out of it.
        losses = original(
            self, log_probs, old_log_probs, advantages * kept, action_mask, rollout_log_probs, **sizes
        )
        rejected = (action_mask * ~kept).sum() / action_mask.sum().clamp(min=1)
        return (*losses[:-1], rejected)

    forward.s3r_original = original  # type: ignore[attr-defined]
    return forward
