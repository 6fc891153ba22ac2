"""Run OpenRLHF's own command line up to the point where training would start, without Ray and DeepSpeed.

    python tests/rl/openrlhf_parser.py SOURCE flags > configs/openrlhf/flags.json
    python tests/rl/openrlhf_parser.py SOURCE parse --actor.model_name_or_path …

SOURCE is the folder that holds the package. `flags` describes all flags; `parse` prints the namespace that
training would get, after OpenRLHF's checks, or fails as OpenRLHF would.
"""

import argparse
import contextlib
import importlib
import json
import runpy
import sys
import types
from pathlib import Path


class ReachedTraining(Exception):  # noqa: N818  (not an error)
    """Raised where `train` begins."""


def _stub(name, path=None, **members):
    module = types.ModuleType(name)
    if path:
        module.__path__ = [str(path)]
    vars(module).update(members)
    sys.modules[name] = module


def _stop():
    raise ReachedTraining


def install_stubs(source):
    """Put stand-ins for what the module imports; its own parser, helpers and checks stay."""
    _stub("ray", is_initialized=_stop)
    _stub("ray.util")
    _stub("ray.util.placement_group", placement_group=None)
    _stub("openrlhf", source / "openrlhf")
    _stub("openrlhf.cli", source / "openrlhf" / "cli")
    _stub("openrlhf.utils", source / "openrlhf" / "utils", get_strategy=None)
    importlib.import_module("openrlhf.utils.config")
    _stub("openrlhf.trainer")
    _stub("openrlhf.trainer.ray", create_vllm_engines=None)
    names = ("RayActorGroup", "ReferenceModelActor", "RewardModelActor")
    _stub("openrlhf.trainer.ray.launcher", **dict.fromkeys(names))
    _stub("openrlhf.trainer.ray.ppo_actor", PolicyModelActor=None)
    _stub("openrlhf.trainer.ray.ppo_critic", CriticModelActor=None)


def parse(source, argv):
    """The namespace that `train` gets."""
    install_stubs(source)
    sys.argv = ["train_ppo_ray", *argv]
    try:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    except ReachedTraining as reached:
        trace = reached.__traceback__
        while trace.tb_frame.f_code.co_name != "train":
            trace = trace.tb_next
        return trace.tb_frame.f_locals["args"]
    raise AssertionError("the module did not call train()")


def flags(source):
    """Flag -> its kind (switch, value, list), type, and choices or number of words where they are limited."""
    caught = []
    original = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = lambda self, *a, **k: caught.append(self) or _stop()
    install_stubs(source)
    with contextlib.suppress(ReachedTraining):
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    argparse.ArgumentParser.parse_args = original
    described = {}
    for action in caught[0]._actions:
        name = action.option_strings[0].removeprefix("--")
        if name in ("-h", "local_rank"):
            continue
        entry = {
            "kind": "list" if action.nargs not in (None, 0) else "switch" if action.nargs == 0 else "value"
        }
        if entry["kind"] != "switch":
            entry["type"] = (action.type or str).__name__
        if isinstance(action.nargs, int) and action.nargs > 0:
            entry["words"] = action.nargs
        if action.choices:
            entry["choices"] = list(action.choices)
        described[name] = entry
    return described


def _plain(value):
    if isinstance(value, types.SimpleNamespace):
        return {name: _plain(item) for name, item in vars(value).items()}
    return value


if __name__ == "__main__":
    folder, what, *words = sys.argv[1:]
    if what == "flags":
        lines = [
            f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(flags(Path(folder)).items())
        ]
        print("{\n" + ",\n".join(lines) + "\n}")
    else:
        print(json.dumps(_plain(parse(Path(folder), words)), default=str))
