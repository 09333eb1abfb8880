"""The planner against reality: counted parameters, allocated moments, saved tensors, run FLOPs.

Tiny models, about a minute. Where nothing else is said the planned number is the exact one.
"""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
import transformers
from conftest import VOCAB, gpt2, llama
from design import cases, full_only
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.conversion.report import gemm_weights
from metis_hf.lab.planning.costs import layer_cost
from metis_hf.lab.planning.plan import (
    meta_model,
    parameter_counts,
    plan_run,
    saved_bytes,
    state_memory,
    step_costs,
)
from metis_hf.lab.planning.workload import DDP, FSDP2, Workload
from metis_hf.layers.make import convert_linear
from metis_hf.operands import Spectral
from metis_hf.schemes import Role, scheme_names

LOAD = Workload(tokens=10_000, sequence_length=64, global_batch=16, device_batch=2, world_size=4)
BLOCKS = 4  # the planner traces two and continues from there


def configs():
    for build in (llama, gpt2):
        config = copy.deepcopy(build().config)
        config.num_hidden_layers = BLOCKS
        yield config
    tied = copy.deepcopy(llama(tie_word_embeddings=True).config)
    tied.num_hidden_layers = BLOCKS
    yield tied


CONFIGS = {"llama": 0, "gpt2": 1, "llama-tied": 2}


@pytest.fixture(params=CONFIGS, ids=list(CONFIGS))
def config(request):
    return list(configs())[CONFIGS[request.param]]


def real_model(config, metis):
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32
    )
    return get_metis_model(model, metis)


@pytest.mark.parametrize(
    ("scheme", "split"), [("nvfp4", False), ("nvfp4", True), ("metis", False), ("metis", True)]
)
def test_parameters(config, scheme, split):
    metis = MetisConfig(scheme=scheme, split_weight=split)
    meta = meta_model(config)
    original = sum(p.numel() for p in meta.parameters())
    planned = parameter_counts(get_metis_model(meta, metis), original)
    plain = transformers.AutoModelForCausalLM.from_config(config)
    model = real_model(config, metis)
    assert planned["original"] == sum(p.numel() for p in plain.parameters())
    assert planned["total"] == sum(p.numel() for p in model.parameters())
    assert planned["converted"] == model.metis_report.converted_params
    layers = [layer for _, layer in metis_layers(model) if split]
    assert planned["split"] == sum(p.numel() for layer in layers for p in layer.weight_params())
    assert (planned["added"] > 0) == split
    assert planned["added"] == planned["total"] - planned["original"]
    assert all(p.is_meta for p in meta.parameters())


@pytest.mark.parametrize("split", [False, True])
def test_weights_gradients_and_moments(config, split):
    """Bytes that exist after one real AdamW step on one process."""
    metis = MetisConfig(split_weight=split)
    load = Workload(tokens=1000, sequence_length=32, global_batch=2, device_batch=2)
    meta = get_metis_model(meta_model(config), metis)
    planned = state_memory(meta, load, sharded=False)
    model = real_model(config, metis)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(2, 32, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()

    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    assert planned["weights"] == size(model.parameters())
    assert planned["gradients"] == size(p.grad for p in model.parameters())
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert planned["moments"] == size(state)
    assert "gradient_buckets" not in planned  # one process has none


@pytest.mark.parametrize("scheme", scheme_names())
def test_state_of_schemes(scheme):
    """Every buffer that the scheme adds to a model, and what its authors' settings come to."""
    config = next(configs())
    metis = MetisConfig(scheme=scheme)
    plain = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    others = {name for name, _ in plain.named_buffers()}
    model = real_model(config, metis)
    held = sum(
        buffer.numel() * buffer.element_size()
        for name, buffer in model.named_buffers()
        if name not in others
    )
    meta = get_metis_model(meta_model(config), metis)
    for sharded in (False, True):
        assert state_memory(meta, LOAD, sharded=sharded)["scheme_state"] == held
    if scheme == "tetrajet2":
        assert held == 12 * model.metis_report.converted_params
    elif scheme == "smoothquant":
        # Two ranges and a mark, for each layer.
        layers = [layer for _, layer in metis_layers(model)]
        assert held == sum(2 * 2 * 4 * layer.in_features + 4 for layer in layers)
    elif scheme in ("nvfp4", "metis", "omniquant"):
        assert held == 0


@pytest.mark.parametrize(
    ("scheme", "bf16", "checkpointing"),
    [
        ("bf16", False, False),
        ("bf16", True, False),
        ("nvidia", True, False),
        ("metis", False, False),
        pytest.param("metis", True, True, marks=[pytest.mark.slow, full_only]),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_saved_activations(name, scheme, bf16, checkpointing):
    """Against the saved tensors of a real forward pass, counted here on their own."""
    config = list(configs())[CONFIGS[name]]
    load = Workload(
        tokens=1000,
        sequence_length=48,
        global_batch=2,
        device_batch=2,
        bf16=bf16,
        checkpointing=checkpointing,
    )
    metis = MetisConfig(scheme=scheme)
    planned = saved_bytes(get_metis_model(meta_model(config), metis), load, sharded=False)
    total = planned.linears + planned.others + planned.weight_copies
    assert (planned.weight_copies > 0) == bf16  # of the output head, if of nothing else

    def saved(checkpointing):
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

    real = saved(checkpointing)
    if checkpointing:  # and one block's own, while it is computed again
        config.num_hidden_layers = BLOCKS + 1
        longer = saved(False)
        config.num_hidden_layers = BLOCKS
        real += longer - saved(False)
    assert total == real


def packed_bytes(model, tokens):
    """Every split x [t i] in NVFP4, once where layers read one tensor and split it alike.

    4.5 bits an element, columns padded to 16; three tensor scales.
    """
    readers = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    inputs = {}
    for name, layer in metis_layers(model):
        parent, _, own = name.rpartition(".")
        operand = layer.scheme.fprop_input
        inputs[parent, readers.get(own, own), operand] = layer.in_features
    total = 0
    for (_, _, operand), i in inputs.items():
        k, padded = operand.conditioner.rank, -(-i // 16) * 16
        elements = tokens * padded + tokens * -(-k // 16) * 16 + k * padded
        total += elements * 9 // 16 + 3 * 4 + 4 * k
    return total


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_saved_inside_converted_layers(sharded):
    """gemm.QuantizedGemm saves x [t i] and the factors of its split in NVFP4, and parameters."""
    config = next(configs())
    load = Workload(tokens=1000, sequence_length=48, global_batch=2, device_batch=2)
    model = get_metis_model(meta_model(config), MetisConfig())
    planned = saved_bytes(model, load, sharded=sharded)
    assert planned.linears == packed_bytes(model, 2 * 48)
    assert (planned.weight_copies == 0) == sharded  # gathered weights are bf16 already


LAYERS = [
    *({"scheme": scheme} for scheme in scheme_names()),
    *({"scheme": scheme, "split_weight": True} for scheme in ("metis", "nvidia", "omniquant")),
    {"scheme": "metis", "decompose": ("weight",)},
    {"scheme": "metis", "decompose": ("activation",)},
    {"scheme": "metis", "rank": 4, "oversample": 2},  # of 320 tokens, 107 sums of rows
    {"scheme": "svdquant", "split_weight": False},
]


@cases(
    {"options": LAYERS, "mode": [None, "contraction"]},
    rotated={"passes": [(), ("forward",), ("backward",)]},
    ids=lambda level: "-".join(map(str, level.values())) if isinstance(level, dict) else str(level),
)
def test_layer_flops(options, mode, passes):
    """Matrix products and factorizations of one layer; the counter knows no additions."""
    metis = MetisConfig(**options, operand_mode=mode, high_precision=passes)
    layer = convert_linear(nn.Linear(96, 160), metis, name="layer")
    x = torch.randn(320, 96, requires_grad=True)
    # The counter knows addmm, but not in place.
    others = {
        torch.ops.aten.addmm_: lambda y, a, b, **_: 2 * a[0] * a[1] * b[1],
        torch.ops.aten.linalg_cholesky_ex: lambda a, **_: a[0] ** 3 / 3,
        torch.ops.aten.linalg_solve_triangular: _solve_flops,
    }
    with FlopCounterMode(display=False, custom_mapping=others) as counter:
        layer(x).sum().backward()
    cost = layer_cost(layer, 320)
    additions = _additions(layer, 320)
    products = (
        cost.gemm + cost.subspace + cost.factorization + cost.projection + cost.low_rank
        + cost.corrections + cost.weight_factors + cost.rotation - additions
    )  # fmt: skip
    assert counter.get_total_flops() == pytest.approx(products, rel=1e-12)


def _solve_flops(factor, right, *, left=True, **_):
    return right[0] * right[1] * factor[0]


def _additions(layer, tokens):
    """The 2tc of the residual in `low_rank` for every spectral copy that the layer makes."""
    scheme, total = layer.scheme, 0
    for operand, width in (
        (scheme.fprop_input, layer.in_features),
        (scheme.wgrad_input, layer.in_features),
        (scheme.dgrad_grad_output, layer.out_features),
        (scheme.wgrad_grad_output, layer.out_features),
    ):
        total += 2 * tokens * width * _splits(operand)
    made = (scheme.resolve(role)[1] for role in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT))
    return total + 2 * layer.out_features * layer.in_features * sum(map(_splits, made))


def _splits(operand):
    spectral = operand is not None and isinstance(operand.conditioner, Spectral)
    return spectral and operand.quantizer is not None


def test_model_flops(config):
    """A dense model's step, GEMMs and attention, as the counter sees eager attention."""
    load = Workload(tokens=1000, sequence_length=48, global_batch=2, device_batch=2, bf16=False)
    meta = meta_model(config)
    gemms = gemm_weights(meta)
    get_metis_model(meta, MetisConfig(scheme="bf16"))
    planned = step_costs(meta, gemms, load)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.config._attn_implementation == "eager"
    ids = torch.zeros(2, 48, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert counter.get_total_flops() == sum(planned.values())
    dense = {"gemm", "other_gemm", "attention"}
    assert {name for name, value in planned.items() if value} == dense


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"keep_first_blocks": 3},
        {"exclude_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
    ids=str,
)
def test_blocks_are_recomputed_whole(changes):
    """Whatever is converted: a forward pass of all blocks, without the output head."""
    meta = meta_model(next(configs()))
    gemms = gemm_weights(meta)
    get_metis_model(meta, MetisConfig(scheme="bf16", **changes))
    load = dataclasses.replace(LOAD, checkpointing=True)
    planned = step_costs(meta, gemms, load)
    inside = sum(size for name, size in gemms.items() if name != "lm_head")
    expected = 2 * load.tokens_per_step * inside + planned["attention"] / 3
    assert planned["recomputation"] == expected


@pytest.mark.slow
def test_plan_adds_up():
    config = next(configs())
    loads = [dataclasses.replace(LOAD, world_size=world) for world in (1, 4)]
    one, four = (plan_run(config, MetisConfig(scheme="nvfp4"), load) for load in loads)
    assert one.flops == four.flops  # of all ranks
    assert one.quantizer_bytes == four.quantizer_bytes
    assert one.communication[FSDP2] == {"all_gather": 0, "reduce_scatter": 0}
    assert four.added_flops == four.flops["quantizers"] > 0  # nothing else in this scheme
    # Ring all-reduce of fp32 gradients over four ranks: 2 * 3/4 of 4P bytes.
    size = 4 * four.parameters["total"]
    assert four.communication[DDP] == {"all_reduce": 1.5 * size}
    assert four.memory[DDP]["gradient_buckets"] == size
    # In bf16: two blocks, the gradients of one and their copy; and the last norm and the head.
    block = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64
    assert four.memory[FSDP2]["gathered"] == 2 * (4 * block + 64 + VOCAB * 64)
    for memory in four.memory.values():  # in fp32 and bf16
        assert memory["loss_gradient"] == 2 * 64 * VOCAB * (4 + 2)
    values = json.loads(json.dumps(four.to_dict()))
    assert values["flops_total"] == pytest.approx(LOAD.steps * sum(values["flops"].values()))
    assert values["memory_total"][DDP] == sum(values["memory"][DDP].values())


@pytest.mark.slow
def test_planning_leaves_nothing_behind():
    """Tracing runs on tensors without values; none of them may stay in a cache."""
    meta = get_metis_model(meta_model(next(configs())), MetisConfig(scheme="metis-paper"))
    saved_bytes(meta, LOAD, sharded=False)
    model = real_model(next(configs()), MetisConfig(scheme="metis-paper"))
    ids = torch.zeros(2, 48, dtype=torch.long)
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    assert type(loss.data) is torch.Tensor
    assert torch.isfinite(loss)


def test_workload_numbers():
    assert LOAD.accumulation == 2
    assert LOAD.tokens_per_step == 1024
    assert LOAD.steps == 10  # 9.8 rounded up
    with pytest.raises(ValueError, match="multiple of 12"):
        Workload(tokens=1, sequence_length=1, global_batch=16, device_batch=3, world_size=4)
    with pytest.raises(ValueError, match="tokens=0"):
        Workload(tokens=0, sequence_length=1, global_batch=1, device_batch=1)


def test_blocks_that_differ_are_traced_whole():
    """Kept blocks save other tensors than converted ones."""
    config = next(configs())
    load = Workload(tokens=1000, sequence_length=48, global_batch=2, device_batch=2, bf16=False)
    metis = MetisConfig(keep_first_blocks=1, keep_last_blocks=1)
    model = get_metis_model(meta_model(config), metis)
    expected = packed_bytes(model, 2 * 48)
    assert saved_bytes(model, load, sharded=False).linears == expected
