"""A plugin of SGLang for the tests: remote calls that look into the scheduler process, or plant a bug there.

`engine.collective_rpc(name, …)` calls an attribute of the scheduler by name and returns nothing, so what a
probe finds goes to a file. The fixture `probed_environment` makes SGLang load this module.
"""

import functools
import random
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch


def register() -> None:
    """Entry point: give the scheduler its probes once it is built, and let a CPU schedule with overlap."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", add_probes, HookType.AFTER)
    # SGLang refuses the combination for lack of kernels in its own algorithms; ours runs, once the one call
    # that PyTorch has for CUDA streams only is left out.
    refusal = "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu"
    HookRegistry.register(refusal, lambda original, server_args: None, HookType.AROUND)
    if not torch.cuda.is_available():
        torch.Tensor.record_stream = lambda *_: None


def add_probes(_, scheduler, *args, **kwargs) -> None:
    scheduler.probe_kv = functools.partial(probe_kv, scheduler)
    planted = ExitStack()
    scheduler.plant = functools.partial(plant, planted)


def probe_kv(scheduler, token_ids: list[int], path: str) -> None:
    """Save the KV rows that a request starting with `token_ids` would take from the radix cache.

    Writes [2, layers, n, Hkv, D], n being the cached length.
    """
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(array("q", token_ids), None, is_bigram=scheduler.tree_cache.is_eagle)
    rows = scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key)).device_indices
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    kv = [torch.stack([buffer[rows] for buffer in buffers]) for buffers in (pool.k_buffer, pool.v_buffer)]
    torch.save(torch.stack(kv).cpu(), path)


def plant(planted: ExitStack, bug: str | None) -> None:
    """Remove the bugs planted before, and plant those that `bug` names, with spaces between."""
    planted.close()
    for name in (bug or "").split():
        planted.enter_context(BUGS[name]())


def provisional_kv_kept():
    """Verification attends to its own K and V, and then puts back those of the sparse draft."""
    from s3r_sglang.attention import DenseAttention

    original = DenseAttention.forward_extend

    def forward_extend(self, q, k, v, layer, forward_batch, *args, **kwargs):
        if not forward_batch.forward_mode.is_target_verify():
            return original(self, q, k, v, layer, forward_batch, *args, **kwargs)
        block = self.state.block_size
        drafted = forward_batch.out_cache_loc.view(-1, block)[:, :-1].flatten()
        pool = self.token_to_kv_pool
        buffers = [get(layer.layer_id) for get in (pool.get_key_buffer, pool.get_value_buffer)]
        provisional = [buffer[drafted].clone() for buffer in buffers]
        output = original(self, q, k, v, layer, forward_batch, *args, **kwargs)
        for buffer, rows in zip(buffers, provisional, strict=True):
            buffer[drafted] = rows
        return output

    return patch.object(DenseAttention, "forward_extend", forward_extend)


def residual_is_p():
    """A rejected draft is replaced by a sample of p, which may be the rejected token again."""
    from s3r_sglang.kernels.reference import chain_sampling

    return patch.object(chain_sampling, "residual_weights", lambda p, q: p)


def verified_at_another_temperature():
    from s3r_sglang import sampling, worker

    def verify_sample(logits, tokens, q, params, *args):
        params = replace(params, temperatures=params.temperatures * 1.15)
        return sampling.verify_sample(logits, tokens, q, params, *args)

    return patch.object(worker, "verify_sample", verify_sample)


def q_recomputed():
    """The acceptance test sees another q than the one the drafts were sampled from."""
    from s3r_sglang import sampling, worker

    def verify_sample(logits, tokens, q, *args):
        sharper = q**1.3
        return sampling.verify_sample(logits, tokens, sharper / sharper.sum(-1, keepdim=True), *args)

    return patch.object(worker, "verify_sample", verify_sample)


def one_noise_for_all():
    """Accept coins and residual draws reuse the words that drew the drafts."""
    from s3r_sglang.kernels.reference import chain_sampling

    streams = SimpleNamespace(**dict.fromkeys(("DRAFT", "ACCEPT", "RESIDUAL", "PREFILL"), 0))
    return patch.object(chain_sampling, "Stream", streams)


def worst_positions_indexed():
    """Not a bug of the law: the index keeps the positions with the least attention."""
    from s3r_sglang import index

    original = index.select_positions
    return patch.object(index, "select_positions", lambda scores, *args: original(-scores, *args))


def paused_at_random():
    """Not a bug of the law: before each round some requests are paused, though memory is not short."""
    from s3r_sglang.scheduler.core import KVScheduler

    choose = random.Random(0)
    fits, make_room = KVScheduler.fits, KVScheduler.make_room

    def make_room_and_pause(self, active):
        with patch.object(KVScheduler, "fits", fits):
            removed = make_room(self, active)
        others = [req for req in active if req not in removed and req.to_finish is None]
        paused = choose.sample(others, len(others) // 3)
        for req in paused:
            self._pause(req)
        return removed + paused

    planted = ExitStack()
    planted.enter_context(patch.object(KVScheduler, "fits", lambda *_: False))
    planted.enter_context(patch.object(KVScheduler, "make_room", make_room_and_pause))
    return planted


def kv_row_lost_at_restore():
    """One position of each restored request has no KV."""
    from s3r_sglang.scheduler.host_pool import HostPool

    original = HostPool.load

    def load(self, blocks, pages):
        done = original(self, blocks, pages)
        for layer in self._layers:
            layer[pages[-1]] = 0
        return done

    return patch.object(HostPool, "load", load)


def another_bonus_at_restore():
    """A restored request goes on behind the token before its last one."""
    from s3r_sglang.scheduler import controller

    original = controller.decode_batch

    def decode_batch(scheduler, reqs):
        batch = original(scheduler, reqs)
        batch.spec_info.bonus_tokens = torch.tensor([req.output_ids[-2:][0] for req in reqs])
        return batch

    return patch.object(controller, "decode_batch", decode_batch)


def another_index_at_restore():
    """Not a bug of the law: a restored request drafts with the sparse index of another slot."""
    from s3r_sglang.scheduler import controller

    original = controller.decode_batch

    def decode_batch(scheduler, reqs):
        index = scheduler.draft_worker.state.index
        slots = torch.tensor([req.req_pool_idx for req in reqs])
        others = slots % (len(index.num_selected) - 1) + 1
        # Only what it may choose from: all in front of its own tail.
        choice = index.tail_start[slots].clamp(min=1)[None, :, None, None]
        index.positions[:, slots] = index.positions[:, others] % choice
        return original(scheduler, reqs)

    return patch.object(controller, "decode_batch", decode_batch)


def round_redrawn_after_pause():
    """A paused request forgets its last round, and draws it again: with the same noise, under a newer index."""
    from s3r_sglang.scheduler.core import KVScheduler
    from s3r_sglang.scheduler.pager import Pager

    fits, pause = KVScheduler.fits, Pager.pause

    def remember(self, active):
        for req in active:
            _, now = getattr(req, "lengths_of_rounds", (0, 0))
            if now != len(req.output_ids):
                req.lengths_of_rounds = now, len(req.output_ids)
        return fits(self, active)

    def forget(self, req):
        before, now = req.lengths_of_rounds
        if before > 0:
            del req.output_ids[before:]
            req.kv_committed_len -= now - before
            req.lengths_of_rounds = 0, before
        return pause(self, req)

    planted = ExitStack()
    planted.enter_context(patch.object(KVScheduler, "fits", remember))
    planted.enter_context(patch.object(Pager, "pause", forget))
    return planted


BUGS: dict[str, Callable[[], Any]] = {
    bug.__name__: bug
    for bug in (
        provisional_kv_kept,
        residual_is_p,
        verified_at_another_temperature,
        q_recomputed,
        one_noise_for_all,
        worst_positions_indexed,
        paused_at_random,
        kv_row_lost_at_restore,
        another_bonus_at_restore,
        another_index_at_restore,
        round_redrawn_after_pause,
    )
}
