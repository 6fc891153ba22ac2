"""A process group beside the default one, between a trainer and rollout servers. Needs PyTorch alone."""

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

TIMEOUT = timedelta(minutes=5)


def share_memory_like_servers() -> None:
    """Let NCCL exchange memory as it does in SGLang's servers; members that differ wait for each other for good.

    A setting in the environment is left alone, since it may be the servers' too.

    Raises:
        RuntimeError: this process has an NCCL group, which has read the setting before it was made.
    """
    setting = "NCCL_CUMEM_ENABLE"
    if setting in os.environ:
        return
    if dist.is_initialized() and "nccl" in c10d.get_backend_config():
        raise RuntimeError(
            f"start the trainer with {setting}=0 in its environment: SGLang's servers run NCCL so, and it hangs "
            "if the trainer that broadcasts weights to them does not"
        )
    os.environ[setting] = "0"


def init_process_group(
    backend: str, address: str, port: int, world_size: int, rank: int, name: str, timeout: timedelta = TIMEOUT
) -> dist.ProcessGroup:
    """Join a group named `name`; it does not become PyTorch's default group.

    The same steps as SGLang's `init_custom_process_group`, which its servers call, and which a trainer without
    SGLang cannot: PyTorch itself makes further groups only out of members of the default one.

    Args:
        backend: "nccl" or "gloo".
        address, port: where rank 0 listens.
        timeout: of the rendezvous and of each operation.
    """
    rendezvous = dist.rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout)
    store, rank, world_size = next(rendezvous)
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
