"""Texts and conversations from the files that people keep them in.

What a file holds decides how it is read, not its name: plain text, JSON (lines or an array), a
table with a header (CSV or TSV), or parquet; each of them also compressed with gzip. An entry is a
text, a conversation, or a prompt with its answer, under the names that data sets use.
"""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from os.path import isfile
from pathlib import Path
from typing import Any

from anybit.errors import InvalidInput

KINDS = "a file of plain text, JSON lines, a JSON array, CSV, TSV or parquet"
TEXTS = ("text", "content")
CHATS = ("messages", "conversations", "conversation")
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
)
MORE = ("input", "context")  # what an instruction is about
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
SPEAKERS |= {role: role for role in ("system", "user", "assistant", "tool")}  # in any case
FIELDS = {*TEXTS, *CHATS, *MORE, "system", "tools", *(name for pair in PAIRS for name in pair)}
EXPECTED = '"text", "messages", "conversations", "prompt" with "completion", or "instruction" with '
EXPECTED += '"output"'


@dataclass(frozen=True)
class Conversation:
    """What a tokenizer's chat template makes a text of.

    Attributes:
        messages: Each with a "role" and a "content", the first one first.
        tools: Descriptions of functions, for the template.
        plain: The prompt and the answer of a pair, which a tokenizer without a template gets.
        where: The place in the data, for errors.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    plain: tuple[str, str] | None = None
    where: str = "a conversation"


Text = str | Conversation


def read_texts(path: str | Path) -> list[Text]:
    """The entries of a file; a file of plain text is one.

    Raises:
        FileNotFoundError: There is no such file.
        InvalidInput: The file is damaged, binary or empty, or an entry is none of the above.
        ImportError: The file is parquet, and pyarrow is not installed.
    """
    if not isfile(path):  # a text, maybe, which Path.is_file finds too long
        raise FileNotFoundError(f"{str(path)[:80]} is not a file; give {KINDS}, or texts as a list")
    path = Path(path)
    texts = (text_of(entry, where) for where, entry in entries(path))
    found = [text for text in texts if not isinstance(text, str) or text.strip()]
    if not found:
        raise InvalidInput(f"{path} holds no text; give {KINDS}")
    return found


def entries(path: Path) -> Iterator[tuple[str, Any]]:
    """What a file holds, each with its place in words."""
    name, data = path.name.lower(), path.read_bytes()
    if data.startswith(b"\x1f\x8b"):
        name = name.removesuffix(".gz")
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidInput(f"{path} is a damaged gzip file ({error})") from None
    if data.startswith(b"PAR1"):
        return from_parquet(path, data)
    text, suffix = decoded(path, data), Path(name).suffix
    found = from_json(path, text, suffix in (".json", ".jsonl", ".ndjson"))
    if found is not None:
        return iter(found)
    table = from_table(path, text, suffix in (".csv", ".tsv"))
    return iter([(str(path), text)]) if table is None else table


def decoded(path: Path, data: bytes) -> str:
    """Bytes as text, with the line ends of Unix."""
    try:
        text = data.decode("utf-8-sig")
        if (at := data.find(b"\0")) >= 0:
            raise UnicodeDecodeError("utf-8", data, at, at + 1, "a zero, as binary files have,")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; give {KINDS}"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


# JSON.

AS_JSON = re.compile(r"""\s*(\{\s*["']|\[\s*\{\s*["'])""")  # how no other text begins
SPACE = re.compile(r"[ \t\n]*")


def from_json(path: Path, text: str, meant: bool) -> list[tuple[str, Any]] | None:
    """The values of a JSON text: lines of them, one below the other, or one array.

    None for what is no JSON, unless it is meant to be. Strings may hold any character: only "\\n"
    ends a line.
    """
    meant = meant or AS_JSON.match(text) is not None
    at, line, decoder = 0, 1, json.JSONDecoder()
    out: list[tuple[str, Any]] = []
    if not meant and not text.lstrip().startswith(("[", "{", '"')):
        return None
    while True:
        begin = SPACE.match(text, at).end()  # type: ignore[union-attr]
        line += text.count("\n", at, begin)
        if begin == len(text):
            break
        try:
            value, at = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            if not meant:
                return None
            line = getattr(error, "lineno", line)
            reason = getattr(error, "msg", "too deep")
            raise InvalidInput(
                f"{path}, line {line}: not valid JSON ({reason}); write one JSON object a line, "
                "or one array of them"
            ) from None
        out.append((f"{path}, line {line}", value))
        line += text.count("\n", begin, at)
    if len(out) != 1:
        return out
    value = out[0][1]
    if isinstance(value, dict) and not FIELDS & value.keys():  # {"data": [...]}
        lists = [inner for inner in value.values() if isinstance(inner, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list) or (value and is_message(value[0])):
        return out
    return [(f"{path}, entry {number}", entry) for number, entry in enumerate(value, 1)]


# Tables.

NAME = re.compile(r"\w+")


def from_table(path: Path, text: str, meant: bool) -> Iterator[tuple[str, Any]] | None:
    """The rows of a table by its header; None for what has none, unless it is meant to be one."""
    first = text.lstrip("\n").partition("\n")[0]
    separator = max("\t,;", key=first.count)
    rows = csv.reader(io.StringIO(text), delimiter=separator, strict=True)
    try:
        header = next((row for row in rows if row), [])
    except csv.Error:
        header = []
    complete = bool({*header} & {*TEXTS, *CHATS}) or any({*pair} <= {*header} for pair in PAIRS)
    if not meant and not (complete and len(header) > 1 and all(map(NAME.fullmatch, header))):
        return None
    if not complete:
        raise InvalidInput(f"{path}: its columns are {', '.join(header)}; name them {EXPECTED}")
    return table_rows(path, rows, header)


def table_rows(path: Path, rows: Any, header: list[str]) -> Iterator[tuple[str, Any]]:
    """The rows below a header, as objects."""
    limit = csv.field_size_limit(sys.maxsize)  # 128 KiB as a rule: texts are longer
    try:
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if row and len(row) != len(header):
                raise InvalidInput(
                    f"{where}: {len(row)} columns, and {len(header)} in the header; put quotes "
                    "around texts with separators"
                )
            if row:
                yield where, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise InvalidInput(f"{path}, line {rows.line_num}: no row of a table ({error})") from None
    finally:
        csv.field_size_limit(limit)


def from_parquet(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    """The rows of a parquet file, without the columns that nobody asks for."""
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError(
            f"{path} is a parquet file, which pyarrow reads: pip install pyarrow"
        ) from None
    try:
        file = parquet.ParquetFile(io.BytesIO(data))
        names = [name for name in file.schema_arrow.names if name in FIELDS]
        rows = file.read(names or None).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise InvalidInput(f"{path} is a damaged parquet file ({error})") from None
    return ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


# Entries.


def is_entry(value: object) -> bool:
    """Whether a dict is an entry of a data set, and no batch of tensors."""
    return isinstance(value, Mapping) and any(isinstance(value.get(f), str | list) for f in FIELDS)


def is_message(value: object) -> bool:
    """Whether a dict is a message of a conversation."""
    return isinstance(value, Mapping) and bool({"role", "from"} & value.keys())


def text_of(entry: Any, where: str) -> Text:
    """The text or the conversation of an entry.

    Args:
        entry: A string, an object with names of `FIELDS`, or a list of messages.
        where: The place of the entry, for errors.

    Raises:
        InvalidInput: It is none of these, or holds null where a text must be.
    """
    if isinstance(entry, str | Conversation):
        return entry
    if isinstance(entry, list) and entry and is_message(entry[0]):
        return conversation(entry, where, {})
    if not isinstance(entry, Mapping) or is_message(entry):
        what = "one message" if isinstance(entry, Mapping) else kind(entry)
        raise InvalidInput(f"{where}: expected an object with {EXPECTED}, found {what}")
    entry = structured(entry, where)
    chat = next((name for name in CHATS if entry.get(name) is not None), None)
    if chat:
        return conversation(entry[chat], where, entry)
    for name in TEXTS:
        if name in entry:
            return string(entry, name, where)
    for first, second in PAIRS:
        if first in entry and second in entry:
            return pair(entry, first, second, where)
    raise InvalidInput(f"{where}: expected {EXPECTED}, found {', '.join(map(str, entry))}")


def structured(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """An entry whose messages and tools are lists, which tables hold as JSON."""
    found = {}
    for name in (*CHATS, "tools"):
        if isinstance(text := entry.get(name), str):
            try:
                found[name] = json.loads(text) if text else None
            except ValueError:
                raise InvalidInput(f"{where}: {name!r} is not valid JSON") from None
    return {**entry, **found}


def conversation(items: Any, where: str, entry: Mapping[str, Any]) -> Conversation:
    """A conversation from its messages, written as {"role", "content"} or {"from", "value"}."""
    messages = []
    for number, item in enumerate(items if isinstance(items, list) else [], 1):
        said = dict(item) if isinstance(item, Mapping) else {}
        if "from" in said and "role" not in said:
            said = {"role": said["from"], "content": said.get("value")}
        role, content = said.get("role"), said.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
            texts = [part for part in parts if isinstance(part, str)]
            content = "".join(texts) if len(texts) == len(parts) else content
        called = content is None and said.get("tool_calls")
        if not isinstance(role, str) or not (isinstance(content, str) or called):
            raise InvalidInput(
                f'{where}: message {number} needs a "role" and a "content" that are texts'
            )
        said |= {"role": SPEAKERS.get(role.lower(), role)}
        if isinstance(calls := said.get("tool_calls"), list):
            said["tool_calls"] = [with_arguments(call) for call in calls]
        messages.append({k: v for k, v in said.items() if v is not None} | {"content": content})
    if not messages:
        raise InvalidInput(f"{where}: the conversation has no messages; remove it")
    if isinstance(system := entry.get("system"), str) and system:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, entry.get("tools") or None, where=where)


def with_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object, as templates want them; OpenAI's are a text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def pair(entry: Mapping[str, Any], first: str, second: str, where: str) -> Conversation:
    """A prompt with its answer; both may be lists of messages."""
    if isinstance(entry[first], list) and isinstance(entry[second], list):
        return conversation(entry[first] + entry[second], where, entry)
    prompt, answer = string(entry, first, where), string(entry, second, where)
    if first == "instruction":
        prompt = "\n\n".join(
            [prompt, *(string(entry, name, where) for name in MORE if entry.get(name))]
        )
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    between = "" if second == "completion" else "\n\n"
    return Conversation(
        conversation(messages, where, entry).messages, plain=(prompt + between, answer), where=where
    )


def string(entry: Mapping[str, Any], name: str, where: str) -> str:
    """A field that must be a text."""
    if not isinstance(entry[name], str):
        raise InvalidInput(
            f"{where}: {name!r} is {kind(entry[name])}, and must be a text; remove the entry"
        )
    return str(entry[name])


def kind(value: object) -> str:
    """What a value is, in JSON's words."""
    names = {list: "a list", dict: "an object", int: "a number", float: "a number", bool: "a bool"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
