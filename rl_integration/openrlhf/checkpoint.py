"""A run that stops leaves a checkpoint of its last whole step: no training is lost with a rollout server."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openrlhf.trainer.ppo_trainer import PPOTrainer

logger = logging.getLogger(__name__)

_Base: Any = PPOTrainer.__ray_metadata__.modified_class


class S3RTrainer(_Base):
    """OpenRLHF's controller of synchronous training; it also saves when a rollout or an evaluation fails.

    Between two steps the weights and the data loader's state belong together. That state is from before the
    prompts of the step that failed, so a resumed run draws them again.
    """

    # Number of the last whole step and its client states; None before it and while a step trains.
    _whole: tuple[int, dict[str, Any]] | None = None

    def train_step(self, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
        """OpenRLHF's."""
        self._whole = None
        return super().train_step(rollout_samples, global_step)

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: Any = None, client_states: Any = None
    ) -> None:
        """OpenRLHF's, at the end of each step."""
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)
        self._whole = global_step, client_states

    def fit(self, global_step: int = 0) -> None:
        """Train; an error is raised again after the checkpoint."""
        try:
            super().fit(global_step)
        except Exception:
            # The error that stopped the run is the one to report, whatever becomes of this.
            with _logged("the checkpoint of the last whole step could not be written"):
                self._save()
            for tracker in filter(None, (self.tensorboard_logger, self.wandb_logger)):
                tracker.close()
            raise

    def _save(self) -> None:
        if self._whole is None:
            return
        global_step, client_states = self._whole
        if global_step % self.args.ckpt.save_steps == 0:
            return
        # Makes super's method save at this step; nothing is logged twice, for there is nothing to log.
        self.args.ckpt.save_steps = 1
        super().save_logs_and_checkpoints(global_step, {}, client_states)


@contextlib.contextmanager
def _logged(message: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception(message)


def latest(path: Path, since: float) -> Path | None:
    """Folder of the policy's newest checkpoint, if it was written after `since` (seconds of the epoch).

    Args:
        path: `--ckpt.path`.
    """
    folder = path / "_actor"
    # DeepSpeed's note of the tag, written after everything else.
    note = folder / "latest"
    if not note.exists() or note.stat().st_mtime < since:
        return None
    return (folder / note.read_text().strip()).absolute()
