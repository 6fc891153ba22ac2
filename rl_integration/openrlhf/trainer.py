"""The policy actor's side: send the weights, check what every sample was sampled from, report what S3R did."""

import socket
import time
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import ray
import torch
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync
from s3r_sglang.rl_integration.openrlhf.engine import VERSION_KEY, EngineState
from s3r_sglang.rl_integration.openrlhf.metrics import summary
from s3r_sglang.rl_integration.weights import DistributedSender, WeightSender


class StaleSampleError(RuntimeError):
    """A sample was not sampled from the weights that are about to be trained on it."""


class S3RActorTrainer(ActorPPOTrainer):
    """OpenRLHF's trainer of the policy, with rollout servers in the place of vLLM's workers.

    The version of the weights is the number of times that this trainer has trained. The first sync happens before
    the first rollout, so that a wrong model, network or precision shows before anything is sampled.
    """

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        self._options = strategy.args.s3r
        self._version = 0
        self._sender: WeightSender | None = None
        self._lives: list[int] = []
        self._sync_seconds = 0.0
        super().__init__(strategy, *args, **kwargs)
        if self._options.correction:
            from s3r_sglang.rl_integration.correction import install_openrlhf_correction

            install_openrlhf_correction()
        self._introduce()
        if self.args.vllm.enable_sleep:
            # As OpenRLHF does before the transfers that it asks for.
            batch_vllm_engine_call(self.vllm_engines, "wake_up", tags=["weights"])
        self.broadcast_to_vllm()

    def _init_vllm_sync_group(self, backend: str) -> None:
        """OpenRLHF's hook. The group is made with the first sync, and again when a server was restarted."""

    def _introduce(self) -> None:
        """Give the engines our handles, so that a restarted server can ask for the weights.

        Not in asynchronous training, where the weights have moved on meanwhile.
        """
        handles = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(handles, ray.get_runtime_context().current_actor)
        if _is_first() and not self.args.train.async_enable:
            ray.get([engine.set_trainers.remote(handles) for engine in self.vllm_engines])

    # ---- training

    def ppo_train(self, kl_ctl: float) -> dict[str, Any]:
        """Train on the replay buffer, once its samples are known to be the present policy's."""
        self._check_versions()
        status = super().ppo_train(kl_ctl)
        if self._options.weight_sync:
            self._version += 1
        if _is_first():
            totals = ray.get([engine.take_totals.remote() for engine in self.vllm_engines])
            gpus = len(self.vllm_engines) * self.args.vllm.tensor_parallel_size
            status.update(summary(totals, gpus, self._sync_seconds))
        return status

    def _check_versions(self) -> None:
        lag = self.args.train.async_queue_size + 1 if self.args.train.async_enable else 0
        for item in self.replay_buffer.items:
            version = int(item.info[VERSION_KEY])
            # -1: an agent that never asked for a token.
            if version != -1 and not self._version - lag <= version <= self._version:
                raise StaleSampleError(
                    f"a sample came from the weights of step {version}, and the trainer is at step {self._version}"
                )

    # ---- weights

    def broadcast_to_vllm(self) -> None:
        """Send the weights to the servers; OpenRLHF calls it after each step, an engine after a restart."""
        started = time.monotonic()
        torch.cuda.empty_cache()
        states = self._states()
        if any(state.version is None for state in states) or (
            self._options.weight_sync and any(state.version != self._version for state in states)
        ):
            if self.use_cuda_ipc:
                self._send_by_ipc(states)
            else:
                self._send_by_broadcast(states)
            torch.distributed.barrier()
            if _is_first():
                ray.get([engine.set_version.remote(self._version) for engine in self.vllm_engines])
        torch.cuda.empty_cache()
        torch_dist_barrier_and_cuda_sync()
        self._sync_seconds = time.monotonic() - started

    def _states(self) -> list[EngineState]:
        """The servers, all running; the same list on all ranks."""
        states: list[Any] = [None]
        if _is_first():
            states = [ray.get([engine.ready.remote() for engine in self.vllm_engines])]
        torch.distributed.broadcast_object_list(states)
        return states[0]

    def _send_by_ipc(self, states: list[EngineState]) -> None:
        """Colocated: rank i and server i are on the same GPU."""
        state = states[torch.distributed.get_rank()]
        sender = WeightSender(state.url, api_key=state.api_key, bucket_bytes=self._options.bucket_mib << 20)
        sender.send(self._parameters(keep=True), str(self._version))
        sender.close()

    def _send_by_broadcast(self, states: list[EngineState]) -> None:
        """Rank 0 to all servers; the other ranks take part in gathering sharded parameters only."""
        if not _is_first():
            for _ in self._parameters(keep=False):
                pass
            return
        lives = [state.life for state in states]
        if self._sender is None or lives != self._lives:
            self._sender = self._join(states)
            self._lives = lives
        self._sender.send(self._parameters(keep=True), str(self._version))

    def _join(self, states: list[EngineState]) -> DistributedSender:
        if self._sender is not None:
            # Its group has lost a member and cannot be dissolved in order; the name is not used again.
            WeightSender.close(self._sender)
        local = all(urlparse(state.url).hostname == "127.0.0.1" for state in states)
        address = "127.0.0.1" if local else ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        return DistributedSender(
            [state.url for state in states],
            api_key=states[0].api_key,
            address=address,
            port=port,
            backend=self.args.vllm.sync_backend,
            group_name=f"s3r-{uuid.uuid4().hex}",
            bucket_bytes=self._options.bucket_mib << 20,
        )

    def _parameters(self, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole parameters, gathered one by one under ZeRO-3; `keep`: they stay valid then."""
        import deepspeed

        model = self.actor.model.module
        sharded = self.strategy.args.ds.zero_stage == 3
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=sharded):
                yield name, parameter.data.clone() if sharded and keep else parameter.data


def _is_first() -> bool:
    return torch.distributed.get_rank() == 0
