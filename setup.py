"""Map the repository's top-level folders to one importable package, `s3r_sglang`.

The folders `kernels/`, `patches/`, `rl_integration/` and `configs/` are mounted below it, so that nothing
but `s3r_sglang` lands in site-packages (SGLang itself depends on another distribution named `kernels`).
"""

from setuptools import find_packages, setup

MOUNTS = {
    "s3r_sglang.kernels.ops": "kernels/ops",
    "s3r_sglang.kernels.reference": "kernels/reference",
    "s3r_sglang.kernels.bench": "kernels/bench",
    "s3r_sglang.patches": "patches",
    "s3r_sglang.rl_integration": "rl_integration",
    "s3r_sglang.configs": "configs",
}


def packages() -> list[str]:
    found = ["s3r_sglang", *(f"s3r_sglang.{name}" for name in find_packages("s3r_sglang"))]
    for mount, folder in MOUNTS.items():
        found += [mount, *(f"{mount}.{name}" for name in find_packages(folder))]
    return found


setup(
    packages=packages(),
    package_dir={"s3r_sglang": "s3r_sglang", **MOUNTS},
    package_data={
        # The sgl_kernel stand-in is a search-path entry, not a package of ours.
        "s3r_sglang": ["py.typed", "data/*", "cpu/standin/sgl_kernel/*.py", "server/static/*"],
        "s3r_sglang.configs": ["*.yaml", "openrlhf/*"],
        "s3r_sglang.patches": ["INVENTORY.md"],
        # Search-path entries too.
        "s3r_sglang.rl_integration.openrlhf": ["standin/**/*.py"],
        "s3r_sglang.rl_integration.data": ["samples/*.jsonl"],
        "s3r_sglang.rl_integration.recipes": ["*.yaml"],
    },
)
