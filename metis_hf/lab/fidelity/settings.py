"""The settings of a fidelity measurement: model, text, and what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metis_hf.config import MetisConfig
from metis_hf.lab.cost import TOKENS
from metis_hf.lab.fidelity.subject import ModelAndText
from metis_hf.schemes import CONTROL, scheme_info, scheme_names
from metis_hf.shared.texts import utf8_text


@dataclass(frozen=True)
class Settings(ModelAndText):
    """The settings of a measurement, including model and text.

    Attributes:
        schemes: names of schemes; None: all but the control.
        ranks: additional ranks at which `metis` is measured.
        configs: JSON files of additional configs; tables show the files' names.
        alone: schemes whose layers are quantized one at a time; None: the first.
        tokens_per_step: tokens per step for counting costs.
        seed: seed of all noise; None: 0, and for `configs` the file's own.
    """

    schemes: tuple[str, ...] | None = None
    ranks: tuple[int, ...] = ()
    configs: tuple[Path, ...] = ()
    alone: tuple[str, ...] | None = None
    tokens_per_step: int = TOKENS
    seed: int | None = None

    def candidates(self) -> list[tuple[str, MetisConfig]]:
        """Return (name in tables, config) of everything to measure.

        Raises:
            FileNotFoundError: a config file is missing.
            ValueError: a scheme is not registered; two rows have one name; there is nothing to
                measure; `alone` names something else; a rank is not positive; a file is no config.
        """
        names = self.schemes
        if names is None:
            names = tuple(name for name in scheme_names() if name != CONTROL)
        for name in names:
            scheme_info(name)
        seed = self.seed or 0
        found = [(name, MetisConfig(scheme=name, seed=seed)) for name in names]
        found += [(f"metis, rank {rank}", MetisConfig(rank=rank, seed=seed)) for rank in self.ranks]
        found += [(path.stem, _read_config(path, self.seed)) for path in self.configs]
        if not found:
            raise ValueError(
                "nothing to measure; name schemes (or all of them), ranks or config files"
            )
        twice = sorted({n for n, _ in found if [m for m, _ in found].count(n) > 1})
        if twice:
            raise ValueError(
                f"two rows would be called {' and '.join(twice)}; give each scheme and rank only "
                "once, or rename a config file"
            )
        for name in self.alone or ():
            if name not in dict(found):
                measured = ", ".join(name for name, _ in found)
                raise ValueError(f"alone={name!r} is not one of the measured rows: {measured}")
        return found


def _read_config(path: Path, seed: int | None) -> MetisConfig:
    text = utf8_text(path)
    try:
        config = MetisConfig.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path} does not contain a valid config: {error}") from error
    return config if seed is None else config.replace(seed=seed)
