"""The teacher in distillation: loads, checks and runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled

from metis_hf.conversion.convert import metis_layers
from metis_hf.conversion.heads import output_head
from metis_hf.shared.messages import shown
from metis_hf.training.precision import high_precision

# Inputs that only the student gets.
_OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")
_OTHER_VOCABULARY = (
    "distillation compares whole next-token distributions, so both models need the same "
    "vocabulary. Choose a teacher from the student's model family, such as the model that the "
    "student was converted from"
)


class Teacher:
    """A frozen model in evaluation mode, or the student itself without quantizers and adapters.

    Args:
        source: a causal language model; a path or hub name of one; None: the student itself.
        student: the trained model, before it is wrapped.
        device: of the student.
        dtype: for a teacher loaded from a path or the hub.
        tokenizer: the student's, compared with the tokenizer saved with the teacher.

    Raises:
        ValueError: the teacher is not a causal language model, has another vocabulary, shares
            parameters with the student, or runs under DeepSpeed ZeRO-3; `source` is None although
            weights other than adapters train or no layer of the student is converted.
    """

    def __init__(
        self,
        source: nn.Module | str | Path | None,
        student: nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype,
        tokenizer: Any = None,
    ) -> None:
        self.model: nn.Module | None = None
        _check_causal("the student", student)
        if source is None:
            _check_own(student)
            return
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                "DeepSpeed ZeRO-3 would shard the teacher's weights, and nothing would gather "
                "them; train with ZeRO-2, FSDP2 or DDP, where each process holds the whole teacher"
            )
        if isinstance(source, str | Path):
            source = _load(str(source), student, dtype, tokenizer)
        _check_causal("the teacher", source)
        _check_sizes(_vocabulary(student), _vocabulary(source))
        _check_apart(student, source)
        if getattr(source, "hf_device_map", None) is None:
            source.to(device)
        self.model = source.requires_grad_(False).eval()

    @torch.no_grad()
    def logits(self, student: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the teacher's logits [b s v] for a batch.

        Args:
            student: the trained model, unwrapped; used if the student is its own teacher.
            inputs: keyword arguments of the student; labels are left out.
        """
        model = student if self.model is None else self.model
        given = {key: value for key, value in inputs.items() if key not in _OF_THE_LOSS}
        with contextlib.ExitStack() as block:
            for module in model.modules():
                block.callback(setattr, module, "training", module.training)
            model.eval()
            if next(metis_layers(model), None) is not None:
                block.enter_context(high_precision(model))
            if self.model is None:
                block.enter_context(_without_adapters(model))
            return logits_of("teacher", model(**given, use_cache=False))


def logits_of(role: str, outputs: Any) -> Tensor:
    """Return the logits among the outputs of the teacher or the student.

    Raises:
        ValueError: there are no logits.
    """
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"the {role} returned no logits, but distillation compares logits; use a causal "
            "language model whose loss is not fused with its head (use_liger_kernel=False)"
        )
    return logits


@contextlib.contextmanager
def _without_adapters(model: Any) -> Iterator[None]:
    """Turn PEFT's adapters off inside the block."""
    # PEFT makes all adapters trainable on exit.
    before = [(param, param.requires_grad) for param in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:
        for param, trains in before:
            param.requires_grad = trains


def _load(name: str, student: nn.Module, dtype: torch.dtype, tokenizer: Any) -> nn.Module:
    """Load a teacher from a path or the hub, after checking its config and tokenizer."""
    config = AutoConfig.from_pretrained(name)
    _check_decoder("the teacher", config)
    _check_sizes(_vocabulary(student), config.get_text_config().vocab_size)
    _check_tokens(tokenizer, name)
    # Under FSDP, transformers may load weights on one process only, for FSDP to broadcast when it
    # shards the model. The teacher is not sharded.
    with patch_environment(fsdp_cpu_ram_efficient_loading="false"):
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)


def _check_causal(role: str, model: Any) -> None:
    """Refuse anything but a decoder with a language model head."""
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "get_text_config"):
        raise ValueError(
            f"{role} is {shown(model)}; expected a transformers model (or, for the teacher, a "
            "path, a hub name, or None)"
        )
    _check_decoder(role, config)
    if output_head(model) is None:
        raise ValueError(
            f"{role} is a {type(model).__name__}, which has no language model head and thus no "
            "next-token logits; load it with AutoModelForCausalLM"
        )


def _check_decoder(role: str, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{role} is an encoder-decoder ({config.model_type}); distillation needs a causal "
            "language model, whose logits correspond to the tokens of input_ids"
        )


def _vocabulary(model: Any) -> int:
    """Return the number of logits per token."""
    width = getattr(output_head(model), "out_features", None)
    return width or model.config.get_text_config().vocab_size


def _check_sizes(student: int, teacher: int) -> None:
    if student != teacher:
        raise ValueError(
            f"the teacher has a vocabulary of {teacher} tokens and the student one of {student}: "
            f"{_OTHER_VOCABULARY}, or call resize_token_embeddings if they differ only in padding"
        )


def _check_tokens(tokenizer: Any, name: str) -> None:
    """Refuse a teacher whose tokenizer assigns one of the student's ids to another token."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    try:
        theirs = AutoTokenizer.from_pretrained(name)
    except Exception:  # the error for a missing tokenizer varies
        return
    tokens = {number: token for token, number in theirs.get_vocab().items()}
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if tokens.get(number, token) != token:
            raise ValueError(
                f"token {number} is {shown(token)} in the student's tokenizer and "
                f"{shown(tokens[number])} in the teacher's ({name}): {_OTHER_VOCABULARY}"
            )


def _check_apart(student: nn.Module, teacher: nn.Module) -> None:
    """Refuse a teacher that shares parameters with the student."""
    names = {id(param): name for name, param in student.named_parameters()}
    for param in teacher.parameters():
        if id(param) in names:
            raise ValueError(
                f"the teacher shares {names[id(param)]} with the student, but a teacher must be "
                "frozen. Convert a copy (get_metis_model(copy.deepcopy(model), ...)), or pass the "
                "teacher's path"
            )


def _check_own(student: Any) -> None:
    """Refuse a student that cannot be its own teacher."""
    if next(metis_layers(student), None) is None:
        raise ValueError(
            "teacher=None uses the student without its quantizers, but none of its layers is "
            "converted; call get_metis_model first, or pass a teacher"
        )
    advice = (
        "Pass the model that the student was converted from (teacher=path or model), or train "
        "LoRA adapters on the frozen student (peft.get_peft_model)"
    )
    if not isinstance(student, PeftModel):
        raise ValueError(
            "teacher=None uses the student without its quantizers and adapters, but it has no "
            f"adapters: its dense weights train, and a teacher must not change. {advice}"
        )
    with _without_adapters(student):  # sets requires_grad=False on all adapter parameters
        trained = [name for name, param in student.named_parameters() if param.requires_grad]
    if trained:
        raise ValueError(
            f"teacher=None uses the student without its quantizers and adapters, but {trained[0]} "
            f"and {len(trained) - 1} more parameters train that do not belong to an adapter, and a "
            f"teacher must not change. {advice}"
        )
