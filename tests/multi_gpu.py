"""Two ranks and one weight: tensor-parallel layers against the unsharded ones (`make test-2gpu`).

    python tests/multi_gpu.py              # two GPUs of this host, NCCL, bf16
    python tests/multi_gpu.py --cpu        # two processes, gloo, fp32

Each scheme's column-parallel and row-parallel layer equals the unsharded layer within the rounding
of its arithmetic, and a decoder block divided among the ranks is as near to the exact one as an
undivided one. Rank 0 prints what was compared; the exit status is 1 when something differed.
"""

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import anybit
from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.kernels.reference import INT8_LARGEST, operand_weight
from anybit.nn.linear import QuantLinear
from anybit.nn.sharding import share
from tests.forks import CONTEXT

RANKS = 2
SCHEMES = (
    "int4:group=64",
    "liquid@int8",
    "fp6",
    "int8",
    "codebook:m=2,v=8",
    "int3:group=32",
    "sparse",
    "int4:group=128,zero",
    "fp:e2m3,group=64",
    "int1:group=32",
)


class Parallel:
    """A linear layer of which this rank holds a part."""

    def __init__(self, packed: Packed, activation: str | None, rank: int, along: str):
        n, k = packed.shape
        self.columns = share(k, rank, RANKS) if along == "rows" else slice(None)
        rows = share(n, rank, RANKS) if along == "columns" else slice(None)
        self.layer = QuantLinear(packed.rows(rows).columns(self.columns), None, activation)

    def part(self, x: Tensor) -> Tensor:
        """This rank's outputs, or its share of all outputs."""
        return self.layer(x[..., self.columns])


def gathered(y: Tensor) -> Tensor:
    parts = [torch.empty_like(y) for _ in range(RANKS)]
    dist.all_gather(parts, y.contiguous())
    return torch.cat(parts, -1)


def reduced(y: Tensor) -> Tensor:
    dist.all_reduce(y)
    return y


def weight(n: int, k: int, scheme: str, device: torch.device) -> Packed:
    """A random weight that rank 0 quantizes: k-means adds up in another order on every GPU."""
    fmt, held = parse_scheme(scheme)[0], [{}]
    if dist.get_rank() == 0:
        packed = anybit.quantize_tensor(torch.randn(n, k, device=device) / k**0.5, fmt)
        found = packed.tensors().items()
        held = [{name: (tensor.view(torch.uint8).cpu(), tensor.dtype) for name, tensor in found}]
    dist.broadcast_object_list(held, 0)  # with their dtypes: a scale's is what its value needs
    tensors = {name: data.to(device).view(dtype) for name, (data, dtype) in held[0].items()}
    return Packed.from_tensors(fmt, (n, k), tensors, scheme)


def check_layers(scheme: str, x: Tensor, n: int, rank: int) -> dict[str, float]:
    """Largest difference to the unsharded layer in units of what rounding allows, of both kinds."""
    activation = parse_scheme(scheme)[1]
    packed = weight(n, x.shape[1], scheme, x.device)
    whole = QuantLinear(packed, None, activation)(x).double()
    allowed = tolerance(packed, activation, x)
    column = gathered(Parallel(packed, activation, rank, "columns").part(x))
    row = reduced(Parallel(packed, activation, rank, "rows").part(x))
    out = {}
    for name, y in (("column", column), ("row", row)):
        out[name] = float(((y.double() - whole).abs() / allowed).max())
    return out


def tolerance(packed: Packed, activation: str | None, x: Tensor) -> Tensor:
    """How far the divided and the undivided layer may lie apart, (M, N).

    Results, ranks' parts and their sum are rounded to x's dtype; sums over K are fp32. A rank that
    holds columns scales its tokens by its own largest activation.
    """
    u = torch.finfo(x.dtype).eps / 2
    x, w = x.double(), operand_weight(packed, x.dtype).double()
    parts = [a @ b.T for a, b in zip(x.chunk(RANKS, 1), w.chunk(RANKS, 1), strict=True)]
    out = u * (2 * sum(parts).abs() + sum(part.abs() for part in parts))
    out += 4 * x.shape[1] * 2.0**-24 * (x.abs() @ w.abs().T)
    if activation == "int8":
        step = x.abs().amax(-1, keepdim=True) / INT8_LARGEST
        out += step * w.abs().sum(1)  # half a step for each of the two
    return out


def block(x: Tensor, linear: Callable[[str, Tensor], Tensor], heads: int) -> Tensor:
    """A decoder block: attention over `heads` heads of this rank, then a gated MLP."""
    length, hidden = x.shape

    def norm(h: Tensor) -> Tensor:
        return F.rms_norm(h, (hidden,), eps=1e-6)

    q, k, v = (linear(name, norm(x)).view(length, heads, -1).transpose(0, 1) for name in "qkv")
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + linear("o", a.transpose(0, 1).reshape(length, -1))
    h = norm(x)
    return x + linear("down", F.silu(linear("gate", h)) * linear("up", h))


def check_block(scheme: str, x: Tensor, rank: int) -> float:
    """The divided block's distance from the exact one over the undivided block's."""
    activation = parse_scheme(scheme)[1]
    hidden, heads = x.shape[1], 8
    shapes = {
        "gate": (2 * hidden, hidden),
        "up": (2 * hidden, hidden),
        "down": (hidden, 2 * hidden),
    }
    weights = {}
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        n, k = shapes.get(name, (hidden, hidden))
        weights[name] = weight(n, k, scheme, x.device)
    whole = {name: QuantLinear(w, None, activation) for name, w in weights.items()}
    divided = {
        name: Parallel(w, activation, rank, "rows" if name in ("o", "down") else "columns")
        for name, w in weights.items()
    }

    def by_this_rank(name: str, h: Tensor) -> Tensor:
        layer = divided[name]
        if name in ("o", "down"):  # h holds this rank's columns already
            return reduced(layer.layer(h))
        return layer.part(h)

    decoded = {name: w.dequantize().double() for name, w in weights.items()}
    exact = block(x.double(), lambda name, h: h @ decoded[name].T, heads)
    y = block(x, by_this_rank, heads // RANKS).double()
    reference = block(x, lambda name, h: whole[name](h), heads).double()
    return float((y - exact).norm() / (reference - exact).norm())


def small(scheme: str) -> int:
    """Width of a block that a CPU quantizes soon, and whose halves hold whole groups."""
    fmt = parse_scheme(scheme)[0]
    group = max(entry.group for entry in fmt.entries().values())
    return max(64 if fmt.window else 128, RANKS * group)


def work(rank: int, cpu: bool, meet: str, schemes: tuple[str, ...]) -> None:
    device = torch.device("cpu" if cpu else f"cuda:{rank}")
    if not cpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo" if cpu else "nccl",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=RANKS,
        device_id=None if cpu else device,
    )
    dtype = torch.float32 if cpu else torch.bfloat16
    n, k, m = (32, 512, 3) if cpu else (1024, 2048, 16)
    problems = []
    with torch.inference_mode():
        for i, scheme in enumerate(schemes):
            torch.manual_seed(i)
            hidden = small(scheme) if cpu else 1024
            x = torch.randn(m, k, device=device).to(dtype)
            h = torch.randn(32, hidden, device=device).to(dtype)
            errors = check_layers(scheme, x, n, rank)
            ratio = check_block(scheme, h, rank)
            if rank == 0:
                print(
                    f"{scheme}: column {errors['column']:.3f}, row {errors['row']:.3f} of the "
                    f"tolerance; block {ratio:.2f} times the undivided one's error",
                    flush=True,
                )
            if max(errors.values()) > 1 or not ratio < 2:
                problems.append(f"{scheme}: {errors}, block {ratio}")
    for problem in problems:
        print(f"rank {rank}: {problem}", flush=True)
    dist.destroy_process_group()
    sys.exit(int(bool(problems)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="two processes and gloo; needs no GPU")
    parser.add_argument("schemes", nargs="*", help="instead of one of every family")
    args = parser.parse_args()
    if not args.cpu and torch.cuda.device_count() < RANKS:
        print(f"{torch.cuda.device_count()} GPUs; {RANKS} are needed (--cpu needs none)")
        return 1
    schemes = tuple(args.schemes) or SCHEMES
    context = CONTEXT if args.cpu else multiprocessing.get_context("spawn")
    meet = tempfile.mktemp(prefix="anybit-ranks-")  # ranks meet at a file that is not there yet
    others = [
        context.Process(target=work, args=(rank, args.cpu, meet, schemes), daemon=True)
        for rank in range(1, RANKS)
    ]
    for process in others:
        process.start()
    failed = False
    try:
        work(0, args.cpu, meet, schemes)
    except SystemExit as done:
        failed = bool(done.code)
    for process in others:
        process.join()
    return int(failed or any(process.exitcode for process in others))


if __name__ == "__main__":
    sys.exit(main())
