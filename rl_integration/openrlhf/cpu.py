"""DeepSpeed on a machine without a GPU, without compiling its CPU kernels first (about seven minutes)."""

from typing import Any

from openrlhf.utils.deepspeed import DeepspeedStrategy


class CPUStrategy(DeepspeedStrategy):
    """OpenRLHF's strategy with PyTorch's AdamW and gloo in the place of DeepSpeed's compiled ones."""

    def get_ds_train_config(self, optim_dict: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
        """OpenRLHF's configuration, and DeepSpeed's switch for PyTorch's optimizer."""
        config = super().get_ds_train_config(optim_dict, **kwargs)
        if optim_dict is not None and optim_dict["type"] == "AdamW":
            config["optimizer"]["params"]["torch_adam"] = True
        return config

    def setup_distributed(self, *args: Any, **kwargs: Any) -> None:
        """OpenRLHF's, after DeepSpeed was told that its shared-memory collectives are not there."""
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        super().setup_distributed(*args, **kwargs)
