"""What users call a model, as a directory that anybit reads.

A name of the hub is downloaded into its cache; another tool's checkpoint is converted once, into
the cache folder.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

from anybit.checkpoint.architecture import CODES
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.checkpoint.foreign.gguf_file import DENSE, is_gguf, read_model
from anybit.checkpoint.foreign.methods import METHODS, refusal
from anybit.checkpoint.rewrite import fingerprint
from anybit.errors import InvalidInput, Unsupported, in_a_line
from anybit.files.directory import cache_folder, read_json, stated_quantization
from anybit.files.hub import located, title
from anybit.files.safetensors import stored_tensors
from anybit.nn.plan import METHOD
from anybit.version import __version__

log = logging.getLogger(__name__)


def ready(model: str | os.PathLike[str]) -> Path:
    """A directory with the same model that anybit reads: itself, or a conversion in the cache.

    model: a directory, a GGUF file, or org/name of the hub.

    Raises:
        FileNotFoundError: Files are missing.
        InvalidInput: As `located` and `convert_checkpoint` do.
        OSError: The disk of a cache is too small.
        Unsupported: The hub cannot be reached.
    """
    directory = located(model)
    if is_gguf(directory):
        stored = {name: block.stored for name, block in read_model(directory).tensors.items()}
    else:
        config = read_json(directory / "config.json")
        method = (stated_quantization(directory, config) or {}).get("quant_method", METHOD)
        if method == METHOD:
            return directory
        stored = {} if method == "ctranslate2" else stored_tensors(directory)
        if method not in METHODS:  # its weights may be unquantized all the same
            if not stored or any(tensor.dtype in CODES for tensor in stored.values()):
                raise refusal(directory, method)
            return directory
    what = [__version__, str(directory.resolve()), fingerprint(directory, stored)]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    out = writable_cache(directory) / f"{title(directory)}-{key}"
    if not (out / "config.json").is_file():
        log.warning("%s is another tool's; its conversion is kept in %s", directory, out)
        own = out.with_name(f"{out.name}.{os.getpid()}")  # another process may do the same
        try:
            convert_checkpoint(directory, own, overwrite=True)
        except BaseException:
            shutil.rmtree(own.with_name(f"{own.name}.partial"), ignore_errors=True)
            raise
        try:
            own.rename(out)
        except OSError:  # the other was first
            if not (out / "config.json").is_file():
                raise
            shutil.rmtree(own)
    return out


def writable_cache(directory: Path) -> Path:
    """The folder of conversions, which is made.

    Raises:
        Unsupported: It cannot be written.
    """
    try:
        folder = cache_folder() / "converted"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise Unsupported(
            f"{directory} is another tool's, and its conversion cannot be kept in the cache folder "
            f"({in_a_line(error)}); set ANYBIT_CACHE to a folder that can be written, or convert "
            f"it: anybit convert {directory} -o DIRECTORY"
        ) from error
    return folder


def dense_directory(model: str | os.PathLike[str]) -> Path:
    """As `ready`, of a model that is to be quantized.

    Raises:
        InvalidInput: It is a GGUF file that is quantized already; and as `ready` does.
    """
    path = located(model)
    if not is_gguf(path):
        return path  # `dense_config` refuses what config.json says is quantized
    kinds = sorted({block.kind for block in read_model(path).tensors.values()} - DENSE.keys())
    if kinds:
        raise InvalidInput(
            f"{path} is quantized already ({', '.join(kinds)}); start from the dense one, or keep "
            f"its weights with `anybit convert {path} -o OUT`, which rounds them with --to FORMAT"
        )
    return ready(path)
