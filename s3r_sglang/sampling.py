"""Exact sampling: the target distribution, draft draws, and acceptance of a draft chain.

Exactness is the product (arXiv 2610.13202, stage 3): a response has the law of the dense policy whatever
the draft distribution q is. It rests on three rules which this module owns. q is the tensor that was sampled
from, never recomputed. Draft noise, accept coins and residual noise are independent streams. And random
numbers are keyed by the sequence length L at which a round started, never by the position of a token: a
position drafted again in a later round needs fresh noise, because the first round's rejected drafts, a
function of the old noise, took part in choosing the index which shapes the later q. Reusing the noise would
make draft and q dependent and bias the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from s3r_sglang.kernels import implementation
from s3r_sglang.kernels.reference.philox import Stream
from s3r_sglang.kernels.reference.target_probs import target_probs as reference_probs

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

__all__ = [
    "SamplingParams",
    "Stream",
    "draft_sample",
    "keep_drafts",
    "request_seed",
    "sample_target",
    "target_probs",
    "verify_sample",
]

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a batch of B requests, on the logits' device.

    The booleans are what the host knows without asking the device: they pick the path, the tensors decide
    the law. A boolean that is true without need costs time only: one request with a filter has the
    distributions of the whole batch materialised.

    Attributes:
        temperatures: [B] or [B, 1] float32, positive (1 for greedy requests).
        top_ks: [B] int32; 1 means greedy, values >= V (SGLang's TOP_K_ALL) mean off.
        top_ps: [B] float32 in (0, 1]; 1 means off.
        min_ps: [B] float32 in [0, 1]; 0 means off.
        logit_bias: [B, V] float32 added to the logits before the temperature, or None.
        all_greedy: whether all requests have top_k <= 1.
        need_top_k, need_top_p, need_min_p: whether any request uses the filter.
        max_top_k: a bound on all top_ks, so that filters on a CPU rank that many tokens only; None means V.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    logit_bias: torch.Tensor | None = None
    all_greedy: bool = False
    need_top_k: bool = True
    need_top_p: bool = True
    need_min_p: bool = True
    max_top_k: int | None = None

    @classmethod
    def from_sampling_info(
        cls, info: "SamplingBatchInfo", host_top_ks: Sequence[int] | None = None
    ) -> "SamplingParams":
        """Take over the parameters of a `SamplingBatchInfo`; tensors are shared, not copied.

        Args:
            info: SGLang's. Its `need_top_k_sampling` counts greedy requests too.
            host_top_ks: the requests' top_k values if the host has them at hand. They let a batch of greedy
                and unfiltered requests skip the filters, and on a CPU spare a batch of small top_ks the sort.
        """
        need_top_k, max_top_k = info.need_top_k_sampling, None
        if host_top_ks:
            need_top_k = any(1 < top_k < info.vocab_size for top_k in host_top_ks)
            max_top_k = max(host_top_ks) if max(host_top_ks) < info.vocab_size else None
        return cls(
            temperatures=info.temperatures,
            top_ks=info.top_ks,
            top_ps=info.top_ps,
            min_ps=info.min_ps,
            logit_bias=info.logit_bias,
            all_greedy=info.is_all_greedy,
            need_top_k=need_top_k,
            need_top_p=info.need_top_p_sampling,
            need_min_p=info.need_min_p_sampling,
            max_top_k=max_top_k,
        )

    @property
    def filtered(self) -> bool:
        """Whether a request's distribution is cut by rank or mass (greedy alone needs no filter)."""
        return not self.all_greedy and (self.need_top_k or self.need_top_p or self.need_min_p)

    @property
    def from_logits(self) -> bool:
        """Whether tokens can be drawn without materialising the target's distributions."""
        return not self.filtered and self.logit_bias is None


def target_probs(
    logits: torch.Tensor, params: SamplingParams, repeat: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The distributions that autoregressive decoding would sample from.

    Args:
        logits: [B * repeat, V], any floating dtype; rows of a request are adjacent.
        params: parameters of the B requests.
        repeat: rows per request, k + 1 for verification.
        out: [B * repeat, V] float32, possibly strided; allocated if None.

    Returns:
        `out`.
    """
    out = torch.empty_like(logits, dtype=torch.float32) if out is None else out
    if params.logit_bias is not None:
        grouped = logits.view(-1, repeat, logits.shape[-1])
        logits = (grouped.float() + params.logit_bias[:, None, :]).flatten(0, 1)
    limits = (params.temperatures.view(-1), params.top_ks, params.top_ps, params.min_ps)
    if not logits.is_cuda:
        return reference_probs(logits, *limits, out, params.filtered, params.max_top_k)
    from s3r_sglang.kernels.ops.target_probs import target_probs as fused

    return fused(logits, *limits, out)


def draft_sample(
    logits: torch.Tensor,
    params: SamplingParams,
    seeds: torch.Tensor,
    rounds: torch.Tensor,
    step: int,
    q_out: torch.Tensor,
) -> torch.Tensor:
    """Draw one draft token per request and keep the distribution it was drawn from.

    Args:
        logits: [B, V], the draft's logits.
        params: parameters of the B requests, those of the target.
        seeds: [B] int64, per-request seeds.
        rounds: [B] int64, sequence lengths L at which the round started.
        step: draft step within the round, 0..k-1.
        q_out: [B, V] float32, possibly strided; receives q.

    Returns:
        [B] int64 token ids.
    """
    kernels = implementation(logits, "chain_sampling")
    if params.from_logits:
        temperatures = params.temperatures.view(-1)
        return kernels.draft_sample(logits, temperatures, params.top_ks, seeds, rounds, step, q_out)
    target_probs(logits, params, out=q_out)
    return kernels.race_sample(q_out, seeds, rounds, step, Stream.DRAFT)


def verify_sample(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    q: torch.Tensor,
    params: SamplingParams,
    seeds: torch.Tensor,
    rounds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a prefix of each request's drafts and sample the token that follows it.

    Args:
        logits: [B * (k + 1), V], the target's logits after the bonus token and each draft.
        draft_tokens: [B, k] int64, k >= 1.
        q: [B, k, V] float32, as written by `draft_sample`.
        params, seeds, rounds: as given to `draft_sample`.

    Returns:
        tokens [B, k + 1] int32: accepted drafts, then the residual or bonus token, then zeros;
        accept_lens [B] int32 in 1..k + 1, bonus included.

    Raises:
        ValueError: if there is no draft, or the shapes do not belong together.
    """
    batch_size, num_drafts = draft_tokens.shape
    vocab_size = logits.shape[-1]
    if num_drafts < 1:
        raise ValueError("verify_sample needs at least one draft token per request")
    if logits.shape[0] != batch_size * (num_drafts + 1) or q.shape != (batch_size, num_drafts, vocab_size):
        shapes = f"drafts {tuple(draft_tokens.shape)}, logits {tuple(logits.shape)}, q {tuple(q.shape)}"
        raise ValueError(f"shapes do not belong together: {shapes}")
    kernels = implementation(logits, "chain_sampling")
    if params.from_logits:
        temperatures = params.temperatures.view(-1)
        return kernels.verify_sample_from_logits(
            logits, temperatures, params.top_ks, draft_tokens, q, seeds, rounds
        )
    p = target_probs(logits, params, repeat=num_drafts + 1)
    return kernels.verify_sample(p.view(batch_size, -1, vocab_size), draft_tokens, q, seeds, rounds)


def keep_drafts(draft_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Emit the drafts as they are: samples of the sparse policy, not of the target.

    The ablation of arXiv 2610.13202, section 6.3. No token follows the last draft, because none was sampled
    from the sparse policy for that position.

    Args:
        draft_tokens: [B, k] int64.

    Returns:
        What `verify_sample` returns: tokens [B, k + 1] int32, the drafts and a zero; accept_lens [B] int32, k.
    """
    batch_size, num_drafts = draft_tokens.shape
    tokens = torch.nn.functional.pad(draft_tokens, (0, 1)).to(torch.int32)
    return tokens, torch.full((batch_size,), num_drafts, dtype=torch.int32, device=draft_tokens.device)


def sample_target(
    logits: torch.Tensor, params: SamplingParams, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Sample the first token after a prefill, so that a request's seed holds from its first token on.

    Args:
        logits: [B, V].
        params: parameters of the B requests.
        seeds: [B] int64.
        positions: [B] integer, position of the token to sample. A request prefilled again after it was
            retracted has grown by then, so its noise is fresh.

    Returns:
        [B] int32 token ids.
    """
    probs = target_probs(logits, params)
    rounds = positions.to(torch.int64)
    return (
        implementation(logits, "chain_sampling")
        .race_sample(probs, seeds, rounds, 0, Stream.PREFILL)
        .to(torch.int32)
    )


def request_seed(base_seed: int, user_seed: int | None, ordinal: int) -> int:
    """The 64-bit Philox key of one request.

    With a seed of the user's, the key depends on that and the ordinal alone, so that any server reproduces
    the response. Without one, it depends on the server's base seed. For a given source, different ordinals
    give different keys, because every step of the mixing is a bijection.

    Args:
        base_seed: the engine's seed.
        user_seed: the request's own seed, or None.
        ordinal: number of the request (without user seed) or of the sample within its group (with).

    Returns:
        An integer in [-2**63, 2**63), fit for an int64 tensor.
    """
    source = _splitmix64(base_seed) if user_seed is None else _splitmix64(_splitmix64(user_seed))
    key = _splitmix64(source + ordinal)
    return key - (1 << 64) if key >> 63 else key


def _splitmix64(state: int) -> int:
    """One output of SplitMix64 (Steele et al., OOPSLA 2014), a bijection of 64-bit integers."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
