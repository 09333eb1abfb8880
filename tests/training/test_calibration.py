"""Static tensor scales: found on data, and frozen after training."""

from __future__ import annotations

import copy

import forked
import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import VOCAB, llama, mixtral
from tensors import assert_same
from torch import nn

from metis_hf import (
    MetisConfig,
    calibrate,
    get_metis_model,
    metis_layers,
)
from metis_hf.numerics import fake_quantize
from metis_hf.training import calibration
from metis_hf.training.calibration import TRIED_SHARES

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

    @pytest.mark.parametrize("method", ["amax", "percentile", "mse"])
    def test_the_order_of_batches_changes_nothing(self, method):
        first, second, third = ids(3, length=90)
        model = converted()
        found = [
            calibrate(model, iter(order), method=method)
            for order in ([first, second, third], [third, first, second])
        ]
        assert found[0] == found[1]

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
        model = get_metis_model(mixtral(), MetisConfig(scheme="w4a4"))
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
        found = calibrate(model, ids())
        assert found == calibrate(model, ids())
        assert modes == {name: module.training for name, module in model.named_modules()}
        assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
        assert not any(module._forward_pre_hooks for _, module in metis_layers(model))

    def test_weights_alone_need_no_batch(self, caplog):
        model = converted("w4a16")
        found = calibrate(model, [])
        assert all(scale.input_amax == 0 and scale.weight_amax > 0 for scale in found.values())
        assert calibrate(model, ids(1)) == found
        assert not caplog.text

    @pytest.mark.parametrize(
        "config", [{"scheme": "w4a16"}, {"scheme_pattern": {"up_proj": "w4a16"}}]
    )
    def test_weights_alone_of_a_layer_that_is_not_called(self, config, caplog):
        """Its weight is read: in high precision here, in four bits in an export."""
        model = converted(target_modules=["q_proj", "up_proj"], **config)
        block = model.model.layers[1].mlp
        block.up_proj.forward = None
        weight = block.up_proj.weight
        block.forward = lambda x: block.down_proj(block.gate_proj(x) * (x @ weight.T))
        calibrate(model, ids(1))
        assert "calibration called 3 of 4 converted layers, but not model.layers.1.mlp.up_proj" in (
            caplog.text
        )

    def test_saved_and_loaded(self, tmp_path):
        model = converted()
        calibrate(model, ids())
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        for (_, layer), (_, other) in zip(metis_layers(model), metis_layers(loaded), strict=True):
            assert_same(other.state_buffers(), layer.state_buffers())

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

    @pytest.mark.parametrize("method", ["mse", "percentile"])
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
            calibrate(model, ids(1))
        assert calibrated.scales_frozen == 0
        assert calibrated.input_amax == 0

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"method": "best"}, "method='best'; choose one of mse, amax, percentile"),
            ({"percentile": 30}, "percentile=30; expected a number above 50"),
            ({"batches": iter([])}, "calibration received no batch"),
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


def together(rank, folder, work):
    """One of two processes, which saves what it found."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    torch.save(work(rank), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def in_two(work, folder):
    """What each of two processes found."""
    others = [forked.start(together, rank, folder, work) for rank in range(2)]
    for other in others:
        other.join(200)
    torch.manual_seed(0)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def a_batch_each(rank):
    return calibrate(converted(), [ids(2)[rank]], method="mse")


def without(rank):
    """The second has no batch, or one that fails."""
    found = calibrate(converted(), [] if rank else ids(1), method="amax")
    try:
        calibrate(converted(), ["no ids"] if rank else ids(1), method="mse")
    except Exception as error:
        return found, f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_no_process_waits_for_one_that_failed(tmp_path):
    (one, failed), (same, reason) = in_two(without, tmp_path)
    assert one == same == calibrate(converted(), ids(1), method="amax")
    assert failed == f"RuntimeError: calibration failed in another process: {reason}"


@pytest.mark.slow
def test_processes_agree(tmp_path):
    first, second = in_two(a_batch_each, tmp_path)
    assert first == second == calibrate(converted(), ids(2), method="mse")
