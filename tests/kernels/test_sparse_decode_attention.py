import pytest
import torch
import triton
import triton.language as tl
from s3r_sglang.kernels.ops import sparse_decode_attention as op_module
from s3r_sglang.kernels.reference import sparse_decode_attention as reference_module
from triton.language.extra.cuda import gdc

IMPLEMENTATIONS = [op_module.sparse_decode_attention, reference_module.sparse_decode_attention]
implementations = pytest.mark.parametrize("attend", IMPLEMENTATIONS, ids=["op", "reference"])


def make_index(batch, num_selected: list[int], tail_start: list[int], seed: int = 1):
    """Index state of all slots: unused entries of `positions` and unused slots point past the table."""
    generator = torch.Generator().manual_seed(seed)
    slots = batch.req_to_token.shape[0]
    positions = torch.full((slots, batch.num_kv_heads, max(num_selected) + 3), 2**30, dtype=torch.int32)
    counts = torch.full((slots,), 2**20, dtype=torch.int32)
    tails = torch.full((slots,), 2**20, dtype=torch.int32)
    for slot, count, tail in zip(batch.req_pool_indices.tolist(), num_selected, tail_start, strict=True):
        counts[slot], tails[slot] = count, tail
        for head in range(batch.num_kv_heads):
            chosen = torch.randperm(tail, generator=generator)[:count].sort().values
            positions[slot, head, :count] = chosen.int()
    device = batch.q.device
    return positions.to(device), counts.to(device), tails.to(device)


def expected(batch, positions, num_selected, tail_start):
    """Float64 masked softmax over the whole prefix: (out [B, Hq, D], lse [B, Hq])."""
    outs, lses = [], []
    for b, slot in enumerate(batch.req_pool_indices.tolist()):
        logits = batch.logits(b)[:, :, 0]  # [Hkv, G, seq_len]
        attended = torch.zeros(batch.num_kv_heads, logits.shape[-1], dtype=torch.bool, device=logits.device)
        attended[:, tail_start[slot] :] = True
        attended.scatter_(1, positions[slot, :, : num_selected[slot]].long(), True)
        logits = logits.masked_fill(~attended[:, None], -torch.inf)
        outs.append(torch.einsum("hgn,nhd->hgd", logits.softmax(-1), batch.values(b)).flatten(0, 1))
        lses.append(logits.logsumexp(-1).flatten())
    return torch.stack(outs), torch.stack(lses)


def one_of(batch, b: int):
    """Request b of a batch alone."""
    return type(batch)(
        batch.q[b : b + 1], batch.k_cache, batch.v_cache, batch.req_to_token,
        batch.req_pool_indices[b : b + 1], batch.seq_lens[b : b + 1], batch.scale,
    )  # fmt: skip


def call(attend, batch, index, **kwargs):
    return attend(
        batch.q[:, 0], batch.k_cache, batch.v_cache, batch.req_to_token, batch.req_pool_indices,
        batch.seq_lens, *index, batch.scale, **kwargs,
    )  # fmt: skip


@implementations
def test_equals_masked_softmax(attend, heads, make_batch, tolerance):
    batch = make_batch([70, 9, 41], 1, **heads)
    # An index with a tail, a short context attended to whole, and a tail of the current position alone.
    index = make_index(batch, num_selected=[37, 0, 5], tail_start=[60, 0, 40])
    lse = torch.empty(3, batch.q.shape[2], device=batch.q.device)
    out = call(attend, batch, index, lse=lse)
    want_out, want_lse = expected(batch, *index)
    assert out.dtype == heads["dtype"]
    torch.testing.assert_close(out.double(), want_out, **tolerance(heads["dtype"]))
    torch.testing.assert_close(lse.double(), want_lse, **tolerance(torch.float32))


@pytest.mark.parametrize(("num_splits", "block_n"), [(1, 16), (3, 32), (5, 16)])
def test_any_split_gives_the_same_result(num_splits, block_n, make_batch, tolerance):
    batch = make_batch([90, 3], group=3, head_dim=48)
    index = make_index(batch, num_selected=[50, 0], tail_start=[77, 0])
    want_out, want_lse = expected(batch, *index)
    for _ in range(2):  # twice: the first launch must leave the arrival counters at zero
        out, lse = torch.empty_like(batch.q[:, 0]), torch.empty_like(want_lse, dtype=torch.float32)
        op_module._launch_kernel(
            batch.q[:, 0], batch.k_cache, batch.v_cache, batch.req_to_token, batch.req_pool_indices,
            batch.seq_lens, *index, batch.scale, out, lse, block_n=block_n, num_splits=num_splits,
        )  # fmt: skip
        torch.testing.assert_close(out.double(), want_out, **tolerance(torch.float32))
        torch.testing.assert_close(lse.double(), want_lse, **tolerance(torch.float32))


@implementations
@pytest.mark.parametrize("num_splits", [1, 3])
def test_stores_the_newest_token_and_attends_to_it(
    attend, num_splits, heads, make_batch, tolerance, monkeypatch
):
    monkeypatch.setattr(op_module._launch, "num_splits", lambda *args, **kwargs: num_splits)
    batch = make_batch([70, 0, 1, 41], 1, **heads)
    # The last tail is the newest token alone.
    index = make_index(batch, num_selected=[37, 0, 0, 5], tail_start=[60, 0, 0, 40])
    lse = torch.empty(4, batch.q.shape[2], device=batch.q.device)
    live = [0, 2, 3]
    rows = [int(batch.req_to_token[batch.req_pool_indices[b], batch.seq_lens[b] - 1]) for b in live]
    want_out, want_lse = zip(*(expected(one_of(batch, b), *index) for b in live), strict=True)
    want_caches = batch.k_cache.clone(), batch.v_cache.clone()
    # As the layers of a model do, K and V come as parts of one tensor; nothing may come from the padding row's.
    packed = torch.full((4, 2, *batch.k_cache.shape[1:]), torch.nan, device=lse.device, dtype=batch.q.dtype)
    for b, row in zip(live, rows, strict=True):
        packed[b, 0], packed[b, 1] = batch.k_cache[row], batch.v_cache[row]
        batch.k_cache[row], batch.v_cache[row] = torch.nan, torch.nan
    out = call(attend, batch, index, lse=lse, new_k=packed[:, 0], new_v=packed[:, 1])
    assert torch.equal(batch.k_cache.nan_to_num(7), want_caches[0].nan_to_num(7))
    assert torch.equal(batch.v_cache.nan_to_num(7), want_caches[1].nan_to_num(7))
    torch.testing.assert_close(out[live].double(), torch.cat(want_out), **tolerance(heads["dtype"]))
    torch.testing.assert_close(lse[live].double(), torch.cat(want_lse), **tolerance(torch.float32))
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()


@implementations
def test_an_index_of_everything_is_dense_attention(attend, make_batch, tolerance):
    batch = make_batch([50, 20])
    dense = make_index(batch, num_selected=[0, 0], tail_start=[0, 0])
    covered = make_index(batch, num_selected=[44, 13], tail_start=[44, 13])
    torch.testing.assert_close(
        call(attend, batch, covered), call(attend, batch, dense), **tolerance(torch.float32)
    )


@implementations
@pytest.mark.parametrize("num_splits", [1, 4])
def test_padding_rows_are_harmless(attend, num_splits, make_batch, tolerance, monkeypatch):
    monkeypatch.setattr(op_module._launch, "num_splits", lambda *args, **kwargs: num_splits)
    batch = make_batch([40, 0, 12], head_dim=32)
    index = make_index(batch, num_selected=[20, 0, 0], tail_start=[35, 0, 0])
    index[1][batch.req_pool_indices[1]] = 5  # a padding row may share a slot that has an index
    lse = torch.full((3, 4), torch.nan, device=batch.q.device)
    out = torch.full_like(batch.q[:, 0], torch.nan)
    assert call(attend, batch, index, out=out, lse=lse) is out
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    index[1][batch.req_pool_indices[1]] = 0
    for b in (0, 2):
        want = expected(one_of(batch, b), *index)[0][0]
        torch.testing.assert_close(out[b].double(), want, **tolerance(torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_graph_follows_new_lengths_and_indices(num_splits, capture, make_batch, tolerance, monkeypatch):
    monkeypatch.setattr(op_module._launch, "num_splits", lambda *args, **kwargs: num_splits)
    batch = make_batch([700, 90], 1, 2, 4, 128, torch.bfloat16)
    index = make_index(batch, num_selected=[300, 0], tail_start=[600, 0])
    longer, dense = batch.seq_lens.clone(), [torch.zeros_like(tensor) for tensor in index]
    batch.seq_lens.copy_(torch.tensor([1, 0]))
    captured_index = [tensor.clone() for tensor in dense]
    out = torch.empty_like(batch.q[:, 0])
    replay = capture(lambda: call(op_module.sparse_decode_attention, batch, captured_index, out=out))
    batch.seq_lens.copy_(longer)
    for source in (dense, index):
        for target, tensor in zip(captured_index, source, strict=True):
            target.copy_(tensor)
        replay()
        torch.testing.assert_close(out.double(), expected(batch, *source)[0], **tolerance(torch.bfloat16))


@triton.jit
def _late_copy(source, target, size, LOADS: tl.constexpr, BLOCK: tl.constexpr):
    """Lets the next kernel start at once, and writes when LOADS loads have come in one after the other."""
    gdc.gdc_launch_dependents()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + place, mask=place < size).to(tl.float32)
    for _ in range(LOADS):
        value = tl.maximum(value, tl.load(source + place, mask=place < size, volatile=True))
    tl.store(target + place, value, mask=place < size)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_waits_for_the_kernel_in_front(num_splits, capture, make_batch, monkeypatch):
    monkeypatch.setattr(op_module._launch, "num_splits", lambda *args, **kwargs: num_splits)
    batch = make_batch([700 - 40 * b for b in range(16)], 1, 8, 4, 128, torch.bfloat16)
    if not op_module._launch.starts_early(batch.q.device):
        pytest.skip("kernels start early from Hopper on")
    index = make_index(batch, num_selected=[60] * 16, tail_start=[99] * 16)
    want = call(op_module.sparse_decode_attention, batch, index)
    source, size, out = batch.q.clone(), batch.q.numel(), torch.empty_like(want)

    def in_a_row():
        _late_copy[(triton.cdiv(size, 1024),)](source, batch.q, size, 300, 1024)
        call(op_module.sparse_decode_attention, batch, index, out=out)

    replay = capture(in_a_row)
    for _ in range(5):
        batch.q.fill_(torch.nan)
        replay()
        assert torch.equal(out, want)


def test_int32_lengths_and_strided_queries(make_batch, tolerance):
    batch = make_batch([33, 18], num_queries=2)
    index = make_index(batch, num_selected=[9, 0], tail_start=[30, 0])
    strided = batch.q[:, 0]
    assert not strided.is_contiguous()
    out = op_module.sparse_decode_attention(
        strided, batch.k_cache, batch.v_cache, batch.req_to_token, batch.req_pool_indices,
        batch.seq_lens.int(), *index, batch.scale,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), expected(batch, *index)[0], **tolerance(torch.float32))


def test_rejects_what_the_kernel_cannot_read(make_batch):
    batch = make_batch([20])
    index = make_index(batch, num_selected=[4], tail_start=[15])
    with pytest.raises(ValueError, match=r"cache is torch\.float16"):
        op_module.sparse_decode_attention(
            batch.q[:, 0], batch.k_cache.half(), batch.v_cache, batch.req_to_token, batch.req_pool_indices,
            batch.seq_lens, *index, batch.scale,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"positions must be torch\.int32"):
        call(op_module.sparse_decode_attention, batch, (index[0].long(), *index[1:]))
    with pytest.raises(ValueError, match="num_selected must be a contiguous"):
        call(op_module.sparse_decode_attention, batch, (index[0], index[1][:1], index[2]))
    newest = torch.empty_like(batch.k_cache[:1])
    with pytest.raises(ValueError, match="new_k and new_v go together"):
        call(op_module.sparse_decode_attention, batch, index, new_k=newest)
    with pytest.raises(ValueError, match="new_v must be"):
        call(op_module.sparse_decode_attention, batch, index, new_k=newest, new_v=newest[:, :1])
    with pytest.raises(ValueError, match=r"lse must be torch\.float32"):
        call(op_module.sparse_decode_attention, batch, index, lse=torch.empty(1, 3, device=batch.q.device))
