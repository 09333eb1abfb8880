"""Plans of trainings against reality: parameters, moments, saved tensors, FLOPs of small models.

Where nothing else is said the planned number is the exact one.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json

import pytest
import torch
import transformers
from conftest import VOCAB, gpt2, llama
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.conversion.report import gemm_weights
from metis_hf.lab.cost import meta_model, model_overhead
from metis_hf.lab.rank_memory import Workload, saved_bytes, state_memory
from metis_hf.lab.training_plan import plan_training, print_plan, step_flops

LOAD = Workload(steps=10, sequence_length=64, global_batch=16, device_batch=2, world_size=4)
ONE = Workload(steps=10, sequence_length=48, global_batch=2, device_batch=2)
BLOCKS = 3  # two are traced, and continued from there
# Converted where tensors are traced, beside dense layers; two of a Llama's read one input.
TRACED = {"llama": ["q_proj", "k_proj"], "gpt2": ["c_attn", "c_fc"]}


def config_of(name):
    model = {"llama": llama, "gpt2": gpt2, "tied": lambda: llama(tie_word_embeddings=True)}[name]()
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = BLOCKS
    return config


def real_model(config, metis):
    config = copy.deepcopy(config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return get_metis_model(model, metis)


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(("name", "split"), [("llama", True), ("gpt2", False), ("tied", True)])
def test_weights_gradients_and_moments(name, split):
    """Bytes that exist after one real AdamW step on one process."""
    config, metis = config_of(name), MetisConfig(split_weight=split)
    planned = state_memory(get_metis_model(meta_model(config), metis), ONE, sharded=False)
    model = real_model(config, metis)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(2, 32, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert planned["weights"] == size(model.parameters())
    assert planned["gradients"] == size(p.grad for p in model.parameters())
    assert planned["moments"] == size(x for s in optimizer.state.values() for x in s.values())
    assert "gradient_buckets" not in planned  # one process has none


def test_state_of_schemes():
    config = config_of("llama")
    plain = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    others = {name for name, _ in plain.named_buffers()}
    for scheme in ("metis", "tetrajet2", "smoothquant"):
        metis = MetisConfig(scheme=scheme)
        held = size(b for n, b in real_model(config, metis).named_buffers() if n not in others)
        meta = get_metis_model(meta_model(config), metis)
        for sharded in (False, True):
            assert state_memory(meta, LOAD, sharded=sharded)["scheme_state"] == held
        assert (held > 0) == (scheme != "metis")


def really_saved(config, metis, bf16, checkpointing):
    """Bytes of the saved tensors of a real forward pass, counted here on their own."""
    model = real_model(config, metis)
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    kept, params = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    ids = torch.randint(0, config.vocab_size, (2, 48))
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
    ):
        model.train()(input_ids=ids, labels=ids)
    return sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in params)


@pytest.mark.parametrize(
    ("name", "scheme", "fmt", "bf16", "checkpointing"),
    [
        ("llama", "metis", "mxfp4", False, False),  # whose scales are not searched
        ("gpt2", "nvidia", None, True, False),
        pytest.param("llama", "metis", None, True, True, marks=pytest.mark.slow),
    ],
)
def test_saved_activations(name, scheme, fmt, bf16, checkpointing):
    config = config_of(name)
    metis = MetisConfig(scheme=scheme, format=fmt, target_modules=TRACED[name])
    load = dataclasses.replace(ONE, bf16=bf16, checkpointing=checkpointing)
    model = get_metis_model(meta_model(config), metis)
    planned = saved_bytes(model, load, sharded=False)
    real = really_saved(config, metis, bf16, checkpointing)
    if checkpointing:  # and one block's own, while it is computed again
        longer = copy.deepcopy(config)
        longer.num_hidden_layers = BLOCKS + 1
        real += really_saved(longer, metis, bf16, False) - really_saved(config, metis, bf16, False)
    assert sum(planned.values()) == real
    assert (planned["weight_copies"] > 0) == bf16  # of the output head, if of nothing else
    # Tracing runs on tensors without values; none of them may stay in a cache.
    ids = torch.zeros(1, 8, dtype=torch.long)
    loss = real_model(config, metis).train()(input_ids=ids, labels=ids).loss
    assert type(loss.data) is torch.Tensor
    assert torch.isfinite(loss)


def test_blocks_that_differ_are_traced_whole():
    """Kept blocks save other tensors than converted ones."""
    config = config_of("llama")
    ends = {"keep_first_blocks": 1, "keep_last_blocks": 1}
    metis = MetisConfig(scheme="nvfp4-rne", target_modules=TRACED["llama"], **ends)
    load = dataclasses.replace(ONE, bf16=False)
    planned = saved_bytes(get_metis_model(meta_model(config), metis), load, sharded=False)
    assert sum(planned.values()) == really_saved(config, metis, False, False)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_model_flops(name):
    """A dense model's step, GEMMs and attention, as the counter sees eager attention."""
    config = config_of(name)
    meta = meta_model(config)
    gemms = gemm_weights(meta)
    get_metis_model(meta, MetisConfig(scheme="nvfp4"))
    planned = step_flops(meta, gemms, ONE)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(2, 48, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert counter.get_total_flops() == sum(planned.values())
    assert [kind for kind, count in planned.items() if not count] == ["recomputation"]


def test_blocks_are_recomputed_whole():
    """Whatever is converted: a forward pass of all blocks, without the output head."""
    meta = meta_model(config_of("llama"))
    gemms = gemm_weights(meta)
    get_metis_model(meta, MetisConfig(scheme="bf16", target_modules=["q_proj", "lm_head"]))
    planned = step_flops(meta, gemms, dataclasses.replace(LOAD, checkpointing=True))
    inside = sum(count for name, count in gemms.items() if name != "lm_head")
    expected = 2 * LOAD.tokens_per_step * inside + planned["attention"] / 3
    assert planned["recomputation"] == expected


def test_a_plan_adds_up_and_is_printed():
    config = config_of("llama")
    metis = MetisConfig(scheme="bf16-split", exclude_modules=["q_proj"])
    plan = plan_training(config, metis, LOAD)
    model = real_model(config, metis)
    layers = [layer for _, layer in metis_layers(model)]
    inside = sum(layer.in_features * layer.out_features for layer in layers)
    assert plan.flops["gemm"] == 6 * LOAD.tokens_per_step * inside
    plain = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    assert plan.parameters == {
        "total": sum(p.numel() for p in model.parameters()),
        "original": sum(p.numel() for p in plain.parameters()),
        "converted": model.metis_report.converted_params,
    }
    assert plan.added_share == model_overhead(config, metis, 2 * 64).share
    split, sharded = plan.memory["DDP"], plan.memory["FSDP2"]
    assert split["gradient_buckets"] == 4 * plan.parameters["total"]
    # In bf16: two blocks, the gradients of one and their copy; and the last norm and the head.
    block = max(sum(p.numel() for p in b.parameters()) for b in model.model.layers)
    assert sharded["gathered"] == 2 * (4 * block + 64 + VOCAB * 64)
    assert sharded["loss_gradient"] == 2 * 64 * VOCAB * (4 + 2)  # in fp32 and bf16
    values = json.loads(json.dumps(plan.to_dict()))
    assert (values["steps"], values["accumulation"], values["tokens"]) == (10, 2, 10 * 1024)
    assert values["flops_total"] == 10 * sum(values["flops"].values())
    assert values["memory_total"]["DDP"] == sum(split.values())
    assert list(values["seconds"]) == ["h100", "h200", "cpu"]
    console = Console(record=True, width=100, file=io.StringIO())
    print_plan(plan, console, device="h200")
    text = console.export_text()
    assert f"{plan.parameters['original']:,}" in text
    assert "Time on 4 x H200, by Python │ about 1 min" in " ".join(text.split())
    assert "Warning" not in text
    # Ten steps of it are no time; ever so many of them are more than a week.
    long = dataclasses.replace(
        plan,
        workload=dataclasses.replace(LOAD, steps=10**12),
        memory={"DDP": {"weights": 2**40}, "FSDP2": {"weights": 2**38}},
    )
    print_plan(long, console, device="h200", runs=2)
    text = console.export_text()
    assert "of all 2 runs" in text
    assert "Warning: the training takes more than a week" in text
    assert "Warning: H200 has 139.8 GiB, which is too little for a rank" in text


def test_a_workload_that_cannot_be_cut():
    with pytest.raises(ValueError, match="multiple of 12"):
        Workload(steps=1, sequence_length=1, global_batch=16, device_batch=3, world_size=4)
    with pytest.raises(ValueError, match="steps=0; expected at least 1"):
        Workload(steps=0, sequence_length=1, global_batch=1, device_batch=1)


def test_models_that_cannot_be_planned_are_refused_by_name():
    for kind, options, found in (
        ("Gemma3", {}, "gemma3 has a text model among other parts"),
        ("T5", {"d_model": 32, "num_layers": 1}, "t5 has an encoder and a decoder"),
        ("Mamba", {}, "mamba has (no attention heads|layers of)"),
        ("Jamba", {}, "jamba has layers of"),
        ("Qwen3Next", {}, "qwen3_next has layers of linear_attention"),
        ("Mixtral", {"num_hidden_layers": 1, "hidden_size": 32}, "mixtral has fused experts"),
    ):
        config = getattr(transformers, f"{kind}Config")(**options)
        with pytest.raises(ValueError, match=found):
            plan_training(config, MetisConfig(), LOAD)


def test_checkpointing_of_unknown_blocks_is_refused():
    config = transformers.BioGptConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"BioGptForCausalLM does not say which .* are blocks"):
        plan_training(config, MetisConfig(), dataclasses.replace(LOAD, checkpointing=True))
