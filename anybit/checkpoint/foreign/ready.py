"""Other tools' checkpoints where one of ours is wanted: converted once, into the cache folder."""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

from anybit.checkpoint.foreign.convert import METHODS, convert_checkpoint
from anybit.checkpoint.foreign.gguf_file import is_gguf, read_model
from anybit.checkpoint.rewrite import fingerprint
from anybit.errors import Unsupported, in_a_line
from anybit.files.directory import cache_folder, read_json, stated_quantization
from anybit.files.safetensors import stored_tensors
from anybit.version import __version__

log = logging.getLogger(__name__)


def ready(directory: Path) -> Path:
    """A directory with the same model that anybit reads: itself, or a conversion in the cache.

    directory: of a model; or a GGUF file.

    Raises:
        FileNotFoundError: Files are missing.
        InvalidInput: As `convert_checkpoint` does.
        OSError: The disk of the cache folder is too small.
    """
    if is_gguf(directory):
        stored = {name: block.stored for name, block in read_model(directory).tensors.items()}
    else:
        config = read_json(directory / "config.json")
        if (stated_quantization(directory, config) or {}).get("quant_method") not in METHODS:
            return directory
        stored = stored_tensors(directory)
    what = [__version__, str(directory.resolve()), fingerprint(directory, stored)]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    out = writable_cache(directory) / f"{directory.resolve().name}-{key}"
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
