"""A conversation in the terminal."""

import time

import typer

from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.errors import AnybitError, InvalidInput, in_a_line


def talk(llm: LLM, params: SamplingParams, system: str | None = None) -> None:
    """Ask, answer, and so on, until the end of the input. Ctrl-C ends an answer early."""
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        try:
            messages.append({"role": "assistant", "content": answer(llm, messages, params)})
        except AnybitError as error:
            # Too long a conversation, bytes that are no text, or what the template does not take.
            typer.secho(f"error: {error}", fg="red", err=True)
            messages.pop()


def answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Write an answer as it comes, then its length and speed; the answer."""
    engine, text, tokens = llm.engine, "", 0
    try:
        prompt = llm.encode_chat(messages)
    except AnybitError:
        raise
    except Exception as error:  # templates and tokenizers raise all kinds
        raise InvalidInput(in_a_line(error)) from None
    texts = llm.transcripts()
    texts.add("chat", prompt, params)
    engine.add("chat", prompt, params)
    start = first = time.monotonic()
    try:
        while engine.busy:
            for delta in texts.read(engine.step()):
                first = first if tokens else time.monotonic()
                tokens += len(delta.tokens)
                text += delta.text
                typer.echo(delta.text, nl=False)
                if delta.error:
                    typer.secho(f"error: {delta.error}", fg="red", err=True)
    except KeyboardInterrupt:
        engine.abort("chat")
    speed = (tokens - 1) / (time.monotonic() - first) if tokens > 1 else 0.0
    note = f"\n[{tokens} tokens, first after {first - start:.2f} s, then {speed:.0f} tokens/s]"
    typer.secho(note, dim=True)
    return text
