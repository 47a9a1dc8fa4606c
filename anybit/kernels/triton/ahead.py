"""Triton's kernels, noted where they would be compiled, and compiled in other processes.

Those write Triton's cache, from which a launch then loads. They know the GPU by its target alone,
so they need none.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction
from triton.runtime.cache import get_cache_key, get_cache_manager

from anybit.kernels.ahead import Notes, notes
from anybit.kernels.triton import lang


class Function(NamedTuple):
    """A Triton function, by where it is."""

    module: str
    name: str

    @classmethod
    def of(cls, function: JITFunction) -> "Function":
        return cls(function.fn.__module__, function.fn.__qualname__)

    def find(self) -> JITFunction:
        found: Any = import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return lang.jit(found)


@contextmanager
def noted(own: Notes) -> Iterator[None]:
    """Where a thread keeps these notes, kernels that Triton's cache lacks are noted, not launched.

    A launch whose kernel is not made returns: so says Triton of its own hook for that, which is
    called too early, with what must be JSON.
    """
    usual = getattr(JITFunction, "_do_compile", None)
    if usual is None:  # another Triton, which then compiles one by one
        yield
        return

    def compiled(
        self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attrs: Any,
        *others: Any,
    ) -> Any:  # fmt: skip
        _, _, target, backend, _ = self.device_caches[device]
        if notes() is own:
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
                    compile_one, Function.of(self), signature, given, attrs, options.__dict__,
                    (target.backend, target.arch, target.warp_size),
                )  # fmt: skip
                error = own.missing(f"{source.name} {place[:16]}", call)
                if own.strict:
                    raise error
                return None
        return usual(self, key, signature, device, constants, options, attrs, *others)

    JITFunction._do_compile = compiled
    try:
        yield
    finally:
        JITFunction._do_compile = usual


def compile_one(
    function: Function, signature: Any, constants: Any, attrs: Any, options: Any, target: Any
) -> None:
    """Compile a kernel into Triton's cache, as the launch that noted it would."""
    given = {
        at: value.find() if isinstance(value, Function) else value
        for at, value in constants.items()
    }
    source = ASTSource(function.find(), signature, given, attrs)
    triton.compile(source, target=GPUTarget(*target), options=options)
