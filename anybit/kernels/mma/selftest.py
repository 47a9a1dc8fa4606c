"""Whether the kernels of this family compute what the definition says on the GPU at hand.

They were run on few kinds of GPU. So before a kernel is used on a GPU for the first time, it
multiplies small problems whose products are known: one-hot tokens read every weight back, small
integers add up exactly. The verdict is kept beside the compiled kernels, for this GPU's name, its
driver and this very kernel.

A wrong kernel may leave the process's CUDA context unusable, so another process runs the test.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from anybit.core.format import Format, get_format
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.files.directory import write_json
from anybit.kernels.backend import LayerSpec
from anybit.kernels.cute import cells, operands
from anybit.kernels.cute.driver import driver_version
from anybit.kernels.cute.jit import kernel_file, kernel_folder
from anybit.kernels.mma import codebook_linear, codebook_selftest, linear, tiles
from anybit.kernels.mma.codebook_tiles import CodebookKernel
from anybit.kernels.mma.tiles import Gpu, Kernel, Tile, gpu_of
from anybit.kernels.reference import operand_weight

log = logging.getLogger(__name__)
RIGHT = "right"
LIMIT = 900  # seconds, compilation included


def kernels_of(
    layer: LayerSpec, dtype: torch.dtype, gpu: Gpu, experts: bool = False
) -> Sequence[Kernel | CodebookKernel]:
    """Every kernel that a layer, or many as experts, may launch; none where one does not fit."""
    if cells.takes(layer.format):
        return codebook_linear.kernels_of(layer, dtype, gpu)
    operand = getattr(torch, operands.operand_of(layer.activation, dtype))
    decoder = operands.decoder_for(layer.format, operand)
    output = operands.NAMES[dtype]
    if experts:
        return tiles.family_experts(decoder, gpu, output)
    return tiles.family(decoder, gpu, layer.shape[0], output)


def refuse(
    layer: LayerSpec, kernels: Sequence[Kernel | CodebookKernel], experts: bool = False
) -> str | None:
    """None if all kernels are right, or not tested yet while the dtype is unknown; else why not."""
    known = verdicts(layer.device)
    names = [kernel_file(kernel).name for kernel in kernels]
    if layer.dtype is not None and not known.keys() >= set(names):
        known = tested(layer, experts)
    wrong = [name for name in names if known.get(name, RIGHT) != RIGHT]
    if not wrong:
        return None
    return (
        f"{len(wrong)} of its {len(names)} kernels failed their self-test on this GPU: "
        f"{known[wrong[0]]}; please report it with {verdict_file(layer.device)}"
    )


def summary(device: torch.device) -> str | None:
    """What has been tested on a GPU, in words; None: nothing."""
    known = verdicts(device)
    if not known:
        return None
    wrong = sum(verdict != RIGHT for verdict in known.values())
    return f"{len(known) - wrong} of {len(known)} kernels for mma.sync passed their self-test"


# Verdicts.


def verdict_file(device: torch.device) -> Path:
    """Where a GPU's verdicts lie."""
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-").replace("/", "-")
    return kernel_folder() / f"selftest-{name}-driver{driver_version()}.json"


def verdicts(device: torch.device) -> dict[str, str]:
    """Verdicts by the name of a kernel's file: `RIGHT`, or what was wrong."""
    path = verdict_file(device)
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}  # made again
    return found if isinstance(found, dict) else {}


def record(device: torch.device, new: dict[str, str]) -> dict[str, str]:
    """Add verdicts to the file."""
    path = verdict_file(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = verdicts(device) | new
    write_json(path, known)
    return known


def tested(layer: LayerSpec, experts: bool) -> dict[str, str]:
    """Run the test of `kernels_of` in another process; all verdicts."""
    assert layer.dtype is not None
    name = torch.cuda.get_device_name(layer.device)
    facts = (
        layer.format.spec,
        layer.activation or "",
        *map(str, layer.shape),
        operands.NAMES[layer.dtype],
        str(layer.device),
        *["experts"] * experts,
    )
    command = [sys.executable, "-m", __name__, *facts]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        failed = "" if ran.returncode == 0 else last
    except subprocess.TimeoutExpired:
        failed = f"no answer in {LIMIT} s"
    known = verdicts(layer.device)
    kernels = kernels_of(layer, layer.dtype, gpu_of(layer.device), experts)
    wanted = [kernel_file(kernel).name for kernel in kernels]
    if missing := {name: failed or "not tested" for name in wanted if name not in known}:
        known = record(layer.device, missing)
    wrong = sum(known[name] != RIGHT for name in wanted)
    log.warning(
        "self-test of the mma kernels for %s%s %s on %s: %d of %d are right; %s",
        "experts of " * experts,
        layer.format.spec,
        layer.shape,
        name,
        len(wanted) - wrong,
        len(wanted),
        "they are used" if not wrong else f"they are not used, see {verdict_file(layer.device)}",
    )
    return known


def main(facts: Sequence[str]) -> None:
    """Test every kernel of a layer, and record each verdict at once."""
    spec, activation, n, k, dtype, device, *experts = facts
    where = torch.device(device)
    layer = LayerSpec(
        get_format(spec), activation or None, (int(n), int(k)), where, getattr(torch, dtype)
    )
    assert layer.dtype is not None
    with torch.cuda.device(where):  # on which kernels are launched
        for kernel in kernels_of(layer, layer.dtype, gpu_of(where), bool(experts)):
            name = kernel_file(kernel).name
            if name not in verdicts(where):
                record(where, {name: "its process died"})
                record(where, {name: verdict(layer, kernel)})


# The test itself.


def verdict(layer: LayerSpec, kernel: Kernel | CodebookKernel) -> str:
    """`RIGHT`, or what is wrong."""
    try:
        if isinstance(kernel, CodebookKernel):
            return codebook_selftest.wrong(layer, kernel) or RIGHT
        weight = SmallWeight(layer, kernel.tile)
        return weight.one_hot(kernel) or weight.integers(kernel) or RIGHT
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class SmallWeight:
    """A small weight: two tiles of rows and some, more K tiles than warps and stages.

    Kernels for experts get three such weights.
    """

    def __init__(self, layer: LayerSpec, tile: Tile):
        assert layer.dtype is not None
        self.dtype, self.device, self.activation = layer.dtype, layer.device, layer.activation
        fmt = layer.format
        self.shape = tile.rows + max(8, fmt.tile[0]), 128 * (tile.warps + tile.stages + 1)
        random = torch.Generator().manual_seed(0)
        several = tile.sorted
        packed = [self.weight(layer.format, random) for _ in range(3 if several else 1)]
        self.weights = [operand_weight(p, self.dtype).to(self.device).double() for p in packed]
        given = [p.to(self.device) for p in packed]
        args = self.activation, self.dtype
        self.prepared = (
            operands.prepare_experts(given, *args) if several else operands.prepare(given[0], *args)
        )
        self.operand = getattr(torch, operands.operand_of(self.activation, self.dtype))

    def weight(self, fmt: Format, random: torch.Generator) -> Packed:
        w = torch.randn(self.shape, generator=random) * 0.02
        grid = fmt.fit(w)
        if not fmt.window:
            return Packed.from_codes(fmt, self.shape, fmt.encode(w, grid), grid)
        size = self.shape[0], self.shape[1] // fmt.width  # every code is some weight's
        codes = torch.randint(2**fmt.bits, size, generator=random, dtype=torch.uint8)
        return Packed.from_codes(fmt, self.shape, codes, grid)  # its encoder would take long

    def run(self, kernel: Kernel, x: Tensor, ends: Sequence[int], two: int = 0) -> list[Tensor]:
        """x (M, K) of small integers -> y (M, N), by each grid; twice, or it is an error.

        ends: where the tokens of each weight end. two: tokens that have two rows, or M is less.
        """
        tile, device = kernel.tile, self.device
        ones = torch.ones(len(x), device=device)
        scale = ones if self.activation else None
        sums = x.sum(1).int() if self.activation == "int8" else None
        codes = x.to(self.operand)
        if tile.kind == "decode":
            w = linear.decoded(codes, kernel, self.prepared)
            return [(codes.double() @ w.double().T).to(self.dtype)]
        pairs = torch.tensor([two], dtype=torch.int32, device=device) if two else None
        starts = None
        if tile.sorted:
            starts = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        tiles_, steps = tiles.tiles_of(tile, len(x), self.shape[0]), self.shape[1] // 128
        grids = [tiles_] if tile.kind == "narrow" else [tiles_, tiles_ * steps // 3]
        found = [
            linear.multiply(
                codes, scale, sums, self.prepared, None, self.dtype, kernel, grid, starts, pairs
            )[: len(x) - two]
            for grid in grids * 2
        ]
        once, again = found[: len(grids)], found[len(grids) :]
        if not all(torch.equal(a, b) for a, b in zip(once, again, strict=True)):
            raise InvalidInput("two runs differ")
        return once

    def one_hot(self, kernel: Kernel) -> str | None:
        """Each token has a single 1: y is the weight, up to the roundings of scale and output."""
        eye = torch.eye(self.shape[1], device=self.device)
        for i, weight in enumerate(self.weights):
            runs = [
                self.run(kernel, x, [0] * i + [len(x)] * (len(self.weights) - i))
                for x in eye.split(kernel.tile.tokens)
            ]
            step = torch.finfo(self.dtype).eps * 1.51 * weight.abs() + 1e-7
            for parts in zip(*runs, strict=True):
                read = torch.cat(parts).double().T
                wrong = int((~((read - weight).abs() <= step)).sum())
                if wrong:
                    return f"{wrong} of {read.numel()} weights are wrong"
        return None

    def integers(self, kernel: Kernel) -> str | None:
        """Random integers from -3 to 3, in more tokens than a tile has.

        Of three experts one gets two tiles of them, one nothing, one a single token. In 8 bits the
        first token of another weight has two rows.
        """
        random = torch.Generator().manual_seed(1)
        ends = [kernel.tile.tokens + 1]
        ends += [ends[0], ends[0] + 1] if len(self.weights) > 1 else []
        x = torch.randint(-3, 4, (ends[-1], self.shape[1]), generator=random)
        x = x.to(self.device).double()
        want = torch.cat(
            [x[a:b] @ w.T for (a, b), w in zip(pairwise([0, *ends]), self.weights, strict=True)]
        )
        joins = self.activation == "int8" and kernel.tile.kind in ("narrow", "gemm")
        joins = joins and kernel.tile.tokens > 1  # else it is launched for one row, without pairs
        if joins:
            want = torch.cat([want[:2].sum(0, keepdim=True), want[2:]])
        errors = [
            (y.double() - want).norm() / want.norm() for y in self.run(kernel, x, ends, int(joins))
        ]
        error = float(torch.stack(errors).max())
        bound = 1e-3 if self.dtype == torch.float16 else 6e-3
        bound = 2e-2 if self.activation == "fp8" else bound  # some tensor cores keep 14 bits
        return None if error <= bound else f"a relative error of {error:.1e}"


if __name__ == "__main__":
    main(sys.argv[1:])
