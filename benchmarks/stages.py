"""Every file of results/ that a script makes: the commands, what they need, and about how long.

In the order of importance. `measure_all.py` runs them and says what the words in braces stand for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Commands = tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """What makes one file of results.

    name: of the file; one of a GPU gets the GPU's name before it. commands: what makes rows; each
    writes a file of its own, and together they are the stage's. minutes: to plan with, of one
    command on an H200 or on two cores of a CPU, with kernels that lie in the cache; a guess.
    needs: keys of `NEEDS`. beside: packages that are measured too if they are there. extra: more
    commands, if what they need is there. before: what is run first and makes no rows.
    apart: whether the host or the board counts, so that no other GPU may work meanwhile.
    """

    name: str
    commands: Commands
    minutes: float
    needs: Commands = ()
    beside: Commands = ()
    extra: Mapping[str, Commands] = field(default_factory=dict)
    before: Commands = ()
    apart: bool = True

    @property
    def on_gpu(self) -> bool:
        return not self.name.startswith(("cpu_", "kv_accuracy"))


NEEDS = {  # and how to get it
    "GPU": "one of NVIDIA's",
    "sm_90": "an H100 or H200",
    "two GPUs": "both visible",
    "vllm": "pip install vllm",
    "aqlm": "pip install aqlm",
    "pynvml": "pip install nvidia-ml-py",
    "study model": "python benchmarks/study_train.py --out build/study-105m, or --study FOLDER",
    "llama.cpp": "npm install node-llama-cpp in a folder, and --llama-cpp FOLDER",
}  # fmt: skip
OTHERS = ("humming", "quack", "vllm", "gemlite", "bitsandbytes")  # packages of `peers.py`
BOOKS = ("aqlm", "CODEGEMM")


def parts(command: str, count: int) -> Commands:
    return tuple(f"{command} --part {i + 1}/{count}" for i in range(count))


GEMM = "gemm.py --workers {workers} --commit {commit} --out {out}"
PEERS = (
    f"{GEMM} --shapes 28672x4096 8192x28672 6144x4096 5120x17408 4096x14336 37888x3584 4096x4096 "
    "1024x4096 --schemes int4:group=128 fp6 liquid@int8 "
    "--only anybit-hopper cublas humming quack marlin machete "
    "--formats bf16 int4:group=128 int4:group=64 fp6 'int4:group=128 folded' "
    "'fp8 rowwise' 'fp8 tensorwise'"
)
MICRO = (
    f"{GEMM} --shapes 5760x2880 4096x7168 --m 16,64,256,1024 --schemes mxfp4 mxfp4@fp8 nvfp4 "
    "fp8:group=128@fp8 int4:group=128@int8 --only anybit-hopper cublas humming marlin "
    "--formats bf16 mxfp4 nvfp4 fp8:group=128 int4:group=128"
)
EXPERTS = "experts.py --peers anybit humming --commit {commit} --out {out}"
COUNTS = "--m 1,16,64,256,1024,4096"
MODELS = ("Mixtral-8x7B", "Qwen3-30B-A3B", "DeepSeek-V3", "GPT-OSS-20B")
ENGINE = "engine.py --workers --commit {commit} --out {out}"
STEPS = f"{ENGINE} --no-prompts"
LLAMA = "--case llama-3-8b"
FULL = f"{LLAMA} bf16 liquid@int8 int8@int8 fp8@fp8 int4:group=128"
VLLM = "in_vllm.py --commit {commit} --out {out}"
CHECKED = ("liquid@int8", "int4:group=128", "fp6", "codebook:m=1,v=4,group=128")
BOOK = "codebook.py --commit {commit} --out {out}"
# Weights with 9 to 16 tokens, for v = 4, and some of them for v = 8.
FEW = (
    "28672x4096 4096x14336 5120x17408 4096x4096 6144x1024 1024x2048 256x1536 1024x3072 17920x1536 "
    "24576x1536 3072x8192 6144x4096 4608x3584 2880x4096 576x7168 1536x8960 2560x10240 5120x5120 "
    "7168x7168 9216x3072 16384x3072 20480x2560 22016x4096 28672x3584 27648x5120 8192x3584 "
    "12288x4096 10240x8192 7168x16384 57344x8192"
)
SOME = (
    "28672x4096 5120x17408 4096x4096 6144x1024 1024x2048 1024x3072 17920x1536 6144x4096 9216x3072 "
    "20480x2560 27648x5120 10240x8192"
)
STUDY = "study.py {study} --out {out}"
PICO = "study.py models/pico --prompts 0 --out {out}"
SPECULATIVE = "speculative.py --commit {commit} --out {out}"
DETERMINISTIC = "deterministic.py --commit {commit} --out {out}"

STAGES = (
    Stage("shapes", parts(f"{GEMM} --models", 4), 1.5, ("sm_90",), apart=False),
    Stage("peers", parts(PEERS, 4), 1, ("sm_90",), OTHERS[:3], apart=False),
    Stage(
        "expert_peers",
        tuple(f"{EXPERTS} {COUNTS} --models {model}" for model in MODELS)
        + tuple(f"{EXPERTS} {COUNTS} --models {model} --micro" for model in MODELS[2:]),
        1, ("sm_90",), ("humming",), apart=False,
    ),
    Stage("gemm", parts(GEMM, 4), 2, ("GPU",), OTHERS, apart=False),
    Stage("micro", parts(MICRO, 2), 1, ("sm_90",), ("humming", "vllm"), apart=False),
    Stage(
        "engine", tuple(f"{ENGINE} --case {m}" for m in ("llama-3-8b", "llama-2-7b")), 4, ("GPU",)
    ),
    Stage(
        "engine_steps",
        (f"{STEPS} --kv int8 --batches 1,16 {LLAMA} bf16 liquid@int8 int4:group=128 fp6 "
         "liquid@int8+int8 int4:group=128+int8 fp6+int8 trellis",),
        2, ("GPU",),
    ),
    Stage(
        "prompts",
        (f"prompts.py {LLAMA} int4:group=128 liquid@int8 --both --prompts "
         "16,64,128,256,384,512,1024,2048,1024x2,2048x2 --commit {commit} --out {out}",),
        1, ("GPU",),
    ),
    Stage(
        "vllm",
        (
            *(f"{VLLM} {case} --batches 1,16,64" for case in (
                "liquid@int8", "int4:group=128", "fp8", "gptq", "marlin", "bf16", CHECKED[3],
                "liquid@int8 --unfused", "liquid@int8 --head int8@int8",
            )),
            *(f"{VLLM} {case} --kv fp8 --batches 64,256"
              for case in ("liquid@int8", "int4:group=128", "fp8", "gptq")),
            *(f"{VLLM} {case} --check models/pico" for case in CHECKED),
        ),
        1.5, ("GPU", "vllm"),
        extra={
            "two GPUs": tuple(f"{VLLM} {case} --check models/pico --ranks 2" for case in CHECKED)
        },
    ),
    Stage(
        "codebook", tuple(f"{BOOK} {mode}" for mode in ("table", "sweep")), 3, ("sm_90",), BOOKS,
        before=("codebook.py compile",), apart=False,
    ),
    Stage(
        "codebook_tiles",
        (
            f"{BOOK} tiles --shapes 28672x4096 4096x14336 5120x17408 4096x4096 "
            "--m 32,64,192,256,1024,4096",
            f"{BOOK} tiles --schemes codebook:m=1,v=4,group=128 --m 9,16 --shapes {FEW}",
            f"{BOOK} tiles --schemes codebook:m=2,v=8,group=128 --m 16 --shapes {SOME}",
        ),
        2, ("sm_90",), before=("codebook.py compile",), apart=False,
    ),
    Stage(
        "codebook_engine",
        (
            f"{ENGINE} {LLAMA} codebook:m=1,v=4,b=8,group=128 codebook:m=2,v=8,b=8,group=128 bf16 "
            "--kv model --batches 1,16,64",
            f"{ENGINE} --case llama-3-70b codebook:m=1,v=4,b=8,group=128 --kv model --batches 1,16",
        ),
        2, ("sm_90",),
        extra={"aqlm": (
            f"{ENGINE} {LLAMA} codebook:m=2,v=8,b=8 codebook:m=1,v=8,b=16 --first aqlm_backend "
            "--kv model --batches 1,4,16",
        )},
    ),
    Stage(
        "codebook_share", ("paper_codebook.py share --commit {commit} --out {out}",), 1, ("sm_90",),
        before=("paper_codebook.py compile",),
    ),
    Stage(
        "codebook_power", ("paper_codebook.py power --commit {commit} --out {out}",), 1,
        ("sm_90", "pynvml"), BOOKS,
    ),
    Stage(
        "trellis_products", ("trellis.py time --out {out}",), 2, ("sm_90",),
        before=("trellis.py time --build",),
    ),
    Stage("trellis_time", ("trellis_time.py --out {out}",), 2, ("GPU",)),
    Stage(
        "rotated_steps",
        (f"{ENGINE} {LLAMA} folded:trellis trellis:rotate=kn trellis trellis@int8 int4:group=128 "
         "--kv int8 --batches 1",),
        2, ("sm_90",),
    ),
    Stage(
        "papers_engine",
        (
            f"{STEPS} --case llama-3-70b-half bf16 --case llama-3-70b fp6 --kv model "
            "--batches 1,16,64 --contexts 640,2560",
            f"{STEPS} {FULL} --kv model --batches 1,16,64,256,512",
            f"{STEPS} {FULL} --kv int8 --batches 1,16,64,128,256,512,80gb",
            f"{STEPS} {LLAMA} liquid@int8 --kv int8-static --batches 1,16,64,256",
            f"{STEPS} {LLAMA} liquid@int8 --kv int8 --batches 1,64,256 --without hopper mma",
            f"{STEPS} --case opt-30b fp6 bf16 --case llama-2-13b fp6 bf16 --kv model "
            "--batches 1,4,16",
            f"{STEPS} --case llama-2-13b liquid@int8 --case mixtral-8x7b liquid@int8 "
            "--case yi-34b liquid@int8 --kv int8 --batches 16,128,80gb",
            f"{STEPS} --case llama-2-70b liquid@int8 --kv int8 --batches 128,80gb",
        ),
        2, ("sm_90",),
    ),
    Stage("layers", ("layers.py --commit {commit} --out {out}",), 3, ("sm_90",)),
    Stage(
        "ablation", ("ablation.py --out {out}",), 1, ("sm_90",), before=("ablation.py --compile",)
    ),
    Stage("cuda_cores", ("cuda_cores.py --commit {commit} --out {out}",), 1, ("sm_90",)),
    Stage("experts", ("experts.py --commit {commit} --out {out}",), 1, ("sm_90",), ("humming",)),
    Stage(
        "mma", ("mma.py time --out {out}",), 3, ("sm_90",),
        before=("mma.py build --jobs {workers}",),
    ),
    Stage(
        "generation", ("generation.py {study} --limit 100 --samples 128 --out {out}",), 15,
        ("GPU", "study model"),
    ),
    Stage("heads", ("heads.py {study} --device cuda --out {out}",), 1, ("GPU", "study model")),
    Stage(
        "accuracy", (f"{STUDY}", "study.py models/pico --out {out}"), 15, ("GPU", "study model"),
        apart=False,
    ),
    Stage(
        "trellis", (f"{STUDY} --cases trellis --prompts 0",), 8, ("GPU", "study model"), apart=False
    ),
    Stage(
        "trellis_gradients", (f"{STUDY} --cases gradients --prompts 0",), 5,
        ("GPU", "study model"), apart=False,
    ),
    Stage(
        "kv_cache",
        ("kv_cache.py time --device cuda --sequences 64,128,256 --contexts 1280,4096 --out {out}",),
        1, ("GPU",),
    ),
    Stage(
        "speculative",
        (f"{SPECULATIVE} texts models/pico --batches 1 8 --rounds 3",
         f"{SPECULATIVE} steps llama-3-8b --formats liquid@int8 --batches 1 8"),
        2, ("GPU",),
    ),
    Stage("layer_time", ("layer_time.py --out {out}",), 2, ("GPU",)),
    # Of a CPU.
    Stage("cpu_kernels", ("cpu.py --out {out}",), 8),
    Stage(
        "cpu_model",
        ("cpu_model.py run build/cpu_model --llama-cpp {llama_cpp} --out {out} "
         "int8 Q8_0 fp6 Q6_K int4:group=64 Q4_0 bf16 BF16",),
        15, ("llama.cpp",),
        before=("cpu_model.py make build/cpu_model --llama-cpp {llama_cpp}",),
    ),
    Stage("cpu_kv_cache", ("kv_cache.py time --out {out}",), 3),
    Stage("kv_accuracy", ("kv_cache.py accuracy models/pico --out {out}",), 1),
    Stage("cpu_heads", ("heads.py --out {out}",), 3),
    Stage("cpu_kv_scales", ("kv_scales.py --out {out}",), 5),
    Stage("cpu_accuracy", ("large_columns.py --out {out}",), 25),
    Stage("cpu_lorc", (f"{PICO} --cases texts --tokens 20000 --samples 16",), 8),
    Stage("cpu_trellis", (f"{PICO} --cases trellis --tokens 20000 --samples 64",), 60),
    Stage(
        "cpu_rotation",
        ("study.py build/pico-outliers --cases rotation --tokens 8000 --samples 16 --prompts 0 "
         "--out {out}",),
        20, before=("outliers.py models/pico build/pico-outliers",),
    ),
    Stage("cpu_trellis_codes", ("trellis_codes.py --out {out}",), 15),
    Stage("cpu_sparse", ("sparse.py --out {out}",), 8),
    Stage(
        "cpu_speculative",
        (f"{SPECULATIVE} texts models/pico --drafts none ngram --batches 1 "
         "--temperatures 0 0.8 --rounds 7",
         f"{SPECULATIVE} steps 1b --formats bf16 int4:group=64 --batches 1 --context 128 "
         "--rounds 9"),
        4,
    ),
    Stage(
        "cpu_deterministic",
        (f"{DETERMINISTIC} speed models/pico",
         f"{DETERMINISTIC} speed 1b --batches 4 16 --prompt 4 --tokens 8 --rounds 3",
         f"{DETERMINISTIC} answers models/pico"),
        6,
    ),
    Stage("cpu_generation", ("generation.py models/pico --device cpu --out {out}",), 60),
)  # fmt: skip

# Files of results/ that no command here makes, and why.
WITHOUT = {
    "triton": "tiles of Triton kernels, which `anybit tune` finds now",
    "paper_kernels": "kernels of other projects in programs of their own",
    "stalls": "stalls.py reads a profile by Nsight Compute",
}
