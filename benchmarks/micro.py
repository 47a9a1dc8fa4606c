"""Time the formats that models are published in, dense, beside humming and vLLM's Marlin.

    python benchmarks/micro.py --out h200_micro.csv

MXFP4, NVFP4, MXFP8 and FP8 blocks, with 16-bit tokens and with 8 bits. For experts, see
`experts.py --micro`. Method and columns are those of `gemm.py`. Peers that are not there are named.
"""

import argparse
import importlib.util
from pathlib import Path

import peers
import torch
from experts import MXFP4, NVFP4
from gemm import given
from torch import Tensor

from anybit import quantize_tensor
from anybit.kernels.backend import CODES
from anybit.kernels.reference import quantize_tokens
from anybit.measure import bench
from anybit.measure.bench import Case, Layer
from anybit.measure.timing import ReadFloor

SHAPES = ["5760x2880", "4096x7168", "7168x2048", "28672x4096"]
SCHEMES = ["mxfp4", "mxfp4@fp8", "mxfp4@int8", "nvfp4", "mxfp8", "mxfp8@fp8", "fp8:group=128@fp8",
           "int4:group=128@int8"]  # fmt: skip
BRAIN = torch.bfloat16
HUMMING = (  # as ours are called, and by humming
    ("mxfp4", MXFP4, "bf16"),
    ("mxfp4", MXFP4, "fp8-given"),
    ("nvfp4", NVFP4, "bf16"),
    ("fp8:group=128", {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128}, "fp8-given"),
    ("int4:group=128", {"dtype": "uint4", "group_size": 128}, "int8-given"),
)
FP4 = 2 | 1 << 8 | 1 << 16 | 1 << 49  # vLLM's number for e2m1
MARLIN_CTAS = 4  # of a multiprocessor at most, each with a lock


def humming() -> list[Case]:
    """humming's kernels, tiles by its own tables."""
    from humming.forward import may_quant_input
    from humming.layer import HummingLayer
    from humming.schema import HummingWeightSchema

    def case(name: str, weight: dict[str, object], activation: str) -> Case:
        kinds = {"fp8-given": {"dtype": "float8e4m3"}, "int8-given": {"dtype": "int8"}}

        def prepare(w: Tensor) -> Layer:
            inputs = kinds.get(activation)
            layer = HummingLayer(*w.shape, dict(weight), inputs, torch_dtype=BRAIN).to(w.device)
            schema = layer.weight_schema
            tensors = HummingWeightSchema.quant_tensor(w.to(BRAIN), schema, BRAIN)
            decoded = schema.dequant_tensors(tensors).float()
            layer.load_from_tensors(tensors)
            layer.transform()
            nbytes = sum(p.nbytes for p in layer.parameters())
            if inputs is None:
                return Layer(layer, lambda layer, x: layer(x), nbytes, decoded)

            def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
                return may_quant_input(layer.humming_config, x)

            def seen(x: Tensor) -> Tensor:
                codes, scale = quantize(x)
                return codes.float() * scale.float()

            def run(layer: HummingLayer, q: Tensor, scale: Tensor) -> Tensor:
                return layer(q, input_scale=scale)

            return Layer(layer, run, nbytes, decoded, quantize, seen)

        return Case("humming", name, activation, BRAIN, prepare)

    return [case(*entry) for entry in HUMMING]


def marlin() -> list[Case]:
    """vLLM's Marlin; of vLLM, only its library of operators is loaded."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ImportError("vllm is not installed")
    folder = Path(next(iter(found.submodule_search_locations)))
    torch.ops.load_library(folder / "_C_stable_libtorch.abi3.so")
    operators = torch.ops._C

    def case(name: str, activation: str) -> Case:
        fp8 = activation == "fp8-given"

        def prepare(w: Tensor) -> Layer:
            n, k = w.shape
            packed = quantize_tensor(w, name)
            # Four bytes of e2m1 numbers are a word of ours and of Marlin's source.
            words = packed.planes[0].T.contiguous()
            words = operators.gptq_marlin_repack(words, k, n, 4, fp8)
            scales, number = marlin_scales(packed.grid, fp8)
            sms = torch.cuda.get_device_properties(w.device).multi_processor_count
            locks = torch.zeros(sms * MARLIN_CTAS, dtype=torch.int32, device=w.device)

            def run(weight: tuple[Tensor, ...], x: Tensor, s: Tensor | None = None) -> Tensor:
                words, scales, locks = weight
                return operators.marlin_gemm(
                    x, None, words, None, scales, s, number, None, locks, FP4, len(x), n, k,
                    False, True, False,
                )  # fmt: skip

            weight, nbytes = (words, scales, locks), words.nbytes + scales.nbytes
            if not fp8:
                return Layer(weight, run, nbytes, packed.dequantize())

            def seen(x: Tensor) -> Tensor:
                codes, scale = quantize_tokens(x, "fp8")
                return codes.float() * scale

            return Layer(
                weight, run, nbytes, packed.dequantize(), lambda x: quantize_tokens(x, "fp8"), seen
            )

        return Case("marlin", name, activation, BRAIN, prepare)

    return [case("mxfp4", "bf16"), case("mxfp4", "fp8-given"), case("nvfp4", "bf16")]


def marlin_scales(grid: dict[str, Tensor], fp8: bool) -> tuple[Tensor, Tensor | None]:
    """Scales as Marlin's threads read them, and NVFP4's number for the weight."""
    scale = grid["scale"].to(BRAIN).T.contiguous()
    n = scale.shape[1]
    order = [i + 8 * j for i in range(8) for j in range(8)]
    if fp8:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    scale = scale.reshape(-1, len(order))[:, order].reshape(-1, n)
    if not fp8:
        scale = scale.view(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, n)
    if "row_scale" not in grid:
        powers = scale.to(torch.float8_e8m0fnu)
        return ((powers.view(torch.uint8) + 6).view(powers.dtype) if fp8 else powers), None
    half = scale.half()  # as 8 bits without a sign, in units that leave the largest below 448
    unit = (448 / half.float().max()).log2().floor().exp2()
    bits = ((half.float() * unit).half() * 2**7).view(torch.int16) << 1
    stored = bits.view(torch.float8_e4m3fn)[:, 1::2].contiguous()
    return stored, (grid["row_scale"][:1, 0] / unit * 2.0 ** (126 - 7)).float()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("h200_micro.csv"), help="the CSV to write")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument(
        "--m", type=bench.parse_counts, default=bench.parse_counts("16,64,256,1024")
    )
    parser.add_argument("--schemes", nargs="*", default=SCHEMES, help="anybit's formats")
    parser.add_argument("--commit", help="written into the CSV; by default git is asked")
    args = parser.parse_args()
    device, cases = torch.device("cuda"), []
    for scheme in args.schemes:
        case = bench.anybit_case(scheme, BRAIN, "hopper")
        cases.append(given(case) if case.activation in CODES else case)
    for adapter in (peers.cublas, humming, marlin):
        try:
            cases += adapter()
        except Exception as error:  # an import of a compiled package can fail in any way
            print(f"left out: {adapter.__name__}: {type(error).__name__}: {error}", flush=True)
    floor, rows = ReadFloor.measure(device), []
    shapes = [bench.parse_shape(text) for text in args.shapes]
    for row in bench.measure(cases, shapes, args.m, device, args.commit, floor):
        print(bench.line(row), flush=True)
        rows.append(row)
        bench.write_csv(args.out, rows)


if __name__ == "__main__":
    main()
