"""What a comparison trains: variants x seeds of one experiment, from presets, YAML and options."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from metis_hf.config import MetisConfig
from metis_hf.experiments.runner import Experiment, Variant
from metis_hf.experiments.sizes import SIZES
from metis_hf.schemes import build_scheme, scheme_info, scheme_names

DEFAULT_SEEDS = (0, 1, 2)
SPEC_FILE = "run.json"  # of a run's directory: what its process trains
ALL = "all"  # instead of a scheme's name: every registered one
ALL_SPLIT = ("weight", "activation", "gradient")


def _schemes(*names: str) -> tuple[Variant, ...]:
    return tuple(Variant.of_scheme(name) for name in names)


def _ablations(scheme: str) -> tuple[Variant, ...]:
    """The paper's Table 2: the method without each of its parts, beside the control."""
    without: dict[str, dict[str, Any]] = {
        f"{scheme} w/o {tensor} split": {"decompose": [t for t in ALL_SPLIT if t != tensor]}
        for tensor in ALL_SPLIT
    }
    parts = {**without, f"{scheme} w/o sampling": {"sample_frac": 1.0}}
    return (
        *_schemes("bf16", scheme),
        *(Variant(name, {"scheme": scheme, **config}) for name, config in parts.items()),
    )


def _ranks(scheme: str) -> tuple[Variant, ...]:
    """The paper's rank sweep (Appendix, sensitivity analysis of rank): 1.5 % to 12.5 %."""
    shares = (0.015, 0.03, 0.0625, 0.125)
    return (
        *_schemes("bf16"),
        *(
            Variant(
                f"{scheme} rank {100 * share:g}%",
                {"scheme": scheme, "rank_frac": share, "rank_multiple": 1},
            )
            for share in shares
        ),
    )


def _with_split_weights() -> tuple[Variant, ...]:
    """Every scheme with its weights stored as u, s, vh and residual, and that control."""
    quantized = (name for name in scheme_names() if not name.startswith("bf16"))
    return (*_schemes("bf16", "bf16-split"), *map(_stored_split, quantized))


def _stored_split(name: str) -> Variant:
    """The scheme itself where it stores weights split by its own definition."""
    side = 64  # of any layer: schemes do not choose by size
    if build_scheme(MetisConfig(scheme=name), side, side).split_weight:
        return Variant.of_scheme(name)
    return Variant(f"{name}, split", {"scheme": name, "split_weight": True})


def _switched() -> tuple[Variant, ...]:
    """A scheme throughout, and with the last fifth in BF16, as in arXiv 2509.25149."""
    passes = {"forward": ["forward"], "both": ["forward", "backward"]}
    return (
        *_schemes("bf16"),
        *(
            variant
            for name in ("nvidia", "metis")
            for variant in (
                *_schemes(name),
                *(
                    Variant(
                        f"{name}, {title} in bf16 from 80%",
                        {"scheme": name},
                        {"at": 0.8, "high_precision": high},
                    )
                    for title, high in passes.items()
                ),
            )
        ),
    )


# The paper's tables and its rank figure, the split weight by itself, the switch; the control first.
PRESETS: dict[str, tuple[Variant, ...]] = {
    "main": _schemes("bf16", "bf16-split", "nvfp4", "nvidia", "metis-paper", "metis"),
    "ablations": _ablations("metis-paper"),
    "ablations-metis": _ablations("metis"),
    "nvidia": _schemes("bf16", "metis-paper", "metis", "nvidia"),
    "rank": _ranks("metis-paper"),
    "rank-metis": _ranks("metis"),
    "split": _with_split_weights(),
    "switch": _switched(),
}

_FILE_KEYS = (
    "preset",
    "schemes",
    "variants",
    "seeds",
    "size",
    "model",
    "training",
    "tokens",
    "sequence_length",
    "global_batch",
    "health_interval",
    "eval_sequences",
    "data",
    "validation",
    "tasks",
    "tasks_dir",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A comparison.

    Attributes:
        variants: in the order of the table.
        seeds: every variant runs with each.
        experiment: what all runs share; its seed is replaced by each of `seeds`.
        size: name of the size that the experiment comes from.
        global_batch: sequences per optimizer step.
        eval_sequences: held-out sequences that the loss is taken on, at most.
        data: directory of chunked tokens, or None for the standard library's sources.
        validation: directory of chunked held-out tokens; None takes `data`'s own.
        tasks: of lm-eval, evaluated on every trained model.
        tasks_dir: local data for them, or None for lm-eval's own sources.
    """

    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    experiment: Experiment
    size: str
    global_batch: int
    eval_sequences: int
    data: str | None = None
    validation: str | None = None
    tasks: tuple[str, ...] = ()
    tasks_dir: str | None = None

    def runs(self) -> list[tuple[Variant, int]]:
        """(variant, seed) of every run, seed by seed so that a part of it is a comparison."""
        return [(variant, seed) for seed in self.seeds for variant in self.variants]

    def settings(self) -> dict[str, Any]:
        """What decides a run's result besides its variant and its seed."""
        settings = asdict(self)
        for name in ("variants", "seeds"):
            del settings[name]
        del settings["experiment"]["seed"]
        return settings

    @property
    def tokens(self) -> int:
        """Training tokens of one run."""
        return self.experiment.steps * self.global_batch * self.experiment.sequence_length


@dataclass
class _Options:
    """A comparison in a user's words: the keys of the YAML file."""

    preset: str | None = None
    schemes: Sequence[str] | None = None
    variants: Mapping[str, Mapping[str, Any]] | None = None
    seeds: Sequence[int] = DEFAULT_SEEDS
    size: str = "tiny"
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    tokens: float | None = None
    sequence_length: int | None = None
    global_batch: int | None = None
    health_interval: int | None = None
    eval_sequences: int | None = None
    data: str | None = None
    validation: str | None = None
    tasks: Sequence[str] = ()
    tasks_dir: str | None = None


def make_plan(file: Path | None = None, **options: Any) -> Plan:
    """A plan from a YAML file and options, which win over the file; None means not given.

    Args:
        file: a mapping with any of the keys below.
        **options: `preset` (a name in PRESETS), `schemes` (registered names, or "all" for each of
            them) and `variants` (name -> fields of MetisConfig, and `precision_schedule` with
            those of PrecisionSchedule) say what is compared, in this order, `main` if nothing does;
            `seeds`; `size` (a name in SIZES) with `model`, `training`, `tokens`,
            `sequence_length`, `global_batch`, `health_interval`, `eval_sequences` to change it;
            `data`, `validation`, `tasks`, `tasks_dir` as in `Plan`.

    Raises:
        ValueError: an unknown key, preset, scheme, size or field, repeated names or seeds.
    """
    values = _read_yaml(file) if file is not None else {}
    given = _Options(**{**values, **{k: v for k, v in options.items() if v is not None}})
    _one_of("size", given.size, SIZES)
    size = SIZES[given.size]
    length = given.sequence_length or size.sequence_length
    batch = given.global_batch or size.global_batch
    tokens = size.tokens if given.tokens is None else float(given.tokens)
    training = {**size.training, **_training(given.training)}
    training.setdefault("max_steps", max(1, round(tokens / (batch * length))))
    experiment = Experiment(
        model={"model_type": size.model_type, **size.config, **given.model},
        training=training,
        sequence_length=length,
        health_interval=_default(given.health_interval, size.health_interval),
        seed=0,
    )
    plan = Plan(
        variants=_variants(given),
        seeds=tuple(int(seed) for seed in given.seeds),
        experiment=experiment,
        size=given.size,
        global_batch=batch,
        eval_sequences=_default(given.eval_sequences, size.eval_sequences),
        data=_absolute(given.data),
        validation=_absolute(given.validation),
        tasks=tuple(given.tasks),
        tasks_dir=_absolute(given.tasks_dir),
    )
    _check(plan)
    return plan


def with_seed(experiment: Experiment, seed: int) -> Experiment:
    """The experiment of one run."""
    return replace(experiment, seed=seed)


def directory_name(variant: str) -> str:
    """A variant's name as a directory: "metis w/o sampling" -> "metis-wo-sampling"."""
    kept = "".join(c if c.isalnum() or c in ".-_" else " " for c in variant.replace("/", ""))
    return "-".join(kept.split())


def _variants(given: _Options) -> tuple[Variant, ...]:
    chosen: list[Variant] = []
    if given.preset is not None:
        _one_of("preset", given.preset, PRESETS)
        chosen += PRESETS[given.preset]
    for name in given.schemes or ():
        chosen += _schemes(*(scheme_names() if name == ALL else [name]))
    for name, config in (given.variants or {}).items():
        chosen.append(Variant.of_fields(str(name), config))
    return tuple(chosen) or PRESETS["main"]


def _check(plan: Plan) -> None:
    for variant in plan.variants:
        if "scheme" not in variant.config:
            raise ValueError(f"variant {variant.name!r} names no scheme, as in 'scheme: metis'")
        scheme_info(variant.config["scheme"])
        variant.metis_config(0)
        variant.callbacks()
    names = [directory_name(variant.name) for variant in plan.variants]
    for kind, items in (("variant", names), ("seed", [str(seed) for seed in plan.seeds])):
        repeated = sorted({item for item in items if items.count(item) > 1})
        if repeated:
            raise ValueError(f"{kind} {', '.join(repeated)} is given more than once")
    if not plan.seeds:
        raise ValueError("no seed to run; name at least one, as in --seeds 0,1,2")
    if plan.size != "tiny" and plan.data is None:
        raise ValueError(
            f"size {plan.size} needs data: give --data DIR, chunked tokens as "
            "recipes/prepare_data.py writes them"
        )
    if plan.tasks_dir is not None and not plan.tasks:
        raise ValueError(f"tasks_dir={plan.tasks_dir} without tasks; name them with --tasks")


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    values = yaml.safe_load(path.read_text()) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a mapping; its keys are {', '.join(_FILE_KEYS)}")
    for key in values:
        if key not in _FILE_KEYS:
            near = difflib.get_close_matches(str(key), _FILE_KEYS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; keys: {', '.join(_FILE_KEYS)}"
            raise ValueError(f"{path}: there is no key {key!r}{hint}")
    return values


def _training(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of TrainingArguments; numbers that YAML 1.1 takes for text (1e-3) as numbers."""
    known = [field.name for field in dataclasses.fields(TrainingArguments)]
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"training: transformers' TrainingArguments has no {key!r}{hint}")
        try:
            values[key] = float(value) if isinstance(value, str) else value
        except ValueError:  # text that means text
            values[key] = value
    return values


def _one_of(what: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise ValueError(f"{what} {name!r} is not known; choose from {', '.join(known)}")


def _default(value: int | None, default: int) -> int:
    return default if value is None else value


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())
