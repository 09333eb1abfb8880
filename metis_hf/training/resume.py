"""Safe resuming with Trainer: maps tensor names and refuses checkpoints of another scheme.

Trainer does not require all names to match when it loads weights, so it would load parts of a
checkpoint of another scheme, or misinterpret its values, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import metis_layers
from metis_hf.conversion.naming import as_in_model, weights_in_layers
from metis_hf.layers.linear import MetisLinear
from metis_hf.shared.checkpoints import last_checkpoint
from metis_hf.shared.messages import some

__all__ = ["ResumeGuard", "guard_loading", "last_checkpoint"]

# Fields that a resumed run may change: they affect neither the parameters nor their meaning.
_FREE = {
    "high_precision",
    "forward_rounding",
    "backward_rounding",
    "scale_rounding",
    "refresh_interval",
    "backend",
    "seed",
}
_FACTORS = ("u", "s", "vh")
_RESIDUAL = ".weight_residual"


class ResumeGuard(TrainerCallback, ExportableState):
    """Refuses to resume from a checkpoint of another scheme, before the first step.

    Names and shapes of tensors reveal most mismatches. The config saved with Trainer's state
    reveals the rest: two schemes may store tensors of the same name in different units.
    """

    trained_config: Mapping[str, Any] | None = None
    _model: nn.Module | None = None

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        if model is not None:
            guard_loading(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Compare the model's config with the checkpoint's.

        Raises:
            ValueError: they differ in a field that affects the parameters or their meaning.
        """
        assert model is not None
        current = _config_of(model)
        name = type(self).__name__
        before = trained_config(state.stateful_callbacks, name)
        if state.global_step and before is not None:
            if current is None:
                raise ValueError(
                    f"the checkpoint was trained with scheme {before.get('scheme')!r}, but this "
                    f"model has no converted layer. {_ADVICE}"
                )
            _check_configs(before, current)
        self._model, self.trained_config = model, current
        # Trainer writes to this entry; checkpoints of runs without this callback do not have it.
        state.stateful_callbacks.setdefault(name, self.state())

    def state(self) -> dict[str, Any]:
        """Return the entry in trainer_state.json, with the current config."""
        if self._model is not None:
            self.trained_config = _config_of(self._model) or self.trained_config
        return {"args": {}, "attributes": {"trained_config": self.trained_config}}


def trained_config(
    stateful_callbacks: Mapping[str, Any], first: str | None = None
) -> dict[str, Any] | None:
    """Return the config that any callback saved in a checkpoint, or None.

    Args:
        stateful_callbacks: of the checkpoint's trainer_state.json.
        first: name of the callback to look at first.
    """
    for _, saved in sorted(stateful_callbacks.items(), key=lambda item: item[0] != first):
        saved = saved or {}
        for one in saved if isinstance(saved, list) else [saved]:
            if (config := one.get("attributes", {}).get("trained_config")) is not None:
                return config
    return None


def guard_loading(model: nn.Module) -> None:
    """Make `model.load_state_dict` refuse weights that are stored in another form.

    Trainer and accelerate load through this method, without requiring all names to match.
    """
    hooks = model._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", None) is _refuse_other_form for hook in hooks):
        model.register_load_state_dict_pre_hook(_refuse_other_form)


def _refuse_other_form(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: Any
) -> None:
    """Raise if the tensors come from a model that stores its weights in another form.

    The tensors are first renamed in place to the model's names: transformers saves some models
    under other names, and Trainer ignores names it does not find. Missing tensors are not an error,
    since a shard of a checkpoint holds only some.
    """
    if isinstance(module, PreTrainedModel) and not prefix:
        tensors = as_in_model(module, state_dict)
        state_dict.clear()
        state_dict.update(tensors)
    layers = {f"{prefix}{name}": layer for name, layer in metis_layers(module)}
    split = {name: layer for name, layer in layers.items() if isinstance(layer, MetisLinear)}
    stored = {key.removesuffix(_RESIDUAL) for key in state_dict if key.endswith(_RESIDUAL)}
    dense = {name for name in split if f"{name}.weight" in state_dict}
    experts = {key for key in state_dict if ".metis_" in key}
    if experts:
        experts -= module.state_dict(prefix=prefix).keys()
    fused = {f"{prefix}{name}" for name in weights_in_layers(module)} & state_dict.keys()
    factors = stored - split.keys()
    ours = "stores it densely" if factors & layers.keys() else "has no converted layer there"
    for names, kind, this in (
        (factors, "a split weight (u, s, vh, weight_residual) for {}", ours),
        (dense, "a dense weight for {}", "stores it as u, s, vh and weight_residual"),
        (experts, "converted experts ({})", "does not have them"),
        (fused, "fused experts ({})", "has a converted layer for each expert"),
    ):
        if names:
            found = kind.format(some(sorted(names), 1))
            raise ValueError(f"the checkpoint has {found}, but this model {this}. {_ADVICE}")
    for name, layer in split.items():
        for key in _FACTORS:
            tensor = state_dict.get(f"{name}.{key}")
            if tensor is not None and tensor.shape != getattr(layer, key).shape:
                raise ValueError(
                    f"{name}.{key} has shape {tuple(tensor.shape)} in the checkpoint, but "
                    f"{tuple(getattr(layer, key).shape)} in this model of rank {layer.rank}. "
                    f"{_ADVICE}"
                )


_ADVICE = (
    "Convert the model with the config that the checkpoint was trained with (stored in its "
    "config.json; split_weight=True stores u, s, vh and weight_residual), or load the checkpoint "
    "with from_pretrained"
)


def _config_of(model: nn.Module) -> dict[str, Any] | None:
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if not isinstance(config, MetisConfig):
        config = next((layer.config for _, layer in metis_layers(model)), None)
    return None if config is None else config.to_dict()


def _check_configs(before: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    keys = [*current, *(key for key in before if key not in current)]  # None values may be absent
    fields = [key for key in keys if key not in _FREE and before.get(key) != current.get(key)]
    if fields:
        changes = ", ".join(f"{key}={before.get(key)!r} -> {current.get(key)!r}" for key in fields)
        raise ValueError(
            f"the checkpoint was trained with a different config than this model: {changes}. "
            f"{_ADVICE}"
        )
