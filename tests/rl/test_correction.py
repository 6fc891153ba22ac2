"""Sparse-RL's correction, against expectations that can be enumerated, and inside OpenRLHF's own loss."""

import importlib
import itertools
import math
import sys
import types

import openrlhf_source
import pytest
import torch
from s3r_sglang.rl_integration.correction import SparseCorrection, install_openrlhf_correction, log_ratio
from s3r_sglang.rl_integration.examples.objective import advantages, policy_loss

PLAIN = SparseCorrection(rejection_threshold=0)
V = 3


def distributions(seed, length):
    """Logits [V^0 + V^1 + …, V] of a policy over responses of `length` tokens, one row per prefix."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(sum(V**t for t in range(length)), V, generator=generator, dtype=torch.float64)


def responses(length):
    """All responses, and for each token the row of `distributions` that it is drawn from."""
    for tokens in itertools.product(range(V), repeat=length):
        rows, row, prefix = [], 0, 0
        for step, token in enumerate(tokens):
            rows.append(row + prefix)
            row, prefix = row + V**step, prefix * V + token
        yield tokens, rows


def token_logprobs(logits, length):
    """[V^length, length] logprobs of every response's tokens."""
    table = torch.log_softmax(logits, -1)
    return torch.stack([table[rows, list(tokens)] for tokens, rows in responses(length)])


def expected_update(policy, dense, sampler, length, reward, correction):
    """Gradient, at policy = dense, of the expected loss when `sampler` draws single responses.

    The advantage is the reward itself, so nothing but the response's own probability needs correction. The loss is
    summed over tokens.
    """
    logits = policy.clone().requires_grad_()
    logprobs = token_logprobs(logits, length)
    old, drawn = token_logprobs(dense, length), token_logprobs(sampler, length)
    mask = torch.ones_like(old, dtype=torch.bool)
    weights = correction(old, drawn, mask) if correction else None
    probability = drawn.sum(1).exp()
    loss = sum(
        p * policy_loss(*(x[i : i + 1] for x in (logprobs, old, mask, reward[:, None])), tokens=1,
                        weights=None if weights is None else weights[i : i + 1])
        for i, p in enumerate(probability)
    )  # fmt: skip
    return torch.autograd.grad(loss, logits)[0]


def test_token_weights_recover_the_dense_update_of_one_token():
    dense, sparse = distributions(0, 1), distributions(1, 1)
    reward = torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64)
    wanted = expected_update(dense, dense, dense, 1, reward, None)
    got = expected_update(dense, dense, sparse, 1, reward, PLAIN.weights)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)
    uncorrected = expected_update(dense, dense, sparse, 1, reward, None)
    assert (uncorrected - wanted).abs().max() > 0.05


def test_token_weights_do_not_correct_the_prefix_and_response_weights_do():
    """Two tokens: w_t alone leaves the second token's prefix with the sparse distribution."""
    dense, sparse = distributions(8, 2), distributions(58, 2)
    reward = torch.linspace(-1, 1, V**2, dtype=torch.float64)
    wanted = expected_update(dense, dense, dense, 2, reward, None)

    def response_weights(old, drawn, mask):
        return log_ratio(old, drawn, mask).sum(1, keepdim=True).exp().expand_as(old)

    exact = expected_update(dense, dense, sparse, 2, reward, response_weights)
    torch.testing.assert_close(exact, wanted, atol=1e-6, rtol=1e-5)
    tokenwise = expected_update(dense, dense, sparse, 2, reward, PLAIN.weights)
    assert (tokenwise - wanted).abs().max() > 0.05


def grpo_update(logits, weight_of, probability, rewards):
    """Gradient of GRPO's loss at the policy itself, expected over groups of two responses of one token each."""
    variable = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(variable, 0)
    old = logprobs.detach()
    total = 0.0
    for group in itertools.product(range(V), repeat=2):
        advantage = advantages(rewards[None, list(group)]).view(-1, 1)
        columns = [x[list(group), None] for x in (logprobs, old)]
        loss = policy_loss(*columns, torch.ones(2, 1, dtype=torch.bool), advantage, weights=weight_of(group))
        total = total + probability[group[0]] * probability[group[1]] * loss
    return torch.autograd.grad(total, variable)[0]


def test_groups_that_were_sampled_sparsely_bias_grpo_even_with_exact_weights():
    """The counterexample of arXiv 2610.13202, appendix A.2: rewards 0, 1, 2 and a uniform dense policy.

    The corrected update of the middle response's logit is sum_v Q(v) H(v), with H = (2 c1 - c2) / 9 (1, 0, -1) and
    c_d the advantage at a difference d of rewards; the dense one is 0.
    """
    rewards = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    dense = torch.zeros(V, dtype=torch.float64)
    sparse = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)

    def weights(group):
        old = torch.full((2, 1), math.log(1 / 3), dtype=torch.float64)
        return PLAIN.weights(old, sparse[list(group)].log()[:, None], torch.ones(2, 1, dtype=torch.bool))

    def none(group):
        return None

    c1, c2 = (d / (math.sqrt(2) * d + 2e-6) for d in (1.0, 2.0))
    uniform = torch.softmax(dense, 0)
    assert grpo_update(dense, none, uniform, rewards)[1].item() == pytest.approx(0.0, abs=1e-9)
    corrected = -grpo_update(dense, weights, sparse, rewards)[1].item()
    assert corrected == pytest.approx((2 * c1 - c2) / 9 * (sparse[0] - sparse[2]).item(), rel=1e-5)
    assert corrected > 0.03


def test_a_response_with_one_anomalous_token_is_rejected_as_a_whole():
    dense = torch.tensor([[-1.0, -12.0, -0.5], [-1.0, -2.0, -30.0], [-1.0, -2.0, -3.0]])
    sparse = torch.tensor([[-1.1, -2.0, -0.6], [-0.5, -2.5, -0.1], [-2.0, -1.0, -3.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    # exp(-10) = 4.5e-5 at the first response's second token; the second one's third is padding.
    weights = SparseCorrection().weights(dense, sparse, mask)
    expected = torch.exp(torch.tensor([[-math.inf] * 3, [-0.5, 0.5, -math.inf], [1.0, -1.0, 0.0]]))
    torch.testing.assert_close(weights, expected)
    kept_all = SparseCorrection(rejection_threshold=1e-5).weights(dense, sparse, mask)
    torch.testing.assert_close(kept_all[0], torch.exp(torch.tensor([0.1, -10.0, 0.1])))
    bounded = SparseCorrection(max_weight=1.5).weights(dense, sparse, mask)
    assert bounded[1:].max().item() == 1.5
    statistics = SparseCorrection().statistics(dense, sparse, mask)
    assert statistics["rejected"] == pytest.approx(1 / 3)
    assert statistics["kl"] == pytest.approx((9.8 + 0.0 + 0.0) / 8)
    assert statistics["max_weight"] == pytest.approx(math.e)


def test_weights_carry_no_gradient_and_ignore_padding():
    dense = torch.tensor([[-1.0, -math.inf]], requires_grad=True)
    sparse = torch.tensor([[-2.0, 0.0]])
    weights = SparseCorrection().weights(dense, sparse, torch.tensor([[True, False]]))
    assert weights.tolist() == [[pytest.approx(math.e), 0.0]]
    assert not weights.requires_grad


def test_equal_policies_need_no_correction():
    logprobs = -torch.rand(4, 7) * 5
    mask = torch.rand(4, 7) < 0.8
    torch.testing.assert_close(SparseCorrection().weights(logprobs, logprobs, mask), mask.float())


def test_unusable_arguments():
    with pytest.raises(ValueError, match="rejection_threshold"):
        SparseCorrection(rejection_threshold=1.0)
    with pytest.raises(ValueError, match="max_weight"):
        SparseCorrection(max_weight=0.5)
    ones = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="shapes differ"):
        log_ratio(torch.zeros(1, 2), torch.zeros(1, 3), ones)
    with pytest.raises(ValueError, match="no finite logprob"):
        log_ratio(torch.tensor([[0.0, -math.inf]]), torch.zeros(1, 2), ones)


@pytest.fixture
def openrlhf_loss(monkeypatch):
    """OpenRLHF's own module of losses, without DeepSpeed, which it imports beside them."""
    root = openrlhf_source.find()
    for name in ("openrlhf", "openrlhf.models"):
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    for name in ("openrlhf.models.utils", "openrlhf.models.loss"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("openrlhf.models.loss")
    yield module
    for name in ("openrlhf.models.utils", "openrlhf.models.loss"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("max_weight", [None, 1.3])
def test_openrlhfs_loss_becomes_ours(openrlhf_loss, max_weight):
    torch.manual_seed(0)
    correction = SparseCorrection(max_weight=max_weight)
    old, noise = -torch.rand(4, 6) * 3, torch.randn(4, 6) * 0.4
    rollout = old - noise
    rollout[2, 1] = old[2, 1] + 11  # ratio exp(-11)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1, 4:] = False
    advantage = torch.randn(4, 1).expand(4, 6)
    logprobs = (old + torch.randn(4, 6) * 0.3).requires_grad_()

    plain = openrlhf_loss.PolicyLoss(0.2, 0.28, is_correction_level="token")
    (before, *_) = plain(logprobs, old, advantage, mask.float(), rollout)
    install_openrlhf_correction(correction)
    install_openrlhf_correction(correction)
    loss_module = openrlhf_loss.PolicyLoss(0.2, 0.28, is_correction_level="token")
    loss, _, _, kl, rejected = loss_module(logprobs, old, advantage, mask.float(), rollout)

    weights = correction.weights(old, rollout, mask)
    wanted = policy_loss(logprobs, old, mask, advantage[:, :1], weights=weights)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(
        *(torch.autograd.grad(x, logprobs, retain_graph=True)[0] for x in (loss, wanted))
    )
    assert not torch.isclose(loss, before)
    assert rejected.item() == pytest.approx(6 / 22)
    assert kl.item() == pytest.approx(((rollout - old) * mask).sum().item() / 22, rel=1e-5)


def test_openrlhf_without_rollout_logprobs_is_an_error(openrlhf_loss):
    install_openrlhf_correction()
    loss = openrlhf_loss.PolicyLoss(is_correction_level="off")
    with pytest.raises(ValueError, match="is_correction_level token"):
        loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2))


def test_another_openrlhf_is_refused(openrlhf_loss, monkeypatch):
    monkeypatch.setattr(openrlhf_loss.PolicyLoss, "forward", lambda self, logits: logits)
    with pytest.raises(RuntimeError, match=r"0\.11\.2"):
        install_openrlhf_correction()
