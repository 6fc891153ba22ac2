"""Weight updates, in the scheduler process: what the model does not take is refused, with one sentence, and what
has been written is remembered, so that nothing is sampled from weights that are partly new."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from s3r_sglang.config import serves_rollouts

# Names that a whole `state_dict` or a rank of several may well have and SGLang rightly skips: buffers that it
# computes itself, and experts of another rank. (And `lm_head.weight` where it is tied.)
SKIPPED = ("rotary_emb.", ".experts.")
# Ends of the names of parameters that every checkpoint has; others, such as the scales of a KV cache, need not be.
REQUIRED = ("weight", "bias")

PARTLY_NEW = "The weights may be partly new: send all of them again."

NamedTensor = tuple[str, torch.Tensor]
Fault = Callable[[torch.nn.Module, "_Writes"], str | None]


@dataclass
class Ledger:
    """What the updates since the last complete one have written; a complete one writes every parameter.

    An update may take several requests, and a request does not say whether it is the last one.

    Attributes:
        written: addresses of the storages of the parameters that are new.
        mixed: whether an update has failed on the way, so that the weights are neither the old nor the new ones.
    """

    written: set[int] = field(default_factory=set)
    mixed: bool = False

    def settle(self, success: bool, complete: bool) -> None:
        """Take note of an update; after a failure, what has been sent before must be sent again."""
        if not success:
            self.mixed = self.mixed or bool(self.written)
        elif complete:
            self.mixed = False
        if complete or not success:
            self.written.clear()


def ledger_of(worker: Any) -> Ledger:
    """The ledger of the weights of `worker`, a `BaseTpWorker`."""
    return vars(worker).setdefault("s3r_ledger", Ledger())


def load_all_or_refuse(original, worker, recv_req) -> tuple[bool, str]:
    """Around `update_weights_from_tensor` and `…_from_distributed` of `BaseTpWorker`.

    SGLang's models skip a name that they do not know, and the update succeeds: a trainer that sends the names of
    a wrapped module (`module.model…`) would go on with samples of the old weights under a new label. And an
    exception, as of a wrong shape, would end the scheduler and the server with it. Returned instead, so that all
    ranks reach the barrier behind this call.
    """
    return _load(original, worker, recv_req, _unknown_name)


def load_whole_or_refuse(original, worker, recv_req) -> tuple[bool, str]:
    """Around `update_weights_from_disk` of `BaseTpWorker`.

    A folder that its trainer has not finished, or not at all, loads what is there and succeeds. And after an
    exception SGLang goes back to the old weights by loading the new folder once more, which ends the scheduler.
    """
    return _load(original, worker, recv_req, _missing_parameter)


def load_or_refuse(original, worker, recv_req) -> tuple[bool, str]:
    """Around `update_weights_from_ipc` of `BaseTpWorker`, which answers for its exceptions itself."""
    return _load(original, worker, recv_req, lambda model, writes: None)


def _load(original, worker, recv_req, fault_of: Fault) -> tuple[bool, str]:
    runner = worker.model_runner
    if not serves_rollouts(runner.server_args):
        return original(worker, recv_req)
    model, writes = runner.model, _Writes()
    try:
        with _recorded(model, writes), _bypassing_the_loader(recv_req, writes):
            success, message = original(worker, recv_req)
        if success and (fault := fault_of(model, writes)):
            success, message = False, fault
    except Exception as error:  # of the model's loader, of unpickling, of the process group
        success, message = False, f"{type(error).__name__}: {str(error)[:500]}"
    return _settled(worker, success, message, writes, from_disk=fault_of is _missing_parameter)


def _settled(worker, success: bool, message: str, writes: "_Writes", from_disk: bool) -> tuple[bool, str]:
    """Enter the outcome in the ledger, that of all ranks: SGLang answers with the outcome of rank 0."""
    ledger, storages = ledger_of(worker), _storages(worker.model_runner.model)
    ledger.written |= writes.storages & set(storages.values())
    outcome = success, message, bool(ledger.written), from_disk or not _unwritten(storages, ledger.written)
    group = worker.model_runner.tp_group
    outcomes = group.all_gather_object(outcome) if group.world_size > 1 else [outcome]
    success, message, _, _ = next((each for each in outcomes if not each[0]), outcome)
    if any(written for _, _, written, _ in outcomes) and not ledger.written:
        ledger.written.add(0)  # of another rank
    ledger.settle(success, complete=success and all(complete for *_, complete in outcomes))
    if success:
        return True, message
    return False, f"{message} {PARTLY_NEW if ledger.mixed else 'Nothing has been changed.'}"


def _storages(model: torch.nn.Module) -> dict[str, int]:
    """Address of the storage of each parameter."""
    return {name: weight.untyped_storage().data_ptr() for name, weight in model.named_parameters()}


def _unwritten(storages: dict[str, int], written: set[int]) -> list[str]:
    """Names of the parameters that a whole update would have written, and that are not."""
    return [name for name, at in storages.items() if name.endswith(REQUIRED) and at not in written]


def _unknown_name(model: torch.nn.Module, writes: "_Writes") -> str | None:
    tied = getattr(model.config, "tie_word_embeddings", False)
    names = [name for name in writes.unused if not _may_be_skipped(name, tied)]
    if not names:
        return None
    return (
        f"The model has no parameter {_and_more(names)}: send weights under the names of its Hugging Face "
        "checkpoint."
    )


def _missing_parameter(model: torch.nn.Module, writes: "_Writes") -> str | None:
    if getattr(model, "quant_config", None) is not None:
        return None  # what is loaded is not what is kept
    names = _unwritten(_storages(model), writes.storages)
    return f"The folder has no weights for {_and_more(names)}." if names else None


def _and_more(names: list[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _may_be_skipped(name: str, tied: bool) -> bool:
    return any(part in name for part in SKIPPED) or (tied and name == "lm_head.weight")


class _Writes(TorchDispatchMode):
    """Notes operations that write into a tensor.

    Attributes:
        count: number of them.
        storages: addresses of what they wrote to.
        unused: names for which nothing was written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.storages: set[int] = set()
        self.unused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.count += 1
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._note(args[position] if position < len(args) else kwargs.get(argument.name))
        return result

    def _note(self, written: Any) -> None:
        for tensor in written if isinstance(written, list | tuple) else [written]:
            if isinstance(tensor, torch.Tensor):
                self.storages.add(tensor.untyped_storage().data_ptr())


@contextmanager
def _recorded(model: Any, writes: _Writes) -> Iterator[None]:
    """Within it, `model.load_weights` notes what it writes, and the names that it wrote nothing for."""
    own, load = vars(model).get("load_weights"), model.load_weights

    def recording(weights: Iterable[NamedTensor], *args: Any, **kwargs: Any) -> Any:
        unused: list[str] = []
        before = at_the_last_pair = writes.count

        def watched() -> Iterator[NamedTensor]:
            """The same pairs; one for which nothing was written before the next is asked for is not used."""
            nonlocal at_the_last_pair
            for name, tensor in weights:
                count = writes.count
                yield name, tensor
                if writes.count == count:
                    unused.append(name)
            at_the_last_pair = writes.count

        with writes:
            result = load(watched(), *args, **kwargs)
        # Nothing can be told of a loader that takes all pairs before it writes the first.
        if writes.count == before or at_the_last_pair > before:
            writes.unused += unused
        return result

    model.load_weights = recording
    try:
        yield
    finally:
        del model.load_weights
        if own is not None:
            model.load_weights = own


def _bypassing_the_loader(recv_req: Any, writes: _Writes) -> AbstractContextManager[Any]:
    """`writes` for load formats ("direct", or the user's own function) that do not call `model.load_weights`."""
    tensors = hasattr(recv_req, "serialized_named_tensors")
    return writes if tensors and recv_req.load_format not in (None, "flattened_bucket") else nullcontext()
