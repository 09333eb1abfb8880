"""The cases of test_parallelism that distributed_run runs in every process."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from conftest import llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from metis_hf import MetisConfig, get_metis_model, load_packed
from metis_hf.deploy import export_checkpoint
from training.distributed_cases import error_of, mixtral
from training.distributed_run import (
    NEAREST,
    Rows,
    build,
    full_state,
    history,
    make_trainer,
    rank,
)

SCHEMES = {
    "nvfp4": {"scheme": "nvfp4", **NEAREST},
    "nvidia": {"scheme": "nvidia", **NEAREST},
    "four-over-six": {"scheme": "four-over-six", **NEAREST},
    "mxfp4": {"scheme": "mxfp4", **NEAREST},
    "bf16": {"scheme": "bf16"},
}
SPLIT = {"scheme": "metis", "split_weight": True}


def saved(out, name, make, config=None):
    """The directory of a checkpoint that the first process writes."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if rank() == 0:
        torch.manual_seed(0)
        model = make() if config is None else get_metis_model(make(), MetisConfig(**config))
        model.save_pretrained(out / name)
    dist.barrier()
    return out / name


def wide():
    """A Llama whose parts hold whole blocks of 32."""
    config = copy.deepcopy(llama().config)
    config.num_key_value_heads, config.intermediate_size = 4, 128
    return LlamaForCausalLM(config)


def step(model):
    """Loss and whole gradients of one batch in fp64, where sums in another order hardly differ."""
    model = model.double().train()
    ids = Rows()[range(2)]["input_ids"]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {}
    for name, param in model.named_parameters():
        grad = param.grad
        grads[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    return {"loss": loss.item(), "grads": grads}


def cutting(engine, out):
    """One step under tensor parallelism: of a Metis checkpoint, of a dense one, and saved again."""
    seen = {}
    for name, config in SCHEMES.items():
        path = saved(out, name, wide, config)
        distributed = DistributedConfig(tp_size=2)
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=distributed)
        seen[name] = {"cut": step(model)}
        model.float().save_pretrained(out / f"{name}-again")
        dist.barrier()
        seen[name]["whole"] = step(AutoModelForCausalLM.from_pretrained(path))
        again = AutoModelForCausalLM.from_pretrained(out / f"{name}-again")
        before = AutoModelForCausalLM.from_pretrained(path).state_dict()
        seen[name]["saved"] = all(torch.equal(v, before[k]) for k, v in again.state_dict().items())
    dense = saved(out, "dense", wide)
    for name, sizes in {"tp_size": {"tp_size": 2}, "fsdp_size": {"fsdp_size": 2}}.items():
        model = AutoModelForCausalLM.from_pretrained(
            dense,
            quantization_config=MetisConfig(**SCHEMES["nvfp4"]),
            distributed_config=DistributedConfig(**sizes),
        )
        seen[f"dense {name}"] = step(model)
    return seen


def refusing(engine, out):
    """What is said of each parallelism that is refused."""
    metis, dense = saved(out, "metis", llama, SPLIT), saved(out, "dense", llama)
    moe = saved(out, "moe", mixtral, SCHEMES["nvfp4"])

    def load(path, config=None, **sizes):
        options = {} if config is None else {"quantization_config": MetisConfig(**config)}
        distributed = DistributedConfig(**sizes)
        return AutoModelForCausalLM.from_pretrained(path, distributed_config=distributed, **options)

    def convert_late():
        get_metis_model(load(dense, tp_size=2), MetisConfig(scheme="nvfp4"))

    def narrow():
        load(saved(out, "narrow", llama, SCHEMES["mxfp4"]), tp_size=2)

    def packed():
        path = saved(out, "wide", wide, {"scheme": "nvfp4-rne"})
        if rank() == 0:
            export_checkpoint(path, out / "packed", format="compressed-tensors")
        dist.barrier()
        load_packed(out / "packed", distributed_config=DistributedConfig(tp_size=2))

    return {
        "packed": error_of(packed),
        "split": error_of(lambda: load(metis, tp_size=2)),
        "dense split": error_of(lambda: load(dense, SPLIT, fsdp_size=2)),
        "converted late": error_of(convert_late),
        "narrow": error_of(narrow),
        "experts": error_of(lambda: load(moe, tp_size=2, fsdp_size=1)),
        "ep": error_of(lambda: load(moe, fsdp_size=2, ep_size=2)),
        "pp": error_of(lambda: load(metis, pp_size=2)),
    }


def sequences(engine, out):
    """Context parallelism through Trainer, with and without MetisCallback."""
    import transformers

    seen = {}
    for name, options in {
        "callback": {},
        "plain": {"cls": transformers.Trainer, "callbacks": [transformers.TrainerCallback()]},
    }.items():
        model = build(scheme="nvfp4", **NEAREST)
        parallel = ParallelismConfig(cp_size=2)
        trainer = make_trainer(engine, out, model, parallelism_config=parallel, **options)
        seen[name] = error_of(trainer.train), trainer.state.global_step
    return seen


def trained(engine, out):
    """Trainer under tensor parallelism, which saves models without a state to resume from."""
    if engine == "one":
        torch.manual_seed(0)
        model = get_metis_model(wide(), MetisConfig(**SCHEMES["nvfp4"]))
    else:
        path = saved(out, "start", wide, SCHEMES["nvfp4"])
        model = AutoModelForCausalLM.from_pretrained(
            path, distributed_config=DistributedConfig(tp_size=2)
        )
    options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    options |= {"gradient_accumulation_steps": 1}
    trainer = make_trainer(engine, out / "run", model.double(), **options)
    trainer.train()
    if engine != "one":
        dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(out / "run/checkpoint-4")
    return {
        "losses": history(trainer),
        "state": full_state(trainer.model),
        "reloaded": again.state_dict(),
    }
