"""Experiments and variants: what the runs of one share, and what differs between them.

Importing this module imports neither torch nor transformers: command lines list presets from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from metis_hf.config import MetisConfig

LARGEST_SEED = 2**32 - 1  # that numpy takes
_SCHEDULE = "precision_schedule"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Settings that all variants of a comparison share; another value is another experiment.

    Args:
        model: keyword arguments of a transformers config, with its `model_type`.
        training: keyword arguments of TrainingArguments, `max_steps` among them; what every run
            shares (output directory, seed, device, logging) is set here.
        sequence_length: tokens per sequence.
        health_interval: steps between measurements of spectral health; 0 never measures.
        seed: of initialization, data order and noise.
        checkpoint: directory whose weights every run starts from; None initializes by the seed.
        one_cycle: arguments of torch's OneCycleLR beside `max_lr` (the learning rate) and
            `total_steps`, for a schedule that transformers does not have; None takes the one that
            TrainingArguments names.
        decay_embeddings: whether weight decay is for embeddings and output head too, as Trainer
            has it.
        scaled_residuals: whether projections that write into the residual stream start 1/sqrt(2 l)
            times smaller in a model of l layers (GPT-2 does so by itself).
    """

    model: dict[str, Any]
    training: dict[str, Any]
    sequence_length: int
    health_interval: int
    seed: int
    checkpoint: str | None = None
    one_cycle: dict[str, Any] | None = None
    decay_embeddings: bool = True
    scaled_residuals: bool = False

    @property
    def steps(self) -> int:
        """Number of optimizer steps of a run."""
        return int(self.training["max_steps"])


@dataclass(frozen=True)
class Variant:
    """Settings that differ between the runs of a comparison.

    Args:
        name: of its directory and table row.
        config: fields of MetisConfig, `scheme` among them.
        precision_schedule: arguments of PrecisionSchedule; None keeps one precision throughout.
    """

    name: str
    config: dict[str, Any]
    precision_schedule: dict[str, Any] | None = None

    @classmethod
    def of_scheme(cls, scheme: str) -> Variant:
        """Return the variant that is a scheme as it is registered."""
        return cls(scheme, {"scheme": scheme})

    @classmethod
    def of_fields(cls, name: str, fields: Mapping[str, Any]) -> Variant:
        """Return the variant of one mapping: fields of MetisConfig, maybe `precision_schedule`."""
        config = dict(fields)
        schedule = config.pop(_SCHEDULE, None)
        return cls(name, config, None if schedule is None else dict(schedule))

    def fields(self) -> dict[str, Any]:
        """Return the mapping that `of_fields` takes."""
        schedule = self.precision_schedule
        return self.config if schedule is None else {**self.config, _SCHEDULE: schedule}

    def callbacks(self) -> list[TrainerCallback]:
        """Return the callbacks that the variant adds to the Trainer.

        Raises:
            ValueError: PrecisionSchedule does not take these arguments.
        """
        if self.precision_schedule is None:
            return []
        from metis_hf.training.precision_schedule import PrecisionSchedule

        try:
            return [PrecisionSchedule(**self.precision_schedule)]
        except TypeError as error:
            raise ValueError(
                f"variant {self.name!r}: precision_schedule is {{at, between, high_precision, "
                f"until}}; {error}"
            ) from None

    def metis_config(self, seed: int) -> MetisConfig:
        """Return the conversion; noise takes the run's seed."""
        from metis_hf.config import MetisConfig

        return MetisConfig.from_dict({**self.config, "seed": seed})
