"""Experiments and variants: the settings that runs share, and the settings that differ.

Importing this module imports neither torch nor transformers, so that listing presets is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from metis_hf.config import MetisConfig

LARGEST_SEED = 2**32 - 1  # numpy's limit
_SCHEDULE = "precision_schedule"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Settings that all variants of a comparison share."""

    model: dict[str, Any]  # keyword arguments of a transformers config, with its `model_type`
    # Keyword arguments of TrainingArguments, including `max_steps`; they override what
    # `training_arguments` sets for every run.
    training: dict[str, Any]
    sequence_length: int  # tokens per sequence
    health_interval: int  # steps between measurements of spectral health; 0 never measures
    seed: int  # of initialization, data order and noise
    checkpoint: str | None = None  # every run starts from its weights; None initializes by the seed
    # Arguments of torch's OneCycleLR except `max_lr` (the learning rate) and `total_steps`; None
    # takes the schedule of TrainingArguments.
    one_cycle: dict[str, Any] | None = None
    decay_embeddings: bool = True  # embeddings and output head have weight decay too, as in Trainer
    # The initial weights of projections that write into the residual stream are divided by
    # sqrt(2 l) in a model of l layers, as GPT-2 does by default.
    scaled_residuals: bool = False

    @property
    def steps(self) -> int:
        """Number of optimizer steps of a run."""
        return int(self.training["max_steps"])


@dataclass(frozen=True)
class Variant:
    """Settings that differ between the runs of a comparison."""

    name: str  # of its directory and table row
    config: dict[str, Any]  # fields of MetisConfig, including `scheme`
    # Arguments of PrecisionSchedule; None keeps one precision throughout.
    precision_schedule: dict[str, Any] | None = None

    @classmethod
    def of_scheme(cls, scheme: str) -> Variant:
        """Return the variant of a registered scheme, unchanged."""
        return cls(scheme, {"scheme": scheme})

    @classmethod
    def of_fields(cls, name: str, fields: Mapping[str, Any]) -> Variant:
        """Return a variant from fields of MetisConfig and an optional `precision_schedule`."""
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
                f"variant {self.name!r}: precision_schedule takes the keys at, between, "
                f"high_precision and until; {error}"
            ) from None

    def metis_config(self, seed: int) -> MetisConfig:
        """Return the MetisConfig of a run, with the run's seed for noise."""
        from metis_hf.config import MetisConfig

        return MetisConfig.from_dict({**self.config, "seed": seed})
