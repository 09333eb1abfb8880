"""Which subclasses of nn.Linear convert, and that they come back as what they were."""

from __future__ import annotations

import importlib

import pytest
import torch
import transformers
from conftest import falcon
from tensors import logits
from torch import nn
from torch.nn.utils import prune
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from metis_hf import MetisConfig, get_metis_model, metis_layers, to_dense
from metis_hf.conversion.linears import why_not_plain


@pytest.mark.parametrize(("scheme", "bias"), [("metis-paper", True), ("nvidia", False)])
def test_falcon(scheme, bias, tmp_path, token_ids):
    """Convert, save, reload, turn back."""
    model = get_metis_model(falcon(bias=bias), MetisConfig(scheme=scheme))
    report = model.metis_report
    assert len(report.layers) == 8  # query_key_value, dense and two of the MLP in each block
    assert {layer.kind for layer in report.layers} == {"FalconLinear"}
    assert report.skipped == {"lm_head": "output head"}
    model.save_pretrained(tmp_path / "metis")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "metis")
    assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))
    weights = {name: layer.weight.detach().clone() for name, layer in metis_layers(loaded)}
    dense = to_dense(loaded)
    for name, weight in weights.items():
        layer = dense.get_submodule(name)
        assert type(layer) is FalconLinear
        assert torch.equal(layer.weight, weight)
        assert (layer.bias is not None) is bias


def test_falcon_in_high_precision_is_falcon(token_ids):
    """What is listed as read really is x W^T."""
    model = falcon()
    expected = logits(model, token_ids)
    converted = get_metis_model(model, MetisConfig(scheme="bf16"))
    torch.testing.assert_close(logits(converted, token_ids), expected, rtol=0, atol=1e-6)


class NamedLinear(nn.Linear):
    """Initialized in its own way, computes as nn.Linear."""

    def __init__(self, sizes, note):
        super().__init__(*sizes)
        self.note, self.settings = note, {"gain": 2}
        nn.init.ones_(self.weight)


class LoudConv1D(Conv1D):
    """Prints in its own way, computes as Conv1D."""

    def extra_repr(self):
        return "loud"


@pytest.mark.parametrize("split", [False, True])
def test_attributes_come_back(split):
    model = nn.Sequential(NamedLinear((32, 64), "first"), LoudConv1D(32, 64), nn.Linear(32, 8))
    x = torch.randn(4, 32)
    expected = model(x)
    get_metis_model(model, MetisConfig(scheme="bf16", split_weight=split, rank=2))
    assert [layer.kind for layer in model.metis_report.layers] == [
        "NamedLinear", "LoudConv1D", "Linear",
    ]  # fmt: skip
    to_dense(model)
    assert [type(layer) for layer in model] == [NamedLinear, LoudConv1D, nn.Linear]
    assert (model[0].note, model[0].settings) == ("first", {"gain": 2})
    assert (model[0].in_features, model[0].out_features) == (32, 64)
    torch.testing.assert_close(model(x), expected)


class Doubled(nn.Linear):
    """Has more than a weight and a bias."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.other = nn.Linear(*sizes)


class Called(nn.Linear):
    """Does more than its forward pass says."""

    def __call__(self, *args):
        return 2 * super().__call__(*args)


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Doubled(8, 8), "its class Doubled has other besides weight and bias"),
        (lambda: Called(8, 8), "its class Called has a custom forward pass"),
        (
            parametrized,
            "its class ParametrizedLinear has parametrizations, weight|parametrizations",
        ),
        (
            lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
            "its class Linear has weight_mask, weight_orig besides weight and bias",
        ),
        (lambda: nn.MultiheadAttention(8, 2).out_proj, "reads the weight of the NonDynamically"),
    ],
)
def test_what_is_more_than_linear_stays(make, reason):
    layer = make()
    assert any(part in why_not_plain(layer) for part in reason.split("|"))
    model = nn.Sequential(nn.Linear(8, 8), layer)
    kind = type(layer)
    get_metis_model(model, MetisConfig(scheme="nvidia"))
    assert type(model[1]) is kind
    assert model.metis_report.skipped["1"] == why_not_plain(layer)


# Every class of transformers that derives from nn.Linear outside its own quantization methods.
IN_TRANSFORMERS = {
    "falcon.modeling_falcon.FalconLinear": True,
    "esm.modeling_esmfold.EsmFoldLinear": True,
    "llama4.modeling_llama4.Llama4Router": False,
    "phimoe.modeling_phimoe.PhimoeTopKRouter": False,
    "deepseek_v4.modeling_deepseek_v4.DeepseekV4GroupedLinear": False,
    "idefics.modeling_idefics.IdeficsDecoupledLinear": False,
}


def test_subclasses_in_transformers():
    for path, plain in IN_TRANSFORMERS.items():
        module, _, name = path.rpartition(".")
        try:
            cls = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        except (ImportError, AttributeError):  # not in this version of transformers
            continue
        layer = cls.__new__(cls)
        nn.Linear.__init__(layer, 8, 8)
        assert (why_not_plain(layer) is None) is plain, path


def test_a_model_of_other_linears_alone_says_why():
    with pytest.raises(ValueError, match=r"nothing to convert. 0: its class Called has a custom"):
        get_metis_model(nn.Sequential(Called(8, 8)))
