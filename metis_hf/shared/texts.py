"""Reading a text that should be UTF-8."""

from __future__ import annotations

from pathlib import Path


def bounded(path: Path, most: int) -> Path:
    """Return the path of a file that is read whole; refuse a file of more than `most` bytes.

    Raises:
        ValueError: it is larger, or no file: a pipe has no end.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file")
    if path.is_file() and (size := path.stat().st_size) > most:
        raise ValueError(
            f"{path} has {size:,} bytes, and what it should hold takes less than {most:,}; name "
            "another file"
        )
    return path


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
        raise ValueError(
            f"{path} is not UTF-8 text ({error}); give a text file, or convert it"
        ) from None
