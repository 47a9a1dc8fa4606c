"""Weights divided among ranks that are played in turn: every format, 2 and 4, odd shapes."""

import math
from itertools import product

import pytest
import torch

import anybit
from anybit.core.packed import Packed, cut, tensor_shapes
from anybit.errors import InvalidInput
from anybit.nn.sharding import Piece, check_columns, share
from tests import forks
from tests.multi_gpu import SCHEMES
from tests.needs import pairs
from tests.specs import SPECS

RANKS = (2, 4)


def unit(fmt):
    """Columns that cannot be divided: a group, a vector, or a tile."""
    return math.lcm(fmt.tile[1], *(e.group for e in fmt.entries().values() if e.group))


def packed_weight(spec, n, k, seed=0):
    """Random codes and a random grid: every bit of storage counts."""
    fmt = anybit.get_format(spec)
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**fmt.bits, (n, fmt.code_count(k)), generator=random)
    grid = {}
    for name, entry in fmt.entries().items():
        shape = entry.shape(n, k)
        if entry.default_dtype.is_floating_point:
            grid[name] = (torch.rand(shape, generator=random) + 0.5).to(entry.default_dtype)
        else:
            grid[name] = torch.randint(1, 17, shape, generator=random).to(entry.default_dtype)
    return Packed.from_codes(fmt, (n, k), codes, grid)


def filled(packed, n, columns, first):
    """A piece that was given every stored tensor of a weight, in an arbitrary order."""
    piece = Piece("layer", packed.format.spec, n, packed.shape[1], columns)
    for key, tensor in reversed(packed.tensors().items()):
        piece.take(key, tensor, first)
    return piece.finish()


def test_scales_that_are_no_numbers_are_refused():
    packed = packed_weight("int4:group=32", 32, 64)
    packed.grid["scale"][3, 1] = torch.inf
    with pytest.raises(InvalidInput, match=r"layer\.scale: 1 values are NaN or inf.*\(3, 1\)"):
        filled(packed, 32, slice(0, 64), 0)
    assert filled(packed, 32, slice(0, 32), 0).shape == (32, 32)  # a part without it


@pytest.mark.parametrize(("spec", "ranks"), pairs(SPECS, RANKS))
def test_rows_of_all_ranks_are_the_weight(spec, ranks):
    fmt = anybit.get_format(spec)
    n = 3 * fmt.tile[0]
    packed = packed_weight(spec, n * ranks, 3 * unit(fmt))
    parts = []
    for rank in range(ranks):
        rows = share(n * ranks, rank, ranks)
        part = packed.rows(rows)
        piece = filled(packed, n, slice(None), rows.start)
        assert all(torch.equal(t, piece.tensors()[key]) for key, t in part.tensors().items())
        parts.append(part.dequantize())
    assert torch.equal(torch.cat(parts), packed.dequantize())


@pytest.mark.parametrize(("spec", "cut"), pairs(SPECS, list(product(RANKS, [1, 3, 5])), 2))
def test_columns_of_all_ranks_are_the_weight(spec, cut):
    """A rank's columns are 1, 3 or 5 groups, vectors or single weights: words are split."""
    ranks, times = cut
    fmt = anybit.get_format(spec)
    k, n = times * unit(fmt) * ranks, 5 * fmt.tile[0]
    packed = packed_weight(spec, n, k)
    x = torch.randn(3, k, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts, y = [], torch.zeros(3, n, dtype=torch.float64)
    for rank in range(ranks):
        columns = share(k, rank, ranks)
        part = packed.columns(columns)
        piece = filled(packed, n, columns, 0)
        assert all(torch.equal(t, piece.tensors()[key]) for key, t in part.tensors().items())
        assert part.codes().shape == (n, packed.format.code_count(k // ranks))
        parts.append(part.dequantize())
        y += x[:, columns] @ part.dequantize().double().T
    assert torch.equal(torch.cat(parts, 1), packed.dequantize())
    assert torch.allclose(y, x @ packed.dequantize().double().T, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("spec", SPECS)
def test_spare_bits_of_a_part_are_zero(spec):
    """Kernels lay words out as they are: what follows a part's last code is no neighbour's."""
    fmt = anybit.get_format(spec)
    packed = packed_weight(spec, 2 * fmt.tile[0], 6 * unit(fmt))
    part = packed.columns(slice(0, 3 * unit(fmt)))
    again = Packed.from_codes(fmt, part.shape, part.codes(), part.grid)
    assert all(torch.equal(a, b) for a, b in zip(part.planes, again.planes, strict=True))


@pytest.mark.parametrize("spec", [s for s in SPECS if unit(anybit.get_format(s)) > 1])
def test_a_divided_group_names_the_layer_and_a_group_that_fits(spec):
    fmt = anybit.get_format(spec)
    k = unit(fmt)  # one group or vector for two ranks
    with pytest.raises(ValueError, match=rf"mlp\.down: K={k} over 2 ranks is {k // 2} ") as error:
        Piece("mlp.down", spec, 16, k, share(k, 0, 2))
    remedy = str(error.value)
    if "quantize it with group=" in remedy:
        group = int(remedy.split("quantize it with group=")[1].split(",")[0])
        name, _, rest = spec.partition(":")
        rest = [option for option in rest.split(",") if option and "group" not in option]
        fits = anybit.get_format(f"{name}:{','.join([*rest, f'group={group}'])}")
        check_columns(fits, k, 2)
    else:
        others = (f"{fmt.unit} of {fmt.tile[1]}", "one scale a row", "use another format")
        assert any(other in remedy for other in others)


@pytest.mark.parametrize("spec", [s for s in SPECS if unit(anybit.get_format(s)) > 1])
def test_cuts_inside_a_group_are_refused(spec):
    """Also where the part has a whole number of groups, and would decode with others' scales."""
    fmt = anybit.get_format(spec)
    size = unit(fmt)
    packed = packed_weight(spec, 2 * fmt.tile[0], 4 * size)
    for columns in (slice(size // 2, size // 2 + size), slice(0, size + size // 2)):
        with pytest.raises(
            ValueError, match=rf"{columns.start} to {columns.stop} of .* {size} col"
        ):
            packed.columns(columns)


def test_rows_inside_a_tile_are_refused():
    packed = packed_weight("trellis", 48, 64)
    with pytest.raises(ValueError, match=r"rows 16 to 40 split a tile .* multiples of 16 rows"):
        packed.rows(slice(16, 40))
    with pytest.raises(ValueError, match="rows 8 to 24 split a tile"):
        cut(packed.format, 64, "scale", packed.grid["scale"], slice(8, 24), slice(None))
    with pytest.raises(ValueError, match="rows 0 to 40 split a tile"):
        Piece("up", "trellis", 40, 64).take("scale", packed.grid["scale"])


def test_what_cannot_be_divided_at_all():
    with pytest.raises(ValueError, match="heads: 10 cannot be divided among 4 ranks"):
        share(10, 0, 4, "heads")
    with pytest.raises(ValueError, match=r"K=1003 .*cannot be divided|1003 cannot be divided"):
        check_columns(anybit.get_format("int4"), 1003, 2)


def test_missing_short_and_misshapen_tensors_are_named():
    packed = packed_weight("fp6", 8, 64)
    tensors = packed.tensors()
    piece = Piece("q_proj", "fp6", 4, 64)
    piece.take("codes4", tensors["codes4"], 4)
    with pytest.raises(ValueError, match="q_proj: the checkpoint lacks codes2, scale"):
        piece.finish()
    with pytest.raises(ValueError, match=r"q_proj\.scale: .* 8 rows, too few for the 4 from 6 on"):
        piece.take("scale", tensors["scale"], 6)
    with pytest.raises(ValueError, match=r"q_proj\.codes2: .* \(8, 3\), .* want \(8, 4\)"):
        piece.take("codes2", tensors["codes2"][:, :3], 0)
    with pytest.raises(ValueError, match=r"q_proj\.zero: in the checkpoint, but not in fp6"):
        piece.take("zero", tensors["scale"], 0)


def test_rows_beyond_a_vocabulary_decode_to_zero():
    packed = packed_weight("int4:group=32", 5, 64)
    piece = Piece("lm_head", "int4:group=32", 8, 64)
    for key, tensor in packed.tensors().items():
        piece.take(key, tensor, 3, padded=True)
    w = piece.finish().dequantize()
    assert torch.equal(w[:2], packed.dequantize()[3:])
    assert not w[2:].any()


def test_dense_parts_are_slices():
    w = torch.randn(6, 10)
    piece = Piece("layer", None, 2, 10, slice(5, 10))
    piece.take("weight", w, 4)
    assert torch.equal(piece.finish(), w[4:, 5:])


def test_columns_in_an_order_of_their_own_become_dense():
    """Act-order: a rank's columns are no slice of what is stored."""
    fmt = anybit.get_format("int4:group=16,order")
    packed = packed_weight(fmt.spec, 4, 64)
    packed.grid["order"] = torch.randperm(64, dtype=torch.int32)
    rows = packed.rows(slice(1, 3))
    assert torch.equal(rows.dequantize(), packed.dequantize()[1:3])
    with pytest.raises(ValueError, match="cannot be cut along K"):
        packed.columns(slice(0, 32))
    parts = [filled(packed, 4, share(64, rank, 2), 0) for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), packed.dequantize())


def test_a_part_does_not_hold_on_to_the_whole():
    packed = packed_weight("int4", 8, 64)
    piece = Piece("layer", "int4", 2, 64)
    for key, tensor in packed.tensors().items():
        piece.take(key, tensor, 2)
    for key, part in piece.tensors.items():
        assert part.untyped_storage().nbytes() == part.nbytes, key
        size, _ = tensor_shapes(packed.format, (2, 64))[key]
        assert part.shape == size
        assert torch.equal(
            part, cut(packed.format, 64, key, packed.tensors()[key], slice(2, 4), slice(0, 64))
        )


def test_two_processes():
    """Layers and a block divided among two processes; two GPUs run the same script."""
    code = "import sys, warnings; warnings.simplefilter('error');"
    code += "from tests.multi_gpu import main; sys.exit(main())"
    ran = forks.run(code, "--cpu", OMP_NUM_THREADS="1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("times the undivided one's error") == len(SCHEMES)
