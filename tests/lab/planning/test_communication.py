"""Planned bytes that processes send, against collectives that only count."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import transformers
from rich.console import Console

from lab.planning.test_planning import CONFIGS
from metis_hf import MetisConfig
from metis_hf.lab.planning.plan import plan_run
from metis_hf.lab.planning.tables import print_plan
from metis_hf.lab.planning.workload import TP, Workload

FSDP2_PROBE = """
import sys, torch, torch.distributed as dist, transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from metis_hf import MetisConfig, get_metis_model
from metis_hf.lab.planning.communication import communication
from metis_hf.lab.cost import meta_model
from metis_hf.lab.planning.plan import state_memory
from metis_hf.lab.planning.workload import FSDP2, Workload
from lab.planning.test_planning import BLOCKS, configs

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
sent = dict(all_gather=0, reduce_scatter=0)
def counted(name, kind):
    real = getattr(dist, name)
    def call(*args, **kwargs):
        a, b = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)][:2]
        sent[kind] += abs(a.numel() - b.numel()) * a.element_size()
        return real(*args, **kwargs)
    setattr(dist, name, call)
new = hasattr(dist, "all_gather_single")  # torch >= 2.13
counted("all_gather_single" if new else "all_gather_into_tensor", "all_gather")
counted("reduce_scatter_single" if new else "reduce_scatter_tensor", "reduce_scatter")

config = list(configs())[int(sys.argv[1])]
load = Workload(tokens=1000, sequence_length=32, global_batch=16, device_batch=2, world_size=4)
meta = get_metis_model(meta_model(config), MetisConfig())
planned = communication(meta, load)[FSDP2]
weights = state_memory(meta, load, sharded=True)["weights"]
model = get_metis_model(transformers.AutoModelForCausalLM.from_config(config), MetisConfig())
mesh = dist.init_device_mesh("cpu", (4,))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
# As accelerate.utils.fsdp_utils.fsdp2_prepare_model does it.
blocks = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
assert len(blocks) == BLOCKS
for block in blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
tied = embedding.weight is head.weight
if not tied:
    fully_shard(embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
tail = [embedding, head] if tied else [head]
fully_shard(tail, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
fully_shard(model, mesh=mesh, mp_policy=policy)
held = sum(p.to_local().numel() * 4 for p in model.parameters())
ids = torch.zeros(2, 32, dtype=torch.long)
for _ in range(load.accumulation):
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
print(weights, held)
for kind, size in sent.items():
    print(planned[kind], size)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_fsdp2_shards_and_communication(name):
    """The first of four ranks, with collectives that only count.

    Communication is planned without the padding of tensors whose first dimension four does not
    divide, hence the tolerance of 2 %.
    """
    command = [sys.executable, "-c", FSDP2_PROBE, str(CONFIGS[name])]
    out = subprocess.run(command, capture_output=True, text=True, check=False, cwd="tests")
    assert out.returncode == 0, out.stderr
    lines = [tuple(map(float, line.split())) for line in out.stdout.splitlines()[-3:]]
    assert lines[0][0] == lines[0][1]
    for planned, real in lines[1:]:
        assert planned == pytest.approx(real, rel=0.02)


TP_PROBE = """
import collections, os, sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from metis_hf import MetisConfig, get_metis_model
from metis_hf.lab.planning.communication import tensor_parallel
from metis_hf.lab.cost import meta_model
from lab.planning.test_communication import tp_config, tp_load

out, scheme, bf16, checkpointing = sys.argv[1], sys.argv[2], *(a == "True" for a in sys.argv[3:])
os.environ.update(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0")
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
load = tp_load(bf16, checkpointing)
config = MetisConfig(scheme=scheme)
planned = tensor_parallel(get_metis_model(meta_model(tp_config()), config), load)
model = get_metis_model(AutoModelForCausalLM.from_config(tp_config()), config)
model.save_pretrained(out)
model = AutoModelForCausalLM.from_pretrained(out, distributed_config=DistributedConfig(tp_size=4))
sent = collections.Counter()

class Counted(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        size = sum(t.numel() * t.element_size() for t in tensors)
        if "all_reduce.default" in str(func) or "allreduce_" in str(func):  # 2 * 3/4
            sent["scales" if tensors[0].dim() == 1 else "outputs"] += 1.5 * size
        elif "all_gather_into_tensor" in str(func):  # three times its own quarter
            sent["logits"] += 3 * size
        elif "c10d" in str(func):
            assert "wait_tensor" in str(func) or "_wrap_tensor" in str(func), func
        return func(*args, **(kwargs or {}))

if checkpointing:
    model.gradient_checkpointing_enable()
ids = torch.zeros(load.device_batch, load.sequence_length, dtype=torch.long)
with Counted():
    for _ in range(load.global_batch // load.device_batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
for kind, size in planned.items():
    print(size, sent[kind.split("_")[0]])
"""


def tp_config():
    return transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip


def tp_load(bf16, checkpointing):
    return Workload(
        tokens=1000,
        sequence_length=32,
        global_batch=8,
        device_batch=2,
        world_size=4,
        bf16=bf16,
        checkpointing=checkpointing,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "bf16", "checkpointing"),
    [
        ("bf16", False, False),
        ("nvidia", True, True),
        ("four-over-six", True, False),
    ],
)
def test_communication_of_tensor_parallelism(scheme, bf16, checkpointing, tmp_path):
    """The first of four ranks, with collectives that only count."""
    command = [sys.executable, "-c", TP_PROBE, str(tmp_path), scheme, str(bf16), str(checkpointing)]
    out = subprocess.run(command, capture_output=True, text=True, check=False, cwd="tests")
    assert out.returncode == 0, out.stderr
    pairs = [tuple(map(float, line.split())) for line in out.stdout.splitlines()[-3:]]
    assert len(pairs) == 3
    assert all(planned == real for planned, real in pairs), pairs
    assert pairs[0][0] > 0
    assert (pairs[2][0] > 0) == (scheme != "bf16")


@pytest.mark.slow
def test_tensor_parallelism_that_is_refused_is_named():
    plan = plan_run(tp_config(), MetisConfig(), tp_load(False, False))
    assert TP not in plan.communication
    assert "cannot cut model.layers.0.self_attn.q_proj, since its operands are split" in plan.uncut
    cut = plan_run(tp_config(), MetisConfig(scheme="nvfp4"), tp_load(False, False))
    assert cut.uncut is None
    assert cut.communication[TP]["outputs_all_reduce"] > 0
    console = Console(record=True, width=100, file=io.StringIO())
    print_plan(cut, console)
    text = console.export_text()
    assert "All-reduce of outputs and input gradients" in text
    assert "TP" in text
