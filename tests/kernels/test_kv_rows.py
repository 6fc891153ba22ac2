import pytest
import torch
from s3r_sglang.kernels.ops import kv_rows
from s3r_sglang.kernels.reference import kv_rows as reference

PAGES, BLOCK = 50, 4


def make_layers(device, row, dtype=torch.float16, count=6, strided=False):
    generator = torch.Generator().manual_seed(row)
    width = row + 3 if strided else row
    pools = [torch.randn((PAGES, width), generator=generator).to(device, dtype) for _ in range(count)]
    return [pool[:, :row] for pool in pools]


def row_pointers(layers):
    return torch.tensor([layer.data_ptr() for layer in layers], device=layers[0].device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("tokens", "row"), [(0, 8), (1, 6), (4, 16), (5, 1), (13, 6), (40, 130)])
@pytest.mark.parametrize("strided", [False, True])
def test_blocks_hold_the_rows_bit_by_bit(device, tokens, row, dtype, strided):
    layers = make_layers(device, row, dtype, strided=strided)
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))[:tokens].to(device)
    pointers = row_pointers(layers)
    # One element more than needed, which must stay as it is.
    want = torch.full((tokens * 6 * row + 1,), 7, dtype=dtype, device=device)
    got = want.clone()
    reference.gather_rows(layers, pointers, pages, want, BLOCK)
    kv_rows.gather_rows(layers, pointers, pages, got, BLOCK)
    assert torch.equal(got, want)
    assert got[-1] == 7
    # Block by block, each layer's rows together.
    begin = tokens // BLOCK * BLOCK * 6 * row
    last = got[begin:-1].view(6, -1, row)
    for rows, layer in zip(last, layers, strict=True):
        assert torch.equal(rows, layer[pages[tokens // BLOCK * BLOCK :]])


@pytest.mark.parametrize("tokens", [0, 1, 4, 13, 25])
def test_rows_return_to_other_pages_and_nowhere_else(device, tokens):
    layers = make_layers(device, 6)
    before = [layer.clone() for layer in layers]
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(2)).to(device)
    source, target = order[:tokens], order[PAGES - tokens :]
    pointers = row_pointers(layers)
    packed = torch.empty(tokens * 6 * 6, dtype=torch.float16, device=device)
    kv_rows.gather_rows(layers, pointers, source, packed, BLOCK)
    for layer in layers:
        layer[source] = torch.nan
    kv_rows.scatter_rows(layers, pointers, target, packed, BLOCK)
    rest = order[tokens : PAGES - tokens]
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[target], old[source])
        assert torch.equal(layer[rest], old[rest])


def test_arguments_that_do_not_fit_are_refused(device):
    layers = make_layers(device, 6)
    pointers, pages = row_pointers(layers), torch.arange(5, device=device)
    packed = torch.empty(5 * 6 * 6, dtype=torch.float16, device=device)
    faults = [
        ((layers, pointers, pages, packed[:-1], BLOCK), "at least 180 long"),
        ((layers, pointers, pages, packed.float(), BLOCK), "dtype torch.float16"),
        ((layers, pointers, pages.int(), packed, BLOCK), "pages must be"),
        ((layers, pointers[:5], pages, packed, BLOCK), "pointers must be"),
        (([*layers[:5], layers[5][1:]], pointers, pages, packed, BLOCK), "alike"),
        (([layer.t() for layer in layers], pointers, pages, packed, BLOCK), "contiguous in a row"),
        ((layers, pointers, pages, packed, 0), "block_tokens is 0"),
    ]
    for arguments, message in faults:
        with pytest.raises(ValueError, match=message):
            kv_rows.gather_rows(*arguments)
