"""What the documentation names exists: files, links, commands with their options, and formats."""

import csv
import re
import shlex
from pathlib import Path

import pytest
import typer

import anybit
from anybit.cli.app import app
from anybit.core.scheme import parse_scheme
from tests.models.page import OUTCOMES, SAID

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
REPORT = "report.md"  # a paper, as long as such are
NOTES = sorted((ROOT / "notes").glob("*.md"))  # these may name code that is gone
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FOLDERS = (
    "anybit/", "benchmarks/", "docs/", "examples/", "kernels/", "models/", "notes/", "tests/",
)  # fmt: skip
SPEC = re.compile(
    r"(int[1-8]|fp[4-8]|fp:e\dm\d|liquid|sparse|codebook)(:[a-z0-9=,]+)?(@int8|@fp8)?"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_it_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    for name in named:
        if name.startswith(FOLDERS) and re.fullmatch(r"[\w./-]+", name):
            places = (ROOT / name, ROOT / "anybit" / name)
            assert any(place.exists() for place in places), f"{page.name}: no {name}"
        if SPEC.fullmatch(name):
            parse_scheme(name)
    for line in re.findall(r"^anybit [a-z-]+.*$", "\n".join(blocks(text)), re.M):
        _, command, *args = shlex.split(line.replace("bench serve", "bench-serve"), comments=True)
        assert command in COMMANDS, f"{page.name}: {line}"
        context = COMMANDS[command].make_context(command, args)
        for spec in context.params["formats"] if command in ("bench", "tune") else ():
            parse_scheme(spec)


@pytest.mark.parametrize(
    "page", [*PAGES, *NOTES], ids=lambda page: f"{page.parent.name}/{page.name}"
)
def test_links_lead_somewhere(page: Path) -> None:
    """Files and headings, on the pages that the site's build does not see as well."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, heading = link.partition("#")
        if not file.startswith(("http:", "https:")):
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name}: {link}"
            assert not heading or heading in anchors(target), f"{page.name}: {link}"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_the_api_page_has_every_public_name() -> None:
    lines = (ROOT / "docs/api.md").read_text(encoding="utf-8").splitlines()
    missing = [n for n, room in anybit.PUBLIC.items() if f"::: anybit.{room}.{n}" not in lines]
    assert not missing


def test_the_benchmarks_page_has_every_script_and_every_file_of_results() -> None:
    named = re.findall(r"`([\w.-]+)`", (ROOT / "benchmarks/README.md").read_text(encoding="utf-8"))
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    results = {path.stem for path in (ROOT / "benchmarks/results").glob("*.csv")}
    assert not (scripts | results) - set(named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_read_in_minutes(page: Path) -> None:
    prose, _ = words(page)
    assert prose <= (3000 if page.name == REPORT else 1200)


def test_all_pages_are_read_in_two_hours() -> None:
    """Whole tables are files of benchmarks/results and docs/models.csv; pages show what decides."""
    others = (REPORT, "CONTRIBUTING.md", "publishing.md")
    counts = [words(page) for page in PAGES if page.name not in others]
    assert sum(prose for prose, _ in counts) <= 18_000
    assert sum(others for _, others in counts) <= 15_000


def test_the_first_screen_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text[: text.index("\n## ")].split()) < 300


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_speak_the_language_of_the_field(page: Path) -> None:
    """Each of these has an ordinary word: interleaved, bandwidth bound, unquantized, request."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    private = r"read floor|no measurable loss|near-dense|texts at once|dense (model|checkpoint)s?\b"
    assert not re.findall(private, text)


def test_pictures_are_used_and_drawn() -> None:
    """Every picture stands on a page, and `benchmarks/plot.py` draws those of measurements."""
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = {path.name for path in (ROOT / "docs/img").iterdir()}
    assert {name for name in pictures if f"img/{name})" in pages} == pictures
    script = (ROOT / "benchmarks/plot.py").read_text(encoding="utf-8")
    assert all(name in script for name in pictures - {"chat.png"} if name.endswith(".png"))


def test_the_models_page_counts_its_file() -> None:
    """`make test-models` writes both."""
    with (ROOT / "docs/models.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    tried = [row for row in rows if row["tried"] == "yes"]
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert f"{len(tried)} architectures of transformers" in page
    assert f"tiny form of {len(rows) - len(tried)} more" in page
    for step, said in SAID.items():
        cells = [row[step] for row in tried]
        counts = " | ".join(str(cells.count(outcome)) for outcome in OUTCOMES)
        assert f"| {said} | {counts} |" in page


def test_there_is_something_to_check() -> None:
    lines = [
        line for page in PAGES for block in blocks(page.read_text()) for line in block.split("\n")
    ]
    assert sum(line.startswith("anybit ") for line in lines) > 20


def blocks(text: str) -> list[str]:
    """Code without a language: what one types in a shell."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [code for language, code in fences if not language]


def words(page: Path) -> tuple[int, int]:
    """Words of prose, and those of tables and code."""
    text = page.read_text(encoding="utf-8")
    left = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.S)
    prose = [line for line in left.splitlines() if not line.lstrip().startswith("|")]
    count = sum(len(line.split()) for line in prose)
    return count, len(text.split()) - count
