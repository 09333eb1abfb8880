"""torch.compile: one graph, the numbers of eager mode, and no more recompilations than needed.

Backend aot_eager: what Dynamo and AOTAutograd trace runs op by op, so equal means equal to the bit.
Tracing takes tens of seconds a scheme. `metis` goes through all of it, schemes of other kinds
through Dynamo alone (backend eager), as a single layer and for one shape; `--full` traces all.
"""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from conftest import VOCAB, llama
from design import named, thinned
from tensors import same
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from training.trainer_tools import records, trainer

from layers.layer_tools import layer_of
from metis_hf import (
    MetisCallback,
    MetisConfig,
    calibrate,
    get_metis_model,
    metis_layers,
    scheme_names,
    set_precision,
)
from metis_hf.numerics.elements import FloatFormat
from metis_hf.numerics.kernels import use_kernels
from metis_hf.operands.conditioners.clamped import Sparse
from metis_hf.schemes import build_scheme

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# Gradients that differ in their last bits put some elements on other FP4 values at the next step:
# differences of 2^-2 of a few elements, seen as up to 0.005 nats.
MEASURED_LOSS = 0.01
# Direct; a rotation of blocks; splits; a rotation of a whole length, state, a sparse part.
TRACED_WHOLE = ("nvfp4", "nvidia", "metis", "metis-paper", "quarot", "smoothquant", "occ")
SHORT = ("quartet2", "smoothquant", "occ", "nvidia", "four-over-six", "hot-channel")
OTHERS = named(scheme_names(), SHORT)


def model_for(scheme, targets=("o_proj",), **changes):
    """A block of a Llama with one converted layer: each adds thousands of operations to trace."""
    torch.manual_seed(0)
    config = MetisConfig(scheme=scheme, target_modules=targets, **changes)
    return get_metis_model(llama(1), config).train()


def batch(rows, columns):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randint(0, VOCAB, (rows, columns), generator=generator)


def loss_and_grads(model, call, ids):
    model.zero_grad()
    loss = call(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", thinned(TRACED_WHOLE, lambda name: name == "metis"))
def test_one_graph_with_the_numbers_of_eager_mode(scheme):
    """Losses and all gradients, at two batch shapes; nothing is traced twice or left to Python."""
    model = model_for(scheme)
    shapes = [(2, 24), (3, 40)]
    expected = [loss_and_grads(model, model, batch(*shape)) for shape in shapes]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with warnings.catch_warnings():
        # Dynamo ignores caches of functions that it traces, and says so.
        warnings.filterwarnings("error", message=".*lru_cache.*")
        got = [loss_and_grads(model, compiled, batch(*shape)) for shape in shapes]
    for index, shape in enumerate(shapes):
        assert same(got[index], expected[index]), shape
    # One graph for the first shape, and one for all other shapes.
    assert counter.frame_count == 2


def test_values_of_a_format_are_not_cached_when_they_are_asked_for():
    """Dynamo traces no functools.cached_property; one that was read before would hide that."""
    fmt = FloatFormat("e2m1 of this test", 2, 1, 1, 6.0)
    largest = torch.compile(lambda x: x * fmt.grid[-1], backend="aot_eager", fullgraph=True)
    assert torch.equal(largest(torch.ones(2)), torch.full((2,), 6.0))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", OTHERS)
def test_dynamo_traces_one_graph(scheme):
    """Of a layer, forward and backward, with the numbers of eager mode."""
    torch.manual_seed(0)
    _, layer = layer_of(scheme, i=64, o=48)
    x = torch.randn(48, 64, requires_grad=True)

    def step(call):
        layer.zero_grad()
        x.grad = None
        y = call(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(param.grad.clone() for param in layer.parameters())]

    expected = step(layer)
    counter = CompileCounterWithBackend("eager")
    assert same(step(torch.compile(layer, backend=counter, fullgraph=True)), expected)
    assert counter.frame_count == 1


def test_calls_are_noted_while_they_are_traced():
    """Without a graph break, also where activations are recomputed, and without a guard."""
    _, layer = layer_of("bf16")
    _, idle = layer_of("bf16")

    def step(x):
        return checkpoint(layer, x, use_reentrant=False) if len(x) else idle(x)

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for _ in range(2):
        layer.calls.forget()
        compiled(torch.ones(4, 48)).sum().backward()
        assert (layer.calls.any, idle.calls.any) == (True, False)
    assert counter.frame_count == 1


def test_a_scheme_is_rebuilt_from_its_fields():
    """As torch 2.8 does with one that it traces: it passes all of them, in their order."""
    for name in scheme_names():
        scheme = build_scheme(MetisConfig(scheme=name), 64, 64)
        values = [getattr(scheme, field.name) for field in dataclasses.fields(scheme)]
        again = type(scheme)(*values)
        assert again == scheme
        assert again.samples_rows == scheme.samples_rows
        assert again.is_high_precision == scheme.is_high_precision


def test_a_sparse_part_is_made_without_replace(monkeypatch):
    """Which torch 2.8 does not trace."""
    monkeypatch.delattr(Sparse, "_replace")
    _, layer = layer_of("occ", i=64, o=48)
    layer(torch.randn(48, 64, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("scheme", ["nvidia", "metis"])
def test_quantizers_are_nodes_of_the_graph(scheme):
    """A compiler gets a few dozen operators for a layer, forward and backward, kernels in them."""
    layer = layer_of(scheme, i=64, o=48)[1]
    x = torch.randn(48, 64, requires_grad=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    with use_kernels(None):
        compiled(x).sum().backward()
        assert torch.equal(compiled(x), layer(x))
    (graph,) = counter.graphs
    nodes = [node for part in graph.modules() for node in part.graph.nodes]
    assert sum("metis_hf.quantize" in str(node.target) for node in nodes) >= 3
    assert len(nodes) < 250


@pytest.mark.slow
def test_inductor_gives_the_numbers_of_eager_mode():
    """The default backend, which fuses what lies between quantizers and GEMMs."""
    torch.manual_seed(0)
    layer = layer_of("metis", i=64, o=48, bias=False)[1]
    x = torch.randn(96, 64, requires_grad=True)

    def step(call):
        layer.weight.grad = x.grad = None
        y = call(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, layer.weight.grad]

    with use_kernels(None):
        assert same(step(torch.compile(layer, fullgraph=True)), step(layer))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", thinned(["nvfp4-rne", "metis"], lambda name: name != "metis"))
def test_explain_finds_no_graph_break(scheme):
    """With every layer converted."""
    model = model_for(scheme, "all-linear")
    assert len(dict(metis_layers(model))) == 7
    ids = batch(2, 24)
    found = torch._dynamo.explain(lambda ids: model(input_ids=ids, labels=ids).loss)(ids)
    assert found.graph_break_count == 0, found.break_reasons
    assert found.graph_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("scheme", thinned(["nvfp4-rne", "metis"], lambda name: name != "metis"))
def test_recompilations_are_bounded(scheme):
    """A graph for the first shape and one for the others, in training and in evaluation; no more
    for further shapes, new weights, going back and forth, or batches from all of whose rows a
    subspace is estimated."""
    model = model_for(scheme, rank=16)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)

    def visit(rows, columns):
        ids = batch(rows, columns)
        compiled.train()
        loss_and_grads(model, compiled, ids)
        compiled.eval()
        with torch.no_grad():
            logits = compiled(input_ids=ids).logits
            assert torch.equal(logits, model(input_ids=ids).logits)

    for shape in [(4, 32), (3, 40)]:
        visit(*shape)
    assert counter.frame_count == 4
    for shape in [(5, 33), (4, 32), (2, 60), (3, 40)]:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1e-3)
        visit(*shape)
    assert counter.frame_count == 4
    for shape in [(2, 24), (3, 11), (3, 40)]:  # 4 (rank + 8) = 96 rows are sampled
        visit(*shape)
    assert counter.frame_count == 4


@pytest.mark.slow
def test_results_lie_in_memory_as_in_eager_mode():
    """Attention, for one, adds up in another order what lies transposed."""
    layer, g = layer_of("metis", i=64, o=48)[1], torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 32, 64, generator=g), torch.randn(2, 32, 48, generator=g)

    def run(function):
        layer.weight.grad, given = None, x.clone().requires_grad_()
        y = function(given)
        y.backward(dy)
        return [y.detach(), given.grad, layer.weight.grad]

    found, wanted = run(torch.compile(layer, backend="aot_eager", fullgraph=True)), run(layer)
    assert all(map(torch.equal, found, wanted))
    assert [each.stride() for each in found] == [each.stride() for each in wanted]


@pytest.mark.slow
def test_a_switch_of_precision_recompiles_once_and_is_right():
    model = model_for("nvidia")
    ids = batch(2, 24)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    first = loss_and_grads(model, compiled, ids)
    assert counter.frame_count == 1
    set_precision(model, high_precision=("forward",))
    for _ in range(2):
        assert same(loss_and_grads(model, compiled, ids), loss_and_grads(model, model, ids))
    assert counter.frame_count == 2
    set_precision(model, high_precision=())
    assert same(loss_and_grads(model, compiled, ids), first)
    assert counter.frame_count <= 3


STEPS = 4
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


def train(model, directory, health_interval=0, **changes):
    """(the model after a few steps of Trainer, what each of them logged)."""
    torch._dynamo.reset()
    data = [{"input_ids": row, "labels": row} for row in batch(24, 24)]
    callback = MetisCallback(health_interval=health_interval)
    made = trainer(directory, model, [callback], data=data, max_steps=STEPS, **changes)
    made.train()
    return model, records(made)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", thinned(["nvfp4-rne", "metis"], lambda name: name != "metis"))
def test_trainer(scheme, tmp_path):
    """Trainer(torch_compile=True): losses and weights of eager mode, refreshes included; health."""
    options = {"split_weight": True, "refresh_interval": 2}

    def run(directory, **changes):
        return train(model_for(scheme, **options), directory, **changes)

    plain, expected = run(tmp_path / "eager")
    model, history = run(tmp_path / "compiled", **COMPILED)
    assert history == expected
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    # A measured step breaks the graph at the hooks, which changes the order of some fp32 sums.
    _, measured = run(tmp_path / "measured", health_interval=4, **COMPILED)
    assert [entry["loss"] for entry in measured] == pytest.approx(
        [entry["loss"] for entry in expected], abs=MEASURED_LOSS
    )
    assert ["metis/weight/sqnr_db" in entry for entry in measured] == [1, 0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False], ids=["calibrated", "scales that move"])
def test_trainer_with_static_scales(frozen, tmp_path):
    """Quantization-aware training as it is deployed: losses, weights and scales of eager mode."""

    def run(directory, **changes):
        model = model_for("w4a4")
        if frozen:
            calibrate(model, [batch(4, 24)])
        return train(model, directory, **changes)

    plain, expected = run(tmp_path / "eager")
    model, history = run(tmp_path / "compiled", **COMPILED)
    assert len(history) == STEPS
    assert history == expected
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert all(layer.scales_frozen == frozen for _, layer in metis_layers(model))
