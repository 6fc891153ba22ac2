"""Weight updates, in the scheduler process: what the model does not take is refused, with one sentence."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from s3r_sglang.config import serves_rollouts

# Names that a whole `state_dict` or a rank of several may well have and SGLang rightly skips: buffers that it
# computes itself, and experts of another rank. (And `lm_head.weight` where it is tied.)
SKIPPED = ("rotary_emb.", ".experts.")

PARTLY_NEW = "The weights may be partly new: send all of them again."

NamedTensor = tuple[str, torch.Tensor]


def load_all_or_refuse(original, worker, recv_req) -> tuple[bool, str]:
    """Around `update_weights_from_tensor` and `…_from_distributed` of `BaseTpWorker`.

    SGLang's models skip a name that they do not know, and the update succeeds: a trainer that sends the names of
    a wrapped module (`module.model…`) would go on with samples of the old weights under a new label. And an
    exception, as of a wrong shape, would end the scheduler and the server with it. Returned instead, so that all
    ranks reach the barrier behind this call.
    """
    runner = worker.model_runner
    if not serves_rollouts(runner.server_args):
        return original(worker, recv_req)
    try:
        with _recorded(runner.model) as unused:
            success, message = original(worker, recv_req)
    except Exception as error:  # of the model's loader, of unpickling, of the process group
        return False, f"{type(error).__name__}: {str(error)[:500]} {PARTLY_NEW}"
    tied = getattr(runner.model.config, "tie_word_embeddings", False)
    names = [name for name in unused if not _may_be_skipped(name, tied)]
    if success and names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return False, (
            f"The model has no parameter {names[0]!r}{others}: send weights under the names of its Hugging Face "
            f"checkpoint. {PARTLY_NEW}"
        )
    return success, message


def _may_be_skipped(name: str, tied: bool) -> bool:
    return any(part in name for part in SKIPPED) or (tied and name == "lm_head.weight")


@contextmanager
def _recorded(model: Any) -> Iterator[list[str]]:
    """Within it, `model.load_weights` adds to the list the names that it wrote nothing for."""
    unused: list[str] = []
    load = model.load_weights

    def recording(weights: Iterable[NamedTensor], *args: Any, **kwargs: Any) -> Any:
        with _Writes() as writes:
            result = load(_watched(weights, writes), *args, **kwargs)
        # Nothing can be told of a loader that takes all pairs before it writes the first.
        if writes.count == 0 or writes.at_the_last_pair > 0:
            unused.extend(writes.unused)
        return result

    model.load_weights = recording
    try:
        yield unused
    finally:
        del model.load_weights


class _Writes(TorchDispatchMode):
    """Counts operations that write into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.at_the_last_pair = 0
        self.unused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.is_mutable
        return func(*args, **(kwargs or {}))


def _watched(weights: Iterable[NamedTensor], writes: _Writes) -> Iterator[NamedTensor]:
    """The same pairs; one for which nothing was written before the next is asked for has not been used."""
    for name, tensor in weights:
        before = writes.count
        yield name, tensor
        if writes.count == before:
            writes.unused.append(name)
    writes.at_the_last_pair = writes.count
