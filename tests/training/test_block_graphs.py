"""Blocks that are recorded one by one, as under FSDP2: with a stand-in, in CUDA graphs on a GPU.

In two processes: test_cuda_graph_distributed.
"""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, gpt2, llama
from tensors import assert_same

from metis_hf import MetisConfig, freeze_scales, get_metis_model, metis_layers
from metis_hf.numerics.kernels import use_kernels
from metis_hf.training.block_graphs import BlockGraphs, units
from metis_hf.training.cuda_graph import WARM_UP, CudaRecorder
from training.recordings import AgainFromPlaces

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
STEPS = 6


def batches(lengths=(24,), device="cpu"):
    draw = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        yield torch.randint(0, VOCAB, (4, lengths[step % len(lengths)]), generator=draw).to(device)


def train(make, recorder=None, *, lengths=(24,), bf16=False, device="cpu", before=None, **config):
    """(losses, model, recordings) of some steps of SGD, in Python or recorded."""
    torch.manual_seed(0)
    model = get_metis_model(make(), MetisConfig(**config)).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    if isinstance(recorder, AgainFromPlaces):
        recorder.model = model
    graphs = None if recorder is None else BlockGraphs(blocks, recorder)
    losses = []
    for step, ids in enumerate(batches(lengths, device)):
        if before is not None:
            before(step, model)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, graphs


def recorded_as_plain(make=llama, **options) -> tuple[BlockGraphs, AgainFromPlaces]:
    recorder = AgainFromPlaces()
    expected = train(make, **options)
    losses, model, graphs = train(make, recorder, **options)
    assert losses == expected[0]
    assert_same(model, expected[1])
    return graphs, recorder


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (llama, {"scheme": "metis"}),
        (llama, {"scheme": "metis", "bf16": True}),
        (llama, {"scheme": "nvidia", "split_weight": True}),
        (gpt2, {"scheme": "nvfp4-rne"}),
    ],
)
def test_recorded_blocks_compute_what_python_does(make, options) -> None:
    graphs, recorder = recorded_as_plain(make, **options)
    assert all(block.recordings == 1 for block in graphs.blocks)
    assert recorder.played == 2 * len(graphs.blocks) * (STEPS - WARM_UP)  # forward and backward


def test_places_are_shared() -> None:
    graphs, _ = recorded_as_plain(scheme="nvfp4-rne")
    one, other = (next(iter(block.made.values())) for block in graphs.blocks)
    pairs = zip(one.inputs + one.outputs, other.inputs + other.outputs, strict=True)
    assert all(mine is theirs for mine, theirs in pairs)


def test_lengths_have_recordings_of_their_own() -> None:
    graphs, recorder = recorded_as_plain(scheme="nvfp4-rne", lengths=(24, 24, 24, 24, 16))
    assert {block.recordings for block in graphs.blocks} == {1}
    assert recorder.played == 2 * len(graphs.blocks) * (STEPS - WARM_UP - 1)


def test_frozen_parameters_and_inputs() -> None:
    def freeze(step, model) -> None:
        model.requires_grad_(False)
        model.model.layers[1].mlp.requires_grad_(True)

    _, recorder = recorded_as_plain(scheme="nvfp4-rne", before=freeze)
    # The first block gets nothing back, and none of its outputs trains.
    assert recorder.played == (1 + 2) * (STEPS - WARM_UP)


def test_static_scales() -> None:
    def fix(step, model) -> None:
        if step == WARM_UP + 1:
            freeze_scales(model)

    graphs, _ = recorded_as_plain(scheme="w4a4", before=fix)
    assert graphs.refused is None


def test_measured_blocks_run_in_python() -> None:
    seen = []

    def measure(step, model) -> None:
        if step == STEPS - 1:
            _, layer = next(iter(metis_layers(model)))
            layer.register_forward_hook(lambda *_: seen.append(step))

    _, recorder = recorded_as_plain(scheme="nvfp4-rne", before=measure)
    assert seen == 2 * [STEPS - 1]
    assert recorder.played == 2 * (2 * (STEPS - WARM_UP) - 1)


@pytest.mark.parametrize(
    ("make", "config", "reason"),
    [
        (lambda: llama(attention_dropout=0.1), {"scheme": "nvfp4-rne"}, "random numbers"),
        (llama, {"scheme": "smoothquant"}, "smoothquant keeps state"),
    ],
)
def test_what_is_not_recorded(make, config, reason, caplog) -> None:
    recorder = AgainFromPlaces()
    _, _, graphs = train(make, recorder, **config)
    assert recorder.played == 0
    assert reason in graphs.refused
    assert sum(reason in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("value", [3, torch.arange(2)])
def test_blocks_that_return_more_than_floats_run_in_python(value) -> None:
    class Block(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x), value

    block, recorder = Block(2, 2), AgainFromPlaces()
    graphs = BlockGraphs([block], recorder)
    for _ in range(WARM_UP + 2):
        assert block(torch.ones(1, 2))[1] is value
    assert recorder.played == 0
    assert "something other than floating-point tensors" in graphs.refused


def test_a_recording_that_fails_leaves_python(caplog) -> None:
    def fails(run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = train(llama, scheme="nvfp4-rne")
    losses, model, graphs = train(llama, fails, scheme="nvfp4-rne")
    assert losses == expected[0]
    assert_same(model, expected[1])
    assert "not permitted" in graphs.refused


def test_a_model_without_such_blocks_says_so(caplog) -> None:
    """It is sharded all the same, so its steps are not recorded whole."""
    graphs = BlockGraphs([], AgainFromPlaces())
    assert "contains a converted layer" in graphs.refused
    assert graphs.refused in caplog.text
    assert units(llama()) is None


def test_blocks_get_their_forward_passes_back() -> None:
    _, model, graphs = train(llama, AgainFromPlaces(), scheme="nvfp4-rne")
    recorder = graphs.record
    graphs.forget()
    played = recorder.played
    ids = next(batches())
    model(input_ids=ids, labels=ids).loss.backward()
    assert recorder.played == played


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nvfp4-rne", "nvidia", "metis"])
def test_in_cuda_graphs(scheme) -> None:
    options = {"scheme": scheme, "bf16": True, "device": "cuda"}
    with use_kernels(None):
        plain = train(llama, **options)
        losses, _, graphs = train(llama, CudaRecorder(), **options)
    assert graphs.refused is None
    assert {block.recordings for block in graphs.blocks} == {1}
    assert losses == pytest.approx(plain[0], rel=1e-4)
