"""Post-training quantization: convert a dense model or checkpoint and calibrate it on a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import get_metis_model, metis_layers, to_dense
from metis_hf.conversion.hub import read_config
from metis_hf.data.chat import check_vocabulary, first_sequences
from metis_hf.deploy.source import (
    check_packable,
    load_model,
    model_class,
    model_config,
    quantization_of,
    read_tokenizer,
)
from metis_hf.lab.show.progress import TaskProgress
from metis_hf.layers.linear import MetisLayer
from metis_hf.schemes import build_scheme
from metis_hf.schemes.states import StaticScales
from metis_hf.shared.messages import some
from metis_hf.training.calibration import METHODS, calibrate, has_static_scales

SCHEMES = ("w4a4", "w4a16")
_BATCH = 4  # sequences per forward pass
_WIDTH = 64  # in and out features of the layer for which `_static` builds schemes
_WHICH_LAYERS = (
    "target_modules",
    "exclude_modules",
    "modules_to_not_convert",
    "layers_to_transform",
    "layers_pattern",
    "keep_first_blocks",
    "keep_last_blocks",
)


@dataclass(frozen=True)
class Calibration:
    """The settings of a calibration."""

    text: str | Path | None  # UTF-8 or .jsonl file; may be None if only weights are quantized
    scheme: str | None = None  # one of SCHEMES, for a model without static scales; None: "w4a4"
    sequences: int = 128  # at most this many, from the start of the text
    length: int = 512  # tokens per sequence, at most the model's context
    method: str = METHODS[0]  # how input scales are chosen; see `calibrate`
    device: str = "cpu"
    exclude: tuple[str, ...] = ()  # added to `MetisConfig.modules_to_not_convert`

    def __post_init__(self) -> None:
        for name, value, known in (
            ("scheme", self.scheme or SCHEMES[0], SCHEMES),
            ("method", self.method, METHODS),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r}; choose one of {', '.join(known)}")
        if self.sequences < 1 or self.length < 2:
            raise ValueError(
                f"cannot calibrate on {self.sequences} sequences of {self.length} tokens; use at "
                "least 1 sequence of 2 tokens"
            )


def calibrated_model(
    checkpoint: str | Path,
    calibration: Calibration,
    report: Callable[[str], None] = print,
    progress: TaskProgress | None = None,
) -> PreTrainedModel:
    """Load a checkpoint, convert it to a scheme with static scales, and calibrate it.

    The returned model is in fp32 on the CPU. A dense checkpoint is converted. A checkpoint in a
    scheme without static scales moves to the chosen scheme, with the same layers and the weights
    that it represents. A checkpoint with static scales keeps its schemes and is calibrated again.
    `report` is called with each line about the work.

    Raises:
        FileNotFoundError: the text file is missing.
        ValueError: a checkpoint quantized by other software; layers that cannot be packed; no
            text although inputs are quantized; a text that is too short; a model that reads more
            than token ids.
    """
    config = model_config(checkpoint)
    method = quantization_of(config)
    if method not in (None, MetisConfig.quant_method):
        raise ValueError(
            f"{checkpoint} is already quantized with {method!r}; give the model that it was made "
            "from"
        )
    reads = _quantizes_inputs(config, calibration)
    rows = calibration_rows(config, checkpoint, calibration) if reads else None
    model = load_model(checkpoint)
    _convert(model, calibration, report)
    check_packable(model)
    batches: list[Tensor] = []
    if rows is not None:
        batches = list(rows.split(_BATCH))
        report(
            f"calibrating on {rows.shape[0]} sequences of {rows.shape[1]} tokens "
            f"(method {calibration.method})"
        )
    elif calibration.text is not None:
        report(f"no layer quantizes its inputs, so {calibration.text} is not read")
    if rows is None and model.can_generate() and _reads_tokens(config, type(model)):
        batches = [model.dummy_inputs["input_ids"]]  # show which layers the model calls
    nn.Module.to(model, calibration.device)
    bars = progress or TaskProgress(None)

    def shown() -> Iterator[Tensor]:
        for batch in batches:
            yield batch
            bars.advance("calibration")

    with bars.running({"calibration": (len(batches), 1.0)}):
        scales = calibrate(model, shown(), method=calibration.method)
    if unseen := [name for name, scale in scales.items() if scale.input_amax and not scale.largest]:
        report(
            f"{len(unseen)} expert layers saw no token and use the input scale of the other "
            f"experts in their layer: {some(unseen, 1)}"
        )
    nn.Module.to(model, "cpu")
    return model


def _convert(
    model: PreTrainedModel, calibration: Calibration, report: Callable[[str], None]
) -> None:
    """Convert the model in place, unless it already has static scales."""
    scheme, exclude = calibration.scheme, calibration.exclude
    if has_static_scales(model):
        for name, value in (("scheme", scheme), ("exclude", list(exclude))):
            if value:
                raise ValueError(
                    f"{name}={value!r} cannot apply, because the checkpoint already has static "
                    f"scales in scheme {_config(model).scheme!r}; leave {name} out"
                )
        return
    config = MetisConfig(scheme=scheme or SCHEMES[0])
    if getattr(model.config, "quantization_config", None) is not None:
        own = _config(model)
        report(f"scheme {own.scheme} -> {config.scheme}")
        config = replace(config, **{name: getattr(own, name) for name in _WHICH_LAYERS})
        kept = [name for name, layer in metis_layers(model) if _is_kept(own, layer)]
        if kept:
            # Experts are named by their fused weight, which `to_dense` restores.
            fused = (re.sub(r"\.metis_(\w+)\.\d+$", r".\1", name) for name in kept)
            names = (*(config.modules_to_not_convert or ()), *dict.fromkeys(map(re.escape, fused)))
            config = replace(config, modules_to_not_convert=names)
            report(f"kept in high precision, as scheme_pattern had set them: {some(kept, 1)}")
        to_dense(model)
    if exclude:
        kept_out = (*(config.modules_to_not_convert or ()), *exclude)
        config = replace(config, modules_to_not_convert=kept_out)
    get_metis_model(model, config)


def _is_kept(config: MetisConfig, layer: MetisLayer) -> bool:
    """Return whether `scheme_pattern` gives the layer a scheme that leaves its weight exact."""
    own = layer.config.replace(high_precision=())
    scheme = build_scheme(own, layer.in_features, layer.out_features)
    return own.scheme != config.scheme and scheme.fprop_weight.quantizer is None


def _config(model: PreTrainedModel) -> MetisConfig:
    config = model.config.quantization_config
    assert isinstance(config, MetisConfig)
    return config


def _quantizes_inputs(config: PreTrainedConfig, calibration: Calibration) -> bool:
    """Return whether the model, once converted, quantizes the inputs of any layer."""
    own = getattr(config, "quantization_config", None)
    states = _static(MetisConfig(scheme=calibration.scheme or SCHEMES[0]))
    if own is not None:
        states = _static(read_config(own)) or states
    return any(state.input for state in states)


def _static(config: MetisConfig) -> list[StaticScales]:
    """Return the StaticScales of the config's schemes that have them."""
    schemes = (build_scheme(config.replace(scheme=name), _WIDTH, _WIDTH) for name in config.schemes)
    return [scheme.state for scheme in schemes if isinstance(scheme.state, StaticScales)]


def _reads_tokens(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> bool:
    return not config.is_encoder_decoder and cls.main_input_name == "input_ids"


def calibration_rows(
    config: PreTrainedConfig, checkpoint: str | Path, calibration: Calibration
) -> Tensor:
    """Return the start of the calibration text as token ids [n length].

    Raises:
        ValueError: no text, a text that is too short, or a model that reads more than token ids.
    """
    if calibration.text is None:
        raise ValueError(
            "this model's layers also quantize their inputs, and the input scales must be "
            "calibrated on a text; give --calibrate TEXT, or --scheme w4a16 to quantize only the "
            "weights"
        )
    cls = model_class(config, checkpoint)
    if not _reads_tokens(config, cls):
        raise ValueError(
            f"{cls.__name__} needs inputs other than token ids; calibrate it in a script: call "
            "metis_hf.calibrate(model, batches) with batches of its inputs, then save and export "
            "the model"
        )
    of_text = config.get_text_config(decoder=True)
    context = getattr(of_text, "max_position_embeddings", None) or calibration.length
    rows = first_sequences(
        Path(calibration.text),
        read_tokenizer(checkpoint),
        min(context, calibration.length),
        calibration.sequences,
    )
    check_vocabulary(rows, of_text.vocab_size, checkpoint)
    return rows
