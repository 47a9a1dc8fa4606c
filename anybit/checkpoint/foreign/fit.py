"""Whether another tool's layers fit into the model, and what of the model they leave out."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from anybit.checkpoint.foreign.base import Layer, decoded
from anybit.checkpoint.names import Names, ignored_unexpected, natural, targets_of
from anybit.checkpoint.places import missing
from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.nn.embedding import factor_of
from anybit.nn.model import is_linear
from anybit.nn.plan import Plan, Spec, check_rows, plan_of
from anybit.quantizers.base import quantize_weight
from anybit.quantizers.rtn import RTN

OTHERS = "transformers makes weights of other layers of it"


def fit_all(
    layers: Mapping[str, Layer],
    module_of: Mapping[str, nn.Module],
    names: Names,
    schemes: Mapping[str, tuple[str, bool]],
    for_transformers: bool,
) -> dict[str, Layer]:
    """Layers as their places in the model need them.

    Args:
        layers: As they are stored, by their names in the checkpoint.
        module_of: The model's modules by those names.
        names: Of the model.
        schemes: What layers are rounded to, of `rounded_to`.
        for_transformers: As in `plan_conversion`.

    Raises:
        InvalidInput: One does not fit, or is to be rounded by its name and becomes dense.
    """
    out = {}
    for name, layer in layers.items():
        scheme, by_name = schemes.get(name, (None, False))
        out[name] = fitted(name, layer, module_of.get(name), names, scheme, for_transformers)
        if by_name and out[name].scheme != scheme:
            raise InvalidInput(
                f"{name} cannot be rounded to {scheme}, since it becomes dense here: "
                f"{out[name].reason}; leave it out"
            )
    return out


def fitted(
    name: str,
    layer: Layer,
    module: nn.Module | None,
    names: Names,
    to: str | None,
    for_transformers: bool,
) -> Layer:
    """A layer as its place in the model needs it.

    Args:
        name: In the checkpoint.
        layer: As it is stored.
        module: Of the model; None where it has no such layer.
        names: Of the model.
        to: The scheme that it is rounded to; None: it stays as it is.
        for_transformers: As in `plan_conversion`.

    Raises:
        InvalidInput: It does not fit.
    """
    if module is None and for_transformers and made_into_others(names, name, layer):
        return decoded(layer, OTHERS)
    if isinstance(module, nn.Embedding) and factor_of(module) is not None:
        check_shape(name, (module.num_embeddings, module.embedding_dim), layer)
        if to is not None:
            check_rows(name, *parse_scheme(to))
            return rounded(name, layer, to)
        return layer
    shape = tuple(module.weight.shape) if isinstance(module, nn.Linear) else None
    if module is not None and shape is None:  # it would be initialized at random
        raise InvalidInput(
            f"{name} is a {type(module).__name__} in {type(names.model).__name__}, and only linear "
            "layers can be converted; use this model with the tool that quantized it"
        )
    if shape is not None and layer.cut is not None:
        cut = layer.cut((shape[0], shape[1]))
        layer = replace(cut, activation=layer.activation, note=layer.note)
    if shape is not None:
        check_shape(name, shape, layer)
    if module is not None and not is_linear(module):
        return decoded(layer, f"a {type(module).__name__} is more than a linear layer")
    return layer if to is None else rounded(name, layer, to)


def made_into_others(names: Names, name: str, layer: Layer) -> bool:
    """Whether transformers makes other weights of a layer's when it loads it, experts aside.

    Raises:
        InvalidInput: It does, and the layer does not have the shape of those weights together.
    """
    first, converter, _ = names.in_model(f"{name}.weight")
    if converter is None or ".experts." in name:
        return False
    if layer.cut is not None:
        raise InvalidInput(
            f"{name}: its shape is not stored, and the model has no layer of that name to tell it; "
            "use this model with the tool that quantized it"
        )
    targets = targets_of(first, converter, names.state)
    shapes = [tuple(names.state[target].shape) for target in targets if target in names.state]
    first_step = converter.operations[0]
    if type(first_step).__name__ == "Chunk" and first_step.dim == 0 and shapes:
        shape = (sum(rows for rows, *_ in shapes), *shapes[0][1:])
        check_shape(name, shape, layer)
    return True


def check_shape(name: str, shape: tuple[int, ...], layer: Layer) -> None:
    """Raise InvalidInput where a layer does not have the model's shape."""
    if shape != layer.shape:
        raise InvalidInput(
            f"{name}: config.json asks for a weight of {shape}, the checkpoint holds one of "
            f"{layer.shape}"
        )


def rounded_to(
    to: Spec | Plan | None, layers: Mapping[str, str | None], embeddings: Container[str | None]
) -> dict[str, tuple[str, bool]]:
    """The schemes of the layers that are to be rounded, and whether more than "*" names them.

    Args:
        to: As in `convert_checkpoint`.
        layers: Names of all quantized layers in the checkpoint, and the model's for them.
        embeddings: Those of the model's names that are embeddings', which "*" does not mean.

    Raises:
        InvalidInput: A pattern matches none.
    """
    plan = {} if to is None else plan_of(to)
    out, unused = dict[str, tuple[str, bool]](), set(plan)
    for name, own in layers.items():
        found = [p for p in plan if any(n and (n == p or fnmatchcase(n, p)) for n in (name, own))]
        unused -= {*found}
        if own in embeddings:
            found = [p for p in found if p.rpartition(".")[2].strip("*?")]
        if found and (scheme := plan[found[-1]]) is not None:
            out[name] = scheme, found[-1] != "*"
    if plan and not layers:
        raise InvalidInput(
            "no layer is quantized here, and only those can be rounded on the way; convert without "
            "a format, then use `anybit quantize`"
        )
    if unused:
        raise InvalidInput(
            f"no quantized layer matches {', '.join(map(repr, sorted(unused)))}; layers are named "
            f"like {', '.join(map(repr, list(layers)[:3]))}"
        )
    return out


def rounded(name: str, layer: Layer, to: str) -> Layer:
    """The layer rounded to nearest in another format; InvalidInput where that cannot store it."""
    fmt, activation = parse_scheme(to)
    try:
        fmt.check(*layer.shape)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from None

    def read() -> Packed:
        return quantize_weight(RTN(), layer.dense(), fmt)

    return replace(layer, format=fmt, read=read, dtypes={}, activation=activation, note="")


def lost_tensors(
    names: Names,
    model: nn.Module,
    dense: Iterable[str],
    coded: Iterable[str],
    unexpected: Iterable[str],
) -> list[str]:
    """Tensors that transformers would make up, but for experts that vLLM may find.

    Args:
        names: Of the model.
        model: Its experts one by one.
        dense: Names of dense tensors in the checkpoint.
        coded: The model's names of its quantized layers.
        unexpected: Quantized layers that it has not, by their names in the checkpoint.
    """
    unknown = experts_of(names, unexpected)
    return [n for n in missing(names, model, dense, coded) if not n.startswith(unknown)]


def experts_of(names: Names, layers: Iterable[str]) -> tuple[str, ...]:
    """What the model's tensors begin with that hold stored experts, where transformers keeps them.

    layers: by the names in the checkpoint.
    """
    ignored = ignored_unexpected(names.model)
    out = set[str]()
    for name in sorted(layers, key=natural):
        weight = f"{name}.weight"
        if ".experts." not in name or ignored(weight) or ignored(names.renamed(weight)):
            continue
        first, converter, _ = names.in_model(weight)
        targets = [first] if converter is None else targets_of(first, converter, names.state)
        out |= {target.partition(".experts.")[0] + ".experts." for target in targets}
    return tuple(sorted(out))
