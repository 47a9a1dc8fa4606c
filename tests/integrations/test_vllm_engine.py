"""vLLM generates what transformers does, from the same checkpoint (`make test-vllm`)."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import anybit
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.integrations.transformers import AnybitConfig
from anybit.nn.model import dequantize_
from tests.integrations.generate import PICO, TOKENS, by_transformers, by_vllm, judge
from tests.specs import SPECS

PLANS = {
    "int8 activations": "liquid@int8",
    "unlike parts of a merged layer": {
        "*": "int4:group=64",
        "*.k_proj": "fp6",
        "*.v_proj": None,
        "*.up_proj": "codebook:m=1,v=4",
        "*.7.*": None,
    },
}


def first_layer(spec):
    """A plan with one layer in a format that takes minutes to encode."""
    return {"*": "int8", "*.0.*": spec} if spec.startswith("trellis") else spec


SCHEMES = [*SPECS, "trellis:code=look@int8"]
WHOLE = [first_layer(scheme) for scheme in SCHEMES]


def compare(got, plan, path, **options):
    """Assert that tokens are transformers', or next to its likeliest where it quantizes tokens.

    The last bit of a norm may move a token's code then, and that a near tie.
    """
    if "@" not in str(plan):
        assert got == by_transformers(path, **options)
        return
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    judge(model.eval(), got)


@pytest.mark.parametrize("plan", [*WHOLE, *PLANS.values()], ids=[*SCHEMES, *PLANS])
def test_checkpoint(tmp_path, plan):
    quantize_checkpoint(PICO, tmp_path / "out", plan)
    compare(by_vllm(tmp_path / "out"), plan, tmp_path / "out")


@pytest.mark.parametrize("plan", ["fp6", "int4:group=64", *PLANS.values()])
def test_dense_checkpoint_quantized_while_it_is_loaded(plan):
    got = by_vllm(PICO, quantization="anybit", hf_overrides={"anybit": {"formats": plan}})
    compare(got, plan, PICO, quantization_config=AnybitConfig(plan))


@pytest.fixture
def two_ranks(monkeypatch):
    """Options of vLLM for two processes, a core or a GPU each."""
    if torch.cuda.device_count() == 1:
        pytest.skip("one GPU")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    return {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.parametrize("plan", ["int4:group=64", "codebook:m=1,v=4"])
def test_tensor_parallelism(tmp_path, plan, two_ranks):
    quantize_checkpoint(PICO, tmp_path / "out", plan)
    assert by_vllm(tmp_path / "out", **two_ranks) == by_transformers(tmp_path / "out")


@pytest.mark.timeout(1200)
def test_compiled_and_cached_graphs_follow_the_backend(tmp_path, monkeypatch):
    """Two backends with other layouts share the cache of compiled graphs, warm the second time."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    quantize_checkpoint(PICO, tmp_path / "out", "int8")
    wanted = by_transformers(tmp_path / "out")
    for backend in ("reference", "native", "reference"):
        options = {"hf_overrides": {"anybit": {"backend": backend}}}
        assert by_vllm(tmp_path / "out", eager=False, **options) == wanted, backend
    assert by_vllm(tmp_path / "out", eager=False) == wanted  # native again, unnamed


MIXTURES = {
    "one format": "int4:group=32",
    "few bits": {"*": "int2:group=32", "*.w2": "int3:group=32"},
    "codebooks": {"*": "codebook:m=2,v=8,b=6", "lm_head": "int8"},
    "unlike projections": {"*": "fp6", "*.w2": None, "*.w3": "int5:group=64"},
}


@pytest.mark.parametrize("plan", MIXTURES.values(), ids=MIXTURES)
def test_experts(tmp_path, mixtral, plan):
    """Stored in codes, and quantized while they are loaded, they are the decoded dense model."""
    quantized_and_decoded(mixtral, tmp_path, plan)
    wanted = by_transformers(tmp_path / "decoded")
    assert by_vllm(tmp_path / "codes") == wanted
    assert by_vllm(mixtral, quantization="anybit", hf_overrides={"anybit": {"formats": plan}}) == (
        wanted
    )


@pytest.mark.parametrize(
    ("model", "expert_parallel"), [("mixtral", False), ("mixtral", True), ("qwen3", True)]
)
def test_experts_of_two_ranks(tmp_path, request, model, expert_parallel, two_ranks):
    quantized_and_decoded(request.getfixturevalue(model), tmp_path, MIXTURES["codebooks"])
    got = by_vllm(tmp_path / "codes", enable_expert_parallel=expert_parallel, **two_ranks)
    assert got == by_transformers(tmp_path / "decoded")


def quantized_and_decoded(source, out, plan):
    """The model quantized in out/codes, and dense with the decoded weights in out/decoded."""
    quantize_checkpoint(source, out / "codes", plan)
    dequantize_(anybit.load(out / "codes")).save_pretrained(out / "decoded")
    AutoTokenizer.from_pretrained(source).save_pretrained(out / "decoded")


@pytest.mark.parametrize("dense", [False, True])
def test_random_weights(tmp_path, dense):
    """`load_format="dummy"`, which vLLM's benchmarks use: no tensor is read, and all is finite."""
    plan, options = {"*": "int4:group=64", "*.k_proj": "codebook:m=1,v=4"}, {}
    if dense:
        options = {"quantization": "anybit", "hf_overrides": {"anybit": {"formats": plan}}}
        path = PICO
    else:
        path = tmp_path / "out"
        quantize_checkpoint(PICO, path, plan)
    tokens = by_vllm(path, load_format="dummy", **options)
    assert tokens != by_transformers(PICO)
    assert all(len(text) == TOKENS for text in tokens)


def without(directory, tensor):
    """Take a tensor out of a checkpoint's file."""
    tensors = load_file(directory / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_missing_codes_are_named(tmp_path):
    quantize_checkpoint(PICO, tmp_path / "out", "fp6")
    without(tmp_path / "out", "model.layers.3.self_attn.k_proj.codes2")
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.k_proj: .* lacks codes2"):
        by_vllm(tmp_path / "out")


@pytest.mark.parametrize("stored", [True, False])
def test_missing_dense_tensors_are_named(tmp_path, stored):
    """For which vLLM would take what lies in memory."""
    out, options = tmp_path / "out", {}
    if stored:
        quantize_checkpoint(PICO, out, "fp6")
    else:
        shutil.copytree(PICO, out)
        options = {"quantization": "anybit", "hf_overrides": {"anybit": {"formats": "fp6"}}}
    without(out, "model.norm.weight")
    with pytest.raises(ValueError, match=r"no file holds 1 tensors .* \(model\.norm\.weight\)"):
        by_vllm(out, **options)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({}, r"needs a format: hf_overrides="),
        ({"anybit": {"formats": "int9"}}, "unknown format 'int9'"),
        ({"anybit": {"formats": "fp6", "kernel": "x"}}, "has kernel; known: formats, backend"),
        ({"anybit": {"formats": "fp6", "backend": "x"}}, "unknown backend 'x'"),
        ({"anybit": {"formats": {"*": "fp6", "*.gaet": None}}}, r"no layer matches '\*\.gaet'"),
        ({"anybit": {"formats": "int4:group=100"}}, "q_proj: K=256 is not a multiple of group=100"),
        ({"anybit": {"formats": {"*.q_proj": "fp6"}}}, "no pattern matches layer .*k_proj"),
        ({"anybit": {"formats": {"*": "fp6", "lm_head": "int8"}}}, "lm_head shares its weight"),
        (
            {"anybit": {"formats": "trellis", "backend": "native"}},
            "'native' refuses it: .* depends on neighbouring codes",
        ),
    ],
)
def test_bad_options(overrides, message):
    with pytest.raises(ValueError, match=message):
        by_vllm(PICO, quantization="anybit", hf_overrides=overrides)
