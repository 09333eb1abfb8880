"""The cases that distributed_run runs in every process: (engine, directory) -> what it saw."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import transformers
from conftest import gpt2, llama, mixtral
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule

from metis_hf import (
    DistillTrainer,
    MetisCallback,
    MetisConfig,
    get_metis_model,
    metis_layers,
    refresh,
    set_precision,
)
from metis_hf.layers.sharding import full_tensor
from metis_hf.shared.checkpoints import checkpoint_damage
from training.distributed_run import (
    NEAREST,
    RANKS,
    Rows,
    accelerator,
    build,
    full_state,
    history,
    make_trainer,
    one_block,
    play_ranks,
    rank,
)
from training.recomputation import recomputed

# Without splits at each use (whose sketches are noise) nearest rounding has no noise.
NOISELESS = {"scheme": "metis", "decompose": ("weight",), "split_weight": True, **NEAREST}
CONFIGS = {
    "metis": NOISELESS,
    "nvidia": {"scheme": "nvidia", **NEAREST},
    "bf16": {"scheme": "bf16"},
    "metis-noise": {"scheme": "metis", "forward_rounding": "stochastic"},
}


def outcome(trainer):
    """Losses, gradient norms and weights after a training; all ranks call it."""
    return {
        "loss": history(trainer),
        "grad_norm": history(trainer, "grad_norm"),
        "state": full_state(trainer.model),
    }


def training(engine, out):
    """Trainer's losses, gradient norms and weights after two steps, for each config."""
    results = {}
    for name, config in CONFIGS.items():
        model = build(**config)
        if engine == "one" and name == "metis-noise":
            play_ranks(model)
        cls = transformers.Trainer if name == "nvidia" else None
        options = {"max_steps": 2} | ({"cls": cls} if cls else {})
        trainer = make_trainer(engine, out, model, **options)
        trainer.train()
        results[name] = outcome(trainer) | {"wrapped": type(trainer.model_wrapped).__name__}
    return results


def loop(engine, out):
    """A plain accelerate loop with an evaluation and a refresh by hand after step 2.

    FSDP2 does not reshard after forward passes here, so that the evaluation leaves whole copies.
    """
    runner = accelerator(engine)
    model = build(**NOISELESS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.DataLoader(Rows(), batch_size=4)
    model, optimizer, data = runner.prepare(model, optimizer, data)
    losses, drifts = [], {}
    for step, batch in enumerate(data):
        with runner.accumulate(model):
            loss = model(**batch).loss
            runner.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(runner.gather(loss.detach()).mean().item())
        if runner.sync_gradients and step + 1 == 2 * (RANKS if engine == "one" else 1):
            with torch.no_grad():
                model(**batch)
            drifts = refresh(model, optimizer)
        if len(losses) == 3 * (RANKS if engine == "one" else 1):
            break
    if engine == "one":
        losses = [sum(losses[i : i + RANKS]) / RANKS for i in range(0, len(losses), RANKS)]
    return {"loss": losses, "drifts": drifts, "state": full_state(model)}


class Held(transformers.TrainerCallback):
    """How many layers keep their quantized weights at the end of each micro-batch."""

    def __init__(self):
        self.counts = []

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        layers = [layer for _, layer in metis_layers(model)]
        self.counts.append((sum(layer.reused_weight is not None for layer in layers), len(layers)))


def micro_batches(engine, out):
    """Two steps of two micro-batches on each rank, with weights quantized once a step and twice."""
    results = {}
    for name in ("kept", "again"):
        held, options = Held(), {"max_steps": 2, "gradient_accumulation_steps": 2}
        callbacks = [MetisCallback(health_interval=0), held] if name == "kept" else [held]
        model, plain = build(**NOISELESS), transformers.Trainer  # which adds no callback
        trainer = make_trainer(engine, out, model, callbacks=callbacks, cls=plain, **options)
        trainer.train()
        results[name] = outcome(trainer) | {"held": held.counts}
    return results


def noise(engine, out):
    """One layer's output and the same input on every rank, for both roundings."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    outputs = {}
    for rounding in ("nearest", "stochastic"):
        model = build(**NOISELESS | {"forward_rounding": rounding})
        outputs[rounding] = model.model.layers[0].self_attn.q_proj.train()(x).detach()
    return outputs


class Spy(transformers.TrainerCallback):
    """After each step: the unquantized loss of one batch, the moments and the parameters."""

    def __init__(self):
        self.losses, self.moments, self.states = {}, {}, {}

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.look(state.global_step, model, optimizer)

    def look(self, step, model, optimizer):
        # Of the weights themselves: what they are quantized to changes with the factors.
        set_precision(model, high_precision=("forward", "backward"))
        with torch.no_grad():
            ids = Rows()[range(8)]["input_ids"]
            self.losses[step] = model(input_ids=ids, labels=ids).loss.item()
        set_precision(model, high_precision=())
        layer = next(layer for _, layer in metis_layers(model))
        self.moments[step] = {
            key: [full_tensor(v).abs().sum().item() for v in optimizer.state[param].values()]
            for key, param in layer.named_parameters()
        }
        self.states[step] = full_state(model)


class SpyBefore(Spy):
    """The same before any callback's end of a step, where MetisCallback is the first."""

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.look(state.global_step + 1, model, optimizer)
        for module in model.modules():  # or the gradients of units that stay whole are not cleared
            if isinstance(module, FSDPModule):
                module.reshard()

    def on_step_end(self, *args, **kwargs):
        pass


def refreshing(engine, out):
    """Trainer with a refresh at steps 2 and 4."""
    model = build(**NOISELESS, refresh_interval=2)
    before, after = SpyBefore(), Spy()
    callbacks = [before, MetisCallback(health_interval=0), after]
    trainer = make_trainer(engine, out, model, callbacks=callbacks, cls=transformers.Trainer)
    trainer.train()
    drifts = {
        entry["step"]: entry["metis/refresh_drift"]
        for entry in trainer.state.log_history
        if "metis/refresh_drift" in entry
    }
    spied = {"before": vars(before), "after": vars(after)}
    return {"loss": history(trainer), "drifts": drifts, **spied}


def _save_and_resume(engine, out, **options):
    """4 steps that save at 2, and 2 more from that checkpoint by another Trainer."""
    seen = {}
    refresh_interval = 0 if engine.startswith("zero") else 2
    for name in ("whole", "resumed"):
        model = build(
            forward_rounding="stochastic", refresh_interval=refresh_interval, split_weight=True
        )
        trainer = make_trainer(
            engine,
            out / name,
            model,
            callbacks=[MetisCallback(health_interval=2)],
            save_strategy="steps",
            save_steps=2,
            **options,
        )
        checkpoint = out / "whole" / "checkpoint-2"
        if name == "resumed":
            assert checkpoint_damage(checkpoint) is None
        trainer.train(str(checkpoint) if name == "resumed" else None)
        with torch.no_grad():
            logits = trainer.model.eval()(input_ids=Rows()[range(2)]["input_ids"]).logits
        seen[name] = outcome(trainer)
        seen[name]["logits"] = logits
    trainer.save_model(str(out / "final"))
    if rank() == 0:
        model.config.save_pretrained(out)
    return seen


def saving(engine, out):
    """Save and resume with whole checkpoints."""
    return _save_and_resume(engine, out)


def sharded(engine, out):
    """Save and resume with a checkpoint that each rank writes its own part of."""
    return _save_and_resume(engine, out, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"})


def checkpointing(engine, out):
    """Losses, norms and weights with and without recomputed activations, with noise."""
    seen = {}
    for name in ("stored", "recomputed"):
        options = {}
        if name == "recomputed" and engine == "fsdp":
            options = {"fsdp_config": {"activation_checkpointing": True}}
        elif name == "recomputed":
            options = recomputed()
        model = build(scheme="metis", forward_rounding="stochastic")
        trainer = make_trainer(engine, out, model, max_steps=2, **options)
        trainer.train()
        by = set()
        for module in trainer.model.modules():
            by |= {"a wrapper"} if "CheckpointWrapper" in type(module).__name__ else set()
            by |= {"the model"} if getattr(module, "gradient_checkpointing", False) else set()
        seen[name] = outcome(trainer) | {"by": by}
    return seen


def mixed_precision(engine, out):
    """Losses under BF16 autocast (FSDP2: BF16 parameters in the forward pass)."""
    trainer = make_trainer(engine, out, build(**NOISELESS), bf16=True, max_steps=2)
    trainer.train()
    dtypes = {param.dtype for param in trainer.model.parameters()}
    return {"loss": history(trainer), "dtypes": dtypes}


def error_of(call, *args):
    try:
        call(*args)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def errors(engine, out):
    """Messages for what is refused."""
    seen = {}
    if engine == "fsdp":
        model = build(llama, split_weight=True)
        model.model.layers[1].mlp.up_proj.bfloat16()
        seen["mixed dtypes"] = error_of(make_trainer(engine, out, model).train)
    dense = llama()
    optimizer = torch.optim.AdamW(dense.parameters())
    prepared, _ = accelerator(engine).prepare(dense, optimizer)
    seen["converted too late"] = error_of(get_metis_model, prepared)
    return seen


def refused(engine, out):
    """What does not work under DeepSpeed: refreshing, and converting what it manages."""
    seen = {}
    model = build(split_weight=True)
    trainer = make_trainer(engine, out, model, callbacks=[MetisCallback(refresh_interval=2)])
    seen["refresh_interval"] = error_of(trainer.train)
    seen["refresh"] = error_of(refresh, trainer.model)
    dense = llama()
    options = {"cls": transformers.Trainer, "callbacks": [transformers.TrainerCallback()]}
    make_trainer(engine, out, dense, max_steps=1, **options).train()
    seen["converted too late"] = error_of(get_metis_model, dense)
    if engine == "zero3":  # its TrainingArguments partition every model that is built later
        late = transformers.AutoModelForCausalLM.from_config(dense.config)
        seen["zero.Init"] = error_of(get_metis_model, late)
    return seen


def _train_blocks(engine, out, models, **options):
    seen = {}
    for block, model in models.items():
        fsdp_config = {"transformer_layer_cls_to_wrap": [block]}
        given = {"fsdp_config": fsdp_config, "max_steps": 2} | options
        trainer = make_trainer(engine, out, model, **given)
        trainer.train()
        seen[block] = outcome(trainer)
    return seen


def architectures(engine, out):
    """Tied embeddings, and Conv1D's transposed weights."""
    models = {
        "LlamaDecoderLayer": build(lambda: llama(1, tie_word_embeddings=True), **NOISELESS),
        "GPT2Block": build(gpt2, scheme="nvidia", **NEAREST),
    }
    return _train_blocks(engine, out, models)


def experts(engine, out):
    """Experts of which each rank visits others."""
    # So many that a micro-batch of one short row leaves some without a token.
    models = {"MixtralDecoderLayer": build(functools.partial(mixtral, 16), **NOISELESS)}
    return _train_blocks(engine, out, models, per_device_train_batch_size=1)


class Padded(Rows):
    """Rows of which each has a length of its own, so that ranks have other numbers of tokens."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        mask = torch.arange(len(row["input_ids"])) < 4 + 7 * index % 25
        labels = row["labels"].where(mask, -100)
        return row | {"attention_mask": mask.long(), "labels": labels}


def distilling(engine, out):
    """Two steps towards a teacher of its own weights, and an adapter's towards its base."""
    seen = {}
    for name in ("copy", "own"):
        model = build(scheme="nvfp4-rne", **NEAREST)
        teacher = one_block() if name == "copy" else None
        if teacher is None:
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        cls = functools.partial(DistillTrainer, teacher=teacher, cross_entropy_share=0.25)
        trainer = make_trainer(engine, out, model, cls=cls, max_steps=2)
        trainer.train_dataset = Padded()
        trainer.train()
        trainer.args.per_device_eval_batch_size = 1  # the tensor scale of a row is its own then
        seen[name] = outcome(trainer)
        seen[name]["kl"] = trainer.evaluate(Padded(count=3))["eval_kl"]  # two processes take four
    return seen


def ram_efficient(engine, out):
    """A checkpoint that only rank 0 reads, and sends to the others while they shard it."""
    seen = {}
    sharing = {"fsdp_config": {"cpu_ram_efficient_loading": True}}
    split = MetisConfig(split_weight=True)
    sources = (("metis", build(split_weight=True), None), ("dense", one_block(), split))
    for name, source, config in sources:
        # Before the model: from_pretrained looks at what the arguments put into the environment.
        make_trainer(engine, out, build(), **sharing)
        if rank() == 0:
            source.save_pretrained(out / name)
        dist.barrier()
        options = {} if config is None else {"quantization_config": config}
        model = transformers.AutoModelForCausalLM.from_pretrained(out / name, **options)
        trainer = make_trainer(engine, out, model, max_steps=1, learning_rate=0.0, **sharing)
        trainer.train()
        seen[name] = full_state(trainer.model)
    return seen
