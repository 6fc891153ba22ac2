"""Exactness gates of the sampling stage, and planted bugs which each gate must catch.

A gate returns the p-value (or deviation) it measures, so that a mutation test can run the very same gate on
a broken rule. All seeds are fixed: the outcomes are deterministic, and a pass threshold of 1e-4 is no
flakiness budget but the size of the test.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from s3r_sglang.kernels.reference import chain_sampling as reference
from scipy import stats
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from s3r_sglang import sampling
from s3r_sglang.sampling import SamplingParams, Stream, request_seed

PASS, PLANTED = 1e-4, 1e-12
TRIALS = 200_000
FEW_TRIALS = 40_000  # enough to expose a planted bug, or for a law checked at full size elsewhere
VOCAB = 16
TOP_K_ALL = 1 << 30
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def make_params(batch_size, device="cpu", temperature=1.0, top_k=TOP_K_ALL, top_p=1.0, min_p=0.0):
    """Parameters of a batch; each argument is one value or a list that is tiled over the batch."""

    def tile(value, dtype):
        values = torch.tensor(value if isinstance(value, list) else [value], dtype=dtype, device=device)
        return values.repeat(batch_size // len(values))

    top_ks, top_ps, min_ps = tile(top_k, torch.int32), tile(top_p, torch.float32), tile(min_p, torch.float32)
    return SamplingParams(
        temperatures=tile(temperature, torch.float32)[:, None],
        top_ks=top_ks,
        top_ps=top_ps,
        min_ps=min_ps,
        all_greedy=bool((top_ks <= 1).all()),
        need_top_k=bool((top_ks != TOP_K_ALL).any()),
        need_top_p=bool((top_ps != 1).any()),
        need_min_p=bool((min_ps > 0).any()),
        max_top_k=int(top_ks.max()) if (top_ks < TOP_K_ALL).all() else None,
    )


def make_seeds(batch_size, device="cpu", base_seed=0):
    return torch.tensor([request_seed(base_seed, None, i) for i in range(batch_size)], device=device)


def chi_square(tokens, probs):
    """p-value of token counts against a law; a token outside the law's support gives 0."""
    counts = torch.bincount(tokens.flatten().cpu().long(), minlength=probs.numel()).double()
    probs = probs.flatten().cpu().double()
    if counts[probs == 0].any():
        return 0.0
    support = probs > 0
    if support.sum() == 1:
        return 1.0
    expected = probs[support] / probs.sum() * counts.sum()
    return stats.chisquare(counts[support].numpy(), expected.numpy()).pvalue


# --- Gate (a): the accept and residual rules, enumerated -------------------------------------------------

COIN_GRID = 1 << 21
TOY_LAWS = {
    "q far from p": ([0.02, 0.08, 0.2, 0.3, 0.4], [0.5, 0.25, 0.15, 0.08, 0.02]),
    "q equals p": ([0.1, 0.2, 0.3, 0.25, 0.15], [0.1, 0.2, 0.3, 0.25, 0.15]),
    "disjoint supports": ([0.5, 0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.2, 0.3, 0.5]),
    "p one-hot": ([0.0, 0.0, 1.0, 0.0, 0.0], [0.3, 0.3, 0.2, 0.1, 0.1]),
    "q one-hot": ([0.3, 0.3, 0.2, 0.1, 0.1], [0.0, 0.0, 1.0, 0.0, 0.0]),
}


def toy_law(p, q, coin_grid=COIN_GRID):
    """Output law and acceptance of one step, from the production rules over a grid of all coins."""
    p, q = torch.tensor([p]), torch.tensor([q])
    coin = torch.arange(coin_grid)[:, None] / coin_grid
    accept = torch.cat(
        [
            reference.accepts(coin, p[:, x : x + 1], q[:, x : x + 1]).double().mean(0)
            for x in range(p.shape[1])
        ]
    )
    weights = reference.residual_weights(p, q)[0].double()
    accepted = q[0].double() * accept
    law = accepted + (1 - accepted.sum()) * weights / weights.sum()
    return law, accepted.sum().item()


def toy_gate(p, q):
    """Largest deviation of the law from p; infinite if a token outside p's support can come out."""
    law, _ = toy_law(p, q)
    p = torch.tensor(p).double()
    return float("inf") if law[p == 0].any() else (law - p).abs().max().item()


@pytest.mark.parametrize("name", TOY_LAWS)
def test_enumerated_law_is_the_target(name):
    p, q = TOY_LAWS[name]
    assert toy_gate(p, q) < 1e-6
    total_variation = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    assert toy_law(p, q)[1] == pytest.approx(1 - total_variation, abs=1e-6)


def distributions(size=6):
    """Probabilities with zeros and many orders of magnitude."""
    weight = st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.integers(1, 4).map(float))
    weights = st.lists(weight, min_size=size, max_size=size).filter(lambda w: sum(w) > 0)
    return weights.map(lambda w: [x / sum(w) for x in w])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(p=distributions(), q=distributions())
def test_enumerated_law_is_the_target_for_any_pair(p, q):
    grid = 1 << 14
    law, _ = toy_law(p, q, grid)
    p = torch.tensor(p).double()
    assert (law[p == 0] == 0).all()
    assert (law - p).abs().max() < 2 / grid


def test_enumeration_catches_residual_replaced_by_p(monkeypatch):
    monkeypatch.setattr(reference, "residual_weights", lambda p, q: p)
    assert toy_gate(*TOY_LAWS["q far from p"]) > 1e-2


def test_enumeration_catches_a_lenient_coin(monkeypatch):
    monkeypatch.setattr(reference, "accepts", lambda coin, p, q: coin * q <= p)
    assert toy_gate(*TOY_LAWS["disjoint supports"]) == float("inf")


# --- Gate (b): every emitted token against its law, narrow adversarial case -------------------------------

SETTINGS = {
    "plain": {},
    "top-p": {"top_p": 0.7},
    "top-k": {"top_k": 3},
    "min-p": {"min_p": 0.1},
    "temperature": {"temperature": 0.6},
    "mixed": {
        "temperature": [1.0, 0.6, 1.5, 1.0, 1.0],
        "top_k": [TOP_K_ALL, 5, TOP_K_ALL, 1, 8],
        "top_p": [1.0, 1.0, 0.7, 1.0, 0.9],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.05],
    },
}


def filtered_law(logits, temperature=1.0, top_k=TOP_K_ALL, top_p=1.0, min_p=0.0):
    """The target law by a scalar loop in float64, written independently of the code under test."""
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    law = torch.zeros_like(probs)
    mass = 0.0
    for rank, token in enumerate(probs.argsort(descending=True, stable=True).tolist()):
        if rank < top_k and mass <= top_p and probs[token] >= min_p * probs.max():
            law[token] = probs[token]
        mass += probs[token].item()
    return law / law.sum()


def chain_gate(setting, device="cpu", trials=TRIALS, num_drafts=3, q_used=lambda q: q):
    """Smallest p-value over request kinds and chain positions; draft logits are the target's negated."""
    generator = torch.Generator().manual_seed(7)
    logits = (1.5 * torch.randn(num_drafts + 1, VOCAB, generator=generator)).to(device)
    logits[:, 0] += 3.0  # likely under p and unlikely under q, so that lane 0 matters in residuals
    params = make_params(trials, device, **setting)
    seeds, rounds = make_seeds(trials, device), torch.full((trials,), 11, device=device)
    q = torch.empty(trials, num_drafts, VOCAB, device=device)
    drafts = [
        sampling.draft_sample(-logits[j].expand(trials, -1), params, seeds, rounds, j, q[:, j])
        for j in range(num_drafts)
    ]
    tokens, accept_lens = sampling.verify_sample(
        logits.repeat(trials, 1), torch.stack(drafts, dim=1), q_used(q), params, seeds, rounds
    )
    kinds = max((len(v) for v in setting.values() if isinstance(v, list)), default=1)
    pvalues = []
    for kind in range(kinds):
        chosen = {key: v[kind] if isinstance(v, list) else v for key, v in setting.items()}
        for j in range(num_drafts + 1):
            emitted = tokens[kind::kinds, j][accept_lens[kind::kinds] > j]
            if len(emitted) > 1000:
                pvalues.append(chi_square(emitted, filtered_law(logits[j].cpu(), **chosen)))
    return min(pvalues)


@pytest.mark.parametrize("name", SETTINGS)
def test_chain_has_the_target_law(name, device):
    assert chain_gate(SETTINGS[name], device) > PASS


def planted_stream(monkeypatch, wrong, right):
    """Make one stream reuse the counters of another."""
    words = reference.random_words

    def confused(seeds, rounds, steps, stream, num_lanes):
        return words(seeds, rounds, steps, right if stream == wrong else stream, num_lanes)

    monkeypatch.setattr(reference, "random_words", confused)


@pytest.mark.parametrize("reused", [Stream.ACCEPT, Stream.DRAFT])
def test_chain_gate_catches_residual_noise_reused(monkeypatch, reused):
    planted_stream(monkeypatch, Stream.RESIDUAL, reused)
    assert chain_gate({}, trials=FEW_TRIALS) < PLANTED


def test_chain_gate_catches_residual_replaced_by_p(monkeypatch):
    monkeypatch.setattr(reference, "residual_weights", lambda p, q: p)
    assert chain_gate({}, trials=FEW_TRIALS) < PLANTED


def test_chain_gate_catches_q_recomputed_at_another_temperature():
    assert chain_gate({}, trials=FEW_TRIALS, q_used=lambda q: torch.softmax(q.log() / 0.8, dim=-1)) < PLANTED


def test_chain_gate_catches_filters_left_out_of_the_target(monkeypatch):
    monkeypatch.setattr(reference, "filter_probs", lambda probs, *_, **__: probs)
    assert chain_gate(SETTINGS["top-p"], trials=FEW_TRIALS) < PLANTED


# --- Gate (b'): a residual without mass -------------------------------------------------------------------


def degenerate_gate():
    """p <= q everywhere and a draft that is always rejected: the token must be a sample of p."""
    trials = 20_000
    p = torch.tensor([0.0, 0.3, 0.5, 0.2, 0.0]).repeat(trials, 2, 1)
    q = torch.tensor([1.0, 0.3, 0.5, 0.2, 0.0]).repeat(trials, 1, 1)
    drafts = torch.zeros(trials, 1, dtype=torch.int64)
    rounds = torch.full((trials,), 3)
    tokens, accept_lens = reference.verify_sample(p, drafts, q, make_seeds(trials), rounds)
    assert (accept_lens == 1).all()
    return chi_square(tokens[:, 0], p[0, 0])


def test_residual_without_mass_falls_back_to_p():
    assert degenerate_gate() > PASS


def test_degenerate_gate_catches_the_last_token_id(monkeypatch):
    def last_token(p, q):
        residual = (p - q).clamp(min=0)
        residual[:, -1] += (residual.sum(-1) == 0).float()
        return residual

    monkeypatch.setattr(reference, "residual_weights", last_token)
    assert degenerate_gate() < PLANTED


# --- Gate (c): joint law across rounds --------------------------------------------------------------------


def rounds_gate(device="cpu", num_requests=TRIALS // 4, num_drafts=2, num_tokens=5):
    """Smallest p-value of the joint laws of consecutive tokens under a random bigram model.

    The draft of a round is steered by the last draft of the round before, as the engine's index is steered
    by rejected drafts; this makes noise that is reused at a position visible.
    """
    vocab = 5
    generator = torch.Generator().manual_seed(3)
    target = (1.2 * torch.randn(vocab, vocab, generator=generator)).to(device)
    steering = -4.0 * torch.eye(vocab, device=device)
    params, seeds = make_params(num_requests, device), make_seeds(num_requests, device)
    rows = torch.arange(num_requests, device=device)
    output = torch.zeros(
        num_requests, num_tokens + (num_drafts + 1) * num_tokens, dtype=torch.int64, device=device
    )
    lengths, last = torch.full_like(rows, 10), torch.zeros_like(rows)
    steer = torch.zeros_like(rows)
    lens_seen = set()
    for _ in range(num_tokens):
        q = torch.empty(num_requests, num_drafts, vocab, device=device)
        chain = [last]
        for j in range(num_drafts):
            logits = -0.5 * target[chain[-1]] + steering[steer]
            chain.append(sampling.draft_sample(logits, params, seeds, lengths, j, q[:, j]))
        drafts = torch.stack(chain[1:], dim=1)
        logits = target[torch.stack(chain, dim=1)].flatten(0, 1)
        tokens, accept_lens = sampling.verify_sample(logits, drafts, q, params, seeds, lengths)
        for j in range(num_drafts + 1):
            kept = accept_lens > j
            output[rows[kept], (lengths - 10 + j)[kept]] = tokens[kept, j].long()
        lens_seen |= set(accept_lens.tolist())
        last = tokens[rows, accept_lens.long() - 1].long()
        lengths, steer = lengths + accept_lens, drafts[:, -1]
    assert lens_seen == set(range(1, num_drafts + 2))

    transition = torch.softmax(target.double(), dim=-1).cpu()
    marginal = torch.zeros(vocab, dtype=torch.float64).index_fill_(0, torch.tensor(0), 1.0) @ transition
    pvalues = []
    for i in range(num_tokens - 1):
        pairs = output[:, i] * vocab + output[:, i + 1]
        pvalues.append(chi_square(pairs, marginal[:, None] * transition))
        marginal = marginal @ transition
    return min(pvalues)


def test_joint_law_across_rounds(device):
    assert rounds_gate(device) > PASS


def test_rounds_gate_catches_noise_keyed_by_position(monkeypatch):
    words = reference.random_words

    def keyed_by_position(seeds, rounds, steps, stream, num_lanes):
        return words(seeds, rounds + steps, 0, stream, num_lanes)

    monkeypatch.setattr(reference, "random_words", keyed_by_position)
    assert rounds_gate() < PLANTED


# --- Gate (d): groups, seeds, batches ---------------------------------------------------------------------


def one_round(seeds, params, logits, num_drafts=3, round_length=20):
    batch_size = len(seeds)
    rounds = torch.full((batch_size,), round_length, device=seeds.device)
    q = torch.empty(batch_size, num_drafts, logits.shape[-1], device=seeds.device)
    drafts = torch.stack(
        [sampling.draft_sample(0.3 * logits, params, seeds, rounds, j, q[:, j]) for j in range(num_drafts)], 1
    )
    return sampling.verify_sample(
        logits.repeat_interleave(num_drafts + 1, 0), drafts, q, params, seeds, rounds
    )


def group_gate(seeds, device):
    """p-value of the pair of first tokens of two samples of a group against the product law."""
    logits = torch.linspace(-1, 1, 6, device=device).repeat(len(seeds), 1)
    tokens, _ = one_round(seeds, make_params(len(seeds), device), logits)
    probs = torch.softmax(logits[0], 0)
    return chi_square(tokens[0::2, 0].long() * 6 + tokens[1::2, 0], probs[:, None] * probs)


def test_samples_of_a_group_are_independent(device):
    assert group_gate(make_seeds(TRIALS // 2, device), device) > PASS
    shared = make_seeds(TRIALS // 4, device).repeat_interleave(2)
    assert group_gate(shared, device) < PLANTED


def test_tokens_depend_on_seed_alone_not_on_the_batch(device):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(60, 33, generator=generator).to(device)
    setting = {"temperature": [1.0, 0.7, 1.2], "top_k": [TOP_K_ALL, 4, 1], "top_p": [1.0, 0.8, 1.0]}
    seeds, params = make_seeds(60, device), make_params(60, device, **setting)
    tokens, accept_lens = one_round(seeds, params, logits)
    assert all(
        torch.equal(a, b)
        for a, b in zip(one_round(seeds, params, logits), (tokens, accept_lens), strict=True)
    )

    order = torch.randperm(60, generator=generator).to(device)[:25]
    subset = SamplingParams(
        params.temperatures[order], params.top_ks[order], params.top_ps[order], params.min_ps[order]
    )
    again, again_lens = one_round(seeds[order], subset, logits[order])
    assert torch.equal(again, tokens[order])
    assert torch.equal(again_lens, accept_lens[order])

    plain = torch.arange(0, 60, 3, device=device)
    alone, _ = one_round(seeds[plain], make_params(20, device), logits[plain])
    assert torch.equal(alone, tokens[plain])
    other, _ = one_round(make_seeds(60, device, base_seed=1), params, logits)
    assert not torch.equal(other, tokens)


def test_padding_after_the_emitted_tokens_is_zero(device):
    logits = torch.randn(500, 9, generator=torch.Generator().manual_seed(2)).to(device)
    tokens, accept_lens = one_round(make_seeds(500, device), make_params(500, device), logits)
    behind = torch.arange(4, device=device) >= accept_lens[:, None]
    assert (tokens[behind] == 0).all()
    assert tokens.dtype == accept_lens.dtype == torch.int32
    assert set(accept_lens.tolist()) == {1, 2, 3, 4}


def test_greedy_emits_the_argmax_chain(device):
    logits = torch.randn(40, 4, 50, generator=torch.Generator().manual_seed(4)).to(device)
    logits[:, :, 13] = logits[:, :, 29] = 9.0  # a tie: the lower token id is the argmax
    params, seeds = make_params(40, device, top_k=1), make_seeds(40, device)
    rounds = torch.arange(40, device=device)
    draft_logits = logits.clone()
    draft_logits[20:, 1, 5] = 20.0  # half of the requests draft a wrong second token
    q = torch.empty(40, 3, 50, device=device)
    drafts = [sampling.draft_sample(draft_logits[:, j], params, seeds, rounds, j, q[:, j]) for j in range(3)]
    tokens, lens = sampling.verify_sample(
        logits.flatten(0, 1), torch.stack(drafts, 1), q, params, seeds, rounds
    )
    assert lens.tolist() == [4] * 20 + [2] * 20
    assert (tokens[:20] == 13).all()
    assert tokens[20:].tolist() == [[13, 13, 0, 0]] * 20


# --- Parameters, the first token, seeds -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["top-p", "top-k", "min-p", "mixed"])
def test_law_is_what_sglang_samples_from(name):
    setting = SETTINGS[name]
    logits = 2.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    params = make_params(FEW_TRIALS, **setting)
    kinds = max((len(v) for v in setting.values() if isinstance(v, list)), default=1)
    probs = torch.softmax(logits / params.temperatures, dim=-1)
    torch.manual_seed(0)
    tokens = top_k_top_p_min_p_sampling_from_probs_torch(
        probs, params.top_ks, params.top_ps, params.min_ps, params.need_min_p, None, None
    )
    law = sampling.target_probs(logits.repeat(FEW_TRIALS, 1), params)
    for kind in range(kinds):
        assert chi_square(tokens[kind::kinds], law[kind]) > PASS


def test_repeated_rows_share_their_request_parameters():
    logits = torch.randn(6, 3, 11, generator=torch.Generator().manual_seed(6))
    setting = {"temperature": [0.5, 2.0], "top_k": [3, TOP_K_ALL], "top_p": [1.0, 0.6]}
    params = make_params(6, **setting)
    together = sampling.target_probs(logits.flatten(0, 1), params, repeat=3).view(6, 3, 11)
    for row in range(3):
        torch.testing.assert_close(
            together[:, row], sampling.target_probs(logits[:, row], params), rtol=0, atol=0
        )
    torch.testing.assert_close(together[0, 1].double(), filtered_law(logits[0, 1], 0.5, 3))
    torch.testing.assert_close(together[1, 2].double(), filtered_law(logits[1, 2], 2.0, top_p=0.6))


def test_logit_bias_applies_before_the_temperature():
    logits, bias = torch.zeros(2, 4), torch.tensor([[0.0, 1.0, 0.0, float("-inf")], [0.0] * 4])
    params = SamplingParams(
        torch.tensor([0.5, 1.0]), torch.full((2,), TOP_K_ALL), torch.ones(2), torch.zeros(2), logit_bias=bias
    )
    expected = torch.softmax((logits + bias) / torch.tensor([[0.5], [1.0]]), dim=-1)
    torch.testing.assert_close(sampling.target_probs(logits, params), expected)


def test_first_token_has_the_target_law_and_its_own_stream(device):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(8)).to(device).repeat(FEW_TRIALS, 1)
    params, seeds = make_params(FEW_TRIALS, device, top_p=0.8), make_seeds(FEW_TRIALS, device)
    positions = torch.full((FEW_TRIALS,), 30, device=device)
    tokens = sampling.sample_target(logits, params, seeds, positions)
    assert tokens.dtype == torch.int32
    assert chi_square(tokens, filtered_law(logits[0].cpu(), top_p=0.8)) > PASS
    drafted = sampling.draft_sample(logits, params, seeds, positions, 0, torch.empty_like(logits))
    assert not torch.equal(drafted.int(), tokens)


@pytest.mark.parametrize("max_top_k", [None, 6])
def test_filters_rank_tied_probabilities_by_token_id(max_top_k):
    logits = torch.randint(-2, 3, (40, 30), generator=torch.Generator().manual_seed(10)).float()
    settings = [(3, 1.0, 0.0), (6, 0.5, 0.0), (6, 1.0, 0.3), (5, 0.3, 0.1)]
    top_k, top_p, min_p = (list(values) for values in zip(*settings, strict=True))
    params = replace(make_params(40, top_k=top_k, top_p=top_p, min_p=min_p), max_top_k=max_top_k)
    for row, probs in enumerate(sampling.target_probs(logits, params)):
        k, p, m = settings[row % 4]
        torch.testing.assert_close(probs.double(), filtered_law(logits[row], top_k=k, top_p=p, min_p=m))


def make_sampling_info(top_ks, **changes):
    ones = torch.ones(len(top_ks))
    info = SamplingBatchInfo(
        temperatures=ones[:, None],
        top_ps=ones,
        top_ks=torch.tensor(top_ks, dtype=torch.int32),
        min_ps=0 * ones,
        is_all_greedy=all(k <= 1 for k in top_ks),
        is_any_greedy=any(k <= 1 for k in top_ks),
        need_top_p_sampling=False,
        need_top_k_sampling=any(k != TOP_K_ALL for k in top_ks),
        need_min_p_sampling=False,
        vocab_size=7,
    )
    return replace(info, **changes)


def test_params_are_taken_from_a_sampling_batch_info():
    info = make_sampling_info(
        [1, TOP_K_ALL],
        temperatures=torch.tensor([[1.0], [0.5]]),
        top_ps=torch.tensor([1.0, 0.9]),
        min_ps=torch.tensor([0.0, 0.1]),
        need_top_p_sampling=True,
        need_min_p_sampling=True,
    )
    params = SamplingParams.from_sampling_info(info)
    logits = torch.randn(2, 7, generator=torch.Generator().manual_seed(9))
    probs = sampling.target_probs(logits, params)
    assert probs[0].tolist() == torch.nn.functional.one_hot(logits[0].argmax(), 7).tolist()
    torch.testing.assert_close(probs[1].double(), filtered_law(logits[1], 0.5, top_p=0.9, min_p=0.1))


@pytest.mark.parametrize(
    ("top_ks", "filtered", "max_top_k"),
    [([1, TOP_K_ALL], False, None), ([1, 1], False, 1), ([1, 3], True, 3), ([3, 7], True, None)],
)
def test_top_ks_known_to_the_host_spare_work(top_ks, filtered, max_top_k):
    params = SamplingParams.from_sampling_info(make_sampling_info(top_ks), host_top_ks=top_ks)
    assert (params.filtered, params.max_top_k) == (filtered, max_top_k)


def test_wrong_shapes_are_refused():
    params, seeds = make_params(2), make_seeds(2)
    rounds = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="at least one draft"):
        sampling.verify_sample(
            torch.zeros(2, 5),
            torch.zeros(2, 0, dtype=torch.int64),
            torch.zeros(2, 0, 5),
            params,
            seeds,
            rounds,
        )
    with pytest.raises(ValueError, match="do not belong together"):
        sampling.verify_sample(
            torch.zeros(5, 5),
            torch.zeros(2, 1, dtype=torch.int64),
            torch.zeros(2, 1, 5),
            params,
            seeds,
            rounds,
        )


def test_request_seeds_are_distinct_and_reproducible():
    seeds = [request_seed(5, None, i) for i in range(1000)] + [
        request_seed(5, user, i) for user in (0, 1, 5, 2**63) for i in range(1000)
    ]
    assert len(set(seeds)) == len(seeds)
    assert torch.tensor(seeds).tolist() == seeds
    assert request_seed(5, 9, 2) == request_seed(6, 9, 2)
    assert request_seed(5, None, 2) != request_seed(6, None, 2)
