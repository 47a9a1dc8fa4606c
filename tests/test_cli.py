"""The command line: what it prints, writes, refuses, and exits with."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import anybit
import anybit.checkpoint.stream
from anybit.cli.app import app
from anybit.cli.build import schemes_of
from anybit.cli.options import calibration_of, gains_by_data
from anybit.core.format import known_formats
from anybit.core.names import ALIASES
from anybit.errors import InvalidInput, InvalidType, Unsupported
from anybit.evaluate.corpus import held_out_text, prose
from anybit.evaluate.model import complete, encode, load_text_model
from anybit.evaluate.perplexity import excerpts, score
from anybit.nn.plan import plan_from
from tests import tiny

ROOT = Path(__file__).parent.parent
PICO = tiny.short_pico()
ENTRY = typer.main.get_command(app)
COMMANDS = ENTRY.commands  # type: ignore[attr-defined]


def run(*args: object, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a command that must exit with `code`."""
    got = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})
    assert got.exit_code == code, got.output
    assert "Traceback" not in got.output
    return got.stdout, got.stderr


@pytest.fixture(scope="module")
def fp6(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "fp6"
    stdout, _ = run("quantize", PICO, "--format", "fp6", "--method", "rtn", "-o", out)
    assert "14 layers" in stdout
    return out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_parse(name: str) -> None:
    stdout, _ = run(name, "--help")
    lines = [line.strip() for line in stdout.splitlines()]
    shown = [line.removeprefix("$ ") for line in lines if line.startswith("$ anybit")]
    assert shown
    for line in shown:
        program, command, *args = shlex.split(line.replace("bench serve", "bench-serve"))
        assert (program, command) == ("anybit", name)
        COMMANDS[name].make_context(name, args)


def test_quantize_is_quantize_(fp6: Path) -> None:
    model, _ = load_text_model(PICO, "cpu")
    anybit.quantize_(model, "fp6")
    again = anybit.load(fp6)
    for name, tensor in model.state_dict().items():
        assert (again.state_dict()[name] == tensor).all(), name


def test_eval_prints_and_writes_what_score_computes(fp6: Path, tmp_path: Path) -> None:
    stdout, _ = run(
        "eval", fp6, "--against", PICO, "--tokens", 1000, "--json", tmp_path / "scores.json"
    )
    scores = json.loads((tmp_path / "scores.json").read_text())
    (model, tokenizer), (dense, _) = load_text_model(fp6, "cpu"), load_text_model(PICO, "cpu")
    documents = excerpts([encode(tokenizer, text) for _, text in held_out_text()], 1000)
    want = score(model, documents, window=1024, dense=dense)
    assert (scores["kl"], scores["agreement"]) == (want.kl, want.agreement)
    assert (scores["perplexity"], scores["tokens"]) == (want.perplexity, want.tokens)
    for name in ("perplexity", "kl", "agreement"):
        assert f"{scores[name]:.5g}" in stdout
    assert "Python standard library (default; choose with --text)" in stdout


def test_eval_of_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("def add(a, b):\n    return a + b\n")
    stdout, _ = run("eval", PICO, "--text", text)
    model, tokenizer = load_text_model(PICO, "cpu")
    want = score(model, [encode(tokenizer, text.read_text())], window=1024)
    assert f"{want.perplexity:.5g}" in stdout
    assert str(text) in stdout
    assert "unknown: one window" in stdout
    assert not {"kl", "nan"} & set(stdout.split())


def test_generate_prints_the_completion_and_samples_by_the_seed() -> None:
    prompt = "def main("
    model, tokenizer = load_text_model(PICO, "cpu")
    want = complete(model, tokenizer, prompt, max_tokens=8)
    assert run("generate", PICO, prompt, "--max-tokens", 8)[0] == prompt + want + "\n"
    sampled = [
        run("generate", PICO, prompt, "--max-tokens", 8, "--temperature", 1, "--seed", seed)[0]
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_formats_lists_every_name_with_its_bits() -> None:
    stdout, _ = run("formats")
    shown = [line.split() for line in stdout.splitlines()]
    for name in dict(known_formats()).keys() - {"fp"}:
        bits = anybit.get_format(name).bits_per_weight((4096, 4096))
        assert [name, f"{bits:.3f}"] in shown
    for name, spec in ALIASES.items():
        assert [name, spec] in shown
    for source in ("LiquidGEMM, section 4", "ZeroQuant(4+2)", "GemLite", "CodeGEMM"):
        assert source in stdout


@pytest.mark.parametrize(
    ("texts", "plan"),
    [
        (["fp6"], {"*": "fp6"}),
        (["int4:group=64,zero"], {"*": "int4:group=64,zero"}),
        (["codebook:m=1,v=4@int8"], {"*": "codebook:m=1,v=4@int8"}),
        (["int3", "*.down_proj=int4:group=64"], {"*": "int3", "*.down_proj": "int4:group=64"}),
        (["*=fp6", " *.q_proj = None "], {"*": "fp6", "*.q_proj": None}),
    ],
)
def test_formats_of_the_command_line_make_a_plan(
    texts: list[str], plan: dict[str, str | None]
) -> None:
    assert plan_from(texts) == plan


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--format", "int9"], "unknown format 'int9'; did you mean int"),
        (["--format", "fp6", "--format", "int4"], "--format is given twice for '*'"),
        (
            ["--format", "int4:group=96"],
            "use group=64 or group=128, or keep the layer unquantized (FORMAT none)",
        ),
        (["--format", "*.q_proj="], "write FORMAT or PATTERN=FORMAT"),
        (["--format", "fp6", "--format", "*.nope=int4"], "no layer matches '*.nope'"),
        (["--plan", "broken.json"], "broken.json is not JSON"),
        (["--plan", "list.json"], "list.json is not a plan"),
        (["--plan", "absent.json"], "absent.json"),
    ],
)
def test_a_bad_quantize_is_one_message_and_leaves_nothing(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    Path("list.json").write_text("[1]")
    _, stderr = run("quantize", PICO, *args, "-o", "out", code=1)
    assert stderr.startswith("error: ")
    assert message in stderr
    assert len(stderr.splitlines()) == 1
    assert sorted(os.listdir()) == ["broken.json", "list.json"]


def test_usage_errors_exit_with_2() -> None:
    assert "No such command" in run("quantise", code=2)[1]
    both = ["quantize", PICO, "--format", "fp6", "--plan", "p", "-o", "x"]
    assert "give either --format or --plan" in run(*both, code=2)[1]
    for ignored, message in (
        (["quantize", PICO, "--format", "int4", "-o", "x", "--kv-scales"], "without --calibrate"),
        (["quantize", PICO, "--format", "int4", "-o", "x", "--samples", 3], "without --calibrate"),
        (["plan", PICO, "--bits", 4.5, "--length", 3], "without --calibrate"),
        (["info", PICO, "--format", ";"], "names nothing"),
        (["plan", PICO, "--bits", 4.5, "--candidates", ""], "names nothing"),
        (["demo", "--formats", ";"], "names nothing"),
        (["eval", PICO, "--limit", 3], "without --tasks"),
        (["eval", PICO, "--tasks", "a", "--text", "x"], "with --tasks"),
        (["eval", PICO, "--tasks", ""], "names nothing"),
        (["generate", PICO, "x", "--seed", 2**70], "--seed"),
    ):
        assert message in run(*ignored, code=2)[1]


def test_a_plan_is_of_a_dense_model(fp6: Path) -> None:
    _, stderr = run("plan", str(fp6), "--bits", "4.5", code=1)
    assert stderr.endswith("is quantized already, with anybit; start from the unquantized one\n")
    _, stderr = run("plan", "no/model", "--bits", "4.5", code=1)
    assert stderr.startswith("error: no/model does not exist here, nor in the hub's cache")


def test_an_output_that_exists_needs_overwrite(fp6: Path) -> None:
    before = (fp6 / "config.json").stat().st_mtime_ns
    _, stderr = run("quantize", PICO, "--format", "int4", "-o", fp6, code=1)
    assert "--overwrite" in stderr
    assert (fp6 / "config.json").stat().st_mtime_ns == before


def test_prose_to_calibrate_on_is_not_what_is_scored(tmp_path: Path) -> None:
    """Both come with Python: documentation, whose topics are divided."""
    calibrated = calibration_of("prose", 4, 64).source
    held_out = prose(held_out=True)
    assert isinstance(calibrated, list)
    assert min(len(calibrated), len(held_out)) > 20
    assert not set(calibrated) & set(held_out)
    receipt = tmp_path / "a.json"
    run("eval", PICO, "--text", "prose", "--tokens", 256, "--json", receipt)
    assert json.loads(receipt.read_text())["text"] == "Python's language reference"
    assert run("eval", "--verify", receipt)[0].endswith("confirmed\n")
    assert (
        "scores conversations" in run("eval", PICO, "--text", "prose", "--answers-only", code=1)[1]
    )


def test_formats_that_gain_by_data() -> None:
    assert gains_by_data({"*": "int8", "lm_head": "int4", "*.q_proj": None}) == "int4"
    assert gains_by_data({"*": "fp6", "lm_head": "int8@int8"}) == "fp6"
    assert gains_by_data({"*": "int8", "lm_head": "int8@int8"}) == "int8@int8"
    assert gains_by_data({"*": "int8", "*.up_proj": "fp8", "*.q_proj": None}) == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["eval", "absent"], "absent does not exist"),
        (["generate", "tests", "x"], "tests has no config.json"),
        (
            ["generate", str(PICO), "x", "--max-tokens", "1024"],
            "exceed the model's context of 1024",
        ),
        (["eval", str(PICO), "--text", str(PICO / "model.safetensors")], "is not UTF-8 text"),
        (["eval", str(PICO), "--tokens", "30"], "30 tokens are too few for 24 documents"),
        (["eval", str(PICO), "--json", "no/scores.json"], "not a directory to write scores.json"),
        (
            ["plan", str(PICO), "--bits", "4.5", "-o", "no/plan.json"],
            "not a directory to write plan",
        ),
        (
            ["plan", str(PICO), "--bits", "4", "--plot", "no/a.png"],
            "not a directory to write a.png",
        ),
        (["plan", str(PICO), "--bits", "4", "--plot", "a.doc"], "name ends in .png, .svg, .pdf"),
        (["plan", "absent", "--bits", "4", "--candidates", "int4;foo"], "unknown format 'foo'"),
        (["plan", str(PICO), "--bits", "4.5", "-o", "tests"], "tests is a directory; name a file"),
        (["generate", str(PICO), "caf\udce9"], "bytes that are not UTF-8"),
        (
            ["quantize", str(PICO), "--format", "int4", "--calibrate", "", "-o", "x"],
            ". is not a file",
        ),
        (["quantize", str(PICO), "--format", "int4", "-o", "."], "the working directory is in it"),
        (["bench", "int4", "--shape", "999999999x999999999"], "bench a smaller layer"),
        (["serve", str(PICO), "--host", "a..b"], "it is not a host name"),
        (["bench-serve", "http://[::1"], "no server answers at http://[::1"),
        (["bench-serve", "http://127.0.0.1:1", "--api-key", "\u00e9"], "no header can"),
        (["demo", "--formats", "int4;foo"], "unknown format 'foo'"),
    ],
)
def test_other_errors_are_one_message(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    stdout, stderr = run(*args, code=1)
    assert message in stderr
    assert len(stderr.splitlines()) == 1
    assert not stdout


def test_an_output_goes_where_a_link_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its target may be absent, or an empty directory; a loop leads nowhere."""
    monkeypatch.chdir(tmp_path)
    disk = tmp_path / "disk"
    (disk / "empty").mkdir(parents=True)
    for name, target in (("a", disk / "absent"), ("b", disk / "empty"), ("loop", "loop")):
        Path(name).symlink_to(target)
    for name in "ab":
        run("quantize", PICO, "--format", "int4", "--method", "rtn", "-o", name)
        assert Path(name).is_symlink()
    assert sorted(path.parent.name for path in disk.rglob("config.json")) == ["absent", "empty"]
    assert "loop" in run("quantize", PICO, "--format", "int4", "-o", "loop", code=1)[1]
    disk = disk.resolve()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == disk)
    _, stderr = run("quantize", PICO, "--format", "int4", "-o", disk, code=1)
    assert f"it is a mount point; choose a new directory, such as {disk / 'model'}" in stderr


def test_what_a_terminal_cannot_show_is_escaped() -> None:
    code = "import typer; from anybit.cli import main; import anybit.cli.app as cli\n"
    code += "cli.app = lambda: typer.echo('\u00e9 \u4e2d \\udcff'); main()"
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=True)
    assert done.stdout == b"\xe9 \\u4e2d \\udcff\n"


@pytest.mark.parametrize("columns", ["0", "80"])
def test_a_terminal_of_no_known_width_gets_help(columns: str) -> None:
    command = [sys.executable, "-m", "anybit.cli", "--help"]
    env = os.environ | {"COLUMNS": columns}
    done = subprocess.run(command, capture_output=True, env=env, text=True, check=True)
    assert "Usage: " in done.stdout


def test_chat_goes_on_after_what_the_template_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    template = "{% if 'no' in messages[-1].content %}{{ raise_exception('Never') }}{% endif %}"
    template += "{% if 'odd' in messages[-1].content %}{{ 1 // 0 }}{% endif %}x"
    shutil.copytree(PICO, tmp_path / "pico")
    (tmp_path / "pico" / "chat_template.jinja").write_text(template)
    asked = iter(["no", "caf\udce9", "odd", "yes"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(asked, None) or exit_chat())
    stdout, stderr = run("chat", tmp_path / "pico", "--max-tokens", 2)
    assert "error: TemplateError: Never" in stderr
    assert "error: ZeroDivisionError" in stderr
    assert "[2 tokens" in stdout


def exit_chat() -> str:
    raise EOFError


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_one_message() -> None:
    _, stderr = run("tune", "int4", "--shape", "64x64", code=1)
    assert stderr == "error: tune measures a GPU, and torch sees none\n"


@pytest.mark.parametrize("bug", [ValueError, TypeError, RuntimeError, AssertionError])
def test_a_bug_keeps_its_traceback(bug: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise bug("inside")

    monkeypatch.setattr("anybit.cli.doctor.doctor", broken)
    got = CliRunner().invoke(app, ["doctor"])
    assert type(got.exception) is bug


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("what"),
        InvalidType("what"),
        Unsupported("what"),
        OSError("what"),
        ImportError("what"),
    ],
)
def test_an_expected_mistake_is_one_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise error

    monkeypatch.setattr("anybit.cli.doctor.doctor", refuse)
    assert run("doctor", code=1) == ("", "error: what\n")


def test_help_needs_neither_torch_nor_transformers() -> None:
    code = f"""if True:
    import sys, anybit.cli.app as cli
    for name in {["", *COMMANDS]!r}:
        try: cli.app([*filter(None, [name]), "--help"])
        except SystemExit as done: assert not done.code
        for module in {{"torch", "transformers", "triton", "numpy"}} & sys.modules.keys():
            print(name, module, file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("Usage") == 1 + len(COMMANDS)
    assert done.stderr.split() == []


def test_debug_shows_where_an_error_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYBIT_DEBUG", "1")
    got = CliRunner().invoke(app, ["eval", "absent"])
    assert isinstance(got.exception, FileNotFoundError)


def test_an_unknown_error_is_null_in_json(tmp_path: Path) -> None:
    """One window has no standard error; JSON has no NaN."""
    (tmp_path / "text").write_text("def f(x):\n    return x\n" * 9)
    out = tmp_path / "scores.json"
    run("eval", PICO, "--text", tmp_path / "text", "--tokens", 60, "--json", out)
    assert json.loads(out.read_text(), parse_constant=pytest.fail)["standard_error"] is None


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_is_a_plain_message_and_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes when the first piece has been written."""

    def interrupted(*args: object, show: Callable[[str], None], **options: object) -> None:
        def and_interrupt(piece: str) -> None:
            show(piece)
            signal.raise_signal(signal.SIGINT)

        complete(*args, show=and_interrupt, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(anybit.evaluate.model, "complete", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stdout, stderr = run("generate", PICO, "x", "--max-tokens", "1000", code=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stdout.startswith("x")
    assert len(stdout) < 100
    assert stderr.splitlines()[-1] == "interrupted"


def test_ctrl_c_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "out.partial"

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("anybit.checkpoint.quantize.quantize_directory", interrupted)
    command = ("quantize", PICO, "--format", "int8", "-o", tmp_path / "out")
    assert run(*command, code=130)[1].splitlines()[-1] == "interrupted; nothing is kept"
    left.mkdir()
    (left / "block_0.safetensors").touch()
    want = f"interrupted; {left} keeps what is done: the same command goes on from there"
    assert run(*command, code=130)[1].splitlines()[-1] == want


def test_quantize_says_nothing_of_its_work_before_the_model_is_found(tmp_path: Path) -> None:
    for wrong in (tmp_path, PICO / "config.json", tmp_path / "nowhere"):
        _, stderr = run("quantize", wrong, "--format", "int4", "-o", tmp_path / "out", code=1)
        assert "calibrating" not in stderr


def test_few_bits_by_rounding_are_warned_of(tmp_path: Path) -> None:
    for spec, warned in (("int2:group=32", True), ("int3:group=32", False)):
        out = tmp_path / spec[:4]
        _, stderr = run("quantize", PICO, "--format", spec, "--method", "rtn", "-o", out)
        assert ("writes nonsense" in stderr) is warned


def test_convert_and_export(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    fixtures = Path(__file__).parent / "foreign" / "fixtures"
    stdout, _ = run("convert", fixtures / "gptq_4bit_v1", "-o", ours)
    assert "from gptq, 7 layers are int4:group=16" in stdout
    some = ("--to", "*.down_proj=int8", "--to", "*.up_proj=fp6")
    stdout, _ = run("convert", fixtures / "gptq_4bit_v1", "-o", tmp_path / "some", *some)
    assert "5 layers are int4:group=16, 1 layers are fp6, 1 layers are int8" in stdout
    stdout, _ = run("export", ours, "-o", theirs)
    assert "7 layers as compressed-tensors" in stdout
    again = tmp_path / "again"
    run("convert", theirs, "-o", again)
    assert (again / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()
    _, stderr = run("convert", PICO, "-o", again, "--overwrite", code=1)
    assert "is not quantized" in stderr
    _, stderr = run("export", ours, "-o", theirs, code=1)
    assert "--overwrite" in stderr


def test_build_takes_the_formats_of_a_checkpoint(tmp_path: Path) -> None:
    formats = {"*": "int4:group=128,rotate=k", "*.down_proj": "liquid@int8", "lm_head": None}
    method = {"quant_method": "anybit", "version": 1, "formats": formats}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"quantization_config": method}))
    for given in (tmp_path, path):  # kernels know nothing of rotations
        assert schemes_of(str(given)) == [("int4:group=128", False), ("liquid@int8", False)]
    assert schemes_of("fp6") == [("fp6", True)]
    with pytest.raises(InvalidInput, match="no such directory or file: nowhere/OUT"):
        schemes_of("nowhere/OUT")
    _, error = run("build", PICO, code=1)
    assert "names no formats of anybit's" in error
    _, error = run("build", "fp6", "--pack", tmp_path / "nowhere" / "kernels", code=1)
    assert "nowhere is not a directory to write kernels into" in error.replace("\n", " ")


def test_a_calibrated_run_ends_with_the_same_summary(tmp_path: Path) -> None:
    options = ["--calibrate", "python", "--samples", 16, "--length", 128]
    stdout, _ = run("quantize", PICO, "--format", "int4", "-o", tmp_path / "out", *options)
    summary = (
        "out: 14 layers with 1.573 million weights quantized, 6 tensors kept, 0 tensors dropped; "
    )
    assert f"{summary}5.25 MB -> " in stdout.replace("\n", "")


def test_help_teaches_the_first_steps_and_puts_authors_commands_apart() -> None:
    stdout, _ = run("--help")
    usual, _, rest = stdout.partition("For authors of kernels and formats")
    assert all(f" {name} " in rest for name in ("bench", "tune", "build"))
    assert not any(f" {name} " in usual for name in ("bench", "tune", "build"))
    assert "bench-serve" not in stdout
    steps = [line.strip() for line in rest.splitlines() if line.strip().startswith("$ anybit")]
    assert [line.split()[2] for line in steps] == ["info", "quantize", "chat"]
    for line in steps:
        _, _, command, *args = shlex.split(line)
        COMMANDS[command].make_context(command, args)
    for name in ("ANYBIT_CACHE", "ANYBIT_DEBUG", "HF_TOKEN"):
        assert name in rest
