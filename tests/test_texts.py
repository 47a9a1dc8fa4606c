"""Texts and conversations from the files that people have, and which tokens are answers."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from anybit import Calibration
from anybit.errors import InvalidInput
from anybit.files.texts import Conversation, read_texts, text_of
from anybit.quantizers.calibration.chat import answers, tokenized
from tests.test_calibration import llama

PICO = Path(__file__).parent.parent / "models/pico"
TEXTS = ["one\u2028two\x85", 'a, "b"\nc', "x" * 200_000]
CHAT = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": " Hello. "},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "<think>so</think>See you."},
]
# As Qwen3 does it: what was thought is left out of all answers but the last, and white space, too.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content.strip() }}{% endif %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def plain() -> Any:
    return AutoTokenizer.from_pretrained(PICO)


@pytest.fixture(scope="module")
def chatty() -> Any:
    return AutoTokenizer.from_pretrained(PICO, chat_template=TEMPLATE)


def table(separator: str) -> str:
    quoted = ('"' + text.replace('"', '""') + '"' for text in TEXTS)
    return f"id{separator}text\n" + "\n".join(f"1{separator}{text}" for text in quoted)


FILES = {
    "lines": "\n\n".join(json.dumps({"text": t, "id": 3}, ensure_ascii=False) for t in TEXTS),
    "indented objects": "\n".join(json.dumps({"content": t}, indent=2) for t in TEXTS),
    "array": json.dumps([{"text": t} for t in TEXTS]),
    "array of strings": json.dumps(TEXTS, indent=1),
    "one object": json.dumps({"version": 1, "data": [{"text": t} for t in TEXTS]}),
    "csv": table(","),
    "semicolons": table(";"),
    "tsv": table("\t"),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", ["data", "data.txt", "data.gz"])
def test_content_decides_and_not_the_name(kind: str, name: str, tmp_path: Path) -> None:
    data = ("\ufeff" + FILES[kind].replace("\n", "\r\n")).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read_texts(tmp_path / name) == TEXTS


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world.\n",
        "[note] {see} below",
        "{\\bf bold} text",
        "{ int x; }",
        '"No," she said.\n"Yes."',
        "[[File:a.png]] a wiki",
        "1984\n\n1",
        "text, label\nand more",
        "name,age\n1,2\n",
        "text\n",
        "{{ jinja }}",
    ],
)
def test_other_text_is_plain(text: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text)
    assert read_texts(tmp_path / "a") == [text]


CONVERSATIONS: dict[str, Any] = {
    "messages": {"messages": CHAT[:2], "text": "written by another template"},
    "conversations": {
        "conversations": [
            {"from": "human", "value": "Hi?", "weight": None},
            {"from": "gpt", "value": " Hello. "},
        ]
    },
    "a list": CHAT[:2],
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi?"}], "tool_calls": None},
            CHAT[1],
        ]
    },
    "text": {"messages": json.dumps(CHAT[:2])},  # as tables hold it
    "strings": {"messages": [{"role": "User", "content": ["Hi", "?"]}, CHAT[1]]},
    "two lists": {"prompt": CHAT[:1], "completion": CHAT[1:2]},
    "pair": {"prompt": "Hi?", "completion": " Hello. "},
    "alpaca": {"instruction": "Hi?", "input": "", "output": " Hello. "},
    "answer": {"question": "Hi?", "answer": " Hello. "},
}


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_conversations_by_the_names_that_people_use(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(CONVERSATIONS[kind]) + "\n")
    (tmp_path / "b.json").write_text(json.dumps([CONVERSATIONS[kind]] * 2))
    for name, count in (("a.jsonl", 1), ("b.json", 2)):
        found = read_texts(tmp_path / name)
        assert len(found) == count
        for one in found:
            assert isinstance(one, Conversation)
            assert one.messages == CHAT[:2]


def test_what_else_an_entry_says() -> None:
    entry = {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "Short."}
    found = text_of(entry, "a")
    assert isinstance(found, Conversation)
    assert [m["content"] for m in found.messages] == ["Short.", "Add.\n\n1, 2", "3"]
    tools = [{"type": "function"}]
    found = text_of({"messages": CHAT, "tools": tools}, "a")
    assert isinstance(found, Conversation)
    assert found.tools == tools
    found = text_of({"messages": CHAT, "tools": json.dumps(tools)}, "a")
    assert isinstance(found, Conversation)
    assert found.tools == tools


def test_arguments_of_tool_calls_are_objects() -> None:
    """Templates write them as JSON, and what is a text already once more."""
    for given, want in (('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("a", "a")):
        call = {"type": "function", "function": {"name": "f", "arguments": given}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        found = text_of([*CHAT[:1], said], "a")
        assert isinstance(found, Conversation)
        assert found.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": want}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"label": 1}\n', r"a\.jsonl, line 3: expected .*found label"),
        ("a.JSONL", '{"text": "a"}\n{"text": "b', r"line 2: not valid JSON \(Unterminated string"),
        ("a.ndjson", "Hello", r"line 1: not valid JSON \(Expecting value\)"),
        ("a", "{'text': 'a'}", r"line 1: not valid JSON \(Expecting property name"),
        ("a", '{"text": "a"} more', r"line 1: not valid JSON"),
        ("a.jsonl", '{"text": null}', r"line 1: 'text' is null, and must be a text; remove"),
        ("a.json", '[{"text": "a"}, {"text": 3}]', r"entry 2: 'text' is a number, and must"),
        ("a", '{"prompt": "a", "completion": null}', r"'completion' is null"),
        ("a", '{"messages": []}', r"line 1: the conversation has no messages"),
        ("a", '{"messages": [{"role": "user"}]}', r"message 1 needs a \"role\" and a \"content\""),
        ("a", '{"messages": "Hi"}', r"line 1: 'messages' is not valid JSON"),
        ("a", '{"messages": 3}', r"the conversation has no messages"),
        ("a", '[[{"role": "user", "content": [{"text": null}]}]]', "entry 1: message 1 needs a"),
        ("a", '[[{"from": ["user"], "value": "Hi"}]]', "entry 1: message 1 needs a"),
        ("a", '{"instruction": "a", "input": 3, "output": "b"}', "'input' is a number, and must"),
        ("a.json", "[1, 2]", r"entry 1: expected an object with .*, found a number"),
        ("a", '{"text": ["a", "b"]}', r"line 1: 'text' is a list, and must be a text"),
        ("a", '{"role": "user", "content": "Hi"}', "expected an object with .*, found one message"),
        ("a.csv", "id,body\n1,x\n", r"its columns are id, body; name them \"text\""),
        ("a", "id,text\n1,a\n2,b,c\n", r"line 3: 3 columns, and 2 in the header; put quotes"),
        ("a.txt", "  \n", "holds no text"),
        ("a.jsonl", '{"text": ""}', "holds no text"),
        ("a.txt", b"\xff", r"a\.txt is not UTF-8 text: .* at byte 0; give a file of plain text"),
        ("a.txt", b"abc\0", r"is not UTF-8 text: a zero, as binary files have, at byte 3"),
        ("a.gz", b"\x1f\x8b123", "is a damaged gzip file"),
    ],
)
def test_what_is_refused_and_where(
    name: str, content: str | bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidInput, match=message) as caught:
        Calibration(path).check_file()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parquet_is_read_by_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train"
    path.write_bytes(b"PAR1 and so on")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="is a parquet file, which pyarrow reads: pip install"):
        read_texts(path)
    monkeypatch.undo()
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    with pytest.raises(InvalidInput, match="is a damaged parquet file"):
        read_texts(path)
    rows = {"id": [1, 2], "messages": [CHAT[:2]] * 2}
    parquet.write_table(pyarrow.table(rows), path)
    first, second = read_texts(path)
    assert isinstance(first, Conversation)
    assert first.messages == CHAT[:2]
    assert isinstance(second, Conversation)
    assert second.where.endswith("train, row 2")


# Tokens.


def test_a_conversation_is_what_the_template_writes(chatty: Any) -> None:
    chat = text_of(CHAT, "a")
    want = "<user>Hi?</s><assistant>Hello.</s><user>Bye</s><assistant><think>so</think>See you.</s>"
    assert chatty.decode(tokenized(chat, chatty)) == want
    assert tokenized("x = 1", chatty) == chatty("x = 1").input_ids


def test_answers_are_what_the_model_writes(chatty: Any) -> None:
    """Without white space that the template drops, and with what it thinks."""
    ids, inside = answers(text_of(CHAT, "a"), chatty)
    assert ids == tokenized(text_of(CHAT, "a"), chatty)
    parts = "".join(chatty.decode([t]) if own else "|" for t, own in zip(ids, inside, strict=True))
    found = [part for part in parts.split("|") if part]
    assert found == ["Hello.", "<think>so</think>See you."]


def test_a_pair_without_a_template_is_one_text(plain: Any, chatty: Any) -> None:
    pair = text_of({"prompt": "def f(", "completion": "x):\n    return x"}, "a")
    ids, inside = answers(pair, plain)
    assert ids == tokenized(pair, plain) == plain("def f(x):\n    return x").input_ids
    assert 0 < inside.index(True) < len(ids)
    assert all(inside[inside.index(True) :])
    special = chatty.all_special_tokens[0]
    ready = text_of({"prompt": f"{special}<user>Hi?", "completion": "Hello"}, "a")
    assert chatty.decode(tokenized(ready, chatty)) == f"{special}<user>Hi?Hello"  # not twice


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "a.jsonl, line 7: messages need a chat template, which this model's tokenizer does"),
        ("{{ raise_exception('Never') }}", "line 7: the chat template refuses it: .*Never"),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "the chat template writes message 2 otherwise than after its prompt",
        ),
        (
            "{{ messages[-1].content }}",
            "line 7: the chat template leaves out message 1, of role 'us",
        ),
    ],
)
def test_templates_that_do_not_fit(template: str | None, message: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PICO, chat_template=template)
    with pytest.raises(InvalidInput, match=message):
        answers(text_of(CHAT, "a.jsonl, line 7"), tokenizer)


def test_plain_text_has_no_answers(chatty: Any) -> None:
    with pytest.raises(InvalidInput, match="plain text has no answers"):
        answers("x", chatty)


def test_entries_calibrate_from_a_list_as_from_a_file(chatty: Any, tmp_path: Path) -> None:
    entries = [{"messages": CHAT}, {"text": "x = 1"}, {"prompt": "a", "completion": "b"}] * 9
    path = tmp_path / "a.json"
    path.write_text(json.dumps(entries))
    model = llama(vocab_size=chatty.vocab_size)
    got = [Calibration(s, 2, 32, chatty).data(model).tolist() for s in (entries, path)]  # type: ignore[union-attr]
    assert got[0] == got[1]
    want = [t for entry in entries for t in tokenized(text_of(entry, ""), chatty)]
    assert got[0][0] == want[:32]
