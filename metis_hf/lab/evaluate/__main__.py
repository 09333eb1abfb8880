"""`python -m metis_hf.lab.evaluate ...` is `lm_eval ...` with `--model metis` registered.

For versions of lm-eval that do not load plug-ins by themselves, such as 0.4.13.
"""

from __future__ import annotations


def main() -> None:
    """Register the model, then run lm-eval's own command line."""
    from lm_eval.__main__ import cli_evaluate

    import metis_hf.lab.evaluate.harness  # noqa: F401

    cli_evaluate()


if __name__ == "__main__":
    main()
