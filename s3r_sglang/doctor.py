"""Check an installation: what works, what does not, and what to do about it."""

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from s3r_sglang import cpu, models

DISTRIBUTION = "s3r-sglang"
ENTRY_POINTS = "sglang.srt.plugins"


@dataclass(frozen=True)
class Check:
    """One finding; `remedy` says what to do when it is not `ok`."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def checks() -> Iterator[Check]:
    """All checks, cheap ones first. Imports SGLang into this process, on a CPU with the stand-in."""
    yield check_python()
    yield from checks_of_requirements()
    yield check_entry_point()
    yield check_device()
    yield check_kernels()
    yield from checks_of_hooks()
    yield check_models()


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Check("Python", supported, version, "use Python 3.11 or 3.12")


def checks_of_requirements() -> Iterator[Check]:
    """The versions this package pins, from its own metadata."""
    for line in metadata.requires(DISTRIBUTION) or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = "not installed"
        fits = version != "not installed" and requirement.specifier.contains(version, prereleases=True)
        wanted = f"pip install '{requirement}'"
        if not fits or "==" in str(requirement.specifier):
            yield Check(requirement.name, fits, version, wanted)


def check_entry_point() -> Check:
    name = "SGLang plugin"
    found = [point for point in metadata.entry_points(group=ENTRY_POINTS) if point.name == "s3r"]
    if not found:
        return Check(name, False, "entry point not found", "install the package again: pip install -e .")
    allowed = [word.strip() for word in os.environ.get("SGLANG_PLUGINS", "").split(",") if word.strip()]
    if allowed and "s3r" not in allowed:
        detail = f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves it out"
        return Check(name, False, detail, "add s3r to SGLANG_PLUGINS, or unset it")
    return Check(name, True, f"entry point {found[0].value}")


def check_device() -> Check:
    import torch

    if not cpu.has_gpu():
        return Check("device", True, f"no GPU visible to torch {torch.__version__}: serving on the CPU")
    major, minor = torch.cuda.get_device_capability()
    detail = f"{torch.cuda.get_device_name()}, sm_{major}{minor}, {torch.cuda.device_count()} visible"
    return Check("device", major >= 8, detail, "the Triton kernels need compute capability 8.0 or newer")


def check_kernels() -> Check:
    if not cpu.has_gpu():
        cpu.prepare()
    try:
        version = importlib.import_module("sgl_kernel").__version__
    except ImportError as error:
        remedy = "reinstall sglang-kernel for this CUDA version, or hide the GPU with CUDA_VISIBLE_DEVICES="
        return Check("sgl_kernel", False, str(error).strip().splitlines()[0], remedy)
    return Check("sgl_kernel", True, version)


def checks_of_hooks() -> Iterator[Check]:
    remedy = f"another plugin may be in the way; try SGLANG_PLUGINS=s3r, then reinstall {DISTRIBUTION}"
    try:
        from sglang.srt.plugins import load_plugins

        from s3r_sglang import plugin

        load_plugins()
        statuses = plugin.verify_installed()
    except Exception as error:
        # Whatever goes wrong in SGLang's or our start-up is the finding.
        yield Check("hooks", False, f"{type(error).__name__}: {error}", remedy)
        return
    for status in statuses:
        if not status.ok:
            yield Check(status.name, False, status.detail, remedy)
    active = sum(status.ok for status in statuses)
    yield Check("hooks", active == len(statuses), f"{active} of {len(statuses)} active", remedy)


def check_models() -> Check:
    folder = models.cache_dir()
    here = [name for name in models.MODELS if models.is_complete(folder / name)]
    return Check("models", True, f"{', '.join(here) or 'none fetched'} in {folder}")
