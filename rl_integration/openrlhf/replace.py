"""Put our parts in the places of OpenRLHF's, in the driver, before its command line runs."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from s3r_sglang.rl_integration.openrlhf import compat
from s3r_sglang.rl_integration.openrlhf.engine import RolloutEngine
from s3r_sglang.rl_integration.openrlhf.options import Options
from s3r_sglang.rl_integration.openrlhf.runtime import has_gpu
from s3r_sglang.rl_integration.openrlhf.server import ServerProcess

# A share of a GPU, as OpenRLHF gives its own engine beside a colocated trainer.
COLOCATED_SHARE = 0.2
GRAPHS_SHARE = 0.1
SPARE_POSITIONS = 16


class EngineActor(RolloutEngine):
    """The engine as Ray makes it: the executor, which may be the user's code, is loaded in the actor."""

    def __init__(
        self, server: ServerProcess, restarts: int, agent_func_path: str | None, remote_rm_url: Any
    ) -> None:
        from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
        from openrlhf.utils.agent import SingleTurnAgentExecutor

        agent = _load_agent_executor(agent_func_path) if agent_func_path else None
        executor = agent or SingleTurnAgentExecutor(remote_rm_url)
        server.host = server.host or ray.util.get_node_ip_address()
        super().__init__(
            server,
            executor,
            # A subclass may ask differently for each sample.
            single_turn=type(executor) is SingleTurnAgentExecutor,
            rewards=bool(agent_func_path or remote_rm_url),
            restarts=restarts,
        )


def install(options: Options, start_ray: Callable[[], None]) -> "Run":
    """Replace OpenRLHF's engines and trainers, and check its arguments as soon as they are parsed.

    Args:
        start_ray: called once they are known to be good; a cluster's start takes long enough.

    Raises:
        compat.UnsupportedError: OpenRLHF is not what it was when this was written.
    """
    import openrlhf.trainer.ray
    import openrlhf.utils
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ray import ppo_actor
    from s3r_sglang.rl_integration.openrlhf.checkpoint import S3RTrainer
    from s3r_sglang.rl_integration.openrlhf.trainer import S3RActorTrainer

    compat.require_known_signatures()
    compat.require_engine_interface(RolloutEngine)
    run = Run(options, start_ray)
    # OpenRLHF would start Ray before it asks for the strategy, where we see its arguments.
    ray.is_initialized = lambda: True
    openrlhf.utils.get_strategy = run.get_strategy
    openrlhf.trainer.ray.create_vllm_engines = run.create_engines
    # Ray sends the policy actor's class by value and, with it, this global of its module.
    ppo_actor.ActorPPOTrainer = S3RActorTrainer
    ppo_trainer.PPOTrainer = ray.remote(S3RTrainer)
    return run


class Run:
    """One training run: our options, and OpenRLHF's arguments once they are known."""

    def __init__(self, options: Options, start_ray: Callable[[], None]) -> None:
        self._options = options
        self._start_ray = start_ray
        self._ray_is_initialized = ray.is_initialized
        self._args: Any = None

    def get_strategy(self, args: Any) -> Any:
        """In the place of OpenRLHF's function of this name, the first to see the parsed arguments."""
        from openrlhf.utils.utils import get_strategy

        compat.require_supported(args)
        ray.is_initialized = self._ray_is_initialized
        self._start_ray()
        args.s3r = self._options
        if self._options.correction and args.algo.advantage.is_correction_level == "off":
            # Asks for the rollout's logprobs; the correction takes the place of OpenRLHF's own.
            args.algo.advantage.is_correction_level = "token"
        self._args = args
        strategy = get_strategy(args)
        if not has_gpu():
            from s3r_sglang.rl_integration.openrlhf.cpu import CPUStrategy

            strategy.__class__ = CPUStrategy
        return strategy

    def checkpoint(self, since: float) -> Path | None:
        """Folder of the newest checkpoint that was written after `since` (seconds of the epoch)."""
        from s3r_sglang.rl_integration.openrlhf.checkpoint import latest

        return None if self._args is None else latest(Path(self._args.ckpt.path), since)

    def create_engines(self, *positional: Any, **_: Any) -> list[Any]:
        """In the place of OpenRLHF's `create_vllm_engines`.

        What it is given is known from the arguments that `get_strategy` saw, but for the placement group of a
        colocated run. The servers start while the trainer's models load, whose first transfer of weights waits for
        them. Colocated ones are asleep before, because their GPUs hold one of the two at a time.
        """
        args = self._args
        colocated = [word for word in positional if isinstance(word, PlacementGroup)]
        share = COLOCATED_SHARE if colocated else None
        group = colocated[0] if colocated else _bundles(args.vllm.num_engines, args.vllm.tensor_parallel_size)
        key = secrets.token_hex(16)
        engines = []
        for index in range(args.vllm.num_engines):
            actor = ray.remote(EngineActor).options(
                num_cpus=share or 1,
                num_gpus=share or args.vllm.tensor_parallel_size,
                # One call per prompt of a rollout batch is in progress.
                max_concurrency=1 << 16,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                ),
            )
            server = self._server(index, key)
            engines.append(
                actor.remote(
                    server, self._options.restarts, args.train.agent_func_path, args.reward.remote_url
                )
            )
        starts = [engine.ready.remote() for engine in engines]
        if colocated:
            ray.get(starts)
        if args.vllm.enable_sleep:
            ray.get([engine.sleep.remote() for engine in engines])
        return engines

    def _server(self, index: int, key: str) -> ServerProcess:
        args, options = self._args, self._options
        words = ["--model-path", args.actor.model_name_or_path]
        words += ["--tensor-parallel-size", str(args.vllm.tensor_parallel_size)]
        words += ["--dtype", {"bf16": "bfloat16", "fp16": "float16"}[args.ds.param_dtype]]
        words += ["--context-length", str(_context(args)), "--trust-remote-code"]
        # An idle scheduler would spin on a core that the trainer needs.
        words += ["--sleep-on-idle", "--weight-version", "initial"]
        if has_gpu():
            # vLLM's share is of everything, SGLang's of weights and KV: activations and CUDA graphs come on top.
            share = max(0.1, args.vllm.gpu_memory_utilization - GRAPHS_SHARE)
            words += ["--mem-fraction-static", f"{share:.3f}"]
            if args.vllm.enforce_eager:
                words += [
                    "--cuda-graph-backend-decode",
                    "disabled",
                    "--cuda-graph-backend-prefill",
                    "disabled",
                ]
            if args.vllm.enable_sleep:
                # A rollout may follow a sleep without new weights: the first one, and evaluation.
                words += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
        if options.config and options.mode != "autoregressive":
            words += ["--s3r-config", options.config]
        folder = Path(options.log_dir or Path(args.ckpt.output_dir) / "s3r_logs").absolute()
        return ServerProcess(
            python=options.engine_python,
            mode=options.mode,
            device="cuda" if has_gpu() else "cpu",
            # Last, so that the user's win.
            arguments=[*words, *options.server_args],
            host=_host(),
            port=options.port and options.port + index,
            seed=args.train.seed + index,
            api_key=key,
            log=folder / f"server-{index}.log",
            start_timeout=options.start_timeout,
        )


def _context(args: Any) -> int:
    """Positions of a server: `--data.max_len`, and some more if the model has them.

    SGLang takes prompts of at most six tokens less than its context; an agent's last turn may come closer.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(args.actor.model_name_or_path, trust_remote_code=True)
    positions = getattr(config.get_text_config(), "max_position_embeddings", 0)
    return max(args.data.max_len, min(args.data.max_len + SPARE_POSITIONS, positions))


def _bundles(num_engines: int, gpus: int) -> Any:
    group = placement_group([{"GPU": gpus, "CPU": 1}] * num_engines, strategy="PACK")
    ray.get(group.ready())
    return group


def _host() -> str:
    """Reachable by the trainer, and by nobody else if everything is on this machine."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return "127.0.0.1" if len(alive) == 1 else ""
