"""Every change to SGLang is checked live: break one, and the server refuses."""

import inspect
import pkgutil
import re
import sys
import types
from importlib import resources
from pathlib import Path

import pytest

from s3r_sglang import plugin as s3r

INVENTORY = resources.files("s3r_sglang.patches") / "INVENTORY.md"


def parent_and_name(target):
    parent, name = target.rsplit(".", 1)
    return pkgutil.resolve_name(parent), name


def test_everything_is_installed(plugin):
    assert [status.name for status in plugin.verify_installed() if not status.ok] == []
    plugin.assert_installed()


@pytest.mark.parametrize("hook", s3r.HOOKS, ids=lambda hook: hook.target.removeprefix("sglang.srt."))
def test_a_hook_that_is_not_active_stops_the_start(plugin, monkeypatch, hook):
    parent, name = parent_and_name(hook.target)
    monkeypatch.setattr(parent, name, inspect.unwrap(getattr(parent, name)))
    with pytest.raises(RuntimeError, match=f"refuses to serve.*{re.escape(hook.target)}: is not wrapped"):
        plugin.assert_installed()


@pytest.mark.parametrize("hook", s3r.HOOKS, ids=lambda hook: hook.target.removeprefix("sglang.srt."))
def test_a_copy_imported_before_the_hook_stops_the_start(plugin, monkeypatch, hook):
    bypass = types.ModuleType("sglang.bypass")
    # Not unwrapped to the end: SGLang decorates some functions itself.
    links = plugin._wrappers(pkgutil.resolve_name(hook.target))
    bypass.copy = next(link for link in links if plugin._hook_of(link) is hook.function).__wrapped__
    monkeypatch.setitem(sys.modules, "sglang.bypass", bypass)
    with pytest.raises(RuntimeError, match=f"{re.escape(hook.target)}: is bypassed .* in sglang.bypass"):
        plugin.assert_installed()


def test_a_symbol_that_is_gone_stops_the_start(plugin, monkeypatch):
    parent, name = parent_and_name(s3r.HOOKS[-1].target)
    monkeypatch.delattr(parent, name)
    with pytest.raises(RuntimeError, match=f"{name}: does not exist"):
        plugin.assert_installed()


def test_missing_fields_stop_the_start(plugin, monkeypatch):
    from sglang.srt.server_args import ServerArgs

    monkeypatch.delitem(ServerArgs.__dataclass_fields__, "s3r_budget_ratio")
    with pytest.raises(RuntimeError, match="s3r_\\* fields are missing"):
        plugin.assert_installed()


def test_a_missing_algorithm_stops_the_start(plugin, monkeypatch):
    from sglang.srt.speculative import spec_registry

    monkeypatch.delitem(spec_registry._REGISTRY, "SELF-SPARSE")
    with pytest.raises(RuntimeError, match="are not registered"):
        plugin.assert_installed()


def test_a_broken_hook_stops_the_server_arguments(make_args, monkeypatch):
    """The main process asserts as well: it is there that requests are checked."""
    parent, name = parent_and_name(s3r.HOOKS[2].target)
    monkeypatch.setattr(parent, name, inspect.unwrap(getattr(parent, name)))
    with pytest.raises(RuntimeError, match="refuses to serve"):
        make_args()
    assert make_args(speculative_algorithm=None).speculative_algorithm is None


def test_another_release_is_refused(plugin, monkeypatch):
    import sglang.version

    monkeypatch.setattr(sglang.version, "__version__", "0.5.18")
    for entry in (plugin.register, plugin.assert_installed):
        with pytest.raises(RuntimeError, match=r"0\.5\.17 only, not 0\.5\.18: run pip install"):
            entry()


def inventory_rows():
    for line in INVENTORY.read_text().splitlines():
        if line.startswith("| `"):
            yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def test_inventory_lists_what_is_installed(plugin):
    listed = [(symbol, kind) for symbol, kind, *_ in inventory_rows()]
    installed = [(hook.target, hook.kind.lower()) for hook in plugin.HOOKS]
    assert listed == [(plugin.FIELDS, "fields"), (plugin.ALGORITHM, "register"), *installed]


@pytest.mark.parametrize("row", list(inventory_rows()), ids=lambda row: row[0].removeprefix("sglang.srt."))
def test_inventory_points_at_the_upstream_lines(row):
    import sglang

    symbol, _, place, *_ = row
    path, line = place.split(":")
    source = Path(sglang.__file__).parent.joinpath(path).read_text().splitlines()[int(line) - 1]
    if symbol == s3r.ALGORITHM:
        name = "register_algorithm"
    else:
        name = symbol.removesuffix(".__init__").removesuffix(" (fields)").rsplit(".", 1)[1]
    assert re.match(rf"\s*(async def|def|class) {name}\b", source)


def algorithm():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm.from_string("self-sparse")


def test_algorithm_answers_what_the_scheduler_asks(plugin):
    spec = algorithm()
    assert spec.is_speculative()
    assert not spec.is_ngram()
    assert not spec.need_topk()
    assert not spec.carries_draft_hidden_states()
    assert spec.supports_overlap
    assert "FutureMap" in inspect.getsource(type(spec).create_future_map)


def test_no_draft_pool_is_asked_for(make_args):
    from sglang.srt.mem_cache.kv_cache_builder import get_draft_kv_pool
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    worker = types.SimpleNamespace(draft_worker=None)
    args = make_args()
    assert get_draft_kv_pool(draft_worker=worker, spec_algorithm=algorithm(), server_args=args) is None
    with pytest.raises(AttributeError):
        get_draft_kv_pool(draft_worker=worker, spec_algorithm=SpeculativeAlgorithm.EAGLE, server_args=args)


def test_warm_up_and_graph_capture_get_a_chain(make_args):
    from sglang.srt.model_executor.runner import base_runner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from s3r_sglang.types import S3RVerifyInput

    def runner(spec_algorithm):
        model_runner = types.SimpleNamespace(spec_algorithm=spec_algorithm)
        return types.SimpleNamespace(model_runner=model_runner, captured_req_width=7)

    for spec_input in (
        base_runner.create_dummy_verify_input(algorithm(), make_args(), None, 7, False),
        DecodeCudaGraphRunner.get_spec_info(runner(algorithm()), 56),
    ):
        assert isinstance(spec_input, S3RVerifyInput)
        assert (spec_input.draft_token_num, spec_input.custom_mask) == (7, None)
        assert spec_input.is_verify_input()
    assert DecodeCudaGraphRunner.get_spec_info(runner(SpeculativeAlgorithm.NONE), 8) is None


def test_reserved_kv_covers_two_blocks(make_args):
    """SGLang doubles the block to absorb the lag of overlap scheduling."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    assert get_alloc_reserve_per_decode(make_args(speculative_num_steps=4)) == 2 * 5
