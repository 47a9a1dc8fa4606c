"""Other people's kernels, each behind one small adapter: how to prepare a weight and multiply it.

An adapter is a function that returns the cases (`measure.bench.Case`) of one package, each with its
own formats; it may import its package only there. Every adapter decodes the weight by the package's
own rules, so that its product can be checked before it is timed. Compiling and tuning happen in the
first calls, which are not timed.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from peers_vllm import int4, vllm
from torch import Tensor

from anybit.core.groups import grouped, ungroup
from anybit.kernels.reference import quantize_tokens
from anybit.measure.bench import Case, Layer, short

GROUP = 128
FP8 = torch.float8_e4m3fn
HALF, BRAIN = torch.float16, torch.bfloat16


def cases() -> tuple[list[Case], dict[str, str]]:
    """The cases of every package that is installed, and why the others have none."""
    found, missing = [], {}
    for name, adapter in PEERS.items():
        try:
            found += adapter()
        except Exception as error:  # an import of a compiled package can fail in any way
            missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return found, missing


def given(activation: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Tokens quantized outside the timed region: codes and their scales (M, 1)."""
    return lambda x: quantize_tokens(x, activation)


def as_given(activation: str) -> Callable[[Tensor], Tensor]:
    """The values that `given` stands for, fp32."""

    def values(x: Tensor) -> Tensor:
        codes, scale = quantize_tokens(x, activation)
        return codes.float() * scale

    return values


# cuBLAS through torch.


def cublas() -> list[Case]:
    """The dense layer in bf16, int8 and fp8."""

    def dense(w: Tensor) -> Layer:
        weight = w.bfloat16()
        return Layer(weight, lambda weight, x: x @ weight.T, weight.nbytes, weight)

    def int8(w: Tensor) -> Layer:
        codes, scale = quantize_tokens(w, "int8")

        def inputs(x: Tensor) -> tuple[Tensor, Tensor, int]:
            q, s = quantize_tokens(x, "int8")
            rows = max(32, len(q))  # cuBLAS wants more than 16
            return torch.nn.functional.pad(q, (0, 0, 0, rows - len(q))), s, len(q)

        return Layer(
            codes,
            lambda codes, q, s, m: torch._int_mm(q, codes.T),
            codes.nbytes,
            codes.float() * scale,
            inputs,
            as_given("int8"),
            lambda y, given: (y[: given[2]].float() * given[1] * scale.T).bfloat16(),
        )

    def rowwise(w: Tensor) -> Layer:
        codes, scale = quantize_tokens(w, "fp8")

        def run(weight: tuple[Tensor, Tensor], q: Tensor, s: Tensor) -> Tensor:
            return torch._scaled_mm(
                q, weight[0].T, scale_a=s, scale_b=weight[1], out_dtype=BRAIN, use_fast_accum=True
            )

        weight = (codes, scale.T.contiguous())
        nbytes, decoded = codes.nbytes + scale.nbytes, codes.float() * scale
        return Layer(weight, run, nbytes, decoded, given("fp8"), as_given("fp8"))

    def tensorwise(w: Tensor) -> Layer:
        scale = w.abs().max() / 448
        codes = (w / scale).to(FP8)

        def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
            s = x.float().abs().max() / 448
            return (x.float() / s).to(FP8), s

        def run(weight: Tensor, q: Tensor, s: Tensor) -> Tensor:
            return torch._scaled_mm(
                q, weight.T, scale_a=s, scale_b=scale, out_dtype=BRAIN, use_fast_accum=True
            )

        return Layer(
            codes,
            run,
            codes.nbytes,
            codes.float() * scale,
            quantize,
            lambda x: quantize(x)[0].float() * quantize(x)[1],
        )

    return [
        Case("cublas", "bf16", "bf16", BRAIN, dense),
        Case("cublas", "int8", "int8-given", BRAIN, int8, "int32 sums, no scales; M padded to 32"),
        Case("cublas", "fp8 rowwise", "fp8-given", BRAIN, rowwise),
        Case("cublas", "fp8 tensorwise", "fp8-given", BRAIN, tensorwise),
    ]


def tinygemm() -> list[Case]:
    """torch's own int4 kernel: groups with a scale and a zero point, bf16."""

    def prepare(w: Tensor) -> Layer:
        rows = w.view(w.shape[0], -1, GROUP)
        low, high = rows.aminmax(dim=-1)
        scale = ((high - low) / 15).bfloat16()
        zero = (low + scale.float() * 8).bfloat16()  # the weight of code 8
        q = rows - zero.float()[..., None]
        q = ungroup((q / scale.float()[..., None] + 8).round().clamp(0, 15)).to(torch.uint8)
        tiles = torch._convert_weight_to_int4pack(q[:, ::2] << 4 | q[:, 1::2], 8)
        pairs = torch.stack((scale.T, zero.T), -1).contiguous()

        def run(weight: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
            return torch._weight_int4pack_mm(x, weight[0], GROUP, weight[1])

        decoded = ungroup(
            (grouped(q.float(), scale) - 8) * scale.float()[..., None] + zero.float()[..., None]
        )
        return Layer((tiles, pairs), run, tiles.nbytes + pairs.nbytes, decoded)

    return [Case("tinygemm", f"int4:group={GROUP},zero", "bf16", torch.bfloat16, prepare)]


# Packages.


E2M1 = {"dtype": "float4e2m1"}
MXFP4 = E2M1 | {"group_size": 32, "scale_dtype": "float8e8m0"}
NVFP4 = E2M1 | {"group_size": 16, "scale_dtype": "float8e4m3", "scale_2_type": "tensor"}
FP8_BLOCKS = {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128}
HUMMINGS_NAMES = {"int8": "int8", "fp8": "float8e4m3"}  # of activations


def humming() -> list[Case]:
    """humming-kernels: JIT-compiled CUDA C++, tiles by its own tables for Hopper.

    It is asked for its tile for each number of tokens: a layer by itself compiles some 30 at once,
    of which the same one then runs.
    """
    from humming.forward import may_quant_input
    from humming.layer import HummingLayer
    from humming.schema import HummingWeightSchema
    from humming.tune import get_heuristics_config

    def case(
        name: str, weight: dict[str, object], activation: str = "", dtype: torch.dtype = HALF
    ) -> Case:
        operand, _, given = activation.partition("-")

        def prepare(w: Tensor) -> Layer:
            inputs = {"dtype": HUMMINGS_NAMES[operand]} if operand else None
            layer = HummingLayer(*w.shape, dict(weight), inputs, torch_dtype=dtype).to(w.device)
            schema = layer.weight_schema
            tensors = HummingWeightSchema.quant_tensor(w.to(dtype), schema, dtype)
            decoded = schema.dequant_tensors(tensors).float()
            layer.load_from_tensors(tensors)
            layer.transform()
            nbytes = sum(p.nbytes for p in layer.parameters())
            config = layer.humming_config

            def run(layer: HummingLayer, x: Tensor, scale: Tensor | None = None) -> Tensor:
                tile = get_heuristics_config(config, shape_m=len(x), device=x.device)
                return layer(x, input_scale=scale, tuning_config=tile)

            if not operand:
                return Layer(layer, run, nbytes, decoded)

            def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
                return may_quant_input(layer.humming_config, x)

            def seen(x: Tensor) -> Tensor:
                codes, scale = quantize(x)
                return codes.float() * scale.float()

            if not given:
                return Layer(layer, run, nbytes, decoded, seen=seen)
            return Layer(layer, run, nbytes, decoded, quantize, seen)

        return Case("humming", name, activation or short(dtype), dtype, prepare)

    def integer(bits: int, group: int = 0) -> dict[str, object]:
        return {"dtype": f"uint{bits}", "group_size": group}

    return [
        case("int4:group=128", integer(4, 128)),
        case("int3:group=128", integer(3, 128)),
        case("int2:group=128", integer(2, 128)),
        case("int8", integer(8)),
        case("fp6", {"dtype": "float6e3m2", "group_size": 0}),
        case("fp5", {"dtype": "float5e2m2", "group_size": 0}),
        case("int4:group=64", integer(4, 64), "int8"),
        case("int4:group=64", integer(4, 64), "int8-given"),
        case("int4:group=128", integer(4, 128), "int8-given"),
        case("int4:group=128", integer(4, 128), "fp8-given"),
        case("int8", integer(8), "int8-given"),
        case("mxfp4", MXFP4, dtype=BRAIN),
        case("mxfp4", MXFP4, "fp8-given", BRAIN),
        case("nvfp4", NVFP4, dtype=BRAIN),
        case("fp8:group=128", FP8_BLOCKS, "fp8-given", BRAIN),
    ]


def quack() -> list[Case]:
    """quack-kernels: CuTe DSL kernels for Hopper, configurations by its own measured rules."""
    from quack.gemm_w4 import gemm_w4a8, gemm_w4a16
    from quack.operand_transform.formats import decode_format

    def prepare(name: str, w: Tensor) -> Layer:
        fmt = decode_format(name)
        codes, scale = fmt.quantize_reference(w)
        blob, strip = fmt.prepare(codes, scale)
        decoded = fmt.dequant_reference(codes, scale)
        nbytes = blob.nbytes + strip.nbytes
        if name == "int4":

            def run16(weight: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
                return gemm_w4a16(x, weight[0], weight[1], wformat=name)

            return Layer((blob, strip), run16, nbytes, decoded)
        channel = scale[1].float().reshape(-1) if isinstance(scale, tuple) else None

        def run8(weight: tuple[Tensor, Tensor], q: Tensor, s: Tensor) -> Tensor:
            return gemm_w4a8(
                q, weight[0], weight[1], act_scale=s.flatten(), chan_scale=channel, wformat=name
            )

        return Layer((blob, strip), run8, nbytes, decoded, given("fp8"), as_given("fp8"))

    def case(name: str, fmt: str, activation: str, note: str = "") -> Case:
        return Case("quack", name, activation, torch.bfloat16, lambda w: prepare(fmt, w), note)

    return [
        case("int4:group=128", "int4", "bf16"),
        case("int4:group=128", "int4sm", "fp8-given"),
        case("int4:group=128 folded", "int4smf", "fp8-given", "scales rounded into fp8 weights"),
    ]


def gemlite() -> list[Case]:
    """gemlite: Triton kernels, with the configurations it ships for the H100."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import gemlite as package
        from gemlite.core import forward_functional
        from gemlite.helper import A16Wn

    tuned = Path(package.__file__).parent / "configs" / "h100.json"
    if not package.load_config(str(tuned)):
        raise RuntimeError(f"{tuned} was not loaded; its kernels would be tuned for minutes")

    def prepare(w: Tensor) -> Layer:
        codes, scale, decoded = int4(w, torch.float16)
        zero = torch.full_like(scale, 8)
        layer = A16Wn(device=w.device, dtype=torch.float16).from_weights(
            codes, scale.reshape(-1, 1), zero.view(-1, 1), 4, GROUP
        )
        meta = layer.get_meta_args()

        def run(weight: list[Tensor], x: Tensor) -> Tensor:
            return forward_functional(x, None, weight, meta)

        weight = [t.data for t in layer.get_tensor_args()]
        return Layer(weight, run, sum(t.nbytes for t in weight), decoded)

    return [Case("gemlite", f"int4:group={GROUP}", "fp16", torch.float16, prepare)]


def bitsandbytes() -> list[Case]:
    """bitsandbytes: NF4 in blocks of 64 with fp32 scales."""
    import bitsandbytes as package
    from bitsandbytes import functional

    def prepare(w: Tensor) -> Layer:
        codes, state = functional.quantize_4bit(w.half(), blocksize=64, quant_type="nf4")

        def run(weight: tuple[Tensor, functional.QuantState], x: Tensor) -> Tensor:
            return package.matmul_4bit(x, weight[0].t(), quant_state=weight[1])

        decoded = functional.dequantize_4bit(codes, state)
        return Layer((codes, state), run, codes.nbytes + state.absmax.nbytes, decoded)

    return [Case("bitsandbytes", "nf4:group=64", "fp16", torch.float16, prepare)]


def aqlm() -> list[Case]:
    """AQLM's CUDA kernels, compiled when first used; a scale a row, vectors of 8, drawn codes."""
    from aqlm import QuantizedLinear

    def case(books: int, bits: int, name: str) -> Case:
        def prepare(w: Tensor) -> Layer:
            n, k = w.shape
            half = {"device": w.device, "dtype": torch.float16}
            layer = QuantizedLinear(k, n, 8, 1, books, bits, bias=False, **half)
            codes = torch.randint(2**bits, (n, k // 8, books), device=w.device)
            layer.codes.data = codes.to(layer.codes.dtype)  # wraps, as AQLM stores them
            layer.codebooks.data.normal_()
            layer.scales.data.uniform_(0.01, 0.06)
            decoded = torch.zeros(n, k, device=w.device)
            for i in range(books):
                decoded += layer.codebooks[i, :, 0].float()[codes[..., i]].view(n, k)
            decoded *= layer.scales.view(n, 1).float()
            layer.requires_grad_(False)
            nbytes = sum(t.nbytes for t in (layer.codes, layer.codebooks, layer.scales))
            return Layer(layer, lambda layer, x: layer(x), nbytes, decoded, random=True)

        return Case("aqlm", name, "fp16", torch.float16, prepare, f"{books}x{bits}")

    return [case(2, 8, "codebook"), case(1, 16, "codebook:m=1,b=16")]


def codegemm() -> list[Case]:
    """CodeGEMM's kernels, from a checkout of naver-aics/codegemm that CODEGEMM names; drawn codes.

    With one token its Psumbook, which adds up every 32 columns in fp16 (5e-3 off for K = 28672);
    with more it decodes the weight for cuBLAS in every product.
    """
    if "CODEGEMM" not in os.environ:
        raise RuntimeError("CODEGEMM names no checkout of github.com/naver-aics/codegemm")
    from torch.utils.cpp_extension import load

    folder = Path(os.environ["CODEGEMM"]) / "codegemm" / "inference" / "custom_kernel"
    operators = "HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS"
    flags = [f"-U__CUDA_NO_{name}__" for name in operators]
    if int((torch.version.cuda or "0").split(".")[0]) >= 13:  # one file launches another's template
        flags.append("-static-global-template-stub=false")
    package = load(
        "codegemm_kernel",
        [str(folder / name) for name in ("bindings.cpp", "gemv.cu", "codegemm.cu")],
        extra_cuda_cflags=flags,
    )

    def case(books: int, width: int) -> Case:
        def prepare(w: Tensor) -> Layer:
            (n, k), device, half = w.shape, w.device, torch.float16
            words = torch.randint(-(2**31), 2**31, (books, k // width // 4, n), device=device)
            words = words.int()
            book = torch.randn(books, 256, width, device=device, dtype=half)
            scale = (torch.rand(k // GROUP, n, device=device) * 0.05 + 0.01).to(half)
            codes = (
                words.view(torch.uint8).view(books, -1, n, 4).transpose(1, 2).reshape(books, n, -1)
            )
            decoded = sum(book[i].float()[codes[i].int()] for i in range(books)).view(n, k)
            decoded *= scale.float().T.repeat_interleave(GROUP, 1)

            def run(weight: tuple[Tensor, ...], x: Tensor) -> Tensor:
                if len(x) > 1:
                    return x @ package.codegemm_dequant(*weight, GROUP)
                y = torch.zeros(1, 1, n, dtype=half, device=device)  # its sums are added to it
                package.codegemm_gemv(x[None], y, *weight, GROUP)
                return y[0]

            weight = words, scale, book
            return Layer(weight, run, sum(t.nbytes for t in weight), decoded, random=True)

        name = f"codebook:m={books},v={width},group={GROUP}"
        return Case("codegemm", name, "fp16", torch.float16, prepare, rounding=4e-3)

    return [case(1, 4), case(2, 8)]


PEERS = {
    f.__name__: f
    for f in (cublas, tinygemm, humming, quack, vllm, gemlite, bitsandbytes, aqlm, codegemm)
}
