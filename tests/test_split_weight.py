"""`split_weight` under any scheme, and the correction of an input along a weight's factors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from conftest import llama
from layer_tools import NEAREST, STOCHASTIC, key_values, layer_of, record, with_exact_quantizers
from torch import nn

from metis_hf import (
    MetisConfig,
    MetisLinear,
    QuantLinear,
    get_metis_model,
    metis_layers,
    scheme_names,
)
from metis_hf.gemm import GemmPlan
from metis_hf.linear import convert_linear
from metis_hf.schemes import Role, build_scheme

SPLIT_BY_THEMSELVES = {"bf16-split", "metis-paper", "svdquant"}
TOKENS, IN, OUT = 40, 64, 48
FLOAT64_TOLERANCE = 1e-12  # sums of at most 64 terms near 1, some of them split in three


def steep(rows, columns, seed=0):
    """A matrix of 8 directions that are 30 times as large as the others."""
    g = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(rows, min(rows, columns), generator=g))
    v, _ = torch.linalg.qr(torch.randn(columns, min(rows, columns), generator=g))
    s = torch.ones(min(rows, columns))
    s[:8] = 30
    return (u * s) @ v.T


@pytest.mark.parametrize("scheme", scheme_names())
class TestEveryScheme:
    def test_form(self, scheme):
        """None is the scheme's own choice; True and False are what they say."""
        own = scheme in SPLIT_BY_THEMSELVES
        for split, expected in ((None, own), (True, True), (False, False)):
            _, layer = layer_of(scheme, split_weight=split)
            assert type(layer) is (MetisLinear if expected else QuantLinear)
            assert layer.scheme.split_weight is expected
        if own:
            config = MetisConfig(scheme=scheme)
            same = build_scheme(config.replace(split_weight=True), IN, OUT)
            assert same == build_scheme(config, IN, OUT)  # in the units of the scheme too
        else:
            _, layer = layer_of(scheme, split_weight=True)
            assert layer.weight_form.compensated
            torch.testing.assert_close(layer.u.square().mean(), torch.tensor(1.0))

    @pytest.mark.parametrize("split", [True, False])
    def test_exact_quantizers_give_a_linear_layer(self, scheme, split):
        """Also: what corrects an input adds nothing where no input has an error."""
        double = {"dtype": torch.float64}
        linear, layer = layer_of(scheme, i=IN, o=OUT, split_weight=split, **double)
        if layer.scheme.clipped_weight:
            layer.weight_clip.data.fill_(40)  # a strength of 1: nothing is clipped
        layer.scheme = with_exact_quantizers(layer.scheme)
        x, dy = torch.randn(TOKENS, IN, **double), torch.randn(TOKENS, OUT, **double)
        results = []
        for module in (linear, layer):
            x_ = x.clone().requires_grad_()
            y = module(x_)
            y.backward(dy)
            weight = getattr(module, "weight_residual", None) if split else module.weight
            weight = module.weight if weight is None else weight
            results.append((y.detach(), x_.grad, weight.grad))
        for expected, found in zip(*results):
            error = (found - expected).abs().max() / expected.abs().max()
            assert error < FLOAT64_TOLERANCE

    @pytest.mark.parametrize("split", [True, False])
    def test_saved_and_loaded(self, scheme, split, token_ids, tmp_path):
        config = MetisConfig(scheme=scheme, split_weight=split)
        assert MetisConfig.from_json(config.to_json()) == config
        model = get_metis_model(llama(), config).eval()
        model.save_pretrained(tmp_path)
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert loaded.config.quantization_config == config
        assert all(isinstance(layer, MetisLinear) == split for _, layer in metis_layers(loaded))
        with torch.no_grad():
            assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


def test_bf16_with_a_split_weight_is_bf16_split():
    """To the bit, and metis-paper without one quantizes its dense weight directly."""
    results = []
    for options in ({"scheme": "bf16", "split_weight": True}, {"scheme": "bf16-split"}):
        torch.manual_seed(0)
        _, layer = layer_of(i=IN, o=OUT, rank=8, **options)
        x = torch.randn(TOKENS, IN, requires_grad=True)
        y = layer(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    dense = build_scheme(MetisConfig(scheme="metis-paper", split_weight=False), IN, OUT)
    others = MetisConfig(scheme="metis-paper", decompose=("activation", "gradient"))
    assert dense.fprop_weight == build_scheme(others, IN, OUT).fprop_weight
    assert not dense.corrects_coordinates


def test_storing_the_factors_needs_no_split_of_the_scheme():
    """split_weight wins over `decompose`, in the scheme's own units."""
    for scheme, unit_rms in (("metis", True), ("metis-paper", False)):
        config = MetisConfig(scheme=scheme, decompose=(), split_weight=True)
        built = build_scheme(config, IN, OUT)
        assert built.split_weight
        assert (built.unit_rms, built.compensated) == (unit_rms, unit_rms)
        assert not built.corrects_coordinates


@pytest.mark.parametrize("value", ["yes", 1, 0, (), "True"])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=r"split_weight=.*expected None, True or False"):
        MetisConfig(split_weight=value)


def test_a_weight_is_split_by_the_same_sketch_at_every_step():
    """Noise follows the weight's bits; the subspace of a weight must not jump with it."""
    _, layer = layer_of("metis", i=256, o=256, rank=8)
    x, w = torch.randn(4, 256), layer.weight.detach()  # no gap in its spectrum: the sketch decides
    conditioner = layer.scheme.fprop_weight.conditioner
    keys = [layer.call_keys(x, weight)[Role.FPROP_WEIGHT] for weight in (w, w * 1.01)]
    assert keys[0].data != keys[1].data
    for fixed in (True, False):
        split = replace(conditioner, fixed_sketch=fixed)
        bases = [split.split(w, key=key)[2] for key in keys]
        assert torch.equal(*bases) == fixed
    assert conditioner.fixed_sketch
    assert not layer.scheme.fprop_input.conditioner.fixed_sketch


def metis_layer(weight, **changes):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return convert_linear(linear, MetisConfig(rank=8, **changes), name="layer").train()


def uncorrected(layer, x):
    """The same layer's output without the correction."""
    scheme, eval_scheme = layer.scheme, layer.eval_scheme
    layer.scheme = replace(scheme, corrects_coordinates=False)
    layer.eval_scheme = replace(eval_scheme, corrects_coordinates=False)
    try:
        return layer(x)
    finally:
        layer.scheme, layer.eval_scheme = scheme, eval_scheme


MODES = pytest.mark.parametrize("mode", ["shared", "contraction"])
FORMS = pytest.mark.parametrize("split", [None, True], ids=["split at use", "stored split"])


class TestCorrection:
    @MODES
    @FORMS
    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("decompose", [("weight",), ("weight", "activation", "gradient")])
    def test_reduces_the_error_where_the_weight_is_large(self, mode, split, training, decompose):
        """In the outputs that the 8 large directions make; in the others nothing is lost."""
        w = steep(96, 128)
        layer = metis_layer(w, operand_mode=mode, split_weight=split, decompose=decompose)
        layer.train(training)
        x = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))
        u = torch.linalg.svd(w).U
        found, without = (y.detach() - x @ w.T for y in (layer(x), uncorrected(layer, x)))
        large = [(e @ u[:, :8]).norm().item() for e in (found, without)]
        small = [(e @ u[:, 8:]).norm().item() for e in (found, without)]
        # Rounding to FP4 leaves a tenth of the error that is quantized; a part of the large
        # directions is the weight's own error, which stays.
        assert large[0] < 0.5 * large[1]
        assert small[0] < 1.1 * small[1]

    @MODES
    def test_is_the_formula(self, mode):
        """Q((x - x_hat) vh_hat^T) (a_hat lam)^T with the operands made one by one."""
        layer = metis_layer(steep(96, 128), operand_mode=mode)
        x = torch.randn(TOKENS, 128)
        keys = layer.call_keys(x)
        plan = GemmPlan(layer.scheme, layer.weight_form, torch.float32, keys)
        x_hat, _ = plan.matrix_operand(Role.FPROP_INPUT, x)
        operand, key = layer.scheme.fprop_weight, keys[Role.FPROP_WEIGHT]
        parts = operand.conditioner.parts(layer.weight.detach(), operand.quantizer, dim=-1, key=key)
        a, v = parts[0], parts[1]
        lam = (layer.weight.detach() @ v.before.T).norm(dim=0)
        left = (x - x_hat) @ v.after.T
        quantizer = layer.scheme.fprop_input.quantizer
        expected = uncorrected(layer, x) + quantizer(left) @ (a.after * lam).T
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-4)

    @MODES
    @FORMS
    def test_gradients_are_those_without(self, mode, split):
        """dgrad and wgrad take w_hat and x_hat as they are."""
        layer = metis_layer(steep(48, 64), operand_mode=mode, split_weight=split)
        dy = torch.randn(TOKENS, 48)
        x = torch.randn(TOKENS, 64)
        results = []
        for call in (layer, lambda x: uncorrected(layer, x)):
            layer.zero_grad()
            x_ = x.clone().requires_grad_()
            y = call(x_)
            y.backward(dy)
            results.append((y.detach(), x_.grad, [p.grad for p in layer.parameters()]))
        (y, dx, grads), (other, dx_other, grads_other) = results
        assert not torch.equal(y, other)
        assert torch.equal(dx, dx_other)
        assert all(torch.equal(a, b) for a, b in zip(grads, grads_other, strict=True))

    @FORMS
    @pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
    def test_empty_inputs(self, split, shape):
        layer = metis_layer(steep(48, 64), split_weight=split)
        x = torch.zeros(shape, requires_grad=True)
        y = layer(x)
        assert y.shape == (*shape[:-1], 48)
        y.sum().backward()
        assert x.grad.shape == shape
        assert all(not p.grad.any() for p in layer.parameters())

    @FORMS
    def test_a_row_of_zeros_stays_zero(self, split):
        layer = metis_layer(steep(48, 64), split_weight=split)
        x = torch.randn(TOKENS, 64)
        x[3] = 0
        assert not layer(x)[3].any()

    def test_noise_is_of_this_layer(self):
        """Layers that read one input share its noise, but not that of their own coordinates."""
        x, keys = torch.randn(TOKENS, IN), []
        for name in ("a", "b"):
            _, layer = layer_of("metis", i=IN, o=OUT, name=name, **STOCHASTIC)
            calls = record(layer)
            layer(x)
            keys.append([key_values(call.key) for call in calls])
        # Three parts of the input, three of the weight, the coordinates.
        assert [a == b for a, b in zip(*keys, strict=True)] == [True] * 3 + [False] * 4
        assert len(set(keys[0])) == 7

    @pytest.mark.parametrize(
        "options",
        [{"decompose": ("activation", "gradient")}, {"high_precision": ("forward",)}],
        ids=["weight left out", "forward in high precision"],
    )
    def test_is_off(self, options):
        _, layer = layer_of("metis", i=IN, o=OUT, **options, **NEAREST)
        assert not layer.scheme.corrects_coordinates
        assert not layer.eval_scheme.corrects_coordinates
        x = torch.randn(TOKENS, IN)
        assert torch.equal(layer(x), uncorrected(layer, x))

    @MODES
    def test_is_on_beside_a_backward_pass_in_high_precision(self, mode):
        _, layer = layer_of("metis", mode, i=IN, o=OUT, high_precision=("backward",))
        x = torch.randn(TOKENS, IN)
        assert not torch.equal(layer(x), uncorrected(layer, x))
