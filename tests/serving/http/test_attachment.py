"""The header under which a file is saved: one line, one name, no folder, whatever another client called the file."""

from __future__ import annotations

from email.message import Message
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.serving.http.attachment import attachment


def saved_as(header: str) -> tuple[str, str]:
    """The name for clients that read RFC 8187 and for those that do not, by another's parser."""
    told = Message()
    told["Content-Disposition"] = header
    assert told.get_content_disposition() == "attachment"
    plain, extended = told.get_param("filename", header="content-disposition"), header.partition("filename*=UTF-8''")[2]
    assert isinstance(plain, str)
    return plain, unquote(extended) or plain


@given(st.one_of(st.text(), st.text('ab./\\"\r\n;%\x00=\u202e*é')))
def test_any_name_is_one_harmless_name(name: str) -> None:
    header = attachment(name)
    assert header.isascii()
    assert header.isprintable()
    for shown in saved_as(header):
        assert shown
        assert shown.isprintable()
        assert not set(shown) & set('/\\"<>:|?*')
        assert shown.strip(" .") == shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("batch.jsonl", "batch.jsonl"),
        ("größe 1.jsonl", "größe 1.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\x\\run.bat", "run.bat"),
        ('a"; filename="b.exe', "a_; filename=_b.exe"),
        ("a\r\nSet-Cookie: b", "aSet-Cookie_ b"),
        ("cod\u202egpj.exe", "codgpj.exe"),
        (".bashrc", "bashrc"),
        ("..", "file"),
        ("", "file"),
        ("100%41", "100%41"),
        ("x" * 300, "x" * 128),
    ],
)
def test_a_good_name_stays_and_a_bad_one_loses_what_is_bad(name: str, shown: str) -> None:
    plain, extended = saved_as(attachment(name))
    assert extended == shown
    assert plain == "".join(each if each.isascii() and each != "%" else "_" for each in shown)
