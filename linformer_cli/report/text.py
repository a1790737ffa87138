"""Bytes as text that is safe to show."""

import codecs


class SafeText:
    """Turns bytes, which arrive in parts, into text for a terminal.

    Invalid UTF-8 becomes U+FFFD. Control characters other than tabs and line ends become escapes such as `\\x1b`,
    because a terminal would obey them.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, data: bytes, last: bool = False) -> str:
        """The text of the next bytes. An incomplete character is kept for the next call, unless this is the `last`."""
        return "".join(_escape(character) for character in self._decoder.decode(data, last))


def _escape(character: str) -> str:
    shown = character.isprintable() or character in "\n\t"
    return character if shown else character.encode("unicode_escape").decode()


def render_windows(windows: list[bytes]) -> str:
    """The text of `windows`, each after a line with its number."""
    return "".join(f"--- {number} ---\n{SafeText().decode(data, last=True)}\n" for number, data in enumerate(windows))
