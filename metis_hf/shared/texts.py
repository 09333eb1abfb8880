"""Reads text files with checks of size and encoding."""

from __future__ import annotations

from pathlib import Path


def bounded(path: Path, most: int) -> Path:
    """Return the path, if the file has at most `most` bytes.

    Raises:
        ValueError: the file is larger, or is not a regular file: a pipe may never end.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file")
    if path.is_file() and (size := path.stat().st_size) > most:
        raise ValueError(f"{path} has {size:,} bytes; choose a file of at most {most:,} bytes")
    return path


def utf8_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the text of a file; the encoding "utf-8-sig" drops a byte order mark.

    Raises:
        ValueError: the file is not UTF-8, such as a compressed file; the message names it.
    """
    try:
        return path.read_text(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error}); pass a text file, or convert this one to UTF-8"
        ) from None
