"""The processes of test_distributed: distributed_run.py ENGINE OUT CASE ...

One process imports what takes seconds, and is forked into RANKS, with the environment of torchrun.

Engines: "ddp", "fsdp" (FSDP2, one unit per decoder layer), "tp", "zero2", "zero3" (DeepSpeed), and
"one", a single process that sees the same micro-batches through gradient accumulation. Each rank
writes OUT/ENGINE-CASE.RANK.pt. Cases are in the modules ..._cases; the tests look at their results.
"""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from conftest import VOCAB, llama

from metis_hf import MetisCallback, MetisConfig, MetisTrainer, get_metis_model, metis_layers

RANKS = 2
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)  # a hanging collective fails, and says so
NEAREST = {"forward_rounding": "nearest", "backward_rounding": "nearest"}


class Rows(torch.utils.data.Dataset):
    """Fixed random sequences, taken in order."""

    def __init__(self, count=64, length=32):
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCAB, (count, length), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def configure(engine):
    """Makes accelerate run `engine` on CPU processes.

    accelerate offers FSDP and DeepSpeed to processes with an accelerator device only (and runs DDP
    without a word where `fsdp=True` meets CPU processes). So its state is set up for CPU, and then
    told that these processes are of a kind that may use FSDP.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        os.environ.pop(name, None)
    if engine == "one":
        return
    state = PartialState(cpu=True, timeout=COLLECTIVE_TIMEOUT)
    kind = state.distributed_type
    if engine in ("fsdp", "tp"):
        kind = DistributedType.MULTI_GPU
    elif engine.startswith("zero"):
        import deepspeed

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        kind = DistributedType.DEEPSPEED
    PartialState._shared_state["distributed_type"] = kind


def engine_args(engine, **fsdp_config):
    """The TrainingArguments that select an engine."""
    if engine == "one":
        return {"use_cpu": True, "gradient_accumulation_steps": RANKS}
    common = {"accelerator_config": {"use_configured_state": True}}
    if engine == "tp":  # from_pretrained has cut the model
        return common | {"use_cpu": True}
    if engine == "ddp":
        return common | {"use_cpu": True, "ddp_find_unused_parameters": False}
    if engine == "fsdp":
        config = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "FULL_STATE_DICT",
        }
        return common | {"use_cpu": True, "fsdp": True, "fsdp_config": config | fsdp_config}
    return common | {
        "deepspeed": {
            "zero_optimization": {
                "stage": int(engine[-1]),
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "train_batch_size": "auto",
            "gradient_clipping": "auto",
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
    }


def one_block():
    """A Llama of which an engine wraps one block, and the rest."""
    return llama(num_hidden_layers=1)


def build(make=one_block, **config):
    """The same converted model on every rank and for every engine."""
    torch.manual_seed(0)
    return get_metis_model(make(), MetisConfig(**config))


def play_ranks(model):
    """Lets one process draw the noise of rank r for micro-batch r."""
    calls = itertools.count()
    current = {"rank": 0}
    model.register_forward_pre_hook(lambda *_: current.__setitem__("rank", next(calls) % RANKS))
    for _, layer in metis_layers(model):
        layer.batch_rank = lambda: current["rank"]


def make_trainer(
    engine, out, model, *, callbacks=(), cls=MetisTrainer, fsdp_config=None, **changes
):
    """A Trainer for 4 steps of 2 micro-batches of 4 sequences, in the given engine."""
    configure(engine)
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "max_grad_norm": 1e3,  # never reached, so that no rounding of the norm enters
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "ddp_timeout": int(COLLECTIVE_TIMEOUT.total_seconds()),
    }
    options |= engine_args(engine, **(fsdp_config or {})) | changes
    trainer = cls(
        model=model,
        args=transformers.TrainingArguments(str(out), **options),
        train_dataset=Rows(),
        callbacks=list(callbacks) or [MetisCallback(health_interval=0)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def history(trainer, key="loss"):
    """One value per logged step."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def full_state(model):
    """name -> whole parameter, whatever the engine did to the model; all ranks call it."""
    state = {}
    for name, param in model.named_parameters():
        value = param.detach()
        if hasattr(param, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([param]):
                value = param.detach().clone()
        elif hasattr(value, "full_tensor"):
            value = value.full_tensor()
        name = name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
        state[name] = value.cpu().clone()
    return state


def accelerator(engine, **options):
    """A plain Accelerator of the engine, as a user's own loop would build it."""
    configure(engine)
    if engine == "one":
        return Accelerator(cpu=True, gradient_accumulation_steps=RANKS, **options)
    if engine == "ddp":
        return Accelerator(**options)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="FULL_STATE_DICT",
        reshard_after_forward=False,
    )
    return Accelerator(fsdp_plugin=plugin, **options)


def rank():
    """This process's rank; 0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def main():
    from training import distributed_cases, parallel_cases, recorded_cases

    modules = distributed_cases, parallel_cases, recorded_cases
    engine, out, *names = sys.argv[1:]
    for name in names:
        case = next(getattr(module, name) for module in modules if hasattr(module, name))
        result = case(engine, Path(out) / f"{engine}-{name}")
        torch.save(result, Path(out) / f"{engine}-{name}.{rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def fork(number):
    """Start the process of a rank."""
    child = os.fork()
    if child:
        return child
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not waiting for the other process, whose collective would never end


def launch():
    """Run all ranks, and end as soon as one has failed."""
    import training.distributed_cases

    assert training.distributed_cases.RANKS == RANKS
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    children = [fork(number) for number in range(RANKS)]
    for _ in range(RANKS):
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with exit code {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    sys.modules["distributed_run"] = sys.modules["__main__"]
    launch()
