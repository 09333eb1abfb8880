"""Plans of comparisons: variants x seeds of one experiment, from presets, YAML and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer
from transformers.integrations import get_reporting_integration_callbacks

from metis_hf.data.chunked import TOKENIZER
from metis_hf.data.corpus import BYTE_ALPHABET
from metis_hf.data.shards import is_text_folder
from metis_hf.deploy.source import model_config
from metis_hf.lab.checkpoint import looking_ahead
from metis_hf.lab.compare.options import Options, check_model, given_values
from metis_hf.lab.compare.presets import PRESET_DEFAULTS, PRESETS, schemes
from metis_hf.lab.compare.sizes import CHECKPOINT, CONTINUED, SIZES
from metis_hf.lab.compare.training import training_arguments
from metis_hf.lab.compare.variants import Experiment, Variant
from metis_hf.lab.evaluate.tasks import plan_tasks
from metis_hf.lab.show.figure import scheme_styles
from metis_hf.schemes import CONTROL, scheme_info, scheme_names

ALL = "all"  # stands for every registered scheme
# TrainingArguments that choose a schedule and so replace the size's `one_cycle`.
_SCHEDULE = {"lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"}
# Prefixes of TrainingArguments that control reporting and do not affect results.
_REPORTING = ("report_to", "project", "trackio_")
DEFAULT_REFERENCE = "metis"  # used if it is among the variants


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """A comparison."""

    variants: tuple[Variant, ...]  # in the order of the table
    seeds: tuple[int, ...]  # every variant runs with each
    experiment: Experiment  # the settings of all runs; its seed is replaced by each of `seeds`
    size: str  # name of the size that the experiment comes from, or "checkpoint"
    global_batch: int  # sequences per optimizer step
    eval_sequences: int  # largest number of held-out sequences for the loss
    # Directory of chunked tokens or of text files; None: the standard library's sources.
    data: str | None = None
    validation: str | None = None  # chunked held-out tokens; None takes `data`'s own
    tasks: tuple[str, ...] = ()  # lm-eval's tasks, evaluated on every trained model
    tasks_dir: str | None = None  # local data for them; None: lm-eval's own sources
    # Variant that the others are compared with, in addition to the control.
    reference: str | None = None

    def runs(self) -> list[tuple[Variant, int]]:
        """Return (variant, seed) of every run, by seed, so that the first runs can be compared."""
        return [(variant, seed) for seed in self.seeds for variant in self.variants]

    def of_seed(self, seed: int) -> Experiment:
        """Return the experiment of a run with this seed."""
        return replace(self.experiment, seed=seed)

    def settings(self) -> dict[str, Any]:
        """Return the settings that decide a result, apart from variant and seed.

        Fields of the experiment that older records do not have are included only if they are set.
        """
        settings = asdict(self)
        for name in ("variants", "seeds", "reference"):
            del settings[name]
        experiment = settings["experiment"]
        del experiment["seed"]
        for name in [name for name in experiment["training"] if name.startswith(_REPORTING)]:
            del experiment["training"][name]
        for field in fields(Experiment):
            if field.name in experiment and experiment[field.name] == field.default:
                del experiment[field.name]
        return settings

    @property
    def embedded(self) -> str | None:
        """`Size.corpus`, which is used if no data is given; None if a run needs data."""
        return SIZES[self.size].corpus if self.size in SIZES else None

    @property
    def text(self) -> Path | None:
        """`data` if it is a folder of text files, else None."""
        folder = None if self.data is None else Path(self.data)
        return folder if folder is not None and is_text_folder(folder) else None

    @property
    def tokens(self) -> int:
        """Training tokens of one run."""
        return self.experiment.steps * self.global_batch * self.experiment.sequence_length


def make_plan(
    file: Path | None = None, *, needs_data: bool = True, **options: Any
) -> ComparisonPlan:
    """Return the plan of a YAML file and options; options override the file, None means not given.

    Args:
        file: a mapping with any of the keys below.
        needs_data: raise if the size needs `data` and none is given; False for a plan that is only
            shown.
        **options: fields of `Options`. `preset`, `schemes` (registered names, or "all") and
            `variants` (name -> fields of MetisConfig, and `precision_schedule` with the arguments
            of PrecisionSchedule) add variants in this order; without any, the preset is "main".
            `size`, or a `checkpoint` whose weights every run starts from, chooses the settings,
            and `model`, `training` and the others override them.

    Raises:
        ValueError: an unknown key, preset, scheme, size, field or task; a value out of range, or
            one that the comparison sets itself; repeated names or seeds; malformed data of a task.
        FileNotFoundError: `tasks_dir` has no data for a task.
    """
    values = given_values(file, **options)
    defaults = dict(PRESET_DEFAULTS.get(str(values.get("preset")), {}))
    if "checkpoint" in values:
        defaults.pop("size", None)
    given = Options(**{**defaults, **values})
    if given.checkpoint is None:
        size_name = given.size or "tiny"
        size = SIZES[size_name]
        model = {"model_type": size.model_type, **size.config, **given.model}
        check_model(given.model, model)
    else:
        size_name, size = CHECKPOINT, CONTINUED
        model = _model_of(Path(given.checkpoint))
    length = given.sequence_length or size.sequence_length
    batch = given.global_batch or size.global_batch
    tokens = given.tokens or size.tokens
    if given.tokens is not None and "max_steps" in given.training:
        raise ValueError(
            f"tokens={given.tokens:g} and training: {{max_steps: {given.training['max_steps']}}} "
            "both set the length of a run; give only one of them"
        )
    training = {**size.training, **given.training}
    training.setdefault("max_steps", max(1, round(tokens / (batch * length))))
    experiment = Experiment(
        model=model,
        training=training,
        sequence_length=length,
        health_interval=(
            size.health_interval if given.health_interval is None else given.health_interval
        ),
        seed=0,
        checkpoint=_absolute(given.checkpoint),
        **{**size.beyond, **({"one_cycle": None} if _SCHEDULE & given.training.keys() else {})},
    )
    variants = _variants(given)
    plan = ComparisonPlan(
        variants=variants,
        seeds=tuple(given.seeds),
        experiment=experiment,
        size=size_name,
        global_batch=batch,
        eval_sequences=given.eval_sequences or size.eval_sequences,
        data=_absolute(given.data),
        validation=_absolute(given.validation),
        tasks=tuple(given.tasks),
        tasks_dir=_absolute(given.tasks_dir),
        reference=_reference(given.reference, [variant.name for variant in variants]),
    )
    _check(plan)
    if needs_data and plan.data is None and not plan.embedded:
        what = "a checkpoint" if plan.size == CHECKPOINT else f"size {plan.size}"
        raise ValueError(
            f"{what} needs data: give --data DIR with text files (.txt or .txt.xz; files named "
            "val* are held out) or with chunked tokens from recipes/prepare_data.py"
        )
    return plan


def _model_of(checkpoint: Path) -> dict[str, Any]:
    """Return the arguments from which AutoConfig makes a checkpoint's config.

    Raises:
        ValueError: not a transformers checkpoint, or one with quantized weights.
    """
    if not (checkpoint / "config.json").is_file():
        raise ValueError(
            f"checkpoint {checkpoint} has no config.json; give a directory that transformers' "
            "save_pretrained wrote"
        )
    config = model_config(checkpoint)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"checkpoint {checkpoint} is quantized; start from its dense weights, which "
            "`metis-hf export` writes"
        )
    own = ("transformers_version", "architectures", "dtype", "_name_or_path", "model_type")
    values = {key: value for key, value in config.to_diff_dict().items() if key not in own}
    text = config.get_text_config()
    return {"model_type": config.model_type, "vocab_size": text.vocab_size, **values}


def directory_name(variant: str) -> str:
    """Return a variant's name as a directory: "metis w/o sampling" -> "metis-wo-sampling".

    Raises:
        ValueError: nothing, or nothing but dots, is left of the name.
    """
    kept = "".join(c if c.isalnum() or c in ".-_" else " " for c in variant.replace("/", ""))
    name = "-".join(kept.split())
    if not name.strip("."):
        raise ValueError(
            f"variant {variant!r} has no usable directory name for its runs; choose a name with "
            "letters or digits"
        )
    return name


def _variants(given: Options) -> tuple[Variant, ...]:
    chosen = [] if given.preset is None else [*PRESETS[given.preset]()]
    for name in given.schemes or ():
        chosen += schemes(*(scheme_names() if name == ALL else [name]))
    for name, config in given.variants.items():
        chosen.append(Variant.of_fields(str(name), config))
    return tuple(chosen) or PRESETS["main"]()


def _reference(given: str | None, names: Sequence[str]) -> str | None:
    if given is None:
        return DEFAULT_REFERENCE if DEFAULT_REFERENCE in names else None
    if given not in names:
        raise ValueError(
            f"reference {given!r} is not one of the variants; choose from {', '.join(names)}"
        )
    if given == CONTROL:
        raise ValueError(
            f"reference {given!r} is the control, to which every gap is measured anyway; choose "
            "another variant or leave the reference out"
        )
    return given


def _check(plan: ComparisonPlan) -> None:
    for variant in plan.variants:
        if "scheme" not in variant.config:
            raise ValueError(
                f"variant {variant.name!r} names no scheme; add one, for example 'scheme: metis'"
            )
        scheme_info(variant.config["scheme"])
        variant.metis_config(0)
        variant.callbacks()
    names = [variant.name for variant in plan.variants]
    _check_directories(names)
    for variant in plan.variants:
        if variant.name == CONTROL and variant.config["scheme"] != CONTROL:
            raise ValueError(
                f"variant {CONTROL!r} has scheme {variant.config['scheme']!r}, but this name is "
                "reserved for the control, which the other variants are compared with; choose "
                "another name"
            )
    scheme_styles(names)  # fail now, not when the figures are drawn
    repeated = sorted({seed for seed in plan.seeds if plan.seeds.count(seed) > 1})
    if repeated:
        raise ValueError(f"seed {', '.join(map(str, repeated))} is given more than once")
    if not plan.seeds:
        raise ValueError("no seed to run; give at least one, for example --seeds 0,1,2")
    if plan.experiment.checkpoint is not None and plan.data is not None:
        _check_tokenizer(Path(plan.experiment.checkpoint), Path(plan.data))
    if plan.validation is not None and (plan.data is None or plan.text is not None):
        source = f"with text data: {plan.text} has"
        if plan.data is None:
            source = "without data: the standard library's text has"
        raise ValueError(
            f"validation={plan.validation} {source} its own held-out files; also give --data DIR "
            "with chunked tokens, or leave --validation out"
        )
    if plan.validation is not None and plan.validation == plan.data:
        raise ValueError(
            f"validation={plan.validation} is the training data; give held-out tokens, or leave "
            "--validation out to use those in data/validation"
        )
    _check_model(plan)
    _check_reporters(training_arguments(plan.experiment, Path("unused")).report_to)
    if plan.tasks_dir is not None and not plan.tasks:
        raise ValueError(
            f"tasks_dir={plan.tasks_dir} has no effect without tasks; name tasks with --tasks"
        )
    if plan.tasks:  # fail now, not when a model is trained
        plan_tasks(plan.tasks, None if plan.tasks_dir is None else Path(plan.tasks_dir))


def _check_reporters(names: Any) -> None:
    """Reject reporters that transformers does not know, or whose package is not installed."""
    try:
        for reporter in get_reporting_integration_callbacks(names):
            reporter()
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"training: report_to: {error}") from None


def _check_model(plan: ComparisonPlan) -> None:
    """Reject a model that is not causal, or that does not fit the sequences or the text."""
    experiment = plan.experiment
    config = AutoConfig.for_model(**experiment.model)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model: {config.model_type} is not a causal language model; choose a model_type that "
            "transformers' AutoModelForCausalLM supports"
        )
    if (field := looking_ahead(config)) is not None:
        raise ValueError(
            f"model: {config.model_type} is an encoder: each token attends to later tokens, so "
            f"there is nothing to predict; set {field}: true under the key model, or choose "
            "another model_type"
        )
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and experiment.sequence_length > context:
        raise ValueError(
            f"sequence_length={experiment.sequence_length} does not fit in the model's context of "
            f"{context} tokens; choose shorter sequences, or set a longer context under the key "
            "model"
        )
    trains = plan.data is None or (plan.text is not None and experiment.checkpoint is None)
    if trains and experiment.model["vocab_size"] <= BYTE_ALPHABET:
        raise ValueError(
            f"model: vocab_size={experiment.model['vocab_size']} is too small to tokenize text, "
            f"which takes {BYTE_ALPHABET + 1} tokens, one for each byte and one for the end of a "
            "text; set at least that many, or give --data DIR with chunked tokens"
        )


def with_accumulation(experiment: Experiment, global_batch: int, processes: int) -> Experiment:
    """Return the experiment with the gradient accumulation that reaches the global batch.

    The batch size per device is at most the process's share of the global batch.

    Raises:
        ValueError: the processes cannot divide the batch.
    """
    asked = experiment.training["per_device_train_batch_size"]
    device_batch = max(1, min(asked, global_batch // processes))
    accumulation, rest = divmod(global_batch, device_batch * processes)
    if rest:
        raise ValueError(
            f"global_batch={global_batch} is not a multiple of {processes} processes x "
            f"per_device_train_batch_size={device_batch}; choose another batch"
        )
    training = {
        **experiment.training,
        "per_device_train_batch_size": device_batch,
        "gradient_accumulation_steps": accumulation,
        "train_sampling_strategy": "sequential",  # the dataset is shuffled already
    }
    return replace(experiment, training=training)


def _check_tokenizer(checkpoint: Path, data: Path) -> None:
    """Reject tokens of another vocabulary than the checkpoint's, if both have a tokenizer."""
    if not (data / TOKENIZER).is_dir() or not (checkpoint / "tokenizer_config.json").is_file():
        return
    own, other = (AutoTokenizer.from_pretrained(d) for d in (checkpoint, data / TOKENIZER))
    if own.get_vocab() != other.get_vocab():
        raise ValueError(
            f"the tokens of {data} come from another vocabulary than {checkpoint} uses; prepare "
            f"them with recipes/prepare_data.py --tokenizer {checkpoint}"
        )


def _check_directories(names: Sequence[str]) -> None:
    """Reject variants that would share a directory on a case-insensitive file system."""
    by_directory: dict[str, str] = {}
    for name in names:
        directory = directory_name(name)
        other = by_directory.setdefault(directory.casefold(), name)
        if names.count(name) > 1:
            raise ValueError(f"variant {name!r} is given more than once")
        if other != name:
            raise ValueError(
                f"variants {other!r} and {name!r} would share the directory {directory}; "
                "rename one of them"
            )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())
