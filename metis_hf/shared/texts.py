"""Reading a text that should be UTF-8."""

from __future__ import annotations

from pathlib import Path


def utf8_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the text of a file.

    Args:
        path: of the file.
        encoding: "utf-8-sig" leaves out a byte order mark.

    Raises:
        ValueError: it is not UTF-8, as a compressed file is not; the message names it.
    """
    try:
        return path.read_text(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error})") from None
