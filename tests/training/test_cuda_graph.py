"""Steps that are recorded once and played: on a CPU with a stand-in, in CUDA graphs on a GPU.

In two processes: test_cuda_graph_distributed.
"""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, llama
from tensors import assert_same
from transformers import TrainerCallback

from metis_hf import (
    MetisCallback,
    MetisConfig,
    MetisTrainer,
    freeze_scales,
    get_metis_model,
    metis_layers,
)
from metis_hf.numerics.kernels import use_kernels
from metis_hf.training import cuda_graph
from metis_hf.training import trainer as trainer_module
from metis_hf.training.cuda_graph import StepGraphs, check
from training.recordings import Again
from training.trainer_tools import arguments, converted, losses

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def rows(count: int, lengths: tuple[int, ...] = (24,)) -> list[dict[str, torch.Tensor]]:
    """Sequences of random tokens; `lengths` of each batch of four."""
    draw = torch.Generator().manual_seed(0)
    sizes = (lengths[i // 4 % len(lengths)] for i in range(count))
    ids = [torch.randint(0, VOCAB, (size,), generator=draw) for size in sizes]
    return [{"input_ids": row, "labels": row} for row in ids]


def train(tmp_path, name, recorder=None, *, data=None, callbacks=(), scheme="nvfp4", **changes):
    """(losses of all steps, model, trainer)."""
    fields = {name: changes.pop(name) for name in [*changes] if name.startswith("subspace")}
    model = converted(scheme, **fields)
    options = {
        "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "use_cpu": not torch.cuda.is_available(), "train_sampling_strategy": "sequential",
    }  # fmt: skip
    trainer = MetisTrainer(
        model=model,
        args=arguments(tmp_path / name, **options | changes),
        train_dataset=rows(64) if data is None else data,
        eval_dataset=rows(8),
        callbacks=[MetisCallback(health_interval=0), *callbacks],
        cuda_graphs=False,
    )
    if recorder is not None:
        trainer.cuda_graphs = True
        made = StepGraphs(model, recorder(model))
        monkeypatched = pytest.MonkeyPatch()
        monkeypatched.setattr(trainer_module, "StepGraphs", lambda model: made)
    trainer.train()
    if recorder is not None:
        monkeypatched.undo()
        assert trainer.graphs is made
    return losses(trainer), model, trainer


def recorded_as_plain(tmp_path, recorder=Again, *, plain=(), callbacks=(), **changes) -> StepGraphs:
    """The recordings of a run that has the losses and weights of one without."""
    expected = train(tmp_path, "plain", callbacks=plain, **changes)
    found = train(tmp_path, "recorded", recorder, callbacks=callbacks, **changes)
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])
    return found[2].graphs


@pytest.mark.parametrize(
    "changes",
    [
        {"scheme": "metis", "gradient_accumulation_steps": 2, "max_steps": 3, "max_grad_norm": 0.1},
        {"bf16": True, "gradient_checkpointing": True, "max_steps": 5},
        pytest.param({"scheme": "metis-paper", "max_steps": 5}, marks=pytest.mark.slow),  # split
    ],
)
def test_a_run_from_recordings_is_the_run(changes, tmp_path, caplog) -> None:
    graphs = recorded_as_plain(tmp_path, **changes)
    assert graphs.recordings == 1
    micro_batches = changes["max_steps"] * changes.get("gradient_accumulation_steps", 1)
    assert graphs.record.played == micro_batches - cuda_graph.WARM_UP
    assert not graphs.made  # they end with the training
    assert "converted layers" not in caplog.text  # all were called before


def test_recordings_that_share_memory_spoil_no_gradient(tmp_path) -> None:
    """A step of two micro-batches of other shapes: the first's gradients are not overwritten."""

    class Shared(Again):
        def __init__(self, model) -> None:
            super().__init__(model)
            self.results: list[list[torch.Tensor]] = []

        def __call__(self, run):
            play, loss = super().__call__(run)
            mine = self.places
            self.results.append(mine)

            def play_over_others() -> None:
                for others in self.results:
                    for place in others if others is not mine else ():
                        place.fill_(float("nan"))
                play()

            return play_over_others, loss

    changes = {"data": rows(64, (24, 16)), "gradient_accumulation_steps": 2}
    assert recorded_as_plain(tmp_path, Shared, **changes).recordings == 2


def test_parameters_that_start_to_train_are_recorded_anew(tmp_path) -> None:
    class Unfreeze(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs) -> None:
            model.model.layers[0].mlp.requires_grad_(state.global_step >= 5)

    each = [Unfreeze()]
    graphs = recorded_as_plain(tmp_path, plain=each, callbacks=each, max_steps=9)
    assert graphs.recordings == 2


def test_measured_steps_run_in_python(tmp_path) -> None:
    """A recording would not call what measures."""

    class Measuring(TrainerCallback):
        seen = 0

        def on_step_begin(self, args, state, control, model=None, **kwargs) -> None:
            if state.global_step % 2:
                layer = next(layer for _, layer in metis_layers(model))
                self.handle = layer.register_forward_hook(self.count)

        def count(self, *_) -> None:
            self.seen += 1

        def on_step_end(self, args, state, control, **kwargs) -> None:
            if hasattr(self, "handle"):
                self.handle.remove()

    measuring = Measuring()
    graphs = recorded_as_plain(tmp_path, callbacks=[measuring], max_steps=10)
    assert measuring.seen == 5
    assert graphs.record.played == 5 - cuda_graph.WARM_UP


def test_what_cannot_be_recorded_runs_in_python(tmp_path, caplog) -> None:
    class Fails:
        def __init__(self, model) -> None:
            self.calls = 0

        def __call__(self, run):
            self.calls += 1
            run()  # gradients are there already
            raise RuntimeError("operation not permitted when stream is capturing\ndetails")

    graphs = recorded_as_plain(tmp_path, Fails)
    assert graphs.record.calls == 2  # with masks as in Python, and with what transformers makes
    assert graphs.refused is not None
    assert "not permitted when stream is capturing" in graphs.refused
    assert "details" not in graphs.refused


def test_steps_with_and_without_a_search_of_subspaces(tmp_path) -> None:
    """One recording each; `subspace_interval=2` takes turns."""
    changes = {"scheme": "metis", "subspace_interval": 2, "subspace_refinements": 1}
    changes |= {"max_steps": 10, "gradient_accumulation_steps": 2}
    graphs = recorded_as_plain(tmp_path, **changes)
    assert graphs.recordings == 2
    assert graphs.record.played == 20 - 2 * cuda_graph.WARM_UP


def test_scales_that_are_fixed_on_the_way(tmp_path) -> None:
    class Fix(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
            if state.global_step == 5:
                freeze_scales(model)

    graphs = recorded_as_plain(
        tmp_path, scheme="w4a4", max_steps=8, plain=[Fix()], callbacks=[Fix()]
    )
    assert graphs.recordings == 1
    assert graphs.refused is None


def test_schemes_with_a_state_run_in_python(tmp_path) -> None:
    graphs = recorded_as_plain(tmp_path, scheme="smoothquant", max_steps=4)
    assert graphs.refused == "smoothquant keeps state that changes with each step"
    assert graphs.record.played == 0


def test_runs_that_cannot_be_recorded_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as accelerate launches
    args = arguments(tmp_path, torch_empty_cache_steps=2)
    with pytest.raises(
        ValueError, match=r"the device is cpu.*FSDP1 flattens.*frees memory.*Leave cuda_graphs out"
    ):
        check(args)
    monkeypatch.setenv("FSDP_VERSION", "2")
    args.gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"already recomputed in the backward pass; turn off"):
        check(args)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=r"DeepSpeed keeps .* use DDP or FSDP2"):
        check(args)
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    with pytest.raises(ValueError, match="the device is cpu"):
        MetisTrainer(model=get_metis_model(llama(), MetisConfig()), args=args, cuda_graphs=True)
    monkeypatch.setenv("METIS_CUDA_GRAPHS", "0")
    monkeypatch.setattr(type(args), "n_gpu", 2)
    args.fp16 = args.torch_compile = True
    with pytest.raises(
        ValueError, match=r"GRAPHS=0 is set.*drives 2 devices.*fp16 scales.*reduce-overhead"
    ):
        check(args)


@pytest.mark.parametrize(("mask", "use_cache"), [(False, True), (False, False), (True, True)])
def test_causal_masks_are_left_to_the_kernel(mask, use_cache, monkeypatch) -> None:
    """Transformers would make them in full, where the GPU cannot be asked whether rows are whole.

    With a mask in the batch it has to.
    """
    masks = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return attention(*args, attn_mask=attn_mask, **kwargs)

    class Capturing(Again):
        def __call__(self, run):
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
                return super().__call__(run)

    model = converted("nvfp4").train()
    graphs = StepGraphs(model, Capturing(model))
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    if mask:
        batch["attention_mask"] = torch.ones_like(ids)

    def step(inputs, count):
        loss = model(**inputs, use_cache=use_cache).loss
        loss.backward()
        return loss.detach()

    for _ in range(cuda_graph.WARM_UP + 1):
        graphs.run(step, batch, None)
    assert graphs.recordings == 1
    assert masks
    assert all((found is not None) == mask for found in masks)


def test_evaluation_in_between(tmp_path) -> None:
    """Played steps turn training on again, of the model and of optimizers that have a mode."""
    modes = []

    class OfAMode(torch.optim.SGD):
        on = True

        def train(self) -> None:
            self.on = True

        def eval(self) -> None:
            self.on = False

        def step(self, *args, **kwargs):
            modes.append(self.on)
            return super().step(*args, **kwargs)

    class Mode(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
            modes.append(model.training)

    changes = {
        "max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "optim": "sgd",
        "callbacks": [Mode()],
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "SGD", OfAMode)
        recorded = train(tmp_path, "recorded", Again, **changes)
    assert recorded[2].graphs.record.played == 6 - cuda_graph.WARM_UP
    assert modes == [True] * 12


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "accumulation", "fields", "recordings"),
    [
        ("nvfp4-rne", 1, {}, 1),
        ("nvidia", 2, {}, 1),
        ("w4a4", 2, {}, 1),
        ("metis", 2, {}, 1),
        ("metis", 2, {"subspace_interval": 3, "max_steps": 9}, 2),
        ("metis", 2, {"subspace_interval": 3, "subspace_refinements": 1, "max_steps": 9}, 2),
    ],
)
def test_in_cuda_graphs(scheme, accumulation, fields, recordings, tmp_path) -> None:
    changes = {"scheme": scheme, "gradient_accumulation_steps": accumulation, "bf16": True}
    changes |= fields
    with use_kernels(None):  # those that a GPU's user gets
        plain = train(tmp_path, "plain", **changes)
        recorded = train(tmp_path, "recorded", lambda model: cuda_graph.CudaRecorder(), **changes)
    graphs = recorded[2].graphs
    assert graphs.refused is None
    assert graphs.recordings == recordings
    assert recorded[0] == pytest.approx(plain[0], rel=1e-4)
