"""Which backend multiplies: the only place where that is decided.

The first backend in `BACKENDS` that does not refuse takes the layer; `anybit doctor` prints every
refusal. `register_backend` adds one.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module

from anybit.errors import InvalidInput
from anybit.kernels.backend import Backend, LayerSpec, adopted

# name: (backend, device types; none: all). A backend that is the name of a module is the module's
# BACKEND, or the module itself, and imported when a layer on such a device first asks.
BACKENDS: dict[str, tuple[object, tuple[str, ...]]] = {
    "hopper": ("anybit.kernels.hopper.backend", ("cuda",)),
    "mma": ("anybit.kernels.mma.backend", ("cuda",)),
    "triton": ("anybit.kernels.triton.backend", ("cuda",)),
    "native": ("anybit.kernels.native.backend", ("cpu",)),
    "dense": ("anybit.kernels.dense", ()),
    "reference": ("anybit.kernels.reference", ()),
}


def register_backend(
    name: str, backend: object, devices: Sequence[str] = (), before: str = "reference"
) -> None:
    """Let a backend multiply layers that are made from now on.

    Args:
        name: by which layers, plots and `anybit doctor` know it.
        backend: an `anybit.kernels.backend.Backend`, or an object with its functions, such as a
            module; or a module's name, which is imported when a layer first asks.
        devices: types of the devices that it runs on ("cpu", "cuda"); none: all.
        before: the backend that it is asked before.

    Raises:
        ValueError: the name is taken, or `before` is unknown.
    """
    if name in BACKENDS:
        raise InvalidInput(f"backend {name!r} is registered already; choose another name")
    if before not in BACKENDS:
        raise InvalidInput(f"unknown backend {before!r}; known: {', '.join(BACKENDS)}")
    known = list(BACKENDS.items())
    known.insert(list(BACKENDS).index(before), (name, (backend, tuple(devices))))
    BACKENDS.clear()
    BACKENDS.update(known)


def get_backend(name: str) -> Backend:
    """The backend of this name, imported if need be."""
    found, devices = BACKENDS[name]
    if isinstance(found, Backend):
        return found
    if isinstance(found, str):
        module = import_module(found)
        found = getattr(module, "BACKEND", module)
    backend = adopted(found)
    BACKENDS[name] = backend, devices
    return backend


def refusals(layer: LayerSpec) -> dict[str, str | None]:
    """Every backend's answer to a layer: None, or why it refuses."""
    return dict(answers(layer))


def answers(layer: LayerSpec) -> Iterator[tuple[str, str | None]]:
    """`refusals`, each backend asked when its turn comes."""
    if layer.format.plain() != layer.format:
        raise InvalidInput(
            f"{layer.format.spec}: kernels take Packed.stored(), and x in its order or rotated"
        )
    for name, (_, devices) in list(BACKENDS.items()):
        if devices and layer.device.type not in devices:
            yield name, f"runs on {' and '.join(devices)} only, not on {layer.device.type}"
        else:
            yield name, get_backend(name).refuse(layer)


def choose(layer: LayerSpec) -> str:
    """Name of the first backend that does not refuse."""
    return next(name for name, reason in answers(layer) if reason is None)
