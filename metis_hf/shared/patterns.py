"""Regular expressions for names of modules, matched in linear time.

A pattern may come from anyone's config.json, and `re` can take minutes for one ("(a+)+$"). RE2
cannot, and it answers as `re` does. It has no look-arounds and no back-references.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import re2

MAX_LENGTH = 2_000  # characters of a pattern: some thirty names of modules
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False


@lru_cache(maxsize=20_000)
def name_pattern(text: str, before: str = "", after: str = "") -> Any:
    """Return the compiled regular expression before + text + after, with match and fullmatch.

    Args:
        text: the pattern.
        before: trusted pattern in front of it.
        after: trusted pattern behind it.

    Raises:
        ValueError: not a regular expression, one of more than `MAX_LENGTH` characters, or one that
            RE2 does not support.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"it has {len(text):,} characters; at most {MAX_LENGTH:,} are allowed")
    try:
        re.compile(text)  # says what is wrong in the words that people know
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("its groups are nested too deeply") from None
    try:
        re2.compile(text, _OPTIONS)
        return re2.compile(before + text + after, _OPTIONS)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        raise ValueError(
            f"RE2, which matches in linear time, does not take it ({reason}). Instead of a "
            "look-ahead, name in exclude_modules what must not match; instead of a back-reference, "
            "write the alternatives out; counts such as {2,9} go up to 1000"
        ) from None


def matching_pattern(patterns: Iterable[str], name: str) -> str | None:
    """Return the first pattern for a module name, by PEFT's rule: it fits the name's end."""
    return next((text for text in patterns if ending_pattern(text).match(name)), None)


def ending_pattern(text: str) -> Any:
    """Return the compiled form of a key of `rank_pattern`, as PEFT writes it."""
    return name_pattern(text, before=r"(.*\.)?(", after=")$")


def containing_pattern(text: str) -> Any:
    """Return the compiled form of an entry of `modules_to_not_convert`.

    Each alternative is bounded on both sides: "a|b" means ["a", "b"]. In PEFT's `modules_to_save`
    one side of each is open, and most of the second alternatives match nothing.
    """
    return name_pattern(text, before=r"(^|.*\.)(?:", after=r")($|\..*)")
