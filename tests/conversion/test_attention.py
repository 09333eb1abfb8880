"""Attention of real architectures: hooked in, computed as their own, put back, saved."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from conftest import VOCAB, falcon, gpt2, llama
from design import some_slow
from tensors import logits
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from versions import OLD_TRANSFORMERS

from conversion.architectures import ARCHITECTURES
from conversion.attention_tools import (
    CONFIG,
    SLIDING,
    converted,
    left_padded,
    results,
    small,
    with_exact_operands,
)
from metis_hf import (
    MetisConfig,
    get_metis_model,
    high_precision,
    metis_layers,
    to_dense,
)
from metis_hf.conversion.attention import attention_products
from metis_hf.layers.attention import ProductOperands
from metis_hf.schemes import Role

EAGER_TOO = ("llama", "gpt2", "gemma3", "mixtral", "t5", "bert-masked")
CASES = [*((name, "sdpa") for name in ARCHITECTURES), *((name, "eager") for name in EAGER_TOO)]
# Caps, windows, sinks, biases, Conv1D, experts, two stacks, no causal mask: what differs.
QUICK = [*((name, "sdpa") for name in ("llama", "gemma3", "mixtral", "t5", "bert-masked")),
         ("gemma2", "sdpa"), ("gpt-oss", "sdpa"), ("gpt2", "eager"), ("t5", "eager")]  # fmt: skip


class TestArchitectures:
    """What masks, windows, caps, sinks and biases mean to the model's own attention."""

    @pytest.mark.parametrize(
        ("name", "implementation"), some_slow(CASES, [case for case in CASES if case not in QUICK])
    )
    def test_is_the_models_own_with_exact_operands(self, name, implementation):
        entry = ARCHITECTURES[name]
        dense = entry.build()
        if not dense._supports_sdpa:
            implementation = "eager"
        dense.set_attn_implementation(implementation)
        model = converted(copy.deepcopy(dense))
        batch = entry.batch()
        quantized = results(model, batch)
        with_exact_operands(model)
        for training in (True, False):
            exact = results(dense.train(training), batch)
            found = results(model.train(training), batch)
            for one, other in zip(found, exact, strict=True):
                # A bias of keys has no gradient but rounding errors.
                atol = 1e-9 + 1e-4 * other.abs().max().item()
                torch.testing.assert_close(one, other, rtol=1e-3, atol=atol)
        assert not torch.equal(quantized[0], exact[0])
        with torch.no_grad():  # back to the former implementation, to the bit
            before = dense(**batch).loss
            with high_precision(model):
                assert torch.equal(model(**batch).loss, before)
            assert torch.equal(to_dense(model)(**batch).loss, before)
        assert not list(attention_products(model))
        assert list(map(type, model.modules())) == list(map(type, dense.modules()))

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("Mistral", SLIDING),
            ("Gemma2", SLIDING | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4}),
            ("Qwen3", {"use_sliding_window": True, "max_window_layers": 0, **SLIDING}),
        ],
    )
    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    def test_windows_and_caps_that_bite(self, name, options, implementation, token_ids):
        if (name, implementation) == ("Gemma2", "sdpa") and OLD_TRANSFORMERS:
            pytest.skip("this version of transformers leaves the cap out")
        dense = small(name, **options)
        for parameter in dense.parameters():
            parameter.data.mul_(3.0)  # scores large enough for the cap
        if dense._supports_sdpa or implementation == "eager":
            dense.set_attn_implementation(implementation)
        whole = small(name, **options | {"sliding_window": 1000})
        whole.load_state_dict(dense.state_dict())
        model = converted(copy.deepcopy(dense))
        with_exact_operands(model)
        batch = left_padded(token_ids)
        with torch.no_grad():
            found, exact, other = (m.eval()(**batch).logits for m in (model, dense, whole))
        kept = batch["attention_mask"].bool()
        torch.testing.assert_close(found[kept], exact[kept], rtol=1e-3, atol=1e-3)
        assert (other[kept] - exact[kept]).abs().max() > 0.01


class TestSelection:
    def test_report_names_what_is_quantized(self):
        model = converted()
        assert "attention products: nvfp4-rne in 2 modules" in str(model.metis_report)
        assert model.metis_report.attention_modules == tuple(
            name for name, _ in attention_products(model)
        )
        assert model.metis_report.to_dict()["attention"]["scheme"] == "nvfp4-rne"
        plain = get_metis_model(llama(), MetisConfig(scheme="bf16"))
        assert "attention" not in str(plain.metis_report)
        assert "attention" not in plain.metis_report.to_dict()

    @pytest.mark.parametrize(
        "options",
        [
            {"keep_last_blocks": 1},
            {"target_modules": ["o_proj"], "layers_to_transform": [0]},
        ],
    )
    def test_what_stays_keeps_its_attention(self, options, token_ids):
        dense = llama().eval()
        model = converted(copy.deepcopy(dense), CONFIG.replace(**options))
        assert [name for name, _ in attention_products(model)] == ["model.layers.0.self_attn"]
        outputs: dict[int, list[torch.Tensor]] = {0: [], 1: []}
        given = torch.randn(2, 40, 64)
        positions = torch.arange(40)[None]
        for one in (dense, model):
            rotary = one.model.rotary_emb(given, positions)
            for index in outputs:
                attention = one.model.layers[index].self_attn
                with torch.no_grad():
                    outputs[index].append(attention(given, rotary, None)[0])
        assert torch.equal(*outputs[1])
        assert not torch.equal(*outputs[0])

    def test_falcons_attention_is_refused_by_name(self):
        model = falcon()
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(ValueError, match=r"self_attention \(FalconAttention\) does not call"):
            converted(model)
        assert before == {name: type(module) for name, module in model.named_modules()}

    def test_a_way_of_its_own_to_fp32_is_refused(self):
        with pytest.raises(ValueError, match="attn has reorder_and_upcast_attn=True"):
            converted(gpt2(reorder_and_upcast_attn=True))

    def test_no_attention_among_the_converted_layers(self):
        with pytest.raises(ValueError, match="no module of LlamaForCausalLM with a converted"):
            converted(llama(), CONFIG.replace(target_modules=["gate_proj"]))
        with pytest.raises(ValueError, match="no module of Sequential"):
            converted(torch.nn.Sequential(torch.nn.Linear(16, 16)))

    def test_scheme_is_refused_before_anything_changes(self):
        model = llama()
        with pytest.raises(ValueError, match="attention='metis' cannot be the scheme"):
            converted(model, CONFIG.replace(attention="metis"))
        assert not list(metis_layers(model))
        assert converted(model)

    def test_implementation_without_matrices_is_refused(self):
        model, implementation = llama(), "flex_attention"
        model.config._attn_implementation_internal = implementation
        with pytest.raises(ValueError, match=rf"masks that are matrices.*{implementation}"):
            converted(model)
        assert not list(metis_layers(model))
        model = converted(llama())
        model.config._attn_implementation_internal = implementation  # afterwards
        with pytest.raises(ValueError, match=rf"self_attn: .*{implementation}"):
            model.model.layers[0].self_attn(torch.randn(1, 4, 64), (torch.ones(1, 4, 16),) * 2)

    def test_implementation_without_a_conversion(self, token_ids):
        model = llama(attn_implementation="metis")
        with pytest.raises(ValueError, match="for converted attention modules"):
            model(input_ids=token_ids)

    def test_tensor_parallelism_is_refused(self, monkeypatch):
        monkeypatch.setattr("metis_hf.conversion.attention.planned", lambda _: {"tp_size": 2})
        with pytest.raises(NotImplementedError, match=r"attention='nvfp4-rne' .*not .*tensor"):
            converted()

    def test_registered(self):
        assert "metis" in ALL_ATTENTION_FUNCTIONS
        mask = ALL_MASK_ATTENTION_FUNCTIONS["metis"](batch_size=1, q_length=3, kv_length=3)
        assert torch.equal(mask[0, 0], torch.ones(3, 3, dtype=torch.bool).tril())


class TestCalls:
    def test_dropout_is_refused_in_training_only(self, token_ids):
        model = converted(llama(attention_dropout=0.1))
        assert logits(model, token_ids).isfinite().all()
        with pytest.raises(NotImplementedError, match=r"self_attn: dropout=0\.1 .*attn_pdrop"):
            model.train()(input_ids=token_ids)

    def test_terms_that_are_not_known_are_refused(self):
        attention = converted().model.layers[0].self_attn
        states = torch.randn(1, 4, 64), (torch.ones(1, 4, 16),) * 2
        with pytest.raises(NotImplementedError, match=r"self_attn passes indices to its attention"):
            attention(*states, indices=torch.zeros(1))
        exact = get_metis_model(llama(), MetisConfig(scheme="bf16", attention="bf16"))
        exact = exact.model.layers[0].self_attn
        with pytest.raises(NotImplementedError, match=r"self_attn passes indices to its attention"):
            exact(*states, indices=torch.zeros(1))  # which "sdpa" would pass over
        with pytest.raises(ValueError, match=r"mask has shape \(1, 4\)"):
            attention(*states, torch.ones(1, 4))

    def test_attentions_can_be_looked_at(self, token_ids):
        model = converted(llama(attn_implementation="eager")).eval()
        weights = model(input_ids=token_ids, output_attentions=True).attentions
        assert len(weights) == 2
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 4, 40))
        assert (weights[0].triu(1) == 0).all()

    def test_generation_quantizes_the_whole_cache(self, monkeypatch):
        """Each step multiplies one query with the quantized keys of the cache."""
        model = converted(config=CONFIG.replace(scheme="nvfp4-rne")).eval()
        calls = []
        original = ProductOperands.operand

        def operand(self, role, x):
            if role is Role.FPROP_WEIGHT:
                calls.append(tuple(x.shape[-2:]))
            return original(self, role, x)

        monkeypatch.setattr(ProductOperands, "operand", operand)
        ids = torch.randint(1, VOCAB, (2, 5))
        out = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert out.shape == (2, 9)
        shapes = [shape for n in (5, 6, 7, 8) for shape in [(n, 16), (16, n)] * 2]
        assert calls == shapes

    def test_static_cache(self):
        model = converted().eval()
        with_exact_operands(model)
        ids = torch.randint(1, VOCAB, (2, 5))
        options = {"max_new_tokens": 6, "do_sample": False}
        static = model.generate(ids, cache_implementation="static", **options)
        assert torch.equal(static, model.generate(ids, **options))
        assert torch.equal(static, to_dense(model).generate(ids, **options))


def test_to_dense_of_a_model_saves_without_a_trace(tmp_path, token_ids):
    model = to_dense(converted())
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert not re.search("metis|quantization_config", text)
    assert model.model.layers[0].self_attn.config is model.config
