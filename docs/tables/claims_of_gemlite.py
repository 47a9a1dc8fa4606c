"""What GemLite claims."""

from claims import BIG, OUT, Claim, best, lost, measured, one, span, speeds
from paper_tables import cores, squares_of
from results import read

FP32, FP16 = "CUDA cores fp32", "CUDA cores fp16"
BITS = ("int8", "int4:group=128", "int2:group=128", "sparse")
GEMM = "h200_gemm.csv: M=1; peer="
SPARSE = "cpu_sparse.csv: spec=sparse; method="
ZERO = "cpu_accuracy.csv: model=pico; spec=int4:group=64,zero; method="


def errors(kernel: str) -> str:
    """Of products, by norm: the least and the greatest."""
    found = sorted(float(r["error"]) for r in read("h200_cuda_cores") if r["kernel"] == kernel)
    return f"{found[0]:.1e} to {found[-1]:.1e}"


def gemlite() -> list[Claim]:
    def triton() -> str:
        peers = ("gemlite", "anybit-triton")
        pairs = [[best("int4:group=128", 1, s, peer=p) for p in peers] for s in (BIG, OUT)]
        return span([theirs / ours for theirs, ours in pairs])

    before, after = (one(SPARSE + method, "perplexity") for method in ("rtn", "trained"))
    dense = one("cpu_sparse.csv: method=fp32", "perplexity")
    return [
        Claim(
            "Decoding fused with the product",
            "yes",
            "yes",
            "anybit/kernels/triton/gemm.py, anybit/kernels/hopper/gemm.py",
        ),
        measured(
            "One token, 8, 4 and 2 bits, over fp16",
            "figures 2 and 3: squares of 4096 to 24576, RTX 3090 and 4090",
            lambda: (
                "the same squares on an H200, over bf16: "
                + ", ".join(f"{spec} {span(squares_of(spec))}" for spec in BITS)
            ),
            "h200_layers.csv: M=1; model=square-4096/square-8192/square-16384/square-24576",
        ),
        Claim("... on consumer GPUs", "the same figures", "", "not run: no such GPU was at hand"),
        measured(
            "On a par with the fastest kernels",
            "yes",
            lambda: f"time of the package over that of our Triton kernels: {triton()}",
            GEMM + "gemlite/anybit-triton; format=int4:group=128",
        ),
        measured(
            "A warp for each output, x in shared memory",
            "on CUDA cores",
            lambda: (
                "tensor cores are faster at one token, too: a kernel of this kind takes "
                f"{span(cores(FP32, 'tensor cores')['1'])} as long"
            ),
            "h200_cuda_cores.csv: M=1; kernel=CUDA cores fp32/tensor cores",
        ),
        Claim(
            "Any width in words of 32 bits",
            "odd widths are padded",
            "planes of 4, 2 and 1 bits, not padded",
            "anybit/core/planes.py",
        ),
        measured(
            "Sums in fp16 are no faster, less exact",
            "Ampere and Ada",
            lambda: (
                "on an H200, time with sums in fp16 over fp32: "
                + ", ".join(f"M={m} {span(x)}" for m, x in cores(FP16, FP32).items())
                + f"; error {errors(FP16)}, with fp32 {errors(FP32)}. Ours are in fp32 or int32"
            ),
            "h200_cuda_cores.csv: kernel=CUDA cores fp16/CUDA cores fp32",
        ),
        Claim(
            "W = (q - zero) / scale",
            "any zero point",
            "for integers; `sparse` has its zero in the middle, 64",
            "anybit/formats/integer.py, anybit/formats/sparse.py",
        ),
        Claim(
            "1:2 sparsity and 7 bits, over fp16",
            "up to 3.5x",
            f"{span(speeds('sparse', 1))} with one token",
            GEMM + "anybit-hopper; format=sparse; activation=fp16",
        ),
        Claim(
            "Pairs 32 columns apart",
            "for coalesced loads",
            "neighbours: our layout is made when a layer is loaded, and the order of columns has "
            "no meaning to the model",
            "anybit/formats/sparse.py",
        ),
        Claim(
            "The zero is skipped, half of the products",
            "on CUDA cores",
            "not skipped: tensor cores multiply both",
            "anybit/formats/sparse.py",
        ),
        Claim(
            "50 % sparsity costs little, with a mask in training",
            "known from 2:4",
            f"perplexity of pico {dense:.2f}; {before:.2f} without training, {after:.2f} after "
            f"{one(SPARSE + 'trained', 'steps'):.0f} steps",
            SPARSE + "rtn/trained, examples/sparse_finetune.py",
        ),
        Claim(
            "A new decoder is a few lines",
            "the dot product's body",
            "three lines",
            "docs/add_a_format.md, tests/test_own_format.py",
        ),
        Claim(
            "... and costs what?",
            "perhaps memory accesses and registers",
            "nothing with the accessors: a user's ternary format compiles to as many PTX "
            "instructions as int2",
            "tests/kernels/test_triton_compile.py",
        ),
        Claim(
            "HQQ finds scales and zero points",
            "named beside GPTQ and AWQ",
            f"int4 in groups of 64 with zero points, loss: rounding {lost(ZERO + 'rtn')}, HQQ "
            f"{lost(ZERO + 'hqq')}",
            ZERO + "rtn/hqq",
        ),
    ]
