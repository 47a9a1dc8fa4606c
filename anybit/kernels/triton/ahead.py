"""Triton's kernels, compiled in other processes: noted for that, or each before its first launch.

Those write Triton's cache, from which a launch then loads. They know the GPU by its target alone,
so they need none. A compiler that aborts at a kernel ends such a process, and never a server.
"""

import hashlib
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime import JITFunction
from triton.runtime.cache import get_cache_key, get_cache_manager

from anybit.errors import Unsupported
from anybit.kernels.ahead import notes
from anybit.kernels.processes import Child

CHILD = Child()
DEADLY: set[str] = set()  # kernels at which a child has ended, by their places in Triton's cache


class Function(NamedTuple):
    """A Triton function, by where it is."""

    module: str
    name: str

    @classmethod
    def of(cls, function: JITFunction) -> "Function":
        return cls(function.fn.__module__, function.fn.__qualname__)

    def find(self) -> JITFunction:
        lang = import_module("anybit.kernels.triton.lang")  # which imports this file
        found: Any = import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return lang.jit(found)


def install() -> None:
    """Look at each kernel of anybit's that Triton is about to compile and that its cache lacks.

    Where a thread keeps notes, it is noted, and not launched: a launch whose kernel is not made
    returns, as Triton says of its own hook for that, which is called too early, with what must be
    JSON. Elsewhere a child compiles it first.
    """
    usual = getattr(JITFunction, "_do_compile", None)
    if usual is None or usual.__module__ == __name__:  # another Triton, which compiles by itself
        return

    def compiled(
        self: Any,
        key: Any,
        signature: Any,
        device: Any,
        constants: Any,
        options: Any,
        attrs: Any,
        *others: Any,
    ) -> Any:
        found = notes()
        if found is not None or self.fn.__module__.startswith("anybit."):
            _, _, target, backend, _ = self.device_caches[device]
            source = ASTSource(self, signature, constants, attrs)
            variables = get_cache_invalidating_env_vars()
            text = get_cache_key(source, backend, options, env_vars=variables)
            place = hashlib.sha256(text.encode()).hexdigest()
            if not get_cache_manager(place).get_group(f"{source.name[:150]}.json"):
                given = {
                    at: Function.of(value) if isinstance(value, JITFunction) else value
                    for at, value in constants.items()
                }
                call = partial(
                    compile_one,
                    Function.of(self),
                    signature,
                    given,
                    attrs,
                    options.__dict__,
                    (target.backend, target.arch, target.warp_size),
                )
                if found is not None:
                    error = found.missing(f"{source.name} {place[:16]}", call)
                    if found.strict:
                        raise error
                    return None
                if place in DEADLY or not CHILD.survives(call):
                    DEADLY.add(place)
                    raise Unsupported(
                        f"Triton's compiler ends its process at the kernel {source.name}; another "
                        "version of Triton may compile it"
                    )
        return usual(self, key, signature, device, constants, options, attrs, *others)

    JITFunction._do_compile = compiled


def compile_one(
    function: Function, signature: Any, constants: Any, attrs: Any, options: Any, target: Any
) -> None:
    """Compile a kernel into Triton's cache, as the launch that noted it would."""
    given = {
        at: value.find() if isinstance(value, Function) else value
        for at, value in constants.items()
    }
    source = ASTSource(function.find(), signature, given, attrs)
    made = triton.compile(source, target=GPUTarget(*target), options=options)
    if hasattr(nvidia, "make_launcher"):  # until Triton 3.6: the first launch runs a C compiler
        with suppress(Exception):  # where there is no driver, for one
            nvidia.CudaLauncher(source, made.metadata)
