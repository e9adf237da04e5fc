"""Only code whose licence reads as permissive is used."""

from __future__ import annotations

import sys
from email.message import Message
from pathlib import Path

import pytest

from ridgeline.training.packages import installed_packages, permissive_licence, standard_library


def metadata(**fields: str) -> Message:
    message = Message()
    for name, value in fields.items():
        message[name.replace("_", "-")] = value
    return message


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 OR BSD-2-Clause", True),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("(MIT OR GPL-3.0-only) AND BSD-3-Clause", False),  # read strictly
        ("BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("Zlib", False),
        ("MPL-2.0", False),
        ("LicenseRef-NVIDIA-Proprietary", False),
    ],
)
def test_spdx_expressions(expression: str, allowed: bool) -> None:
    assert bool(permissive_licence(metadata(License_Expression=expression))) is allowed


def test_one_line_licence_fields_count_when_nothing_better_is_there() -> None:
    assert permissive_licence(metadata(License="BSD 3-Clause License")) == "BSD"
    assert permissive_licence(metadata(License="Apache License, Version 2.0")) == "Apache-2.0"
    assert permissive_licence(metadata(License="MPL-2.0 AND MIT")) is None
    assert permissive_licence(metadata()) is None


def test_every_classifier_must_be_permissive() -> None:
    both = metadata(License="MIT")
    both["Classifier"] = "License :: OSI Approved :: MIT License"
    assert permissive_licence(both) == "MIT"
    both["Classifier"] = "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"
    assert permissive_licence(both) is None


def test_installed_packages_lists_python_files_of_permissive_distributions(tmp_path: Path) -> None:
    for name, licence in (("good", "MIT"), ("bad", "GPL-3.0-only")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text("x = 1\n")
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n"
        )
        (info / "RECORD").write_text(f"{name}/code.py,,\n{name}/data.txt,,\n../../bin/{name}.py,,\n")
    packages = list(installed_packages([str(tmp_path)]))
    assert [(p.name, p.version, p.licence) for p in packages] == [("good", "1.0", "MIT")]
    assert packages[0].files == (("good/code.py", tmp_path / "good" / "code.py"),)


def test_the_standard_library_is_this_interpreters() -> None:
    library = standard_library()
    names = {name for name, _ in library.files}
    assert {"json/decoder.py", "asyncio/events.py"} <= names
    assert not any("site-packages" in name for name in names)
    assert library.version == ".".join(map(str, sys.version_info[:3]))
