"""Attention layers over SGLang's own pools, for the stages that read and write KV."""

from types import SimpleNamespace

import pytest
import torch

from s3r_sglang.config import S3RConfig

NUM_LAYERS = 2


class Layers:
    """Both attention backends over SGLang's own pools: scattered rows, two layers, random K and V.

    Imports SGLang when it is built: that imports Triton, which the kernel tests want to do first.

    Args:
        config: draft length, budget and window.
        num_kv_heads, group, head_size: shape of a layer; `group` query heads share a KV head.
        contexts: slot -> positions that the request table holds.
        fused: score the index while verifying.
    """

    def __init__(
        self,
        config: S3RConfig,
        num_kv_heads: int,
        group: int,
        head_size: int,
        contexts: dict[int, int],
        fused: bool = False,
    ) -> None:
        from s3r_sglang.attention import DenseAttention, SparseAttention
        from s3r_sglang.index import SparseIndex
        from s3r_sglang.sglang_symbols import RadixAttention
        from s3r_sglang.state import RoundState

        self.contexts = contexts
        self.block_size = config.draft_length + 1
        self.num_kv_heads, self.num_heads, self.head_size = num_kv_heads, num_kv_heads * group, head_size
        self.generator = torch.Generator().manual_seed(100 * num_kv_heads + group)
        num_slots = max(contexts) + 1
        self.index = SparseIndex(config, NUM_LAYERS, num_slots, num_kv_heads, max(contexts.values()), "cpu")
        self.state = RoundState(
            config=config,
            index=self.index,
            block_size=self.block_size,
            num_slots=num_slots,
            draft_lse=torch.full((NUM_LAYERS, len(contexts), self.block_size, self.num_heads), -torch.inf),
            max_context=max(contexts.values()),
            scores=None,
            fused=fused,
        )
        self.base = self._pools()
        self.dense = DenseAttention(self.base, self.state)
        self.sparse = SparseAttention(self.base, self.state)
        self.modules = [
            RadixAttention(self.num_heads, head_size, head_size**-0.5, num_kv_heads, layer)
            for layer in range(NUM_LAYERS)
        ]

    def _pools(self):
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

        from s3r_sglang.cpu.attention import CPUAttention

        used, longest = sum(self.contexts.values()), max(self.contexts.values())
        requests = ReqToTokenPool(max(self.contexts), longest, "cpu", enable_memory_saver=False)
        rows = torch.randperm(2 * used, generator=self.generator).int()[:used]
        for slot, mine in zip(self.contexts, rows.split(list(self.contexts.values())), strict=True):
            requests.req_to_token[slot, : len(mine)] = mine
        shape = (self.num_kv_heads, self.head_size, NUM_LAYERS)
        pool = MHATokenToKVPool(2 * used, 1, torch.float32, *shape, "cpu", enable_memory_saver=False)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.normal_(generator=self.generator)
        return CPUAttention(SimpleNamespace(device="cpu", req_to_token_pool=requests, token_to_kv_pool=pool))

    def random_inputs(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(q [count, Hq, D], k and v [count, Hkv, D]) for each layer."""
        shapes = [(count, heads, self.head_size) for heads in (self.num_heads, *2 * [self.num_kv_heads])]
        drawn = [[torch.randn(shape, generator=self.generator) for shape in shapes] for _ in self.modules]
        # Queries of twice the usual spread: some weights then dominate, as in a trained model.
        return [(2 * q, k, v) for q, k, v in drawn]

    def keys(self, layer: int, slot: int) -> torch.Tensor:
        """[contexts[slot], Hkv, D] in order of position."""
        return self.base.token_to_kv_pool.get_key_buffer(layer)[self.rows(slot)]

    def values(self, layer: int, slot: int) -> torch.Tensor:
        """[contexts[slot], Hkv, D] in order of position."""
        return self.base.token_to_kv_pool.get_value_buffer(layer)[self.rows(slot)]

    def rows(self, slot: int) -> torch.Tensor:
        """Pool rows of the slot's positions."""
        return self.base.req_to_token_pool.req_to_token[slot, : self.contexts[slot]].long()

    def prefill(self, slots: list[int], new: list[int], inputs) -> list[torch.Tensor]:
        """Feed the last `new` positions of each slot; returns the output [sum(new), Hq, D] of each layer."""
        from s3r_sglang.sglang_symbols import ForwardMode

        lengths = [self.contexts[slot] for slot in slots]
        return self._extend(ForwardMode.EXTEND, slots, new, lengths, inputs, None)

    def verify(self, slots: list[int], inputs) -> list[torch.Tensor]:
        """Feed the last k + 1 positions of each slot; returns the output [B * (k + 1), Hq, D] of each layer."""
        from s3r_sglang.sglang_symbols import ForwardMode
        from s3r_sglang.types import S3RVerifyInput

        starts = [self.contexts[slot] - self.block_size for slot in slots]
        block = S3RVerifyInput(None, None, self.block_size)
        new = [self.block_size] * len(slots)
        return self._extend(ForwardMode.TARGET_VERIFY, slots, new, starts, inputs, block)

    def _extend(self, mode, slots, new, seq_lens, inputs, spec_info) -> list[torch.Tensor]:
        batch = SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=torch.tensor(slots),
            seq_lens=torch.tensor(seq_lens),
            extend_prefix_lens=torch.tensor([self.contexts[s] - n for s, n in zip(slots, new, strict=True)]),
            extend_seq_lens=torch.tensor(new),
            out_cache_loc=torch.cat([self.rows(s)[-n:] for s, n in zip(slots, new, strict=True)]),
            encoder_lens=None,
            spec_info=spec_info,
        )
        self.dense.init_forward_metadata(batch)
        return self._run(self.dense.forward_extend, inputs, batch)

    def draft(self, slots: list[int], step: int, inputs) -> list[torch.Tensor]:
        """Feed position L + step of each slot, L being its length less k + 1; returns [B, Hq, D] per layer."""
        positions = [self.contexts[slot] - self.block_size + step for slot in slots]
        batch = SimpleNamespace(
            req_pool_indices=torch.tensor(slots),
            seq_lens=torch.tensor(positions) + 1,
            out_cache_loc=torch.stack([self.rows(s)[p] for s, p in zip(slots, positions, strict=True)]),
        )
        self.sparse.step = step
        return self._run(self.sparse.forward_decode, inputs, batch)

    def _run(self, forward, inputs, batch) -> list[torch.Tensor]:
        layers = zip(self.modules, inputs, strict=True)
        outputs = [forward(q.flatten(1), k, v, module, batch) for module, (q, k, v) in layers]
        return [output.view(-1, self.num_heads, self.head_size) for output in outputs]


@pytest.fixture
def layers_of():
    """The class `Layers`; test modules cannot import it from here."""
    if torch.cuda.is_available():
        pytest.skip("pools on the CPU: beside a GPU, SGLang stores to pools on it only")
    return Layers
