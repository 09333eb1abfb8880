"""What a layer had before conversion goes with it: its places and its hooks."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from conftest import falcon, gpt2, llama
from tensors import logits
from torch import nn

from conversion.architectures import ARCHITECTURES
from metis_hf import MetisConfig, QuantLinear, calibrate, get_metis_model, metis_layers, to_dense

NAME = "model.layers.0.self_attn.q_proj"


def convert(model, **options):
    return get_metis_model(model, MetisConfig(**{"scheme": "nvfp4", **options}))


class TestHooks:
    def test_all_kinds_follow(self, token_ids):
        model, calls = llama(), []
        layer = model.get_submodule(NAME)

        def note(kind):
            return lambda *args, **kwargs: calls.append(kind)

        handles = [
            layer.register_forward_pre_hook(note("pre")),
            layer.register_forward_pre_hook(note("pre, kwargs"), with_kwargs=True),
            layer.register_forward_hook(note("post")),
            layer.register_forward_hook(note("post, kwargs"), with_kwargs=True),
            layer.register_forward_hook(note("post, always"), always_call=True),
            layer.register_full_backward_pre_hook(note("backward pre")),
            layer.register_full_backward_hook(note("backward")),
        ]

        def run():
            calls.clear()
            model(token_ids, labels=token_ids).loss.backward()
            return list(calls)

        expected = run()
        assert len(expected) == len(handles)
        convert(model)
        assert isinstance(model.get_submodule(NAME), QuantLinear)
        assert run() == expected
        to_dense(model)
        assert type(model.get_submodule(NAME)) is nn.Linear
        assert run() == expected
        convert(model)
        for handle in handles:
            handle.remove()
        assert run() == []

    def test_accelerate_s_follow(self, token_ids):
        """They are a forward pass put on the instance."""

        class Count(ModelHook):
            calls = 0

            def pre_forward(self, module, *args, **kwargs):
                self.calls += 1
                return args, kwargs

        model, hook = llama(), Count()
        add_hook_to_module(model.get_submodule(NAME), hook)
        for calls, change in enumerate((convert, to_dense, convert), start=1):
            change(model)
            model(token_ids)
            assert hook.calls == calls
        assert isinstance(model.get_submodule(NAME), QuantLinear)

    @pytest.mark.parametrize("kind", ["llama", "falcon"])
    def test_dispatched_models_convert(self, kind, token_ids):
        """device_map over several devices hooks every module, and offloads none."""
        plain = {"llama": llama, "falcon": falcon}[kind]()
        model = copy.deepcopy(plain).eval()
        dispatch_model(model, {"": "cpu"}, force_hooks=True)
        convert(model)
        layers = dict(metis_layers(model))
        assert len(layers) == len(convert(plain).metis_report.layers)
        assert all(isinstance(layer._hf_hook, AlignDevicesHook) for layer in layers.values())
        params = {name: id(param) for name, param in model.named_parameters()}
        expected = logits(plain, token_ids)
        assert torch.equal(logits(model, token_ids), expected)
        assert {name: id(param) for name, param in model.named_parameters()} == params
        to_dense(model)
        dense = [model.get_submodule(name) for name in layers]
        assert all(layer._old_forward.__self__ is layer for layer in dense)
        kinds = {type(layer).__name__ for layer in dense}
        assert kinds == {"Linear" if kind == "llama" else "FalconLinear"}

    def test_a_forward_pass_of_the_instance_stays(self, token_ids):
        model = llama()
        layer = model.get_submodule(NAME)
        forward = layer.forward
        layer.forward = lambda x: 0 * forward(x)
        expected = logits(model, token_ids)
        converted = logits(convert(model, scheme="bf16"), token_ids)
        torch.testing.assert_close(converted, expected)
        reason = "its forward pass was replaced (module.forward = ...)"
        assert model.metis_report.skipped[NAME] == reason

    def test_a_forward_pass_over_accelerate_s_stays(self):
        model = llama()
        layer = model.get_submodule(NAME)
        add_hook_to_module(layer, ModelHook())
        forward = layer.forward
        layer.forward = lambda x: 0 * forward(x)
        assert "replaced" in convert(model).metis_report.skipped[NAME]


class TestOffloaded:
    MESSAGE = r"q_proj: its weight is offloaded .*Load the model without device_map, convert it"

    def test_by_accelerate(self):
        model = cpu_offload(llama(), execution_device="cpu")
        with pytest.raises(ValueError, match=self.MESSAGE):
            convert(model, scheme="metis-paper")
        assert type(model.get_submodule(NAME)) is nn.Linear

    @pytest.mark.parametrize("early", [False, True])
    def test_by_device_map(self, early, tmp_path):
        llama().save_pretrained(tmp_path / "model")
        places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu",
                  "lm_head": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}  # fmt: skip
        options = {"device_map": places, "offload_folder": tmp_path / "offload"}
        load = transformers.AutoModelForCausalLM.from_pretrained
        if early:
            with pytest.raises(ValueError, match=self.MESSAGE):
                load(tmp_path / "model", quantization_config=MetisConfig(scheme="bf16"), **options)
            return
        model = load(tmp_path / "model", **options)
        with pytest.raises(ValueError, match=self.MESSAGE):
            convert(model)
        convert(model, modules_to_not_convert=["model.layers.0"])  # as the message says
        assert len(list(metis_layers(model))) == 7

    def test_to_dense(self, tmp_path):
        convert(llama(), split_weight=True, rank=4).save_pretrained(tmp_path / "model")
        places = {"model": "disk", "lm_head": "cpu"}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
        )
        with pytest.raises(ValueError, match=r"q_proj is offloaded .*call to_dense there"):
            to_dense(model)

    def test_without_hooks(self):
        model = llama()
        model.get_submodule(NAME).to("meta")
        with pytest.raises(ValueError, match=self.MESSAGE):
            convert(model)


class Twice(nn.Module):
    """One layer in two places."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32, bias=False)
        self.b = self.a
        self.c = nn.ModuleList([nn.Linear(32, 32), self.a])

    def forward(self, x):
        return self.c[0](self.b(self.a(x)))


class TestSeveralPlaces:
    @pytest.mark.parametrize(
        ("options", "split"),
        [
            ({}, True),
            ({"target_modules": ["b", "0"]}, False),
            ({"target_modules": r"c\.1"}, True),
        ],
    )
    def test_all_are_replaced(self, options, split):
        model = Twice()
        convert(model, split_weight=split, rank=2, **options)
        assert type(model.a) is not nn.Linear
        assert model.a is model.b is model.c[1]
        assert len(model.metis_report.layers) == len(list(metis_layers(model)))
        assert "a" not in model.metis_report.skipped
        model(torch.randn(4, 32)).sum().backward()
        to_dense(model)
        assert type(model.a) is nn.Linear
        assert model.a is model.b is model.c[1]

    def test_any_name_excludes_and_has_patterns(self):
        model = convert(Twice(), exclude_modules=["b"])
        assert model.metis_report.skipped == {"a": "excluded by exclude_modules"}
        assert type(model.b) is nn.Linear
        model = convert(Twice(), scheme_pattern={"b": "bf16"})
        assert model.a.config.scheme == "bf16"

    def test_a_tied_weight_is_still_one(self):
        model = Twice()
        model.c[0].weight = model.a.weight
        convert(model, target_modules=["a"])
        with pytest.raises(ValueError, match=r"selects no layer|tied"):
            convert(to_dense(model))
        with pytest.raises(ValueError, match=r"a shares its weight with c\.0"):
            convert(model, target_modules=["a"], split_weight=True, rank=2)

    def test_a_model_that_is_one_layer(self):
        with pytest.raises(
            ValueError, match=r"the model is a single Linear, .*torch.nn.Sequential"
        ):
            convert(nn.Linear(32, 32))


class TestFastPath:
    """torch's encoder layers read weights in evaluation, and call no layer."""

    @pytest.mark.parametrize(("nested", "split"), [(False, True), (True, False)])
    def test_converted_layers_run(self, nested, split):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
        x, padding = torch.randn(2, 16, 64), torch.zeros(2, 16, dtype=torch.bool)
        padding[1, 10:] = True

        def run():
            return model(x, src_key_padding_mask=padding)[~padding]

        with torch.no_grad():
            dense = run()
        convert(model, split_weight=split, rank=4)
        assert len(list(metis_layers(model))) == 4
        with torch.no_grad():
            quantized = run()
        assert torch.equal(quantized, run())
        assert (quantized - dense).abs().max() > 1e-2
        to_dense(model)
        assert model.use_nested_tensor is nested
        assert not any(module._forward_pre_hooks for module in model.modules())
        with torch.no_grad():
            torch.testing.assert_close(run(), dense)


SPLITS = [("nvfp4", None), ("metis", True), ("svdquant", None), ("omniquant", None)]


def parameters(model):
    """The weights that a model has as a plain one, by name."""
    return dict(to_dense(copy.deepcopy(model)).named_parameters())


class TestInitializers:
    """`model.apply(function)`: linear layers are looked for by their class."""

    @pytest.mark.parametrize(("scheme", "split"), SPLITS)
    @pytest.mark.parametrize("kind", ["llama", "gpt2"])
    def test_converted_layers_are_drawn_as_plain_ones(self, kind, scheme, split):
        """From the same generator; GPT-2 has Conv1D layers, with biases."""
        plain = llama() if kind == "llama" else gpt2()
        model = convert(copy.deepcopy(plain), scheme=scheme, split_weight=split)
        before = parameters(model)
        exact = not next(metis_layers(model))[1].weight_form.is_split
        if kind == "gpt2" and not exact:  # it writes to weights through their blocks
            with pytest.raises(NotImplementedError, match=r"c_proj stores its weight in factors"):
                model.apply(model._init_weights)
            return
        for each in (plain, model):
            torch.manual_seed(1)
            each.apply(each._init_weights)
        for name, drawn in parameters(model).items():
            expected = plain.get_parameter(name)
            torch.testing.assert_close(drawn, expected, rtol=0, atol=0 if exact else 1e-7)
            if expected.dim() == 2 and "wte" not in name:
                assert not torch.equal(drawn, before[name]), name

    @pytest.mark.parametrize(("scheme", "split"), SPLITS)
    @pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
    def test_fused_experts_are_drawn(self, kind, scheme, split):
        model = convert(ARCHITECTURES[kind].build(), scheme=scheme, split_weight=split)
        before, copied = parameters(model), copy.deepcopy(model)
        copied.apply(copied._init_weights)
        for name, kept in parameters(model).items():
            assert torch.equal(kept, before[name])  # the copy is another model
            if name.endswith(("gate_up_proj", "down_proj")):
                drawn = parameters(copied)[name]
                assert drawn.std().item() == pytest.approx(model.config.initializer_range, rel=0.1)
                assert not torch.equal(drawn, kept)
        seen = []
        model.apply(lambda module: seen.append(len(module._parameters)))
        assert len(seen) > 20
        plain = to_dense(model)
        plain.apply(plain._init_weights)

    @pytest.mark.parametrize(("scheme", "split"), SPLITS)
    def test_functions_of_one_s_own(self, scheme, split):
        """That write through `data`, and that know nothing of the class."""

        def half(module):
            if isinstance(module, nn.Linear):
                module.weight.data.fill_(0.5)

        def double(module):
            for parameter in module.parameters(recurse=False):
                parameter.data.mul_(2)

        model = convert(llama(1), scheme=scheme, split_weight=split)
        before = parameters(model)[f"{NAME}.weight"]
        seen = []
        model.apply(lambda module: seen.append(type(module)))
        assert nn.Linear in seen
        torch.testing.assert_close(parameters(model)[f"{NAME}.weight"], before, rtol=0, atol=0)
        model.apply(half)
        drawn = parameters(model)[f"{NAME}.weight"]
        torch.testing.assert_close(drawn, torch.full_like(drawn, 0.5), rtol=0, atol=1e-6)
        layer = model.get_submodule(NAME)
        weight = layer.weight_params()[-1].detach().clone()
        model.apply(double)  # once, not as itself and as a linear layer
        assert torch.equal(layer.weight_params()[-1], 2 * weight)

    def test_state_begins_again(self, token_ids):
        """Scales are of the weights that were there before."""
        model = convert(llama(1), scheme="w4a4")
        calibrate(model, [token_ids])
        layer = model.get_submodule(NAME)
        assert layer.scales_frozen
        model.apply(lambda module: None)
        assert layer.scales_frozen
        model.apply(model._init_weights)
        assert not any(buffer.any() for buffer in layer.state_buffers().values())

    @pytest.mark.parametrize(("scheme", "split"), SPLITS)
    def test_a_model_without_memory_is_filled(self, scheme, split, token_ids):
        """Converted on the meta device, and then drawn."""
        with torch.device("meta"):
            model = convert(llama(1), scheme=scheme, split_weight=split)
        model.apply(model._init_weights)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        model.apply(model._init_weights)
        assert all(layer.to_dense().weight.std() > 0.01 for _, layer in metis_layers(model))
