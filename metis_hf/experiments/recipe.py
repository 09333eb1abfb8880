"""Code that the training recipes share: arguments, data, model, trainer, the dry run.

A recipe is a script that a person launches with accelerate; it says which model is trained and with
which settings, and calls these functions one after the other.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import HfArgumentParser, PreTrainedConfig, PreTrainedModel, TrainingArguments

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model
from metis_hf.data.chunked import causal_batch
from metis_hf.experiments.runner import new_model
from metis_hf.planning.plan import Plan, plan_run
from metis_hf.planning.workload import Workload
from metis_hf.schemes import import_schemes, scheme_names
from metis_hf.shared.checkpoints import last_checkpoint
from metis_hf.shared.locks import hold_directory
from metis_hf.shared.yaml_file import read_yaml
from metis_hf.training.callback import MetisCallback
from metis_hf.training.trainer import MetisTrainer

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_SMOKE_TEXT = 60  # documents of the embedded corpus
# Arguments of TrainingArguments that recipes do not take, and what says it in their place.
_NOT_TAKEN = {
    "num_train_epochs": "--tokens says how long a run is",
    "resume_from_checkpoint": "a run goes on from its own --output_dir, training with --resume",
}


@dataclass
class RecipeArguments:
    """Arguments of a recipe besides transformers' TrainingArguments."""

    data: str | None = field(
        default=None,
        metadata={"help": "Directory of chunked tokens, made by recipes/prepare_data.py."},
    )
    scheme: str = field(
        default="metis", metadata={"help": f"How GEMMs compute: {', '.join(scheme_names())}."}
    )
    metis: str = field(
        default="{}",
        metadata={"help": "More of MetisConfig, as JSON: '{\"rank_frac\": 0.03}'."},
    )
    metis_import: list[str] | None = field(
        default=None,
        metadata={"help": "Python files or modules that register schemes of yours."},
    )
    tokens: float = field(default=100e9, metadata={"help": "Tokens of the whole run."})
    sequence_length: int = field(default=1024, metadata={"help": "Tokens per sequence."})
    global_batch: int = field(
        default=512,
        metadata={"help": "Sequences per optimizer step; gradient accumulation follows from it."},
    )
    eval_sequences: int = field(
        default=1024,
        metadata={"help": "Held-out sequences: of DIR/validation, else the last of the data."},
    )
    health_interval: int = field(
        default=500, metadata={"help": "Steps between measurements of spectral health; 0: never."}
    )
    resume: bool = field(
        default=False,
        metadata={"help": "Go on from the last checkpoint in output_dir, or start if it has none."},
    )
    smoke: bool = field(
        default=False,
        metadata={"help": "The same code on the CPU in a minute: tiny model, embedded text."},
    )
    dry_run: bool = field(default=False, metadata={"help": "Print what the run takes, and stop."})
    world_size: int | None = field(
        default=None, metadata={"help": "Processes to plan for; default: those launched."}
    )
    json: bool = field(default=False, metadata={"help": "Print the dry run as JSON."})

    def metis_config(self, seed: int) -> MetisConfig:
        """Return the conversion; noise takes the run's seed unless `metis` gives one.

        Raises:
            ValueError: `metis` is not a JSON object of MetisConfig's fields.
        """
        try:
            values = json.loads(self.metis)
        except json.JSONDecodeError as error:
            raise ValueError(f"--metis {self.metis!r} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"--metis {self.metis!r} is not a JSON object of MetisConfig's fields")
        if "scheme" in values:
            raise ValueError(f"--metis gives the scheme; say --scheme {values['scheme']}")
        return MetisConfig.from_dict({"seed": seed, **values, "scheme": self.scheme})

    def workload(self, training: TrainingArguments, world_size: int) -> Workload:
        """Return the run as numbers; `max_steps` of the training arguments goes before `tokens`."""
        tokens = int(self.tokens)
        if training.max_steps > 0:
            tokens = training.max_steps * self.global_batch * self.sequence_length
        return Workload(
            tokens=tokens,
            sequence_length=self.sequence_length,
            global_batch=self.global_batch,
            device_batch=training.per_device_train_batch_size,
            world_size=world_size,
            bf16=bool(training.bf16),
            checkpointing=_checkpointing(training),
        )


def parse_arguments(
    defaults: Mapping[str, Any],
    smoke: Mapping[str, Any],
    *,
    description: str | None = None,
    argv: Sequence[str] | None = None,
    kind: type = RecipeArguments,
) -> tuple[Any, TrainingArguments]:
    """Read the command line over `--config FILE.yaml` over the recipe's own defaults.

    Args:
        defaults: of the recipe, for fields of both dataclasses.
        smoke: what `--smoke` changes in them; a YAML file or the command line can change it again.
        description: for `--help`.
        argv: default: that of the process.
        kind: dataclass of the recipe's arguments besides TrainingArguments; `smoke` and `dry_run`
            are among them.

    Returns:
        (arguments of that kind, TrainingArguments).

    Raises:
        ValueError: a key of the YAML file that no argument has, epochs, or a source of schemes that
            cannot be imported.
    """
    early = ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config")
    early.add_argument("--smoke", nargs="?", const="true", default=None)
    early.add_argument("--dry_run", "--dry-run", nargs="?", const="true", default=None)
    chosen, rest = early.parse_known_args(argv)
    values = dict(defaults)
    types = (kind, TrainingArguments)
    in_file = _read_yaml(chosen.config, types) if chosen.config else {}
    switches = {key: getattr(chosen, key) or in_file.get(key) for key in ("smoke", "dry_run")}
    on = {key for key, value in switches.items() if str(value).lower() in ("true", "1", "yes")}
    if "smoke" in on:
        values |= smoke
    if on:
        values["use_cpu"] = True  # neither wants a device
    values |= in_file
    values |= {key: value for key, value in switches.items() if value is not None}

    parser = HfArgumentParser(types, description=description, allow_abbrev=False)  # type: ignore[arg-type]
    parser.add_argument("--config", help="YAML file of these arguments; the command line wins.")
    # As text, so that argparse converts and checks a value wherever it comes from (in YAML 1.1,
    # 1e-4 is a string).
    parser.set_defaults(**{key: _as_text(value) for key, value in values.items()})
    arguments, training, _ = parser.parse_args_into_dataclasses(args=rest)
    for name, instead in _NOT_TAKEN.items():
        if (value := getattr(training, name)) != getattr(TrainingArguments, name):
            raise ValueError(f"{name}={value}: {instead}; leave it out")
    for source in getattr(arguments, "metis_import", None) or ():
        import_schemes(source)
    return arguments, training


def _read_yaml(path: str, types: Sequence[type]) -> dict[str, Any]:
    values = read_yaml(Path(path))
    known = [f.name for kind in types for f in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; --help lists the arguments"
            raise ValueError(f"{path}: there is no argument {key!r}{hint}")
    if isinstance(values.get("metis"), dict):
        values["metis"] = json.dumps(values["metis"])
    if isinstance(values.get("metis_import"), str):
        values["metis_import"] = [values["metis_import"]]
    return values


def _as_text(value: Any) -> Any:
    return value if value is None or isinstance(value, dict | list) else str(value)


def _checkpointing(training: TrainingArguments) -> bool:
    return bool(training.gradient_checkpointing or training.activation_checkpointing)


def dry_run(
    config: PreTrainedConfig, arguments: RecipeArguments, training: TrainingArguments
) -> Plan | None:
    """Print what the run takes, without allocating it; on the first process only.

    Raises:
        ValueError: a batch that the processes cannot divide, or a model that cannot be planned.
    """
    if int(os.environ.get("RANK", 0)) != 0:
        return None
    world_size = arguments.world_size or int(os.environ.get("WORLD_SIZE", 1))
    workload = arguments.workload(training, world_size)
    plan = plan_run(config, arguments.metis_config(training.seed), workload)
    if arguments.json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        from metis_hf.planning.tables import print_plan

        print_plan(plan)
    return plan


def load_data(
    arguments: RecipeArguments, training: TrainingArguments, config: PreTrainedConfig
) -> tuple[datasets.Dataset, datasets.Dataset, PreTrainedTokenizerBase | None]:
    """Chunked sequences to train on and to hold out, and the tokenizer if it is at hand.

    `--data` wins; without it, `--smoke` chunks text of the standard library.

    Raises:
        FileNotFoundError: `--data` is no directory of chunked tokens, or an unfinished one.
        ValueError: no data, or data that do not fit the arguments or the model.
    """
    if arguments.data is not None:
        dataset, evaluation = _chunked_data(Path(arguments.data), arguments, config)
        tokenizer = None
    elif arguments.smoke:
        dataset, tokenizer = _embedded_text(arguments, config)
        evaluation = None
    else:
        raise ValueError(
            "no data: give --data DIR, a directory of chunked tokens as recipes/prepare_data.py "
            "writes it (its --help says how), or try --smoke"
        )
    if evaluation is None:
        evaluation, dataset = _hold_out(dataset, arguments.eval_sequences)
    # In memory and once: a sampler would keep a Python list of all indices on every process.
    seed = training.seed if training.data_seed is None else training.data_seed
    dataset = dataset.shuffle(seed=seed, keep_in_memory=True)
    return dataset.with_format("torch"), evaluation.with_format("torch"), tokenizer


def _hold_out(dataset: datasets.Dataset, count: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the last `count` sequences, and the others."""
    rest = len(dataset) - count
    if count < 1 or rest < 1:
        raise ValueError(
            f"eval_sequences={count} of {len(dataset)} sequences; hold out at least one and leave "
            "some to train on"
        )
    return dataset.select(range(rest, len(dataset))), dataset.select(range(rest))


def _chunked_data(
    path: Path, arguments: RecipeArguments, config: PreTrainedConfig
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Return what recipes/prepare_data.py wrote: training sequences and a validation split."""
    from metis_hf.data.chunked import META, load_chunked, read_meta

    length = read_meta(path)["seq_len"]
    if length != arguments.sequence_length:
        raise ValueError(
            f"--data {path} holds sequences of {length} tokens, and the run wants "
            f"{arguments.sequence_length}; pass --sequence_length {length} or chunk again"
        )
    dataset = load_chunked(path, vocab_size=config.vocab_size)
    validation = path / "validation"
    if not (validation / META).is_file():
        return dataset, None
    held_out = load_chunked(validation, vocab_size=config.vocab_size)
    if arguments.eval_sequences < 1:
        raise ValueError(
            f"eval_sequences={arguments.eval_sequences}: nothing would be evaluated of "
            f"{validation}; give at least 1"
        )
    return dataset, held_out.select(range(min(arguments.eval_sequences, len(held_out))))


def _embedded_text(
    arguments: RecipeArguments, config: PreTrainedConfig
) -> tuple[datasets.Dataset, PreTrainedTokenizerBase]:
    from metis_hf.data.corpus import chunk, stdlib_documents, train_tokenizer

    documents = stdlib_documents()[:_SMOKE_TEXT]
    tokenizer = train_tokenizer(documents, config.vocab_size)
    dataset = chunk(documents, tokenizer, arguments.sequence_length)
    return dataset.select_columns(["input_ids"]), tokenizer


def build_model(
    config: PreTrainedConfig, arguments: RecipeArguments, training: TrainingArguments
) -> PreTrainedModel:
    """Return the model from scratch, with fp32 master weights on the process's device, converted.

    The same on every process: initialization depends on the seed alone.
    """
    model = new_model(config, training.seed, training.device)
    get_metis_model(model, arguments.metis_config(training.seed))
    if training.process_index == 0:
        print(model.metis_report, flush=True)
    return model


def build_trainer(
    model: PreTrainedModel,
    arguments: RecipeArguments,
    training: TrainingArguments,
    train: datasets.Dataset,
    evaluation: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> MetisTrainer:
    """MetisTrainer with the number of steps and the accumulation that the arguments ask for.

    Raises:
        ValueError: a global batch that the processes cannot divide, or an accumulation that
            contradicts it.
    """
    workload = arguments.workload(training, training.world_size)
    given, derived = training.gradient_accumulation_steps, workload.accumulation
    if given not in (1, derived):
        raise ValueError(
            f"gradient_accumulation_steps={given} contradicts global_batch={workload.global_batch}"
            f", which takes {derived} on {training.world_size} processes; leave it out"
        )
    training.gradient_accumulation_steps = derived
    training.max_steps = workload.steps
    training.train_sampling_strategy = "sequential"  # the dataset is shuffled already
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        # Else every rank would add up whole gradients, in bf16, while it accumulates.
        training.accelerator_config.gradient_accumulation_kwargs = {"sync_each_batch": True}  # type: ignore[union-attr]
    if len(train) < workload.steps * workload.global_batch and training.process_index == 0:
        times = workload.steps * workload.global_batch / len(train)
        print(f"The data hold {len(train):,} sequences; each is seen {times:.1f} times.")
    return MetisTrainer(
        model=model,
        args=training,
        train_dataset=train,  # type: ignore[arg-type]
        eval_dataset=evaluation,  # type: ignore[arg-type]
        processing_class=tokenizer,
        data_collator=causal_batch,
        callbacks=[MetisCallback(health_interval=arguments.health_interval)],
    )


def train_and_evaluate(trainer: MetisTrainer, arguments: RecipeArguments) -> dict[str, float]:
    """Train, save the model into output_dir, evaluate the held-out loss.

    Raises:
        ValueError: output_dir has checkpoints and `--resume` was not given, or it is in use by
            another process.
    """
    directory = Path(str(trainer.args.output_dir))
    first = trainer.args.process_index == 0
    with hold_directory(directory, "--output_dir") if first else nullcontext():
        return _train_and_evaluate(trainer, arguments, directory)


def _train_and_evaluate(
    trainer: MetisTrainer, arguments: RecipeArguments, directory: Path
) -> dict[str, float]:
    training = trainer.args
    if not arguments.resume and (present := sorted(directory.glob("checkpoint-*"))):
        raise ValueError(
            f"output_dir {directory} has checkpoints ({present[-1].name}); go on with "
            "--resume, or choose another --output_dir"
        )
    trainer.train(resume_from_checkpoint=last_checkpoint(directory))
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if arguments.smoke and training.process_index == 0:
        _check_reload(trainer)
    return metrics


def _check_reload(trainer: MetisTrainer) -> None:
    """Load what was saved as anyone would, and compares."""
    directory = str(trainer.args.output_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert trainer.model is not None
    reloaded, trained = model.state_dict(), trainer.model.state_dict()
    if reloaded.keys() != trained.keys():
        raise RuntimeError(f"{directory}: other weights were saved than the model has")
    for name, value in trained.items():
        if not torch.equal(value.cpu(), reloaded[name]):
            raise RuntimeError(f"{directory}: {name} was not saved as it is")
    print(f"Saved to {directory} and reloaded: equal to the bit.")
