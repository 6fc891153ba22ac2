"""One random seed for every request, kept from its first prefill to its last token."""

from __future__ import annotations

import torch

from s3r_sglang.sampling import request_seed
from s3r_sglang.sglang_symbols import Req


class RequestSeeds:
    """Seeds by request slot, on the device.

    A request with a `sampling_seed` of its own is reproducible on any server. The others are numbered in the
    order of their first prefill; all tensor-parallel ranks see the same order, so they draw the same noise.
    Data-parallel replicas take turns with the numbers: with the same ones, samples of a group that were routed
    to different replicas would be equal.

    Args:
        base_seed: seed of the server, equal on all ranks and replicas.
        num_slots: request slots of SGLang's request pool.
        device: where the seeds are read.
        replica, num_replicas: data-parallel rank and size.
    """

    def __init__(
        self,
        base_seed: int,
        num_slots: int,
        device: torch.device | str,
        replica: int = 0,
        num_replicas: int = 1,
    ) -> None:
        self._base_seed = base_seed
        self._by_slot = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._next_ordinal = replica
        self._num_replicas = num_replicas

    def admit(self, reqs: list[Req], req_pool_indices: torch.Tensor) -> None:
        """Record the seeds of the requests of a prefill batch under their slots [B]."""
        seeds = torch.tensor([self._seed_of(req) for req in reqs], dtype=torch.int64)
        if self._by_slot.is_cuda:
            seeds = seeds.pin_memory()
        self._by_slot[req_pool_indices] = seeds.to(self._by_slot.device, non_blocking=True)

    def of(self, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """The seeds [B] int64 of the requests in the slots [B]."""
        return self._by_slot[req_pool_indices]

    def _seed_of(self, req: Req) -> int:
        # Kept on the request: a retracted request is prefilled again, in another slot, with the same seed.
        seed = getattr(req, "s3r_seed", None)
        if seed is None:
            user_seed = req.sampling_params.sampling_seed
            if user_seed is None:
                seed = request_seed(self._base_seed, None, self._next_ordinal)
                self._next_ordinal += self._num_replicas
            else:
                seed = request_seed(self._base_seed, user_seed, 0)
            req.s3r_seed = seed
        return seed
