"""Configuration, acceptance and KV scheduling so far, in `/server_info` (`internal_states[i]["s3r"]`).

And beside it, whether the weights are partly those of an update that failed (`s3r_weights_mixed`).
"""

from dataclasses import asdict


def add_internal_state(output, scheduler, request):
    """After `Scheduler.get_internal_state`, in the scheduler process of each replica."""
    from s3r_sglang.patches.weight_loading import ledger_of

    from s3r_sglang.config import is_self_sparse, serves_rollouts

    if is_self_sparse(scheduler.server_args.speculative_algorithm):
        output.internal_state["s3r"] = {
            "config": scheduler.s3r_kv.config.model_dump(),
            **scheduler.draft_worker.metrics.summary(),
            "kv": asdict(scheduler.s3r_kv.stats()),
        }
    if serves_rollouts(scheduler.server_args):
        output.internal_state["s3r_weights_mixed"] = ledger_of(scheduler.tp_worker).mixed
    return output
