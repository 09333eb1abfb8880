"""Static tensor scales: found on data, frozen after training, and what the layers do with them."""

from __future__ import annotations

import copy

import forked
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from conftest import VOCAB, llama
from layers.layer_tools import layer_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from metis_hf import (
    MetisConfig,
    calibrate,
    get_metis_model,
    metis_layers,
)
from metis_hf.monitoring.health import operand_health
from metis_hf.noise import Key
from metis_hf.numerics import fake_quantize
from metis_hf.training import calibration
from metis_hf.training.calibration import TRIED_SHARES

IN, OUT, TOKENS = 70, 48, 40
FP32 = {"rtol": 1e-5, "atol": 1e-6}
JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("query", "key", "value"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


def converted(scheme="w4a4", **options):
    return get_metis_model(llama(), MetisConfig(scheme=scheme, **options))


def ids(batches=3, seed=1, length=40):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (2, length), generator=g) for _ in range(batches)]


def inputs_of(model, batches):
    """What each layer reads when its inputs are quantized under their own amax."""
    seen = {name: [] for name, _ in metis_layers(model)}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0]))
        for name, layer in metis_layers(model)
    ]
    with torch.no_grad():
        for batch in batches:
            model.eval()(batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat([x.reshape(-1, x.shape[-1]) for x in xs]) for name, xs in seen.items()}


def group_of(name, names):
    parent, _, own = name.rpartition(".")
    together = next((group for group in JOINED if own in group), (own,))
    return [f"{parent}.{other}" for other in together if f"{parent}.{other}" in names]


class TestLayer:
    """The forward pass of a deployed layer, and its straight-through gradient."""

    def fixed(self, scheme, amax=2.0):
        layer = layer_of(scheme, i=IN, o=OUT)[1]
        layer.input_amax.fill_(amax)
        layer.weight_amax.fill_(layer.weight.abs().max() * 1.5)
        layer.scales_frozen.fill_(1)
        return layer

    @pytest.mark.parametrize("scheme", ["w4a4", "w4a16"])
    @pytest.mark.parametrize("training", [True, False])
    def test_by_definition(self, scheme, training):
        layer = self.fixed(scheme).train(training)
        x = (3 * torch.randn(TOKENS, IN)).requires_grad_()
        w = layer.weight.detach().clone().requires_grad_()
        x_hat = x if scheme == "w4a16" else fake_quantize(x, amax=torch.tensor(2.0))
        w_hat = fake_quantize(w, scale_rule="search", amax=layer.weight_amax)
        expected = F.linear(x_hat, w_hat, layer.bias)
        dy = torch.randn(TOKENS, OUT)
        gradients = torch.autograd.grad(expected, (x, w), dy)
        found = layer(x)
        torch.testing.assert_close(found, expected, **FP32)
        for a, b in zip(torch.autograd.grad(found, (x, layer.weight), dy), gradients):
            torch.testing.assert_close(a, b, **FP32)

    def test_bf16_keeps_the_tensor_scales_apart(self):
        """As the hardware does: codes times block scales, and one fp32 factor at the end."""
        layer = self.fixed("w4a4").to(torch.bfloat16)
        x = torch.randn(TOKENS, IN).bfloat16()
        x_hat = fake_quantize(x.float(), amax=layer.input_amax)
        w_hat = fake_quantize(layer.weight.detach().float(), scale_rule="search",
                              amax=layer.weight_amax)  # fmt: skip
        exact = F.linear(x_hat, w_hat, layer.bias.float())
        rounding = (layer(x).float() - exact).norm() / exact.norm()
        assert rounding < 2.0**-8  # of the output to bf16

    def test_until_they_are_frozen_nothing_is_clipped(self):
        layer = layer_of("w4a4", i=IN, o=OUT)[1]
        first, second = torch.randn(TOKENS, IN), 5 * torch.randn(TOKENS, IN)
        for x in (first, second, first):
            layer(x)
        assert layer.input_amax == second.abs().max()
        with torch.no_grad():
            found = layer(first)
        x_hat = fake_quantize(first)  # under its own scale
        w_hat = fake_quantize(layer.weight.detach(), scale_rule="search")
        torch.testing.assert_close(found, F.linear(x_hat, w_hat, layer.bias), **FP32)

    def test_what_is_not_finite_is_not_remembered(self):
        layer = layer_of("w4a4", i=IN, o=OUT)[1]
        x = torch.randn(TOKENS, IN)
        x[0, 0] = torch.inf
        layer(x)
        assert layer.input_amax == 0

    def test_frozen_scales_stay(self):
        layer = self.fixed("w4a4")
        before = {name: value.clone() for name, value in layer.state_buffers().items()}
        layer(100 * torch.randn(TOKENS, IN)).sum().backward()
        assert all(
            torch.equal(before[name], value) for name, value in layer.state_buffers().items()
        )

    @pytest.mark.parametrize(("frozen", "scans"), [(False, 2), (True, 0)])
    def test_scans_of_a_call(self, frozen, scans, monkeypatch):
        """The input and the weight once each in training, and nothing once scales are fixed."""
        from metis_hf.schemes import states

        layer = self.fixed("w4a4") if frozen else layer_of("w4a4", i=IN, o=OUT)[1]
        scanned = []
        original = states.largest_magnitude
        monkeypatch.setattr(
            states, "largest_magnitude", lambda x: scanned.append(x.shape) or original(x)
        )
        layer(torch.randn(TOKENS, IN)).sum().backward()
        assert len(scanned) == scans
        assert len(set(scanned)) == scans

    def test_a_recomputed_call_has_the_scale_of_the_first(self):
        """Another raises the buffer before the backward pass recomputes it."""
        layer = layer_of("w4a4", i=IN, o=OUT)[1]
        first = torch.randn(TOKENS, IN).requires_grad_()
        expected = torch.autograd.grad(layer(first).square().sum(), (first, layer.weight))
        y = checkpoint(layer, first, use_reentrant=False)
        layer(50 * torch.randn(TOKENS, IN))
        found = torch.autograd.grad(y.square().sum(), (first, layer.weight))
        assert all(map(torch.equal, found, expected))

    def test_a_move_that_fails_leaves_the_state_as_it_was(self):
        """A device without memory; casts see the state as integers meanwhile."""
        layer = self.fixed("w4a4")

        def full(tensor):
            raise torch.OutOfMemoryError("a test")

        with pytest.raises(torch.OutOfMemoryError):
            layer._apply(full)
        assert layer.input_amax.dtype is torch.float32
        assert layer.input_amax == 2

    def test_health_measures_under_the_fixed_scale(self):
        layer = self.fixed("w4a4", amax=0.25)
        x = torch.randn(TOKENS, IN)
        operand = layer.active_scheme().fprop_input.bind(layer.call_state(x, layer.call_keys(x)))
        found = operand_health(x, operand, rank=4, key=Key(0))
        beyond = (x.abs() > 0.25 * (1 + 1e-5)).float().mean().item()  # up to 448 * 6 * 0.25 / 2688
        assert found["saturated"] == pytest.approx(beyond, abs=0.02)

    def test_micro_batches_keep_the_scale_of_their_call(self):
        """A later one raises the buffer before the backward pass of the first."""
        layer = layer_of("w4a4", i=IN, o=OUT)[1]
        first = torch.randn(TOKENS, IN).requires_grad_()
        expected = torch.autograd.grad(layer(first).square().sum(), (first, layer.weight))
        y = layer(first)
        layer(50 * torch.randn(TOKENS, IN))
        found = torch.autograd.grad(y.square().sum(), (first, layer.weight))
        assert all(map(torch.equal, found, expected))


class TestCalibrate:
    @pytest.mark.parametrize("method", ["amax", "percentile", "mse"])
    def test_by_definition(self, method):
        model, batches = converted(), ids()
        seen = inputs_of(model, batches)
        found = calibrate(model, batches, method=method, percentile=99.0)
        assert found.keys() == seen.keys()
        for name, layer in metis_layers(model):
            group = group_of(name, seen)
            assert found[name].group == tuple(group)
            assert layer.scales_frozen == 1
            weights = [dict(metis_layers(model))[member].weight for member in group]
            assert layer.weight_amax == max(weight.abs().max() for weight in weights)
            largest = seen[name].abs().max()
            assert found[name].largest == largest
            if method == "amax":
                expected = largest
            elif method == "percentile":
                parts = seen[name].abs().view(len(batches), -1).sort(1).values
                expected = parts[:, round(0.99 * parts.shape[1]) - 1].max()
            else:

                def error(amax, x=seen[name]):
                    return (fake_quantize(x, amax=amax) - x).double().square().sum().item()

                expected = min((largest * share for share in TRIED_SHARES), key=error)
            torch.testing.assert_close(layer.input_amax, expected.detach())

    def test_layers_deployed_as_one_share_scales(self):
        model = converted()
        found = calibrate(model, ids())
        one = found["model.layers.0.self_attn.q_proj"]
        assert [name.rpartition(".")[2] for name in one.group] == ["q_proj", "k_proj", "v_proj"]
        for name in one.group:
            assert (found[name].input_amax, found[name].weight_amax) == (
                one.input_amax,
                one.weight_amax,
            )

    def test_rows_of_padding_are_left_out(self):
        model, batch = converted(), ids(1)[0]
        mask = torch.ones_like(batch)
        mask[:, 3:] = 0
        name = "model.layers.0.mlp.down_proj"  # its input is not normalized
        whole, cut, masked = (
            calibrate(model, [each], method="amax")[name].input_amax
            for each in (
                batch, batch[:, :3], {"input_ids": batch, "attention_mask": mask},
            )
        )  # fmt: skip
        assert masked == pytest.approx(cut, rel=0.1)  # what is read upstream has another amax
        assert whole != pytest.approx(cut, rel=0.1)

    def test_rows_of_padding_reach_no_expert(self):
        config = transformers.MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=2,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(config)
        get_metis_model(model, MetisConfig(scheme="w4a4"))
        batch = ids(1)[0] % 64
        mask = torch.ones_like(batch)
        mask[:, 20:] = 0

        def of_experts(pad):
            padded = torch.where(mask.bool(), batch, pad)
            found = calibrate(model, [{"input_ids": padded, "attention_mask": mask}])
            return {name: scale.input_amax for name, scale in found.items() if "experts" in name}

        assert of_experts(3) == of_experts(7) != {}

    def test_the_model_stays_as_it_was(self):
        model = converted().train()
        model.model.layers[0].mlp.eval()
        modes = {name: module.training for name, module in model.named_modules()}
        before = {name: value.clone() for name, value in model.named_parameters()}
        calibrate(model, ids())
        assert modes == {name: module.training for name, module in model.named_modules()}
        assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
        assert not any(module._forward_pre_hooks for _, module in metis_layers(model))

    def test_again_is_the_same(self):
        model = converted()
        assert calibrate(model, ids()) == calibrate(model, ids())

    def test_weights_alone_need_no_batch(self):
        model = converted("w4a16")
        found = calibrate(model, [])
        assert all(scale.input_amax == 0 and scale.weight_amax > 0 for scale in found.values())

    def test_saved_and_loaded(self, tmp_path):
        model = converted()
        calibrate(model, ids())
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        for (name, layer), (_, other) in zip(
            metis_layers(model), metis_layers(loaded), strict=True
        ):
            for key, value in layer.state_buffers().items():
                assert torch.equal(value, other.get_buffer(key)), f"{name}.{key}"

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_layer_without_finite_inputs_is_named(self, value):
        """A scale of nothing would saturate all that it gets; zeros are inputs like others."""
        model, name = converted(), "model.layers.0.mlp.down_proj"
        for given in (0.0, value):
            hook = model.get_submodule(name).register_forward_pre_hook(
                lambda _, args, given=given: (torch.full_like(args[0], given),)
            )
            if given == 0:
                assert calibrate(model, ids(), method="amax")[name].input_amax == 0
            else:
                with pytest.raises(ValueError, match=rf"{name}.* saw .* NaN or inf in every batch"):
                    calibrate(model, ids())
            hook.remove()

    @pytest.mark.parametrize("method", ["mse", "amax", "percentile"])
    def test_a_batch_that_is_not_finite_is_left_out(self, method, monkeypatch):
        """In both passes: the scale is that of the other batches."""
        monkeypatch.setattr(calibration, "TRIED_SHARES", (1e9, 1.0))  # the worst first
        first, bad, last = ids(3)

        def spoil(_, args, embedded):
            return embedded * torch.inf if torch.equal(args[0], bad) else embedded

        found, start = [], converted()
        for batches in ([first, bad, last], [first, last]):
            model = copy.deepcopy(start)
            model.get_input_embeddings().register_forward_hook(spoil)
            found.append(calibrate(model, batches, method=method))
        assert found[0] == found[1]
        assert all(each.input_amax <= each.largest for each in found[0].values())

    def test_a_layer_without_tokens_is_named(self):
        model = converted()

        class Never(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return torch.zeros(*x.shape[:-1], self.inner.out_features)

        model.model.layers[1].mlp.up_proj = Never(model.model.layers[1].mlp.up_proj)
        calibrated = dict(metis_layers(model))["model.layers.0.mlp.up_proj"]
        match = r"model.layers.1.mlp.up_proj.inner saw no token.*exclude_modules"
        with pytest.raises(ValueError, match=match):
            calibrate(model, ids())
        assert calibrated.scales_frozen == 0
        assert calibrated.input_amax == 0

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"method": "best"}, "method='best'; choose one of mse, amax, percentile"),
            ({"percentile": 30}, "percentile=30; expected more than 50"),
            ({"batches": iter([])}, "'mse' reads the batches twice.*pass a list"),
            ({"batches": [], "method": "amax"}, "calibration got no batch"),
        ],
    )
    def test_bad_input(self, options, match):
        with pytest.raises(ValueError, match=match):
            calibrate(converted(), **{"batches": ids(1), **options})

    def test_a_model_without_static_scales(self):
        with pytest.raises(
            ValueError, match=r"no layer with static tensor scales.*scheme=\"w4a4\""
        ):
            calibrate(converted("nvfp4"), ids(1))


def process(rank, folder):
    """One of two processes that calibrate on a batch each."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    found = calibrate(converted(), [ids(2)[rank]], method="mse")
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def process_without(rank, folder):
    """One of two processes, of which the second has no batch, or one that fails."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    found = [calibrate(converted(), [] if rank else ids(1), method="amax")]
    try:
        calibrate(converted(), ["no ids"] if rank else ids(1), method="mse")
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_no_process_waits_for_one_that_failed(tmp_path):
    others = [forked.start(process_without, rank, tmp_path) for rank in range(2)]
    for other in others:
        other.join(200)
    (one, failed), (same, reason) = (
        torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(2)
    )
    torch.manual_seed(0)
    assert one == same == calibrate(converted(), ids(1), method="amax")
    assert failed == f"RuntimeError: calibration failed in another process: {reason}"


@pytest.mark.slow
def test_processes_agree(tmp_path):
    others = [forked.start(process, rank, tmp_path) for rank in range(2)]
    for other in others:
        other.join(200)
    first, second = (torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(2))
    assert first == second
    torch.manual_seed(0)
    assert first == calibrate(converted(), ids(2), method="mse")
