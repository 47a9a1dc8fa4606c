"""Models by name, against a stand-in of the hub on this machine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import anybit
from anybit.checkpoint.save_load import load_dense
from anybit.errors import InvalidInput, Unsupported
from anybit.files.hub import check_push, located, name_of, push, repository_of
from tests import hub as stand_in
from tests.test_cli import PICO, run

NAME = "org/pico"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[stand_in.Hub]:
    """The stand-in with pico in it, as a real repository has it: with more than is needed."""
    folder = tmp_path / "served"
    shutil.copytree(PICO, folder, ignore=shutil.ignore_patterns("*.csv", "*.png"))
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"twice")
    (folder / "consolidated.safetensors").write_bytes(b"twice")
    monkeypatch.chdir(tmp_path)
    with stand_in.serving({NAME: folder}) as found:
        stand_in.use(found, tmp_path / "home", monkeypatch)
        yield found


def only_gguf(hub: stand_in.Hub, tmp_path: Path, *names: str) -> None:
    folder = tmp_path / "ggufs"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    hub.repositories["org/ggufs"] = folder


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("org/name", ("org/name", "main", None)),
        ("org/name@v1.0", ("org/name", "v1.0", None)),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3", None)),
        ("org/name:Q4_K_M", ("org/name", "main", "Q4_K_M")),
        ("org/Qwen3-0.6B@a1b2:UD-Q4_K_XL", ("org/Qwen3-0.6B", "a1b2", "UD-Q4_K_XL")),
        *(
            (path, None)
            for path in ("name", "./org/name", "/org/name", "a/b/c", "a/b.gguf", "../a")
        ),
    ],
)
def test_a_name_of_the_hub_is_told_from_a_path(text: str, want: tuple[str, ...] | None) -> None:
    found = name_of(text)
    assert want == (found and (found.repository, found.revision, found.variant))


def test_only_what_a_model_needs_is_downloaded_once(hub: stand_in.Hub) -> None:
    path = located(NAME)
    assert (path / "model.safetensors").read_bytes() == (PICO / "model.safetensors").read_bytes()
    got = hub.fetched(NAME)
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= got
    assert not any(name.endswith(".bin") or "/" in name or "consolidated" in name for name in got)
    assert repository_of(path) == NAME
    hub.asked.clear()
    assert located(NAME) == path
    assert not hub.fetched(NAME)


def test_shards_are_those_that_the_index_names(hub: stand_in.Hub, tmp_path: Path) -> None:
    model = anybit.quantize_(load_dense(PICO), "int8")
    folder = tmp_path / "sharded"
    model.save_pretrained(folder, max_shard_size="3MB")
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"of another version")
    hub.repositories["org/sharded"] = folder
    path = located("org/sharded")
    names = set(
        json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()
    )
    assert len(names) > 1
    assert {p.name for p in path.glob("*.safetensors")} == names
    assert anybit.load("org/sharded").num_parameters() == model.num_parameters()


def test_load_and_llm_take_a_name(hub: stand_in.Hub, tmp_path: Path) -> None:
    llm = anybit.LLM(NAME, "int8", draft=NAME)
    params = anybit.SamplingParams(max_tokens=4, temperature=0)
    assert llm.generate("def f(", params)[0].tokens == (
        anybit.LLM(PICO, "int8").generate("def f(", params)[0].tokens
    )
    (hub.repositories[NAME] / "README.md").unlink()
    shutil.rmtree(tmp_path / "home")
    out = tmp_path / "out"
    anybit.save(anybit.quantize_(load_dense(located(NAME)), "int8"), out)
    assert "base_model: org/pico" in (out / "README.md").read_text()
    hub.repositories["me/pico-int8"] = out
    again = anybit.load("me/pico-int8")
    assert again.state_dict().keys() == anybit.load(out).state_dict().keys()


def test_an_adapter_of_the_hub_is_located(hub: stand_in.Hub, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt"):
        (folder / name).write_text("{}")
    hub.repositories["org/lora"] = folder
    assert {p.name for p in located("org/lora").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_a_directory_of_that_name_wins(hub: stand_in.Hub, tmp_path: Path) -> None:
    (tmp_path / "org" / "pico").mkdir(parents=True)
    assert located(NAME) == Path(NAME)
    assert not hub.asked


def test_the_cache_does_without_a_hub(hub: stand_in.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    path = located(NAME)
    hub.down = True
    assert located(NAME) == path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert located(NAME) == path
    assert not hub.asked
    (path / "model.safetensors").unlink()
    with pytest.raises(Unsupported, match=r"in its cache org/pico has no model.safetensors"):
        located(NAME)


def test_one_line_says_what_to_do_without_network(
    hub: stand_in.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    remedy = "hf download org/pico --local-dir DIR"
    hub.down = True
    with pytest.raises(Unsupported, match=f"cannot be asked .*503.*{remedy}"):
        located(NAME)
    hub.down = False
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unsupported, match=f"HF_HUB_OFFLINE forbids to ask; .*{remedy}"):
        located(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unsupported, match=f"127.0.0.1:9 cannot be asked .*{remedy}"):
        located(NAME)


def test_what_the_hub_refuses_is_one_line(hub: stand_in.Hub, tmp_path: Path) -> None:
    (tmp_path / "out" / "pico-fp6").mkdir(parents=True)
    hub.gated.add(NAME)
    refused = [
        (
            "org/none",
            FileNotFoundError,
            "neither here nor on http.*; if it is private, log in with",
        ),
        ("out/pico-fp8", FileNotFoundError, r"did you mean out/pico-fp6\?"),
        (f"{NAME}@v9", FileNotFoundError, "org/pico has no revision 'v9'"),
        (NAME, InvalidInput, "org/pico is gated: accept its conditions on http.*/org/pico"),
    ]
    for name, kind, message in refused:
        with pytest.raises(kind, match=message) as error:
            located(name)
        assert "\n" not in str(error.value)


def test_repositories_without_a_model_that_can_be_read(hub: stand_in.Hub, tmp_path: Path) -> None:
    folder = hub.repositories[NAME]
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        InvalidInput, match=r"no model.safetensors .*, only .*: look for a revision"
    ):
        located(NAME)
    (folder / "config.json").unlink()
    with pytest.raises(InvalidInput, match=r"has no config.json, so it is not a model"):
        located(NAME)
    only_gguf(hub, tmp_path, "a-Q4_K_M.gguf", "a-F16.gguf", "mmproj-F16.gguf")
    with pytest.raises(InvalidInput, match=r"org/ggufs:F16 \(there are F16, Q4_K_M\)"):
        located("org/ggufs")
    assert not any(file.endswith((".bin", ".gguf")) for file in hub.fetched(NAME))


def test_a_gguf_file_is_named_by_its_quantization(hub: stand_in.Hub, tmp_path: Path) -> None:
    parts = [f"Q8_0/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    only_gguf(hub, tmp_path, "m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m.IQ2_XS.gguf", *parts)
    for variant, name in [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("ud-q4_k_m", "m-UD-Q4_K_M.gguf"),
        ("iq2_xs", "m.IQ2_XS.gguf"),
        ("m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
    ]:
        path = located(f"org/ggufs:{variant}")
        assert path.read_bytes() == name.encode()
    path = located("org/ggufs:Q8_0")
    assert [p.name for p in sorted(path.parent.iterdir())] == [p.partition("/")[2] for p in parts]
    assert path.name == "m-Q8_0-00001-of-00002.gguf"
    with pytest.raises(InvalidInput, match=r"no GGUF file of Q3_K; there are IQ2_XS, Q4_K_M, Q8_0"):
        located("org/ggufs:Q3_K")


def test_a_small_disk_is_told_before_the_download(
    hub: stand_in.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**7, 10**7, 10**6)
    )
    with pytest.raises(OSError, match=r"not enough disk space in .*, 1 MB are free"):
        located(NAME)
    assert "model.safetensors" not in hub.fetched(NAME)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's
def test_pushing_uploads_a_directory_or_a_file(
    hub: stand_in.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match="'here' cannot be pushed to; give ORG/NAME"):
        check_push("here")
    with pytest.raises(InvalidInput, match="needs a token with write access: log in with"):
        check_push("org/out")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(InvalidInput, match="the hub does not know this token"):
        check_push("org/out")
    monkeypatch.setenv("HF_TOKEN", stand_in.TOKEN)
    check_push("org/out")
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("---\ntags:\n- anybit\n---\n")
    (out / "model.safetensors").write_bytes(b"weights")
    assert push(out, "org/out") == f"{hub.address}/org/out"
    assert hub.private["org/out"] in (True, "private")
    push(out / "model.safetensors", "org/file")
    assert set(hub.pushed["org/out"]) == {"README.md", "model.safetensors"}
    assert hub.pushed["org/file"] == {"model.safetensors": b"weights"}
    hub.down = True
    with pytest.raises(Unsupported, match=r"out is complete, but .*hf upload org/out"):
        push(out, "org/out")


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's
def test_from_a_name_of_the_hub_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with stand_in.serving({"org/pico": PICO}) as served:
        stand_in.use(served, tmp_path / "home", monkeypatch)
        command = [
            *("quantize", "org/pico", "--format", "fp6", "--method", "rtn"),
            *("-o", "out", "--push-to", "me/pico-fp6"),
        ]
        assert "needs a token" in run(*command, code=1)[1]
        assert not served.fetched("org/pico")
        monkeypatch.setenv("HF_TOKEN", stand_in.TOKEN)
        stdout, _ = run(*command)
        assert stdout.splitlines()[-1] == f"{served.address}/me/pico-fp6"
        pushed = served.pushed["me/pico-fp6"]
        files = {path.name: path.read_bytes() for path in Path("out").iterdir()}
        assert pushed == files
        assert run("generate", "org/pico", "def f(", "--max-tokens", 4)[0].startswith("def f(")
        # A refused OUT costs no download, nor does a name that is not there cost OUT.
        served.asked.clear()
        assert "exists" in run(*command[:-2], code=1)[1]
        assert not served.asked
        assert "org/none does not exist, neither here" in run("eval", "org/none", code=1)[1]


def test_importing_anybit_does_not_import_the_hub() -> None:
    code = "import sys, anybit, anybit.cli.app; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
