"""Tokens per second of a model on a CPU: anybit's engine beside llama.cpp, in turns.

    python benchmarks/cpu_model.py make FOLDER --llama-cpp NODE
    python benchmarks/cpu_model.py run FOLDER --llama-cpp NODE int8 Q8_0 --out results.csv
    python benchmarks/cpu_model.py run . --llama-cpp NODE --model NAME CONVERTED FILE.gguf

`make` writes a random Llama of 1.1 billion parameters, its quantized checkpoints and GGUF files by
ggml's own quantizers. `run` loads each contestant in a process of its own, and then lets all read a
prompt and write tokens in turns; a row holds medians. Both have a dense bf16 head. The third line
runs a published model: a checkpoint that `anybit convert` made, and its file (or the name of one
that `make` wrote). NODE: a folder where
`npm install node-llama-cpp` was run, whose llama.cpp is built for every kind of processor.
"""

import argparse
import ctypes
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from csv_rows import add_rows
from torch import Tensor

from anybit.checkpoint.stream import quantize_checkpoint
from anybit.kernels.processor import processor
from anybit.measure.bench import current_commit

SHAPE = {
    "hidden_size": 2048, "num_hidden_layers": 22, "intermediate_size": 5632,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
FORMATS = ("int8", "int4", "int4:group=64", "fp6", "liquid@int8")
GGUFS = ("BF16", "Q8_0", "Q6_K", "Q4_0", "Q4_K")
LAYERS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
FLOOR = 256 << 20  # bytes that are read to know how fast memory is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["make", "run", "worker"])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "formats", nargs="*", help="of anybit (bf16, int4) and GGUF (Q4_0); directories and files"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="of all threads, where others use the machine, too"
    )
    parser.add_argument("--model", default="random Llama, 1.1B", help="its name in the rows")
    parser.add_argument("--llama-cpp", type=Path, metavar="NODE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16, help="of a round's text")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=2, help="rounds with a prompt")
    parser.add_argument("--out", type=Path, help="a CSV that rows are added to")
    args = parser.parse_intermixed_args()
    torch.set_num_threads(args.threads)
    if args.what == "make":
        make(args.folder, args.llama_cpp, args.formats or [*FORMATS, *GGUFS])
    elif args.what == "worker":
        worker(args.folder)
    else:
        for row in run(args):
            print(json.dumps(row))
            if args.out:
                add_rows(args.out, [row])


# Making.


def make(folder: Path, node: Path | None, formats: list[str]) -> None:
    """Write what is not there yet."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    dense = folder / "bf16"
    if not dense.is_dir():
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"])
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(dense)
    for name in formats:
        if name in GGUFS and node and not (folder / f"{name}.gguf").is_file():
            write_gguf(dense, folder / f"{name}.gguf", name, node)
        elif name not in GGUFS and name != "bf16" and not (folder / name).is_dir():
            quantize_checkpoint(dense, folder / name, name)


def write_gguf(dense: Path, path: Path, name: str, node: Path) -> None:
    """The model in a type of llama.cpp's; embeddings and head stay bf16."""
    import gguf
    from safetensors.torch import load_file

    kind, c = gguf.GGMLQuantizationType[name], SHAPE
    ggml = ctypes.CDLL(str(library(node)))
    ggml.ggml_quantize_chunk.restype = ggml.ggml_row_size.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    ggml.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, pointer, pointer, count, count, count, pointer,
    ]  # fmt: skip
    ggml.ggml_row_size.argtypes = [ctypes.c_int, count]
    tensors = load_file(dense / "model.safetensors")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_rope_dimension_count(64)
    writer.add_layer_norm_rms_eps(1e-6)
    vocabulary = c["vocab_size"]
    writer.add_tokenizer_model("llama")
    special = [b"<unk>", b"<s>", b"</s>", *(f"<0x{i:02X}>".encode() for i in range(256))]
    writer.add_token_list(special + [f"t{i}".encode() for i in range(vocabulary - len(special))])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (vocabulary - len(special)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def half(t: Tensor) -> Any:
        return t.contiguous().view(torch.uint8).numpy()

    def packed(t: Tensor) -> Any:
        if name == "BF16":
            return half(t)
        x, (n, k) = t.float().contiguous(), t.shape
        out = torch.empty(n, ggml.ggml_row_size(int(kind), k), dtype=torch.uint8)
        ggml.ggml_quantize_chunk(int(kind), x.data_ptr(), out.data_ptr(), 0, n, k, None)
        return out.numpy()

    bf16 = gguf.GGMLQuantizationType.BF16
    for own, other in (("token_embd", "model.embed_tokens"), ("output", "lm_head")):
        writer.add_tensor(f"{own}.weight", half(tensors[f"{other}.weight"]), raw_dtype=bf16)
    norms = {"output_norm": "model.norm"}
    for i in range(c["num_hidden_layers"]):
        norms[f"blk.{i}.attn_norm"] = f"model.layers.{i}.input_layernorm"
        norms[f"blk.{i}.ffn_norm"] = f"model.layers.{i}.post_attention_layernorm"
        for own, other in LAYERS.items():
            weight = packed(tensors[f"model.layers.{i}.{other}.weight"])
            writer.add_tensor(f"blk.{i}.{own}.weight", weight, raw_dtype=kind)
    for own, other in norms.items():
        writer.add_tensor(f"{own}.weight", tensors[f"{other}.weight"].float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def library(node: Path) -> Path:
    return next(node.glob("node_modules/@node-llama-cpp/linux-x64/bins/*/libggml-base.so"))


# Running.


def worker(model: Path) -> None:
    """anybit in a process: reads what to do, line by line, and answers with seconds."""
    from anybit.engine.llm import LLM
    from anybit.engine.sequence import SamplingParams

    llm = LLM(model, length=1024, max_running=1, prefix_caching=False)
    weights = sum(layer_bytes(m) for m in llm.engine.runner.model.modules())
    print("ready", weights, flush=True)
    for line in sys.stdin:
        what, count = line.split()
        size, tokens = (int(count), 1) if what == "prompt" else (16, int(count) + 1)
        ids = torch.randint(300, SHAPE["vocab_size"], (size,)).tolist()
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        llm.engine.add(f"{time.time()}", ids, params)
        start = time.perf_counter()
        llm.engine.step()
        if what == "decode":  # the first token is not counted
            start = time.perf_counter()
        while llm.engine.busy:
            llm.engine.step()
        print(time.perf_counter() - start, flush=True)


def layer_bytes(module: Any) -> int:
    """Bytes of a linear layer's weight as it is multiplied."""
    from anybit.nn.embedding import QuantEmbedding

    if isinstance(module, torch.nn.Embedding | QuantEmbedding):
        return 0  # a tied head counts by itself
    prepared = getattr(module, "prepared", None)
    if prepared is not None:
        return sum(t.nbytes for t in prepared.layout)
    weight = getattr(module, "weight", None)
    return weight.nbytes if isinstance(weight, Tensor) and weight.dim() == 2 else 0


class Contestant:
    """A process with a loaded model. weights: bytes that a decode step reads."""

    def __init__(self, name: str, args: argparse.Namespace):
        made = name in GGUFS
        self.name = Path(name).name
        self.engine = "llama.cpp" if made or name.endswith(".gguf") else "anybit"
        self.prompts: list[float] = []
        self.decodes: list[float] = []
        self.cpu_time = args.cpu_time
        here = Path(__file__)
        if self.engine == "anybit":
            command = [sys.executable, here, "worker", args.folder / name]
            command += ["--threads", args.threads]
        else:
            file = (args.folder / (f"{name}.gguf" if made else name)).resolve()
            node = args.llama_cpp.resolve()
            command = ["node", here.with_name("llama_cpp.mjs"), file, args.threads, node]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [str(part) for part in command], stdin=pipe, stdout=pipe, text=True
        )
        weights = self._line().split()[1:]
        # Which are read as the head, too, where a published file has none of its own.
        embeddings = SHAPE["vocab_size"] * SHAPE["hidden_size"] * 2 if made else 0
        self.weights = int(weights[0]) if weights else file.stat().st_size - embeddings

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended; see above")
        return line

    def seconds(self, what: str, count: int) -> float:
        """Of a prompt, or of tokens; CPU time has the prompt of 16 before these in it."""
        assert self.process.stdin is not None
        before = self._used()
        print(what, count, file=self.process.stdin, flush=True)
        seconds = float(self._line())
        return self._used() - before if self.cpu_time else seconds

    def _used(self) -> float:
        """Seconds that all threads of the process have run so far, by Linux."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of all contestants, which take turns."""
    contestants = [Contestant(name, args) for name in args.formats]
    data, floors = torch.zeros(FLOOR // 4), []
    for c in contestants:
        c.seconds("prompt", 64)  # compiles what is not yet
        c.seconds("decode", 4)
    for i in range(args.rounds):
        floors.append(read_seconds(data, args.cpu_time))
        for c in contestants:
            before = c.seconds("decode", 1) if args.cpu_time else 0
            c.decodes.append(c.seconds("decode", args.tokens + args.cpu_time) - before)
            if i < args.prompts:
                c.prompts.append(c.seconds("prompt", args.prompt))
    bandwidth = FLOOR / median(floors)
    for c in contestants:
        c.process.kill()
        step = median(c.decodes) / args.tokens
        numbers = {
            "prompt_tokens_per_s": args.prompt / median(c.prompts), "decode_tokens_per_s": 1 / step,
            "weights_gb": c.weights / 1e9, "read_gbps": bandwidth / 1e9,
            "vs_floor": step * bandwidth / c.weights,
        }  # fmt: skip
        yield {
            "model": args.model, "engine": c.engine, "format": c.name,
            **{name: f"{value:.4g}" for name, value in numbers.items()},
            "seconds": "CPU" if args.cpu_time else "wall",
            "prompt": args.prompt, "tokens": args.tokens, "rounds": args.rounds,
            "cpu": processor(), "threads": args.threads, "date": time.strftime("%Y-%m-%d"),
            "commit": current_commit(), "versions": versions(c.engine, args.llama_cpp),
        }  # fmt: skip


def read_seconds(data: Tensor, cpu_time: bool) -> float:
    clock = time.process_time if cpu_time else time.perf_counter
    start = clock()
    data.sum()
    return clock() - start


def versions(engine: str, node: Path | None) -> str:
    if engine == "anybit":
        names = ("torch", "llvmlite")
        return " ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    assert node is not None
    package = json.loads((node / "node_modules/node-llama-cpp/package.json").read_text())
    binaries = node / "node_modules/node-llama-cpp/llama/binariesGithubRelease.json"
    release = json.loads(binaries.read_text())["release"]
    return f"llama.cpp {release} node-llama-cpp {package['version']}"


if __name__ == "__main__":
    main()
