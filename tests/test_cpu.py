"""The `sgl_kernel` stand-in: its functions against their definition, its absence of everything else."""

import os
import subprocess
import sys

import pytest
import torch

from s3r_sglang import cpu


@pytest.fixture(scope="module")
def standin():
    """The stand-in as a module, also where the real `sgl_kernel` is importable."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("standin", cpu.STANDIN / "sgl_kernel" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_table_rows_take_the_slots_in_request_order(standin):
    table = torch.zeros(4, 8, dtype=torch.int32)
    requests, start, end = torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([4, 5])
    slots = torch.tensor([11, 12, 13, 21, 22])
    standin.assign_req_to_token_pool_cpu(requests, table, start, end, slots, 8)
    assert table[2].tolist() == [0, 11, 12, 13, 0, 0, 0, 0]
    assert table[0].tolist() == [0, 0, 0, 21, 22, 0, 0, 0]
    assert table[[1, 3]].abs().sum() == 0

    read = torch.full((6,), -1)
    standin.assign_extend_cache_locs_cpu(requests, table, start, end, read, 8)
    assert read.tolist() == [11, 12, 13, 21, 22, -1]


def test_a_request_without_new_tokens_takes_no_slot(standin):
    table = torch.zeros(2, 4, dtype=torch.int32)
    standin.assign_req_to_token_pool_cpu(
        torch.tensor([0, 1]), table, torch.tensor([2, 0]), torch.tensor([2, 1]), torch.tensor([7]), 4
    )
    assert table.tolist() == [[0, 0, 0, 0], [7, 0, 0, 0]]


def test_kv_rows_move_in_every_buffer_even_if_they_overlap(standin):
    layers = [torch.arange(24, dtype=torch.bfloat16).reshape(6, 2, 2) + 100 * layer for layer in range(3)]
    before = [layer.clone() for layer in layers]
    standin.copy_all_layer_kv_cache_cpu(
        torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64),
        torch.tensor([8, 8, 8]),
        torch.tensor([0, 1, 2]),
        torch.tensor([1, 2, 5]),
    )
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer, old[[1, 2, 5, 3, 4, 5]])


def test_any_other_function_raises_when_called(standin):
    function = standin.fast_topk_v2
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.fast_topk_v2 has no CPU implementation"):
        function(1, k=2)
    with pytest.raises(AttributeError):
        _ = standin.__path_of_nothing__


def test_prepare_keeps_what_the_user_has_set():
    environ = {"PYTHONPATH": "/mine", "OMP_NUM_THREADS": "4"}
    arguments = cpu.prepare(environ)
    cpu.prepare(environ)
    assert environ == {
        "PYTHONPATH": f"{cpu.STANDIN}{os.pathsep}/mine",
        "OMP_NUM_THREADS": "4",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    assert arguments == cpu.SERVER_ARGS
    assert arguments is not cpu.SERVER_ARGS


def test_child_processes_import_the_standin():
    environ = dict(os.environ)
    cpu.prepare(environ)
    command = [sys.executable, "-c", "import sgl_kernel; print(sgl_kernel.__version__)"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("+s3r.cpu")
