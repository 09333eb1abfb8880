"""Regular expressions for module names, matched in linear time.

A pattern may come from an untrusted config.json, and `re` can take minutes on patterns such as
"(a+)+$". RE2 takes linear time and gives the same matches, but does not support look-arounds and
back-references.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import re2

MAX_LENGTH = 2_000  # characters of a pattern: about thirty module names
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False


@lru_cache(maxsize=20_000)
def name_pattern(text: str, before: str = "", after: str = "") -> Any:
    """Return the compiled regular expression before + text + after, with match and fullmatch.

    Only `text` is checked: `before` and `after` are trusted.

    Raises:
        ValueError: `text` is not a regular expression, has more than `MAX_LENGTH` characters, or is
            not supported by RE2.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"it has {len(text):,} characters; at most {MAX_LENGTH:,} are allowed")
    try:
        re.compile(text)  # its error messages are more familiar than RE2's
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
            f"RE2, which matches in linear time, does not support it ({reason}). Instead of a "
            "look-ahead, list what must not match in exclude_modules; instead of a back-reference, "
            "write out the alternatives; counts such as {2,9} go up to 1000"
        ) from None


def matching_pattern(patterns: Iterable[str], name: str) -> str | None:
    """Return the first pattern that matches the end of a module name, as in PEFT, or None."""
    return next((text for text in patterns if ending_pattern(text).match(name)), None)


def ending_pattern(text: str) -> Any:
    """Return the compiled form of a key of `rank_pattern`, by PEFT's rule."""
    return name_pattern(text, before=r"(.*\.)?(", after=")$")


def containing_pattern(text: str) -> Any:
    """Return the compiled form of an entry of `modules_to_not_convert`.

    Each alternative is anchored on both sides: "a|b" means ["a", "b"]. In PEFT's `modules_to_save`
    the first and last alternative are each anchored on one side only.
    """
    return name_pattern(text, before=r"(^|.*\.)(?:", after=r")($|\..*)")
