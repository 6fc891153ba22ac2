"""The algorithm as SGLang's registry sees it: its capabilities, its worker and its defaults."""

import logging
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.speculative_hook import _disable_overlap_schedule_for_cpu
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from s3r_sglang.config import ALGORITHM, config_of
from s3r_sglang.support import refuse_unsupported

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# The command line accepts both spellings; resolution leaves the first in ServerArgs.
NAMES = (ALGORITHM, ALGORITHM.replace("_", "-"))

# The built-in algorithms default to 48, sized for the memory of a second model. Ours has none, and the paper
# runs up to 256 requests per replica. On a CPU, SGLang's own default would be 4,096 request slots.
DEFAULT_MAX_RUNNING_REQUESTS = 256


class S3RAlgorithm(CustomSpecAlgo):
    """A chain draft by the target model itself, over the target's KV pool."""

    # The scheduler calls these three on every algorithm, but the base class for plugins lacks them.
    create_future_map = SpeculativeAlgorithm.create_future_map

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        """Drafting writes provisional KV at the block's positions, which verification overwrites."""
        return True

    def handle_server_args(self, server_args: "ServerArgs") -> None:
        """Fill the remaining defaults; the shape of the draft was set in ServerArgs.__init__."""
        server_args.speculative_algorithm = ALGORITHM
        # A prefill graph splits around attention, and would refresh the index from padded rows; capturing it
        # takes 84 s on an H200 besides, for a stage that rollouts spend little time in.
        server_args.cuda_graph_config.prefill.backend = Backend.DISABLED
        _disable_overlap_schedule_for_cpu(server_args)
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        config = config_of(server_args)
        logger.info("S3R effective configuration: %s", config.model_dump_json())
        if not config.faithful:
            logger.warning(
                "S3R mode direct: responses are sampled from the sparse policy, not from the dense one. This is "
                "for ablations (arXiv 2610.13202, section 6.3); they carry s3r_faithful: false, and "
                "log-probabilities are the sparse policy's."
            )


def worker_class(server_args: "ServerArgs") -> type:
    """Worker of the scheduler process, imported there only: it pulls in the model runner and the kernels."""
    from s3r_sglang.worker import S3RWorker

    return S3RWorker


def register_algorithm() -> None:
    for name in NAMES:
        SpeculativeAlgorithm.register(
            name,
            supports_overlap=True,
            validate_server_args=refuse_unsupported,
            spec_class=S3RAlgorithm,
        )(worker_class)
