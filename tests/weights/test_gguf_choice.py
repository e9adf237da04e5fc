"""GGUF as people have it: in parts, in capitals, in a folder, and on the hub with a tag."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.folder import fingerprint, resolve_model
from ridgeline.weights.formats.gguf_file import gguf_parts, read_gguf
from ridgeline.weights.gguf_choice import chosen_gguf, tag_of
from ridgeline.weights.hub import is_hub_id
from tests import gguf_files, tiny_models
from tests.weights.loading import load

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write(tiny_models.build("qwen3"), tmp_path_factory.mktemp("whole") / "tiny.gguf")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The same model in several files, as the gguf package divides it."""
    gguf_files.write(tiny_models.build("qwen3"), tmp_path / "tiny.gguf", part_tensors=9)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in found] == [f"tiny-{n:05}-of-{len(found):05}.gguf" for n in range(1, len(found) + 1)]
    assert len(found) == 3
    return found


def refused(path: Path, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words) as caught:
        load(resolve_model(path))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_parts_are_the_whole(whole: Path, parts: list[Path]) -> None:
    expected = dict(load(whole).named_parameters())
    for named in parts:  # whichever is named
        found = dict(load(resolve_model(named)).named_parameters())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], parameter) for name, parameter in expected.items())


def test_a_part_that_changes_changes_the_fingerprint(parts: list[Path]) -> None:
    before = fingerprint(parts[0])
    parts[2].write_bytes(parts[2].read_bytes())
    assert fingerprint(parts[0]) != before


def test_parts_that_are_no_model_are_one_sentence(parts: list[Path], tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    gguf_files.write(tiny_models.build("qwen3"), others / "tiny.gguf", part_tensors=11)
    saved = parts[1].read_bytes()
    parts[1].unlink()
    refused(parts[0], "is one of 3 parts, and 1 of them are missing .tiny-00002-of-00003.gguf")
    shutil.copy(others / parts[1].name, parts[1])
    refused(parts[0], "as tiny-00002-of-00003.gguf does; they are parts of two models|promises")
    shutil.copy(parts[0], parts[1])
    refused(parts[0], "is part 1 of 3, though its name says 2 of 3")
    parts[1].write_bytes(saved[:-4000])
    refused(parts[0], "00002-of-00003.gguf cannot be read as a GGUF file .it ends before the data of ")
    alone = tmp_path / "renamed.gguf"
    shutil.copy(parts[2], alone)
    refused(alone, "is part 3 of 3, and the others are found by their names; call it NAME-00003-of-00003.gguf")


@pytest.mark.parametrize(("name", "value"), [("split.count", 7), ("split.count", 2**31), ("split.tensors.count", 3)])
def test_counts_that_are_wrong_are_one_sentence(name: str, value: int, parts: list[Path]) -> None:
    data = parts[0].read_bytes()
    start = data.index(name.encode()) + len(name) + 4
    width = {2: 2, 5: 4, 4: 4}[int.from_bytes(data[start - 4 : start], "little")]
    written = (value & (256**width - 1)).to_bytes(width, "little")
    parts[0].write_bytes(data[:start] + written + data[start + width :])
    refused(parts[0], "download")


def test_parts_with_any_bytes_changed_are_read_or_refused(parts: list[Path]) -> None:
    saved = {path: path.read_bytes() for path in parts}

    @settings(max_examples=80, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(parts))
        content = bytearray(saved[path])
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(4, 900))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        try:
            read_gguf(path)
        except ModelLoadError as error:
            assert "\n" not in str(error)  # noqa: PT017 (many changes hurt nothing but a name)
        path.write_bytes(saved[path])

    check()


def test_capitals_are_a_gguf_file_too(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "TINY.GGUF"
    shutil.copy(whole, path)
    assert resolve_model(path) == path
    load(path)
    assert resolve_model(tmp_path) == path


def placed(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF")
    return folder


def test_a_folder_is_the_one_model_in_it(tmp_path: Path) -> None:
    parts = ("big/m-Q8_0-00001-of-00002.gguf", "big/m-Q8_0-00002-of-00002.gguf")
    folder = placed(tmp_path / "a", *parts, "mmproj-F16.gguf", "m.imatrix.gguf", "config.json", "README.md")
    assert resolve_model(folder) == folder / parts[0]
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve_model(folder) == folder
    assert resolve_model(f"{folder}:q8_0") == folder / parts[0]


def test_several_models_are_chosen_from_by_a_tag(tmp_path: Path) -> None:
    names = ("m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m.f16.gguf", "q/m-Q6_K-00001-of-00002.gguf")
    folder = placed(tmp_path / "a", *names)
    chosen = {"Q4_K_M": 0, "q4_k_m": 0, "UD-Q4_K_M": 1, "F16": 2, "Q6_K": 3}
    assert {tag: resolve_model(f"{folder}:{tag}") for tag in chosen} == {
        tag: folder / names[at] for tag, at in chosen.items()
    }
    refused(folder, r"holds 4 GGUF models; name one as in .*a:Q4_K_M \(it has m-Q4_K_M, m-UD-Q4_K_M, m.f16, q/m-Q6_K\)")
    refused(Path(f"{folder}:Q5_0"), "holds no GGUF model whose name ends in 'Q5_0'; it has m-Q4_K_M, ")
    refused(Path(f"{folder}:K_M"), "whose name ends in 'K_M'")
    refused(Path(f"{placed(tmp_path / 'none', 'model.safetensors')}:Q4_0"), "no GGUF file, so 'Q4_0' chooses nothing")


def test_the_hub_s_copy_on_this_machine_is_chosen_from(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the hub client itself, in its own layout, in which files are links."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit, place = "0" * 40, tmp_path / "models--someone--tiny-GGUF"
    snapshot = place / "snapshots" / commit
    placed(place, "refs/main", "blobs/aa")
    (place / "refs/main").write_text(commit)
    shutil.copy(whole, place / "blobs/aa")
    snapshot.mkdir(parents=True)
    for name in ("tiny-Q4_K_M.gguf", "tiny-BF16.gguf"):
        (snapshot / name).symlink_to("../../blobs/aa")
    found = resolve_model("someone/tiny-GGUF:Q4_K_M", download_dir=tmp_path)
    assert found == snapshot / "tiny-Q4_K_M.gguf"
    load(found)
    with pytest.raises(ModelLoadError, match=r"name one as in .*BF16"):
        resolve_model("someone/tiny-GGUF", download_dir=tmp_path)
    with pytest.raises(ModelLoadError, match="no copy is on this machine"):
        resolve_model("someone/other-GGUF:Q4_K_M", download_dir=tmp_path)


HUB = [
    "config.json",
    "README.md",
    "m-q4_K_M.gguf",
    "m-UD-Q4_K_M.gguf",
    "m-IQ4_K_M.gguf",
    "other/m-Q4_K_M.gguf",
    "mmproj-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "q/[m]-Q6_K-00001-of-00002.gguf",
    "q/[m]-Q6_K-00002-of-00002.gguf",
    "model.safetensors",
]


@pytest.mark.parametrize(
    ("tag", "files"), [("Q4_K_M", HUB[2:3]), ("ud-q4_k_m", HUB[3:4]), ("IQ4_K_M", HUB[4:5]), ("Q6_K", HUB[8:10])]
)
def test_the_hub_is_asked_for_the_tagged_files_alone(
    tag: str, files: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    def snapshot(_: str, allow_patterns: list[str], ignore_patterns: list[str], **how: object) -> str:
        wanted = filter_repo_objects(HUB, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        return str(placed(tmp_path, *wanted))

    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda _, **how: HUB)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve_model(f"someone/m-GGUF:{tag}") == tmp_path / files[0]
    found = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(found) == sorted([*files, "config.json"])


def test_a_tag_that_the_hub_has_not_is_refused_before_any_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda _, **how: HUB)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda _, **how: pytest.fail("it was asked"))
    with pytest.raises(ModelLoadError, match=r"^someone/m-GGUF holds no GGUF model whose name ends in 'Q5_0'; it has "):
        resolve_model("someone/m-GGUF:Q5_0")


@given(st.text(max_size=30))
def test_names_come_apart_in_one_way(model: str) -> None:
    name, tag = tag_of(model)
    assert model == (name if tag is None else f"{name}:{tag}")
    assert is_hub_id("a/b" if tag is None else f"a/b:{tag}")


def test_the_names_of_parts() -> None:
    assert [path.name for path in gguf_parts(Path("d/M-00002-of-00003.GGUF"))] == [
        f"M-{n:05}-of-00003.GGUF" for n in (1, 2, 3)
    ]
    for odd in ("m-00001-of-99999.gguf", "m-00001-of-00000.gguf", "m-1-of-3.gguf", "m.gguf"):
        assert gguf_parts(Path(odd)) == [Path(odd)]


def test_a_folder_without_gguf_has_none(tmp_path: Path) -> None:
    assert chosen_gguf(placed(tmp_path, "mmproj.gguf", "a.txt"), "Q8_0") is None
