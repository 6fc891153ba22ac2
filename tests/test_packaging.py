"""What lands in site-packages, and what the installed distribution offers."""

import ast
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    """Names in a wheel built from the tracked and new files of this tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_only_s3r_sglang_lands_in_site_packages(wheel_names):
    tops = {name.split("/", 1)[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"s3r_sglang"}


@pytest.mark.parametrize("folder", ["s3r_sglang", "kernels", "patches", "rl_integration", "configs"])
def test_every_source_file_is_in_the_wheel(wheel_names, folder):
    inside = {name.removeprefix("s3r_sglang/") for name in wheel_names}
    missing = []
    for path in (ROOT / folder).rglob("*.py"):
        name = path.relative_to(ROOT).as_posix().removeprefix("s3r_sglang/")
        if name not in inside:
            missing.append(name)
    assert missing == []


def test_data_files_are_in_the_wheel(wheel_names):
    assert {
        "s3r_sglang/py.typed",
        "s3r_sglang/data/demo_prompts.jsonl",
        "s3r_sglang/server/static/index.html",
        "s3r_sglang/patches/INVENTORY.md",
        "s3r_sglang/configs/default.yaml",
    } <= set(wheel_names)


def test_sglang_and_the_shell_find_us():
    points = {
        (point.group, point.name): point.value for point in metadata.distribution("s3r-sglang").entry_points
    }
    assert points == {
        ("console_scripts", "s3r"): "s3r_sglang.cli:main",
        ("console_scripts", "s3r-openrlhf"): "s3r_sglang.rl_integration.openrlhf.cli:main",
        ("sglang.srt.plugins", "s3r"): "s3r_sglang.plugin:register",
    }


def test_importing_the_command_line_imports_no_framework():
    """`s3r --help` has to answer at once, and `sgl_kernel` must not load before the stand-in is in place."""
    code = "import sys, s3r_sglang.cli; print(sorted({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []
