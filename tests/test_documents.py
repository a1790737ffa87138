"""Tests of reading documents that may come from anyone."""

import os
from pathlib import Path

import pytest
from loops import loop_over

from linformer_cli.documents import DEEPEST, LARGEST_DOCUMENT, parse_json, read_bytes, read_json, read_toml

DEEP = 100_000
DEEP_JSON = {
    "lists": "[" * DEEP + "]" * DEEP,
    "objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "unfinished lists": "[" * DEEP,
    "one level too many": "[" * (DEEPEST + 2) + "]" * (DEEPEST + 2),
}
DEEP_TOML = {
    "lists": f"a = {'[' * DEEP}{']' * DEEP}",
    "tables": f"a = {'{a=' * DEEP}1{'}' * DEEP}",
    "a table of many parts": f"[{'.'.join('a' * DEEP)}]",
    "a key of many parts": f"{'.'.join('a' * DEEP)} = 1",
    "one level too many": f"{'.'.join('a' * (DEEPEST + 2))} = 1",
}


@loop_over("read, kind", [*((read_json, kind) for kind in DEEP_JSON), *((read_toml, kind) for kind in DEEP_TOML)])
def test_deep_documents_are_refused(tmp_path: Path, read, kind: str) -> None:
    (tmp_path / "file").write_text((DEEP_JSON if read is read_json else DEEP_TOML)[kind])
    with pytest.raises(ValueError, match="nested more than 32 levels deep"):
        read(tmp_path / "file")


def test_documents_may_have_some_depth(tmp_path: Path) -> None:
    text = "[" * DEEPEST + "]" * DEEPEST
    assert str(parse_json(text)) == text
    (tmp_path / "file").write_text("a.b.c = [[1, 2], [3]]")
    assert read_toml(tmp_path / "file") == {"a": {"b": {"c": [[1, 2], [3]]}}}


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfa = 1")
    assert read_toml(tmp_path / "file") == {"a": 1}
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize("text", ['"\\ud800"', '{"\\udcff": 1}', '[["a\\udfff"]]'])
def test_lone_surrogates_are_refused_unless_they_are_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        parse_json(text)
    assert parse_json(text, any_text=True)
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"


@pytest.mark.parametrize("data", [b"\xff", b"\xff\xfe{\0}\0", b"", b"{", b"1" * 5000])
def test_what_is_not_json_in_utf8_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    for read in (read_json, read_toml):
        if data or read is read_json:  # nothing is valid TOML
            with pytest.raises(ValueError):
                read(tmp_path / "file")


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert read_bytes(file, 3) == b"abc"
    with pytest.raises(ValueError, match="it has 3 bytes, and at most 2 are read"):
        read_bytes(file, 2)
    os.truncate(file, 10 * 2**30)  # takes no space on the disk
    with pytest.raises(ValueError, match=f"at most {LARGEST_DOCUMENT:,} are read"):
        read_json(file)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_pipes_devices_and_folders_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # has no writer, so a read could wait for ever
    for file in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises((ValueError, OSError)):
            read_bytes(file)
