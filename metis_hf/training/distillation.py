"""DistillTrainer: trains a quantized student to match the distributions of a frozen teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import EvalLoopOutput

from metis_hf.training.distillation_loss import check_temperature, distillation_loss
from metis_hf.training.distillation_teacher import Teacher, logits_of
from metis_hf.training.trainer import MetisTrainer


class DistillTrainerMixin:
    """Mixin for Trainer and its subclasses: quantization-aware distillation (QAD).

    For TRL, write `class QadSFT(DistillTrainerMixin, MetisTrainerMixin, SFTTrainer)`. The loss is

        (1 - cross_entropy_share) * KL(teacher || student) + cross_entropy_share * cross entropy

    The KL is the mean over all tokens in `attention_mask`, or all tokens without a mask, including
    the last token and tokens with label -100 (prompts). Labels are needed only for evaluation and
    the cross entropy. With gradient accumulation and several processes every token has the same
    weight, as in Trainer's own loss (`average_tokens_across_devices`).

    `evaluate` reports `eval_loss`, the cross entropy that Trainer reports without a teacher, and
    `eval_kl`, the KL at temperature 1; compare runs by both. A subclass's own metrics in
    `compute_loss`, such as TRL's entropy and token accuracy, are not computed.

        >>> from transformers import AutoModelForCausalLM
        >>> from metis_hf import DistillTrainer, MetisConfig, get_metis_model
        >>> student = AutoModelForCausalLM.from_pretrained(path)
        >>> student = get_metis_model(student, MetisConfig(scheme="nvfp4-rne"))
        >>> trainer = DistillTrainer(
        ...     student, arguments, train_dataset=rows, eval_dataset=rows, teacher=path
        ... )
        >>> before, result, after = trainer.evaluate(), trainer.train(), trainer.evaluate()

    Memory: the loss keeps the student's and the teacher's logits and allocates nothing else of that
    size, see `distillation_loss`; the cross entropy needs as much as in Trainer. Checkpoints hold
    only the student; a resumed run needs the same teacher again.

    Args:
        args: for Trainer.
        teacher: a model, which is frozen and moved to the student's device; a path or hub name,
            loaded in the student's dtype (BF16 or FP16 under `bf16` or `fp16`); None: the student
            itself without quantizers and adapters, if only a PEFT adapter trains. A teacher's
            converted layers run unquantized. Each process holds the whole teacher.
        temperature: divides both logits in training, > 0.
        cross_entropy_share: share of the labels' cross entropy in the loss, 0 to 1.
        kwargs: for Trainer.

    Raises:
        ValueError: a temperature or share out of range, or an unsuitable teacher; see `Teacher`.
    """

    def __init__(
        self,
        *args: Any,
        teacher: PreTrainedModel | str | Path | None = None,
        temperature: float = 1.0,
        cross_entropy_share: float = 0.0,
        **kwargs: Any,
    ) -> None:
        check_temperature(temperature)
        if not 0 <= cross_entropy_share <= 1:
            raise ValueError(
                f"cross_entropy_share={cross_entropy_share}; expected a share from 0 (only the "
                "teacher) to 1 (only the labels)"
            )
        super().__init__(*args, **kwargs)
        self.temperature = temperature
        self.cross_entropy_share = cross_entropy_share
        trainer: Any = self
        self.teacher = Teacher(
            teacher,
            trainer.model,
            device=trainer.accelerator.device,
            dtype=_teacher_dtype(trainer),
            tokenizer=trainer.processing_class,
        )
        self._tokens_of_step: Tensor | None = None
        self._divergences: list[Tensor] = []  # in evaluation: (sum over tokens, token count)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train with Trainer."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._tokens_of_step = None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """Return the micro-batches of a step, and count their tokens over all processes."""
        batches, labels = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        count = torch.as_tensor(sum(token_mask(batch).sum() for batch in batches))
        count = count.to(trainer.args.device)
        if trainer.args.average_tokens_across_devices:
            count = trainer.accelerator.reduce(count, "sum")
        if self._tokens_of_step is None:
            self._tokens_of_step = count.clone()
        else:  # in place: a recorded step (`cuda_graphs`) reads this tensor
            self._tokens_of_step.copy_(count)
        return batches, labels

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of a micro-batch in training, the cross entropy in evaluation.

        Args:
            model: the student, as Trainer wrapped it.
            inputs: its keyword arguments.
            return_outputs: return (loss, the student's outputs).
            num_items_in_batch: number of labels in the whole step; divides the cross entropy.

        Raises:
            ValueError: the logits differ in shape or are missing, or the attention mask is not
                [batch, tokens].
        """
        trainer: Any = self
        mask = token_mask(inputs)
        student = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        with trainer.accelerator.autocast():
            taught = self.teacher.logits(student, inputs)
        if trainer.accelerator.mixed_precision != "no":
            taught = taught.float()  # as accelerate casts the student's: the loss reuses it
        entropy: Any = 0.0
        if model.training and not self.cross_entropy_share:
            outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
        else:
            # Trainer's own method: a subclass's may return a loss without logits.
            entropy, outputs = Trainer.compute_loss(
                trainer, model, {**inputs}, True, num_items_in_batch
            )
        logits = logits_of("student", outputs)
        if model.training:
            loss = (1 - self.cross_entropy_share) * self._divergence(
                logits, taught, mask, num_items_in_batch
            ) + self.cross_entropy_share * entropy
        else:
            loss = entropy
            rows = zip(logits.detach(), taught, mask)
            summed = torch.stack([distillation_loss(*row, tokens=1) for row in rows])
            of_rows = torch.stack([summed, mask.sum(-1).to(summed)], 1)
            # Over all processes, without the rows that pad the last batch.
            self._divergences.append(trainer.accelerator.gather_for_metrics(of_rows).sum(0))
        return (loss, outputs) if return_outputs else loss

    def _divergence(
        self, logits: Tensor, taught: Tensor, mask: Tensor, labels_of_step: Tensor | int | None
    ) -> Tensor:
        """Return a micro-batch's share of the step's KL, scaled so that Trainer yields the mean."""
        # Trainer sums the gradients of a step's micro-batches and averages them over processes.
        trainer: Any = self
        loss = distillation_loss(
            logits, taught, mask, temperature=self.temperature, tokens=self._tokens_of_step
        )
        if self._tokens_of_step is None:  # called outside training: the mean over this batch
            return loss
        if trainer.args.average_tokens_across_devices:
            loss = loss * trainer.accelerator.num_processes
        counted = trainer.model_accepts_loss_kwargs and labels_of_step is not None
        counted = counted or trainer.compute_loss_func is not None
        said = getattr(trainer, "loss_is_scaled_for_ga", None)  # set by a subclass
        if not (counted if said is None else said):
            # Trainer takes the loss for the micro-batch's mean and will divide it.
            loss = loss * trainer.current_gradient_accumulation_steps
        return loss

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate as Trainer does, and add the mean KL per token to the metrics."""
        self._divergences = []
        output = super().evaluation_loop(  # type: ignore[misc]
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        if self._divergences:
            total, tokens = torch.stack(self._divergences).sum(0).tolist()
            output.metrics[f"{metric_key_prefix}_kl"] = total / max(tokens, 1)
            self._divergences = []
        return output


def token_mask(inputs: dict[str, Any]) -> Tensor:
    """Return the mask of the positions that are tokens, not padding, [b s] bool.

    Raises:
        ValueError: the attention mask is not 2-D, or the batch has no tokens.
    """
    mask = inputs.get("attention_mask")
    if mask is None:
        tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
        if not isinstance(tokens, Tensor):
            raise ValueError(f"the batch has no input_ids, only {', '.join(inputs)}")
        return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is {shape}; distillation needs a mask [batch, tokens] to find "
            "padding. Leave the mask out if the batch has no padding"
        )
    return mask.bool()


def _teacher_dtype(trainer: Any) -> torch.dtype:
    """Return the student's compute dtype, in which the teacher is loaded."""
    if trainer.args.bf16:
        return torch.bfloat16
    if trainer.args.fp16:
        return torch.float16
    floats = (p.dtype for p in trainer.model.parameters() if p.is_floating_point())
    return next(floats, torch.float32)


class DistillTrainer(DistillTrainerMixin, MetisTrainer):
    """MetisTrainer with a teacher; see `DistillTrainerMixin`."""
