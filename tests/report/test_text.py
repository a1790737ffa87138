"""Tests of bytes shown as text."""

import pytest

from linformer_cli.report.text import SafeText, render_windows


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_characters_that_arrive_in_parts_are_joined(size: int) -> None:
    data, text = "naïve €\t😀\n".encode(), SafeText()
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    assert "".join(text.decode(part) for part in parts) + text.decode(b"", last=True) == "naïve €\t😀\n"


def test_a_terminal_gets_no_control_characters_and_no_invalid_text() -> None:
    shown = SafeText().decode(b"\x1b[2J\x07a\x00\r\n\xff\xe2\x82|\xc2\x9b\xe2\x80\xae\xe2\x82", last=True)
    assert shown == "\\x1b[2J\\x07a\\x00\\r\n\ufffd\ufffd|\\x9b\\u202e\ufffd"
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_windows_are_numbered() -> None:
    assert render_windows([b"one\n", b"\xe2\x82"]) == "--- 0 ---\none\n\n--- 1 ---\n\ufffd\n"
