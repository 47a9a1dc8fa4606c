"""Structured output, penalties, biases, and what is asked about prompts."""

import json
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

from anybit.engine import masks
from anybit.engine.llm import LLM
from anybit.engine.masks import fill, unpacked
from anybit.engine.schemas import json_rule
from anybit.engine.sequence import SamplingParams
from anybit.engine.structured import Grammars, Matcher, Structured, by_number
from anybit.errors import InvalidInput, InvalidType
from tests.engine.conftest import PICO, one_thread

__all__ = ["one_thread"]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(PICO, dtype="float32", kv_bytes=1 << 24)


def texts(llm: LLM, structured: Structured, **options: Any) -> list[str]:
    """Whole texts, sampled hot, so that only the mask keeps them in form."""
    params = SamplingParams(
        n=4, seed=3, temperature=1.5, max_tokens=300, structured=structured, **options
    )
    completions = llm.generate("x = ", params)[0].completions
    assert [c.finish for c in completions] == ["stop"] * 4
    return [c.text for c in completions]


def test_every_kind_of_structure_holds(llm: LLM) -> None:
    for text in texts(llm, Structured(regex=r"[0-9]{2,4}(px|em)")):
        assert re.fullmatch(r"[0-9]{2,4}(px|em)", text)
    assert set(texts(llm, Structured(choice=["yes", "no", 'say "é"\n']))) <= {
        "yes", "no", 'say "é"\n',
    }  # fmt: skip
    for text in texts(llm, Structured(json=PERSON)):
        person = json.loads(text)
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 150
    assert texts(llm, Structured(json=json.dumps({"const": [1, None]})))
    for grammar in ('root ::= "a" | "b" root', 'start: "b"{0,5} "a"'):
        for text in texts(llm, Structured(grammar=grammar)):
            assert re.fullmatch("b*a", text)


def test_structure_beside_free_text_and_under_preemption() -> None:
    """Masks belong to rows: neighbours keep their tokens, and a text that starts over its state."""
    llm = LLM(PICO, dtype="float32", kv_bytes=1 << 24)
    free = SamplingParams(temperature=0, max_tokens=30)
    bound = SamplingParams(temperature=0, max_tokens=60, structured=Structured(json=PERSON))
    alone = [llm.generate("def f(", free)[0].text, llm.generate("x = ", bound)[0].text]
    mixed = llm.generate(["def f(", "x = "] * 3, [free, bound] * 3)
    assert [output.text for output in mixed] == alone * 3
    small = LLM(PICO, dtype="float32", kv_bytes=1 << 19)
    mixed = small.generate(["def f(", "x = "] * 8, [free, bound] * 8)
    assert small.engine.scheduler.preemptions
    assert [output.text for output in mixed] == alone * 8


def test_thousands_of_choices(llm: LLM) -> None:
    many = [f"c{i}" for i in range(5000)]
    assert set(texts(llm, Structured(choice=many))) <= set(many)


def test_a_grammar_that_cannot_go_on_is_an_error_and_no_end(llm: LLM) -> None:
    """llguidance stops there as it does at the end of a text. What its copies share is dropped."""
    grammar = "start: " + " | ".join(f'"d{i}"' for i in range(5000))
    assert llm.engine.grammars is not None
    kept = set(llm.engine.grammars._compiled)
    params = SamplingParams(max_tokens=9, structured=Structured(grammar=grammar))
    for _ in range(2):
        completion = llm.generate("x", params)[0].completions[0]
        assert completion.finish == "error"
        assert re.fullmatch("the grammar cannot go on: .*; make it simpler", completion.error)
        assert completion.text == "d"
        assert set(llm.engine.grammars._compiled) == kept


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_a_grammar_whose_masks_take_long_holds_up_nobody(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, known: bool, ahead: bool
) -> None:
    """Its text sits steps out, whether it is known to take long, and then goes on as ever.

    Also where steps start ahead, as on a GPU.
    """
    monkeypatch.setattr(llm.engine.runner, "overlaps", ahead)
    monkeypatch.setattr(masks, "USUAL", 0.01)
    engine, go, real = llm.engine, threading.Event(), Matcher.fill
    params = SamplingParams(max_tokens=12, seed=1, structured=Structured(regex="[a-z ]{90}"))
    want = [llm.generate(prompt, params)[0].tokens for prompt in ("x", "y")]

    def fill(self: Matcher, bits: torch.Tensor) -> None:
        assert go.wait(60)
        real(self, bits)

    monkeypatch.setattr(Matcher, "fill", fill)
    got: dict[str, list[int]] = {name: [] for name in ("x", "y", "plain")}
    begun = engine.stats.steps
    for name in ("x", "y"):
        engine.add(name, llm.encode(name), params)
        engine.requests[name][0].matcher.found.slow = int(known)
    engine.add("plain", [5, 6], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    while engine.busy:
        for delta in engine.step():
            got[delta.request] += delta.tokens
            assert not delta.error
        if len(got["plain"]) == 20:
            assert got["x"] == got["y"] == [] or go.is_set()
            go.set()
        assert len(got["plain"]) > 0 or engine.stats.steps - begun < 9
    assert [got["x"], got["y"]] == want


def test_ends(llm: LLM) -> None:
    """A complete text ends whatever min_tokens and ignore_eos say; stop strings still work."""
    two = Structured(regex="[0-9][0-9]")
    assert all(len(text) == 2 for text in texts(llm, two, ignore_eos=True, min_tokens=50))
    params = SamplingParams(max_tokens=50, structured=Structured(regex="[ab]{9}c{9}"), stop="cc")
    output = llm.generate("x", params)[0].completions[0]
    assert (output.finish, output.stop_reason) == ("stop", "cc")
    assert re.fullmatch("[ab]{9}", output.text)


def test_thoughts_are_free(llm: LLM) -> None:
    digits, colon = llm.encode("7")[-1], llm.encode(":")[-1]
    think = (digits, colon)
    structured = Structured(choice=["no"], think=think)
    never = SamplingParams(max_tokens=40, structured=structured, logit_bias={digits: -100})
    forced = SamplingParams(max_tokens=40, structured=structured, logit_bias={digits: 100})
    assert llm.generate("x", never)[0].text == "no"
    # The bias keeps the thoughts open until another one closes them.
    assert set(llm.generate("x", forced)[0].text) == {"7"}
    thinking = Structured(choice=["no"], think=think, thinking=True)
    close = SamplingParams(max_tokens=40, structured=thinking, logit_bias={colon: 100})
    assert llm.generate("x", close)[0].text == ":no"


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"regex": "[0-9"}, "unclosed character class"),
        ({"json": {"type": "thing"}}, "Invalid type: thing"),
        ({"json": {"type": "object", "if": {}}}, 'its schema has "if", which cannot'),
        ({"json": "{"}, "not JSON"),
        ({"json": {"const": 10**5000}}, "not JSON"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "start: start"}, "has no text"),
        ({"json": {"$ref": "#"}}, "has no text"),
        ({"grammar": 'root ::= "a" (' + "(" * 9999}, "it is no GBNF"),
        ({"json": {"oneOf": [{"type": "integer"}, {"minimum": 1}]}}, "use anyOf, or give each"),
        ({"choice": []}, "not empty"),
        ({"json": True, "regex": "a"}, "json and regex"),
        ({}, "exactly one"),
    ],
)
def test_refusals(llm: LLM, structured: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)) as error:
        llm.generate("x", SamplingParams(structured=Structured(**structured)))
    assert "\n" not in str(error.value)


def takes(llm: LLM, structured: Structured, text: str) -> bool:
    """Whether a text, written token by token, is one that a structure wants."""
    assert llm.engine.grammars is not None
    matcher = llm.engine.grammars.matcher(structured)
    for token in llm.encode(text):
        if not matcher.allows(token):
            return False
        matcher.take(token)
    return matcher.grammar.is_accepting()


INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"enum": [2**53, -5, 2.5]}, ["9007199254740992", "-5", "2.5"], ["9007199254740993"]),
        ({"const": 2**63 - 1}, ["9223372036854775807"], ["9223372036854775808"]),
        (INT64, ["9223372036854775807", "-1", "-9223372036854774784"],
         ["9223372036854775808", "-9223372036854775809"]),
        ({"type": "integer", "exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63},
         ["9223372036854775807"], ["9223372036854775808", "-9223372036854775809"]),
        # As JavaScript writes int64's ends.
        ({"type": "integer", "minimum": -9223372036854776000, "maximum": 9223372036854776000},
         ["9223372036854775807"], ["9223372036854775808"]),
        # A narrower bound of the other kind stays.
        (INT64 | {"exclusiveMinimum": 0}, ["1"], ["0", "-1"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "0.0"]),
        ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, ["-0.1"], ["0", "-0"]),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5},
         ["0.5"], ["0"]),
        ({"type": "number", "multipleOf": 0.01}, ["0.25", "3"], ["0.125"]),
        ({"allOf": [{"multipleOf": 4, "type": "integer"}, {"multipleOf": 6}]}, ["12"], ["4", "6"]),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ["[1, 2]"], ["[a]"]),
        ({"type": "string", "format": "binary"}, ['"x"'], ["x"]),
        ({"type": "object", "properties": {"default": {"const": 7}}, "default": 2**53 + 1},
         ['{"default": 7}'], ['{"default": 8}']),
    ],
)  # fmt: skip
def test_schemas_mean_what_they_say(
    llm: LLM, schema: dict, right: list[str], wrong: list[str]
) -> None:
    for structured in (Structured(json=schema), Structured(grammar=f"start: {json_rule(schema)}")):
        assert all(takes(llm, structured, text) for text in right)
        assert not any(takes(llm, structured, text) for text in wrong)


BIG = 2**53 + 1


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [BIG]},
        {"const": {"a": [BIG]}},
        {"enum": [1755555555555555557]},
        {"enum": [12345678901234567890123]},
        {"enum": [-(2**63)]},
        {"enum": [123456789.12345679]},  # which llguidance reads as the double below
        {"const": float("inf")},
        {"type": "integer", "minimum": BIG},
        {"type": "integer", "maximum": 2**64 - 1},
        {"type": "integer", "maximum": 2**63 - 2},
        {"type": "integer", "exclusiveMaximum": 2**60},
        {"type": "number", "maximum": 2**60},  # written in 16 digits and zeros
        {"maximum": -BIG},
        {"type": "integer", "multipleOf": BIG},
        {"type": "number", "multipleOf": 0.07},
        {"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]},
        {"properties": {"a": {"items": {"anyOf": [{"enum": [BIG]}]}}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [BIG]}}},
        {"$ref": "#/of/a", "of": {"a": {"enum": [BIG]}}},
    ],
)
def test_numbers_that_would_be_rounded_are_refused(llm: LLM, schema: dict) -> None:
    assert llm.engine.grammars is not None
    user = 'start: /"/ "%json {" // %json {\n %json ' + json.dumps(schema)
    for structured in (Structured(json=schema), Structured(grammar=user)):
        with pytest.raises(InvalidInput, match=r"kept exactly|common multiple"):
            llm.engine.grammars.matcher(structured)


def test_what_python_calls_a_list_or_a_number(llm: LLM) -> None:
    assert set(texts(llm, Structured(choice=(c for c in "ab")))) <= {"a", "b"}
    assert set(texts(llm, Structured(json={"enum": (1, np.float64(1e-7))}))) <= {"1", "0.0000001"}
    with pytest.raises(InvalidInput, match="kept exactly"):
        json_rule({"enum": (2**53 + 1,)})
    for wrong in (
        {"choice": "ab"}, {"choice": b"ab"}, {"choice": 5}, {"choice": ["a", 1]}, {"regex": b"a"},
        {"regex": 5}, {"grammar": 5},
    ):  # fmt: skip
        with pytest.raises(InvalidType, match=r"no string|list of strings"):
            Structured(**wrong)
    marks = SamplingParams(structured=Structured(regex="a", think=(10**6, 5)))
    with pytest.raises(InvalidInput, match="token 1000000 is not in the vocabulary"):
        llm.generate("x", marks)


def test_unions_that_a_constant_tells_apart(llm: LLM) -> None:
    def option(kind: str) -> dict:
        properties = {"kind": {"const": kind, "title": "Kind"}, "value": {"type": "string"}}
        return {"type": "object", "properties": properties, "required": ["kind"]}

    cat, dog = {"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}
    schema = {"oneOf": [cat, dog], "discriminator": {"propertyName": "kind"}}
    union = Structured(json=schema | {"$defs": {"Cat": option("cat"), "Dog": option("dog")}})
    assert takes(llm, union, '{"kind": "cat", "value": "x"}')
    assert not takes(llm, union, '{"kind": "cow"}')
    overlapping = schema | {"$defs": {"Cat": option("cat"), "Dog": option("cat")}}
    with pytest.raises(InvalidInput, match="use anyOf"):
        takes(llm, Structured(json=overlapping), "{}")


def test_no_tokens_go_to_white_space(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "maxItems": 2}}}
    for structured in (Structured(json=schema), Structured(json=True)):
        assert takes(llm, structured, '{"a":[1,2]}')
        assert takes(llm, structured, '{"a": [1, 2]}')
        for text in ('{ "a":[]}', '{"a":  []}', '{"a":\n[]}', '{"a":[ 1]}', '{"a":[1 ,2]}'):
            assert not takes(llm, structured, text)
    wide = Structured(json=schema | {"x-guidance": {"whitespace_flexible": True}})
    assert takes(llm, wide, '{\n  "a": []\n}')


def test_an_added_token_that_is_not_special_is_named_by_number() -> None:
    """Such as Qwen's `<tool_call>`; its text is written in other tokens."""
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    names = ["<tool_call>", "<b>", "<\uff5ctool\u2581call\u2581begin\uff5c>", "[CALL]", "word"]
    tokenizer.add_tokens([AddedToken(name, special=False) for name in names])
    grammars = Grammars(tokenizer, 4096 + len(names), frozenset([0]))
    for name in names:
        number = tokenizer.convert_tokens_to_ids(name)
        numbered = by_number(tokenizer).get(name)
        assert numbered == (number if name[0] == "<" else None)
        mark = json.dumps(name) if numbered is None else f"<[{number}]>"
        matcher = grammars.matcher(Structured(grammar=f'start: {mark} "ab"'))
        assert matcher.allows(number)
        for token in (number, *tokenizer.encode("ab", add_special_tokens=False)):
            matcher.take(token)
        assert matcher.ended, (name, matcher.error)
        for texts in ({"regex": re.escape(name)}, {"choice": [name]}):
            matcher = grammars.matcher(Structured(**texts))
            while not matcher.ended:
                bits = torch.zeros(-(-grammars.vocabulary // 32), dtype=torch.int32)
                fill([matcher], bits[None])()
                assert not matcher.error, (name, matcher.error)
                allowed = unpacked(bits[None])[0].nonzero().flatten()
                matcher.take(int(allowed[0]))


def test_the_text_of_a_special_token_is_text(llm: LLM) -> None:
    """It is written in other tokens, also where nothing else may come."""
    end = "<|endoftext|>"
    for structured, text in (
        (Structured(choice=[end]), end),
        (Structured(choice=[f"a{end}b"]), f"a{end}b"),
        (Structured(regex=re.escape(end)), end),
        (Structured(json={"const": end}), f'"{end}"'),
        (Structured(grammar=f'start: "{end}" {end}'), end),  # and then the token, by its name
    ):
        params = SamplingParams(max_tokens=40, temperature=0, structured=structured)
        (completion,) = llm.generate("x = ", params)[0].completions
        assert (completion.text, completion.finish) == (text, "stop")


def test_penalties_and_biases_by_definition(llm: LLM) -> None:
    """Greedy tokens follow from the model's logits and the tokens written so far."""
    model = AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)
    prompt = llm.encode("import os\nimport ")
    options = {"presence_penalty": 0.7, "frequency_penalty": 1.1}
    params = SamplingParams(max_tokens=12, temperature=0, logit_bias={199: 1.5}, **options)
    got = llm.generate(prompt, params)[0].tokens
    tokens = list(prompt)
    for token in got:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        logits[199] += 1.5
        for other in set(tokens[len(prompt) :]):
            logits[other] -= 0.7 + 1.1 * tokens[len(prompt) :].count(other)
        assert token == int(logits.argmax())
        tokens.append(token)
    plain = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0))[0].tokens
    assert got != plain


def test_prompts_are_read(llm: LLM) -> None:
    """Log probabilities and embeddings are transformers', in chunks and after shared prefixes."""
    model = AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)
    prompts = [llm.encode("def main(x):\n    return x"), [7], llm.encode("import os\n" * 30)]
    small = LLM(PICO, dtype="float32", kv_bytes=1 << 24, max_tokens=48)
    params = SamplingParams(max_tokens=0, prompt_logprobs=2, embed=True)
    for output in small.generate(prompts + prompts, params):
        (completion,) = output.completions
        assert (completion.tokens, completion.finish) == ([], "length")
        with torch.no_grad():
            out = model(torch.tensor([output.prompt]), output_hidden_states=True)
        logp = out.logits[0].log_softmax(-1)
        first, *rest = completion.prompt_logprobs or ()
        assert first is None
        assert [entry.token for entry in rest] == output.prompt[1:]
        want = [float(logp[i, t]) for i, t in enumerate(output.prompt[1:])]
        assert [entry.logprob for entry in rest] == pytest.approx(want, abs=1e-4)
        assert all(len(entry.top) == 2 for entry in rest)
        mean = out.hidden_states[-1][0].mean(0)
        assert completion.embedding == pytest.approx((mean / mean.norm()).tolist(), abs=1e-4)
    # Beside an answer, too.
    params = SamplingParams(max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    both = small.generate(prompts[0], params)[0]
    assert len(both.completions[0].prompt_logprobs or ()) == len(prompts[0])
    assert len(both.tokens) == 3
    full = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert small.generate([5] * small.length, full)[0].completions[0].finish == "length"
    with pytest.raises(InvalidInput, match="must fit"):
        small.generate([5] * (small.length + 1), full)
