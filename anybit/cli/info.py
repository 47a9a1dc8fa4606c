"""`anybit info`: what a model is, how large it gets in each format, and where it then fits.

All is told by config.json and the headers of the weights, which are not read.
"""

import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from anybit.checkpoint.architecture import bare_model
from anybit.checkpoint.foreign.convert import Opened, plan_conversion
from anybit.checkpoint.foreign.gguf_file import is_gguf, read_model
from anybit.checkpoint.foreign.gguf_model import open_model
from anybit.checkpoint.foreign.methods import METHODS
from anybit.checkpoint.rewrite import SHARD_BYTES
from anybit.checkpoint.stream import WEIGHT_DTYPES
from anybit.core.scheme import parse_scheme
from anybit.engine.loader import model_class
from anybit.engine.memory import FRACTION
from anybit.engine.models import UnknownModel
from anybit.errors import InvalidInput
from anybit.files.directory import megabytes, read_json, stated_quantization
from anybit.files.hub import name_of, peek
from anybit.files.safetensors import Stored
from anybit.nn.embedding import embedding_layers
from anybit.nn.experts import unpublished
from anybit.nn.model import dense_layers, linear_schemes
from anybit.nn.plan import METHOD, canonical, stored_plan
from anybit.planning.gpus import gpu

FORMATS = ("int8", "fp6", "liquid@int8", "int4:group=128", "int3:group=128", "int2:group=32,zero")
DEVICES = ("rtx4090", "h100")
EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Place:
    """Where a model may run. bandwidth: bytes/s of its memory; None: not known."""

    name: str
    memory: float
    bandwidth: float | None = None


LAPTOP = Place("laptop", 16e9)


@dataclass(frozen=True)
class Size:
    """A model in one format.

    Attributes:
        format: Of all layers that are quantized by default; "as it is".
        bits: Of a weight of these layers, scales included.
        disk: Bytes of the files.
        memory: Bytes of the weights and the KV cache.
        tokens_per_second: By place, the most that its memory bandwidth allows, of all sequences
            together; 0 where the model does not fit, None where no bandwidth is known.
    """

    format: str
    bits: float
    disk: int
    memory: int
    tokens_per_second: dict[str, float | None]


@dataclass(frozen=True)
class Info:
    """All that `anybit info` tells.

    Attributes:
        model: As it was given.
        architecture: The class of transformers.
        parameters: Numbers of weights.
        dtype: Of most bytes in the files.
        quantized: How the files are quantized; "" if they are not.
        layers: Linear layers that are quantized by default.
        weights: Their weights.
        cache: Bytes of the KV cache of a token in 16 bits; None: not known.
        context: Tokens of each sequence.
        sequences: At the same time.
        engine: What runs it.
        sizes: By format.
        refused: Formats that cannot store it, and why.
    """

    model: str
    architecture: str
    parameters: int
    dtype: str
    quantized: str
    layers: int
    weights: int
    cache: int | None
    context: int
    sequences: int
    engine: str
    sizes: list[Size]
    refused: dict[str, str]


def info(
    model: str | Path,
    formats: Sequence[str] = FORMATS,
    devices: Sequence[str] = DEVICES,
    memory: str | None = None,
    context: int = 4096,
    sequences: int = 1,
) -> Info:
    """What a model is, in numbers.

    Args:
        model: A directory, a GGUF file, or org/name of the hub; of weights only headers are read.
        formats: Schemes to compute sizes for, unless it is anybit's already.
        devices: Usual names of GPUs.
        memory: Of another machine: "24GB".
        context: Tokens of a sequence in the KV cache, or as many as the model takes.
        sequences: How many run at the same time.

    Raises:
        FileNotFoundError: There is no such model.
        InvalidInput: Its files cannot be read; a format, GPU or size is unknown.
        Unsupported: The hub cannot be reached.
    """
    places = [LAPTOP, *(Place(g.name, g.memory, g.bandwidth) for g in map(gpu, devices))]
    places += [Place("memory of", bytes_of(memory))] if memory else []
    for scheme in formats:
        parse_scheme(scheme)
    held = opened(model, formats)
    bare = held.model
    shapes, default = dense_layers(bare), linear_schemes(bare, "int8")
    cache = cache_of(bare.config)
    longest = getattr(bare.config.get_text_config(), "max_position_embeddings", None) or context
    context = min(context, longest)
    kept = (cache or 0) * context * sequences
    read = 1 - idle_share(bare, shapes, sequences)
    sizes = [
        Size(
            name,
            bits,
            int(disk),
            int(disk + kept),
            rates(places, disk, disk * read, kept, sequences),
        )
        for name, (bits, disk) in held.sizes.items()
    ]
    return Info(
        model=str(model),
        architecture=type(bare).__name__,
        parameters=weights_of(bare),
        dtype=held.dtype,
        quantized=held.quantized,
        layers=len(default),
        weights=sum(math.prod(shapes[name]) for name in default),
        cache=cache,
        context=context,
        sequences=sequences,
        engine=engine_of(bare.config),
        sizes=sizes,
        refused=held.refused,
    )


def weights_of(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


@dataclass(frozen=True)
class Held:
    """What files hold.

    Attributes:
        model: transformers', without memory.
        dtype, quantized: As in `Info`.
        sizes: Bits of a weight, and bytes of all, by format; first "as it is".
        refused: As in `Info`.
    """

    model: Any
    dtype: str
    quantized: str
    sizes: dict[str, tuple[float, float]]
    refused: dict[str, str] = field(default_factory=dict)


def opened(model: str | Path, formats: Sequence[str]) -> Held:
    """What any model holds; see `info`."""
    named, path = name_of(model), Path(model)
    if named and named.variant:
        raise InvalidInput(
            f"{model} names a GGUF file of the hub, and info reads those on this machine; download "
            f"it with `hf download {named.repository} FILE`, and give its path"
        )
    return of_file(path, formats) if not named and is_gguf(path) else of_directory(model, formats)


def of_directory(model: str | Path, formats: Sequence[str]) -> Held:
    """What a directory holds, or a model of the hub; see `info`."""
    directory, stored = peek(model)
    bare = bare_model(directory, stored)
    shapes = dense_layers(bare)
    default = linear_schemes(bare, "int8")
    parameters = weights_of(bare)
    quantization = stated_quantization(directory, read_json(directory / "config.json"))
    total = sum(tensor.nbytes for tensor in stored.values())
    words = embedding_layers(bare)
    coded = [name for name in words if quantization and f"{name}.weight" not in stored]
    known = shapes | words
    counted = {name: known[name] for name in (*default, *coded)}
    now = stored_bits(stored, counted) or 8 * total / parameters
    held = Held(bare, main_dtype(stored.values()), quantized_by(quantization, directory), {})
    held.sizes["as it is"] = now, total
    method = quantization.get("quant_method") if quantization else None
    each, left = total / parameters, set[str]()  # bytes of the others, and some of their names
    if method in METHODS:  # `anybit convert --to` rounds what is in codes, and nothing else
        each, kind = bare.dtype.itemsize, bare.config.model_type
        left = {
            unpublished(name.removesuffix(".weight"), kind)
            for name, tensor in stored.items()
            if name.endswith(".weight") and tensor.torch_dtype in WEIGHT_DTYPES
        }
    if method is None or method in METHODS:
        add_formats(held, formats, each, left)
    return held


def add_formats(held: Held, formats: Sequence[str], each: float, left: Container[str]) -> None:
    """Sizes of a model after `anybit quantize`.

    Args:
        held: Gets them.
        formats: As in `info`.
        each: Bytes of a weight that stays as it is.
        left: Names of linear layers that do.
    """
    bare, shapes = held.model, dense_layers(held.model)
    parameters = weights_of(bare)
    for scheme in formats:
        try:
            schemes = linear_schemes(bare, scheme)
            bits, count = in_format(shapes, {n: s for n, s in schemes.items() if n not in left})
        except InvalidInput as error:
            held.refused[scheme] = str(error)
        else:
            held.sizes[scheme] = bits / count, bits / 8 + (parameters - count) * each


def of_file(path: Path, formats: Sequence[str]) -> Held:
    """What a GGUF file holds, as `anybit convert` takes it; see `info`."""
    contents = read_model(path)
    with TemporaryDirectory() as folder:
        found = Opened(path, Path(folder), "gguf", *open_model(contents, Path(folder)))
        exact = plan_conversion(found, SHARD_BYTES)
        blocks = [block for name, block in contents.tensors.items() if name.startswith("blk.")]
        blocks = [block for block in blocks if len(block.shape) > 1]
        weights = sum(math.prod(block.shape) for block in blocks)
        kinds = Counter(block.kind for block in contents.tensors.values() if len(block.shape) > 1)
        words = "GGUF: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        loss = ", some of which anybit decodes" if exact.decoded else ", which anybit keeps"
        dtype = main_dtype(block.stored for block in contents.tensors.values())
        held = Held(found.names.model, dtype, words + loss if exact.layers else "", {})
        total = sum(block.stored.nbytes for block in contents.tensors.values())
        now = 8 * sum(block.stored.nbytes for block in blocks) / max(weights, 1)
        held.sizes["as it is"] = now, total
        if not exact.layers:
            add_formats(held, formats, total / weights_of(held.model), ())
            return held
        for scheme in formats:
            try:
                work = plan_conversion(found, SHARD_BYTES, scheme)
            except InvalidInput as error:
                held.refused[scheme] = str(error)
                continue
            own = canonical(scheme)
            rounded = {n: layer.shape for n, layer in work.layers.items() if layer.scheme == own}
            bits, count = in_format(rounded, dict.fromkeys(rounded, own))
            held.sizes[scheme] = bits / count, work.needed([*work.shards])
    return held


def stored_bits(stored: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Bits of a weight of those layers whose tensors have their names; 0.0 if none has."""
    held: Counter[str] = Counter()
    for name, tensor in stored.items():
        layer, _, part = name.rpartition(".")
        if layer in shapes and part != "bias":
            held[layer] += tensor.nbytes
    return 8 * held.total() / max(sum(math.prod(shapes[name]) for name in held), 1)


def in_format(
    shapes: Mapping[str, tuple[int, ...]], schemes: Mapping[str, str]
) -> tuple[float, int]:
    """Stored bits of the layers that are quantized, and their weights."""
    bits, weights = 0.0, 0
    for name, scheme in schemes.items():
        n, k = shapes[name]
        bits += parse_scheme(scheme)[0].bits_per_weight((n, k)) * n * k
        weights += n * k
    return bits, max(weights, 1)


def idle_share(bare: Any, shapes: Mapping[str, tuple[int, ...]], sequences: int) -> float:
    """The share of the weights that a step of one token of each sequence does not read.

    These are embeddings that are not the head as well, and experts that no token is sent to.
    """
    words = bare.get_input_embeddings()
    head = bare.get_output_embeddings()
    idle = 0.0
    if words is not None and (head is None or head.weight is not words.weight):
        idle += words.weight.numel()
    experts = {int(m[1]): 0 for m in map(EXPERT.search, shapes) if m}
    top = getattr(bare.config.get_text_config(), "num_experts_per_tok", None)
    if experts and top:
        of_experts = sum(math.prod(shape) for n, shape in shapes.items() if EXPERT.search(n))
        idle += of_experts * max(0.0, 1 - top / len(experts)) ** sequences
    return idle / weights_of(bare)


def rates(
    places: Sequence[Place], weights: float, read: float, kept: int, sequences: int
) -> dict[str, float | None]:
    """`Size.tokens_per_second` of weights that take, and are read by, so many bytes a step."""
    out: dict[str, float | None] = {}
    for place in places:
        fits = weights + kept <= place.memory * FRACTION
        most = sequences * place.bandwidth / (read + kept) if place.bandwidth else None
        out[f"{place.name} {place.memory / 1e9:.3g} GB"] = most if fits else 0.0
    return out


def cache_of(config: Any) -> int | None:
    """Bytes of the engine's KV cache of a token, in 16 bits, as if every layer had attention."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", 0)
    latent = getattr(text, "kv_lora_rank", None)
    width = getattr(text, "head_dim", None)
    if latent:
        heads, width = 1, latent + text.qk_rope_head_dim
    elif not width and heads and getattr(text, "hidden_size", None):
        width = text.hidden_size // text.num_attention_heads
    kinds = getattr(text, "layer_types", None) or []
    others = [kind for kind in kinds if "attention" not in kind or kind == "linear_attention"]
    layers = getattr(text, "num_hidden_layers", 0) - len(others)
    return 2 * 2 * layers * heads * width if layers and heads and width else None


def main_dtype(stored: Iterable[Stored]) -> str:
    sizes: Counter[str] = Counter()
    for tensor in stored:
        sizes[tensor.dtype] += tensor.nbytes
    return sizes.most_common(1)[0][0].lower()


def quantized_by(quantization: Mapping[str, Any] | None, directory: Path) -> str:
    """How a checkpoint is quantized, in words; "" if it is not."""
    if quantization is None:
        return ""
    method = str(quantization.get("quant_method"))
    if method == METHOD:
        plan = stored_plan(dict(quantization), directory)
        return "anybit: " + ", ".join(dict.fromkeys(scheme for scheme in plan.values() if scheme))
    if method in METHODS:
        return f"{method}, which anybit converts when it loads it, without loss"
    return f"{method}, which anybit cannot read"


def engine_of(config: Any) -> str:
    """What runs a model, and why not something faster."""
    try:
        model_class(config, "it")
    except UnknownModel as reason:
        why = str(reason).removeprefix("it: ")
        return (
            "transformers' modules, on the KV cache of anybit's engine if attention is all that "
            f"looks at other tokens, else one sequence at a time ({why})"
        )
    return "anybit's engine (serve, chat, LLM), and transformers"


def bytes_of(text: str) -> float:
    """Bytes of a memory: "24GB", "24 GiB", "24"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(gib|gb|g)?\s*", text.lower())
    if not found or not float(found[1]):
        raise InvalidInput(f"{text!r} is not the size of a memory; give 24GB, for example")
    return float(found[1]) * (2.0**30 if found[2] == "gib" else 1e9)


def show(found: Info) -> None:
    """Print it."""
    console = Console()
    console.width = max(console.width, 100)  # where a cell is cut, a number says something else

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    say(
        f"{found.model}: {found.architecture}, {found.parameters / 1e6:,.4g} million parameters, "
        + (f"quantized by {found.quantized}" if found.quantized else found.dtype)
    )
    linear = f"{found.layers} linear layers, {found.weights / 1e6:,.4g} million weights"
    stay = "embeddings, output head and norms stay as they are unless they are named"
    say(linear if found.quantized else f"quantized by default: {linear}; {stay}")
    say(f"runs in: {found.engine}; vLLM with anybit's plugin, if vLLM has {found.architecture}")
    kept = "of unknown size, not counted"
    if found.cache is not None:
        whole = megabytes(found.cache * found.context * found.sequences)
        kept = f"{whole} ({found.sequences} x {found.context:,} tokens of {found.cache:,} bytes)"
    say(f"KV cache: {kept}")
    columns = [*found.sizes[0].tokens_per_second]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("format", "bits", "disk", "memory", *columns):
        heading = re.sub(r" (?=[\d.]+ GB$)", "\n", name)
        table.add_column(heading, justify="left" if name == "format" else "right", no_wrap=True)
    for size in found.sizes:
        cells = [rate_text(size.tokens_per_second[name]) for name in columns]
        disk, memory = megabytes(size.disk), megabytes(size.memory)
        table.add_row(size.format, f"{size.bits:.2f}", disk, memory, *cells)
    console.print(table, highlight=False)
    for scheme, why in found.refused.items():
        say(f"{scheme}: {why}")
    say(
        f"memory: weights and KV cache; a model fits that takes up to {FRACTION:.0%} of it. "
        "<=: tokens/s that memory bandwidth allows (bandwidth / bytes read), not measured."
    )


def rate_text(rate: float | None) -> str:
    """A cell: whether it fits, and at how many tokens/s."""
    if rate is None:
        return "fits"
    return f"<= {rate:,.0f}" if rate else "too large"
