"""Code that the training recipes share: data, model, trainer, the dry run.

A recipe is a script that a person launches with accelerate; it says which model is trained and with
which settings, and calls `Recipe.run`, which calls the other functions one after the other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)

from metis_hf.conversion.convert import get_metis_model
from metis_hf.data.chunked import META, TOKENIZER, causal_batch, load_chunked, read_meta
from metis_hf.lab.compare.runner import new_model, whole_batches
from metis_hf.lab.compare.sizes import Size
from metis_hf.lab.cost import meta_model
from metis_hf.lab.planning.plan import Plan, plan_run
from metis_hf.lab.planning.workload import Workload
from metis_hf.lab.recipe_arguments import (
    RecipeArguments,
    check_context,
    parse_arguments,
)
from metis_hf.shared.checkpoints import last_checkpoint, newest_first
from metis_hf.shared.locks import hold_directory
from metis_hf.shared.quiet import no_warnings
from metis_hf.training.callback import MetisCallback
from metis_hf.training.start_checks import check_device
from metis_hf.training.trainer import MetisTrainer

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_SMOKE_TEXT = 60  # documents of the embedded corpus
_SMOKE = {
    "max_steps": 4,
    "sequence_length": 64,
    "global_batch": 4,
    "per_device_train_batch_size": 2,
    "eval_sequences": 8,
    "health_interval": 100,
    "save_steps": 2,
    "logging_steps": 1,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
}
_SMOKE_MODEL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 224,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    },
}
_SMOKE_VOCABULARY = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True)
class Recipe:
    """A model to train from scratch, and its settings.

    Attributes:
        name: of the script; its runs are in runs/NAME, unless --output_dir says otherwise.
        size: the model, and how it is trained.
        tokens: of the whole run, unless --tokens says otherwise.
        seed: of weights, data and noise, unless --seed says otherwise.
    """

    name: str
    size: Size
    tokens: float = 100e9
    seed: int = 42

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the arguments that this recipe has unless the command line changes them."""
        return {
            "output_dir": f"runs/{self.name}",
            "tokens": self.tokens,
            "sequence_length": self.size.sequence_length,
            "global_batch": self.size.global_batch,
            "seed": self.seed,
            **self.size.training,
        }

    @property
    def smoke(self) -> dict[str, Any]:
        """Return what `--smoke` changes in `defaults`."""
        return {"output_dir": f"runs/smoke-{self.name}", **_SMOKE}

    def config(self, *, smoke: bool = False) -> PreTrainedConfig:
        """Return the config of the model, or of the tiny one of its architecture."""
        kind = self.size.model_type
        changes = _SMOKE_MODEL[kind] | _SMOKE_VOCABULARY if smoke else {}
        return AutoConfig.for_model(kind, **self.size.config | changes)

    def run(self, description: str | None) -> None:
        """Do what the command line asks for: train, or print what that would take.

        Args:
            description: for `--help`.
        """
        with ExitStack() as held:
            with one_line_errors():
                arguments, training = parse_arguments(
                    self.defaults, self.smoke, description=description
                )
                config = self.config(smoke=arguments.smoke)
                if arguments.dry_run:
                    dry_run(config, arguments, training)
                    return
                check_run(arguments, training, config)
                held.enter_context(hold_output(arguments, training))
                train, evaluation, tokenizer = load_data(arguments, training, config)
            model = build_model(config, arguments, training)
            trainer = build_trainer(model, arguments, training, train, evaluation, tokenizer)
            train_and_evaluate(trainer, arguments)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with one line where the block, before any training, refuses what is asked."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def dry_run(
    config: PreTrainedConfig, arguments: RecipeArguments, training: TrainingArguments
) -> Plan | None:
    """Print what the run takes, without allocating it; on the first process only.

    Raises:
        ValueError: a batch that the processes cannot divide, sequences that do not fit the model's
            context, or a model that cannot be planned.
    """
    if int(os.environ.get("RANK", 0)) != 0:
        return None
    check_context(config, arguments.sequence_length)
    world_size = arguments.world_size
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", 1))
    workload = arguments.workload(training, world_size)
    plan = plan_run(config, arguments.metis_config(training.seed), workload)
    if arguments.json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        from metis_hf.lab.planning.tables import print_plan

        print_plan(plan)
    return plan


def check_run(
    arguments: RecipeArguments, training: TrainingArguments, config: PreTrainedConfig
) -> None:
    """Refuse what the run would refuse, before its data and its model are made.

    Raises:
        NotImplementedError: a device on which no scheme can be computed.
        ValueError: a model that cannot be converted so, a batch as `build_trainer` refuses it, or
            sequences that do not fit the model's context.
    """
    check_device(training.device)
    _checked_workload(arguments, training)
    check_context(config, arguments.sequence_length)
    with no_warnings():
        get_metis_model(meta_model(config), arguments.metis_config(training.seed))


def _checked_workload(arguments: RecipeArguments, training: TrainingArguments) -> Workload:
    """Return the run as numbers; raises as `build_trainer` does."""
    workload = arguments.workload(training, training.world_size)
    given, derived = training.gradient_accumulation_steps, workload.accumulation
    if given not in (1, derived):
        raise ValueError(
            f"gradient_accumulation_steps={given} contradicts global_batch={workload.global_batch}"
            f", which takes {derived} on {training.world_size} processes; leave it out"
        )
    return workload


def load_data(
    arguments: RecipeArguments, training: TrainingArguments, config: PreTrainedConfig
) -> tuple[datasets.Dataset, datasets.Dataset, PreTrainedTokenizerBase | None]:
    """Return sequences to train on and to hold out, and the tokenizer if it is at hand.

    `--data` wins; without it, text of the standard library is chunked (`--smoke`).

    Raises:
        ValueError: data that do not fit the arguments or the model.
    """
    tokenizer: PreTrainedTokenizerBase | None = None
    if arguments.data is not None:
        directory = Path(arguments.data)
        dataset, evaluation = _chunked_data(directory, arguments, config)
        if (directory / TOKENIZER).is_dir():
            tokenizer = AutoTokenizer.from_pretrained(directory / TOKENIZER)
    else:
        dataset, tokenizer = _embedded_text(arguments, config)
        evaluation = None
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

    The same on every process: initialization depends on the seed and the kind of device.
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
    """Return a MetisTrainer with the steps and the accumulation that the arguments ask for.

    Raises:
        ValueError: a global batch that the processes cannot divide, or an accumulation that
            contradicts it.
    """
    workload = _checked_workload(arguments, training)
    training.gradient_accumulation_steps = workload.accumulation
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
        train_dataset=whole_batches(train, training),  # type: ignore[arg-type]
        eval_dataset=evaluation,  # type: ignore[arg-type]
        processing_class=tokenizer,
        data_collator=causal_batch,
        callbacks=[MetisCallback(health_interval=arguments.health_interval)],
    )


@contextmanager
def hold_output(arguments: RecipeArguments, training: TrainingArguments) -> Iterator[None]:
    """Make output_dir and hold it, by the first process, while the block runs.

    Raises:
        ValueError: another run holds it, or it has checkpoints and `--resume` was not given.
    """
    directory = Path(str(training.output_dir))
    first = training.process_index == 0
    with hold_directory(directory, "--output_dir") if first else nullcontext():
        if not arguments.resume and (present := newest_first(directory)):
            raise ValueError(
                f"output_dir {directory} has checkpoints ({present[0].name}); go on with "
                "--resume, or choose another --output_dir"
            )
        yield


def train_and_evaluate(trainer: MetisTrainer, arguments: RecipeArguments) -> dict[str, float]:
    """Train from the last checkpoint, save the model into output_dir, evaluate the held-out loss.

    The caller holds output_dir, see `hold_output`.
    """
    training = trainer.args
    trainer.train(resume_from_checkpoint=last_checkpoint(Path(str(training.output_dir))))
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
