"""From config.json to the class of a model: checked before anything is built or loaded."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from anybit.checkpoint.late import import_late
from anybit.checkpoint.layout import check_fit, check_missing, layout
from anybit.checkpoint.names import Names, natural
from anybit.errors import AnybitError, InvalidInput, in_a_line, loading
from anybit.files.directory import quantization_of, read_json, stated_quantization
from anybit.files.safetensors import WEIGHTS, Stored, stored_tensors
from anybit.nn.tied import untie

LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depth",
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "draft_vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "d_model",
    "d_ff",
    "d_kv",
    "n_embd",
    "n_head",
    "n_inner",
    "num_heads",
    "moe_intermediate_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "kv_lora_rank",
    "q_lora_rank",
    # Not numbers of tensors: some lie in one, and dense models may state experts they do not have.
    *EXPERTS,
)
ADAPTER = "adapter_config.json"
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
MOST_POSITIONS = 1 << 31
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
CODES = {
    "U8",
    "I8",
    "I16",
    "I32",
    "U32",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
}  # of weights that are not dense
# A model may have more tensors than its files: merged ones are taken apart, some are computed.
SPARE, MANY_TIMES, LEAST_BYTES = 1000, 16, 64

log = logging.getLogger(__name__)


def check_sizes(config: Mapping[str, Any], stored: Mapping[str, Stored]) -> None:
    """Raise InvalidInput for sizes in a config.json that its tensors cannot have.

    Checked before a model is built, since a million layers take minutes even without contents.

    Args:
        config: Of config.json.
        stored: The checkpoint's tensors.
    """
    nbytes = sum(tensor.nbytes for tensor in stored.values())
    limits = (
        (LAYERS, len(stored), f"{len(stored)} tensors"),
        (WIDTHS, nbytes, f"{nbytes} bytes of tensors"),
        (POSITIONS, MOST_POSITIONS, ""),
    )
    for path, value in entries(config):
        name = path.rpartition(".")[2]
        for names, limit, what in limits:
            if name not in names or value is None or isinstance(value, dict | list):
                continue
            whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            if not whole or isinstance(value, bool) or value < 0:
                raise InvalidInput(f"config.json: {path} is {value!r}; it must be a whole number")
            if value > limit:
                held = f", but the files hold {what}" if what else f"; at most {limit} can be"
                raise InvalidInput(f"config.json: {path} is {value}{held}")


def entries(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of nested objects, outermost first."""
    for name, value in config.items():
        yield prefix + name, value
        if isinstance(value, dict):
            yield from entries(value, f"{prefix}{name}.")


def dense_config(source: Path) -> dict[str, Any]:
    """The config.json of a model that is to be quantized.

    A quantization_config that was left beside dense weights is not in it.

    Raises:
        FileNotFoundError: There is none.
        InvalidInput: It is damaged, or the model is quantized already.
    """
    config = read_json(source / "config.json")
    quantization_of(config, source)
    stated = stated_quantization(source, config)
    if stated is None:
        return config
    if any(tensor.dtype in CODES for tensor in stored_tensors(source).values()):
        raise quantized_already(source, stated)
    log.warning(
        "%s: config.json says that the model is quantized, with %s; its weights are dense, so that "
        "does not count",
        source,
        stated.get("quant_method", "an unknown method"),
    )
    return {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}


def quantized_already(source: Path, stated: Mapping[str, Any]) -> InvalidInput:
    method = stated.get("quant_method", "an unknown method")
    return InvalidInput(
        f"{source} is quantized already, with {method}; start from the unquantized one"
    )


def configuration(source: Path, stored: Mapping[str, Stored] | None = None) -> tuple[Any, str]:
    """What a directory's config.json says, as transformers reads it, and the class that it names.

    Args:
        source: The directory.
        stored: Its tensors, where they are in other files than the directory's.

    Returns:
        The configuration, of a part of a model perhaps, and the class's name; "" where it has none.

    Raises:
        FileNotFoundError: Files are missing.
        InvalidInput: Files are damaged, sizes are impossible, or the model runs by files of its
            own alone.
    """
    raw = read_json(source / "config.json")
    quantization_of(raw, source)
    stored = stored_tensors(source) if stored is None else stored
    try:
        check_sizes(raw, stored)
    except InvalidInput as error:
        raise InvalidInput(f"{source}: {error}") from None
    if own := raw.get("transformers_weights"):
        raise InvalidInput(
            f"{source}: config.json: transformers_weights is {own!r}; only {WEIGHTS} and shards "
            "with an index are read: rename the file, and remove the entry"
        )
    if (source / ADAPTER).is_file():
        raise InvalidInput(
            f"{source}: {ADAPTER} lies beside the model, and transformers would add that adapter "
            "to it; merge it into the model, or move it into a directory of its own"
        )
    import_late()
    refuse_code(source, raw)
    names = raw.get("architectures") or [""]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(
            f"{source}: config.json: architectures is {names!r}, not a list of names"
        )

    import transformers

    with built(source):
        config = transformers.AutoConfig.from_pretrained(
            source, local_files_only=True, trust_remote_code=False
        )
    name = names[0]
    if config.model_type == "ministral" != raw.get("model_type"):  # a Mistral with layer_types
        name = name.replace("Mistral", "Ministral")
    return config, name


def model_class(source: Path, stored: Mapping[str, Stored] | None = None) -> tuple[Any, Any]:
    """The class of transformers that a directory's config.json names, and its configuration.

    stored: as in `configuration`.

    Raises:
        FileNotFoundError: Files are missing.
        InvalidInput: As `configuration` does, or the class is none of transformers' models.
    """
    config, name = configuration(source, stored)

    import transformers

    if not name:
        return transformers.AutoModelForCausalLM, config
    kind = getattr(transformers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise InvalidInput(
            f"{source}: config.json names the class {name!r}, which is no model of "
            f"transformers {transformers.__version__}; install a version that has it, or call "
            "from_pretrained of the class itself"
        )
    if kind.config_class and not isinstance(config, kind.config_class):  # a part of a composite
        with built(source):
            config = kind.config_class.from_pretrained(source, local_files_only=True)
    return kind, config


def refuse_code(source: Path, raw: Mapping[str, Any]) -> None:
    """InvalidInput for a model that runs by Python files of its own alone."""
    import transformers

    code, names = raw.get("auto_map"), raw.get("architectures") or []
    known = raw.get("model_type") in transformers.CONFIG_MAPPING
    if not code or (known and all(hasattr(transformers, str(name)) for name in names)):
        return
    raise InvalidInput(
        f"{source}: {', '.join(map(str, names)) or 'the model'} is not in transformers "
        f"{transformers.__version__} but in Python files of the checkpoint, which anybit does not "
        "run; if you trust them, load it with from_pretrained(..., trust_remote_code=True), and "
        "use anybit.quantize_ and anybit.save"
    )


class built:
    """Turns any error of transformers about a config.json into an `InvalidInput`."""

    def __init__(self, source: object):
        self.source = source

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, *rest: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, AnybitError | ImportError):
            return
        raise InvalidInput(
            f"{self.source}: transformers cannot build the model that config.json describes: "
            f"{in_a_line(error)}"
        ) from error


def bare_model(source: Path, stored: Mapping[str, Stored] | None = None) -> Any:
    """The model that config.json describes, on the meta device: names and shapes, no memory.

    stored: as in `model_class`.

    Raises:
        FileNotFoundError: Files are missing.
        InvalidInput: As `model_class` does, when transformers cannot build the model, and when it
            has many times more tensors than the files.

    Returns:
        The model. `has_own_head` says that its files untied it: see `own_head`.
    """
    kind, config = model_class(source, stored)
    stored = stored_tensors(source) if stored is None else stored
    nbytes = sum(tensor.nbytes for tensor in stored.values())
    with bounded(source, [tensor.shape for tensor in stored.values()], nbytes):
        model = empty_model(source, kind, config)
    model.has_own_head = own_head(model, stored)
    if model.has_own_head:
        untie(config)
        model = empty_model(source, kind, config)
        model.has_own_head = True
    return model


def own_head(model: Any, stored: Mapping[str, Stored]) -> bool:
    """Whether files hold another weight for a head than for the embedding that it is tied to.

    transformers then takes the head for one of its own, whatever `tie_word_embeddings` says. Where
    that flag ties more than files hold, as T5's may, it stays as it is.
    """
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    state = model.state_dict()
    shapes = {tuple(state[name].shape) for pair in ties.items() for name in pair if name in state}
    alike = [n for n in sorted(stored, key=natural) if stored[n].shape in shapes]
    if len(alike) < 2:
        return False
    names = Names(model)
    found = {names.in_model(name)[0]: stored[name] for name in alike}
    pairs = [(found.get(target), found.get(source)) for target, source in ties.items()]
    whole = [(a, b) for a, b in pairs if a is not None and b is not None]
    return len(whole) == len(pairs) and not all(a.equals(b) for a, b in whole)


@contextmanager
def bounded(source: object, shapes: Sequence[tuple[int, ...]], nbytes: int) -> Iterator[None]:
    """Stop a model from being built that has far more tensors than its files can fill.

    shapes, nbytes: of the tensors in the files, all together.

    Each takes memory, even without contents. A tensor of experts counts once for each of them,
    since they become layers of their own.

    Raises:
        InvalidInput: It has.
    """
    held = sum(shape[0] if len(shape) > 2 else 1 for shape in shapes)
    limit = SPARE + min(MANY_TIMES * held, nbytes // LEAST_BYTES)
    seen, thread = 0, get_ident()

    def count(module: nn.Module, name: str, parameter: Tensor) -> None:
        nonlocal seen
        if get_ident() != thread:
            return
        fused = parameter.dim() == 3 and parameter.shape[2] >= 16  # no convolution
        seen += len(parameter) if fused else 1
        if seen > limit:
            raise InvalidInput(
                f"{source}: config.json describes a model of more than {limit} tensors, but the "
                f"files hold {len(shapes)} in {nbytes} bytes; it belongs to another model"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def empty_model(source: object, kind: Any, config: Any) -> Any:
    """A model of a class of transformers on the meta device. source: for the error's text."""
    make = getattr(kind, "from_config", None) or kind._from_config
    with built(source), torch.device("meta"):
        return make(config)


def check_model(source: Path) -> Any:
    """Everything that can be told of a directory before its weights are read.

    Returns:
        The class of its model.

    Raises:
        FileNotFoundError: Files are missing.
        InvalidInput: As `bare_model` does; a dense model's tensors are missing, or of other shapes.
    """
    model = bare_model(source)
    if not quantization_of(read_json(source / "config.json"), source):
        found = layout(stored_tensors(source), model, lambda name: False)
        check_missing(source, found.missing, found.unexpected)
        check_fit(source, found.names, found.stored, model.state_dict())
    return type(model)


def load_model(source: Path, **options: Any) -> Any:
    """Load a model, dense or quantized, as the class that config.json names.

    Args:
        source: Directory of the model.
        options: For `from_pretrained`.

    Raises:
        FileNotFoundError: Files are missing.
        InvalidInput: As `check_model` does; tensors are missing.
    """
    kind = check_model(source)
    with loading(source):
        model, info = kind.from_pretrained(
            source, output_loading_info=True, local_files_only=True, **options
        )
    check_missing(source, info["missing_keys"], info["unexpected_keys"])
    return model
