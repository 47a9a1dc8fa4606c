"""Directories and small files, written whole or not at all; disk space; the cache folder."""

import errno
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from anybit.errors import InvalidInput

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
# What lies beside a model and is none of it. Folders with weights of their own are other models.
WEIGHTS_OF_ALL = (
    *(f"*{end}" for end in OTHER_WEIGHTS),
    "*.safetensors",
    "*.index.json",
    "*.onnx_data",
    "*.ot",
    "*.npz",
    "*.npy",
    "*.pkl",
    "*.pickle",
    "*.ggml",
    "*.tflite",
    "*.nemo",
    "*.mlmodel",
    "*.distcp",
    "*.engine",
)
LEFT_OUT = (
    ".*",
    "__pycache__",
    "*.pyc",
    "*.tmp",
    "*.partial",
    "*.lock",
    "cache",
    "node_modules",
    "optimizer*",
    "scheduler*",
    "scaler*",
    "rng_state*",
    "trainer_state.json",
    "training_args*",
    "checkpoint-*",
    "global_step*",
    "zero_to_fp32.py",
    "wandb",
    "runs",
    "logs",
    "mlruns",
    "lightning_logs",
    "tensorboard",
    "events.out.*",
    "*.log",
    "*.csv",
    "*.tsv",
    "*.parquet",
    "*.arrow",
    "*.jsonl",
    "*.db",
    "*.sqlite",
    "*.tar",
    "*.gz",
    "*.zip",
    "*.7z",
    "*.pem",
    "*.key",
    "*credential*",
    "*secret*",
    "adapter_config.json",
    # How another tool has quantized it.
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "quanto_qmap.json",
)
LARGEST_FILE = 1 << 26  # bytes of a file that is no weight, such as a tokenizer
QUANTIZATION = "quantization_config"  # its key in config.json
COPY = 1 << 24  # bytes copied at a time

log = logging.getLogger(__name__)


def read_text(path: Path) -> str:
    """A file of UTF-8 text; errors name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; errors name the file when it is none, or its directory."""
    if not path.is_file():
        raise FileNotFoundError(absent(path))
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def absent(path: Path) -> str:
    """Why there is no such file in a directory that a user gave, and what to give."""
    directory = path.parent
    if directory.is_dir():
        what = f"has no {path.name}"
    else:
        what = "is a file" if directory.exists() else "does not exist"
    if path.name != "config.json":
        return f"{directory} {what}"
    return (
        f"{directory} {what}; give the directory of a model, as `anybit quantize` and "
        "`save_pretrained` write it"
    )


def quantization_of(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """What a config.json says of how the model is quantized; {} when nothing."""
    found = config.get(QUANTIZATION)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InvalidInput(
            f"{source}: config.json: quantization_config is {found!r}, and must be an object; "
            "repair it, or remove it from a dense model"
        )
    return found


def stated_quantization(source: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How a directory says that its model is quantized; None where it does not.

    Older tools say it under other names: in config.json, or in files of their own (ModelOpt,
    AutoGPTQ, AutoAWQ, quanto), or not at all (CTranslate2).
    """
    own = config.get("quantization")
    if isinstance(own, dict) and "quant_method" not in (config.get(QUANTIZATION) or {}):
        return {"quant_method": "mlx"} | own  # which MLX writes under both names
    for key, method in ((QUANTIZATION, None), ("compression_config", "compressed-tensors")):
        if isinstance(config.get(key), dict):
            return ({"quant_method": method} if method else {}) | config[key]
    found = {
        name: read_json(source / name)
        for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
        if (source / name).is_file()
    }
    if isinstance(own := found.get("hf_quant_config.json", {}).get("quantization"), dict):
        return {"quant_method": "modelopt", "quantization": own}
    gptq, awq = found.get("quantize_config.json", {}), found.get("quant_config.json", {})
    if "bits" in gptq:
        return {"quant_method": "gptq"} | gptq
    if "w_bit" in awq:
        words = {"w_bit": "bits", "q_group_size": "group_size"}
        return {"quant_method": "awq"} | {words.get(key, key): v for key, v in awq.items()}
    if (source / "quanto_qmap.json").is_file():
        return {"quant_method": "quanto", "layers": read_json(source / "quanto_qmap.json")}
    if (source / "model.bin").is_file() and "model_type" not in config:
        return {"quant_method": "ctranslate2"}
    return None


def destination(out: str | os.PathLike[str]) -> Path:
    """Where a directory goes that a user calls `out`: the place of a link's target, not its own.

    Without links (and `..`) it is the path as it was given, which reports then show.
    """
    given, real = Path(out), Path(os.path.realpath(out))
    return given if given.name and given.absolute() == real else real


class Unmoved(InvalidInput):
    """A finished directory lies beside its place, which cannot be replaced."""


@contextmanager
def new_directory(out: Path, overwrite: bool, needed: int) -> Iterator[Path]:
    """A directory to fill with `needed` bytes that becomes `out` on a clean exit, or vanishes."""
    check_absent(out, overwrite)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(out.parent, error) from error
    check_space(out.parent, needed)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        move_directory(temporary, out)
    except Unmoved:  # it says where the finished directory is
        raise
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_disk_full(error):
            raise disk_full(out.parent, needed) from error
        raise


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Make a directory, if there is none, and let no other run hold it meanwhile.

    It may be renamed then, and is removed if it is empty at the end. A process that is killed holds
    nothing any more. Windows and some network file systems have no such locks: nobody is kept out.

    Raises:
        InvalidInput: Another run holds it.
    """
    busy = InvalidInput(
        f"another run is writing into {directory}; wait for its end, or choose another directory"
    )
    made = False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        made = True
        handle = None if os.name == "nt" else os.open(directory, os.O_RDONLY)
    except (FileExistsError, FileNotFoundError) as error:
        taken = directory.is_symlink() or directory.is_file()
        if made or (isinstance(error, FileExistsError) and not taken):
            raise busy from None  # it was there and then not, or the other way round
        raise unwritable(directory, error) from error
    except OSError as error:
        raise unwritable(directory, error) from error

    def there() -> bool:
        try:
            return handle is None or os.path.samestat(os.fstat(handle), directory.stat())
        except FileNotFoundError:
            return False

    try:
        # If it is not there, its run has just ended.
        if handle is not None and not (lock(handle) and there()):
            raise busy
        try:
            yield
        finally:
            if there():
                with suppress(OSError):  # not empty
                    directory.rmdir()
    finally:
        if handle is not None:
            os.close(handle)


def unwritable(directory: Path, error: OSError) -> OSError:
    """The same kind of error, in words: a directory cannot be made."""
    what = "is a file" if directory.is_file() else error.strerror or type(error).__name__
    return type(error)(f"{directory} cannot be made ({what}); choose another directory")


def lock(handle: int) -> bool:
    """Whether nobody else has locked an open file; then it is ours until it is closed."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        pass
    return True


def check_absent(out: Path, overwrite: bool) -> None:
    """Raise where a finished directory cannot take the place of `out`.

    Raises:
        FileExistsError: It is not free, and holds no checkpoint that may be overwritten.
        InvalidInput: It can only be filled, and not replaced.
    """
    if not out.exists():
        return
    here = Path.cwd().is_relative_to(os.path.realpath(out))
    if here or os.path.ismount(out):
        what = "the working directory is in it" if here else "it is a mount point"
        raise InvalidInput(
            f"{out} cannot be replaced, since {what}; choose a new directory, such as "
            f"{out / 'model'}"
        )
    if out.is_dir() and not any(out.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{out} exists; choose another directory, or pass overwrite=True")
    if not (out / "config.json").is_file():
        raise FileExistsError(
            f"{out} exists and holds no checkpoint (no config.json), so it is not overwritten; "
            "choose another directory"
        )


def move_directory(source: Path, out: Path) -> None:
    """Put a finished directory in the place of `out`, whose old contents go only after that.

    Raises:
        Unmoved: `out` stays where it is, as a bind mount does, of which nothing tells before.
    """
    for path in source.rglob("*"):
        if path.is_file():
            sync(path)
    sync(source)
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    try:
        if out.exists():
            os.rename(out, old)
        os.rename(source, out)
    except BaseException as error:
        if old.exists():
            os.rename(old, out)
        if isinstance(error, OSError) and error.errno in (errno.EBUSY, errno.EXDEV):
            raise Unmoved(
                f"{out} cannot be replaced ({error.strerror}), as a mount point or a directory of "
                f"a container's image; the finished directory is {source}: rename that one"
            ) from error
        raise
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def copy_others(source: Path, out: Path) -> list[str]:
    """Copy all that a model is beside its weights and config.json, and log what is left out.

    Left out are weights in any format, what training leaves, caches, data, and what is large. Kept
    as they are: parts that `modules.json` names, weights included, as sentence-transformers has
    them. Files that `out` has already stay. Returns the names of the files that were copied.
    """
    copied, left = list[str](), list[str]()
    for path in of_a_model(source, module_folders(source), left):
        name = path.relative_to(source)
        if not (out / name).exists():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, out / f"{name}.tmp")
            os.replace(out / f"{name}.tmp", out / name)
            copied.append(str(name))
    if left:
        log.warning("%s: left out, as no part of the model: %s", source, ", ".join(sorted(left)))
    return copied


def of_a_model(source: Path, kept: set[Path], left: list[str], below: Path = Path()) -> list[Path]:
    """The files that `copy_others` copies, below a folder; names of others are added to `left`."""
    found: list[Path] = []
    for path in sorted((source / below).iterdir()):
        name = path.relative_to(source)
        known = any(name.is_relative_to(folder) for folder in kept)
        holds = any(folder.is_relative_to(name) for folder in kept)  # parts of the model
        if path.name.startswith(".") or name == Path("config.json") or own_weights(name):
            continue  # not worth a word
        if path.is_dir():
            other = any(matches(p.name, WEIGHTS_OF_ALL) for p in path.iterdir())
            if known or holds or not (other or matches(path.name, LEFT_OUT) or path.is_symlink()):
                found += of_a_model(source, kept, left, name)
                continue
        elif path.is_file():
            small = path.stat().st_size <= LARGEST_FILE
            if known or (small and not matches(path.name, (*WEIGHTS_OF_ALL, *LEFT_OUT))):
                found.append(path)
                continue
        left.append(f"{name}/" if path.is_dir() else str(name))
    return found


def own_weights(name: Path) -> bool:
    """Whether a file is one of those that the model is read from."""
    return name.parent == Path() and matches(
        name.name, ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
    )


def module_folders(source: Path) -> set[Path]:
    """The folders of the parts of a model of sentence-transformers that lie beside it."""
    path = source / "modules.json"
    try:
        parts = json.loads(path.read_text("utf-8")) if path.is_file() else []
        names = {str(part["path"]) for part in parts} - {"", "."}
    except (ValueError, TypeError, KeyError):
        raise InvalidInput(f"{path}: expected a list of objects with a path; repair it") from None
    if wrong := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise InvalidInput(f"{path}: names {wrong[0]!r}, which is no folder of the model")
    return {Path(name) for name in names}


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)


def cache_folder(folder: str | Path | None = None) -> Path:
    """Where things lie that can be made again: `folder`, $ANYBIT_CACHE, or the user's cache."""
    folder = folder or os.environ.get("ANYBIT_CACHE")
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anybit"


def check_folder(path: Path) -> None:
    """ValueError when there is no directory to write a file into; call it before the work."""
    if not path.parent.is_dir():
        raise InvalidInput(
            f"{path.parent} is not a directory to write {path.name} into; make it first"
        )
    if path.is_dir():
        raise InvalidInput(f"{path} is a directory; name a file in it to write")


def without_nan(row: dict[str, Any]) -> dict[str, Any]:
    """The row with None for nan, which JSON does not have."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}


def write_json(path: Path, value: object) -> None:
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """A file of text: as it was before, or with all of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        part.write_text(text, "utf-8")
        os.replace(part, os.path.realpath(path))
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file of bytes to write, in the place of `path` once all is in it; else nothing is left."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        try:
            yield part
            part.close()
            os.chmod(part.name, 0o644)
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise


def sync(path: Path) -> None:
    """Make a file's contents, or a directory's entries, survive a power cut."""
    if os.name == "nt" and path.is_dir():  # directories cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_space(directory: Path, needed: int) -> None:
    """OSError (ENOSPC) when `needed` bytes do not fit on the disk of `directory`."""
    if needed > shutil.disk_usage(directory).free:
        raise disk_full(directory, needed)


def disk_full(directory: Path, needed: int, advice: str = "") -> OSError:
    free = shutil.disk_usage(directory).free
    return OSError(
        errno.ENOSPC,
        f"not enough disk space in {directory}: {megabytes(needed)} are needed, "
        f"{megabytes(free)} are free{advice}",
    )


def megabytes(count: int) -> str:
    """Bytes in words."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def is_disk_full(error: BaseException) -> bool:
    """Also for errors of the safetensors library, which are no OSError."""
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
