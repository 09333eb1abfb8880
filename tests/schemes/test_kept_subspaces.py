"""Subspaces of inputs and output gradients that layers keep from step to step."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import transformers
from conftest import llama
from layers.layer_tools import layer_of
from tensors import same
from torch import nn
from torch.utils.checkpoint import checkpoint
from training.trainer_tools import converted, trainer

from metis_hf import MetisCallback, MetisConfig, get_metis_model, metis_layers
from metis_hf.layers.make import convert_linear
from metis_hf.training.layer_states import after_step

IN, OUT, RANK, TOKENS = 48, 32, 4, 96
KEPT = {"subspace_interval": 3}
REFINED = {**KEPT, "subspace_refinements": 1}
BASES = ("input_basis", "grad_output_basis")


def metis(scheme="metis", fields=None, **changes):
    torch.manual_seed(0)
    options = {"i": IN, "o": OUT, "rank": RANK, **(KEPT if fields is None else fields), **changes}
    return layer_of(scheme, **options)[1]


def batch(seed, tokens=TOKENS, directions=RANK):
    """x [tokens IN] with some strong directions, others for each seed, and a little noise."""
    draw = torch.Generator().manual_seed(seed)
    strong = torch.randn(tokens, directions, generator=draw)
    strong = strong @ torch.randn(directions, IN, generator=draw)
    return strong + 0.05 * torch.randn(tokens, IN, generator=draw)


def step(layer, number, *batches, call=None):
    """One optimizer step of some micro-batches: outputs, and gradients of the parameters."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    optimizer.zero_grad()
    outputs = [(call or layer)(x) for x in batches]  # all forward passes come first
    sum(y.square().mean() for y in outputs).backward()
    seen = [y.detach() for y in outputs] + [p.grad.clone() for p in layer.parameters()]
    optimizer.step()
    after_step(layer, number, 100)
    return seen


def buffers(layer):
    return {name: value.clone() for name, value in layer.state_buffers().items()}


def known(layer):
    return layer.state_buffers()["subspaces_known"].tolist()


def energy(x, basis):
    """The share of the energy of x [t c] in the span of the columns of a basis [c k]."""
    x, (q, _) = x.double(), torch.linalg.qr(basis.double())
    return ((x @ q).square().sum() / x.square().sum()).item()


def test_they_are_found_in_every_third_step():
    """The first step finds them; so does each whose number is a multiple of the interval."""
    layer, found = metis(), []
    for number in range(1, 8):
        step(layer, number, batch(number))
        found.append((known(layer), buffers(layer)["input_basis"]))
    assert [one for one, _ in found] == [[1, 1], [1, 1], [0, 0], [1, 1], [1, 1], [0, 0], [1, 1]]
    bases = [basis for _, basis in found]
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(bases)]
    assert changed == [False, False, True, False, False, True]
    for basis, number in ((bases[0], 1), (bases[3], 4)):
        assert energy(batch(number), basis) > 0.99
        torch.testing.assert_close(basis.T @ basis, torch.eye(RANK))


@pytest.mark.parametrize("scheme", ["metis", "metis-paper"])
def test_a_call_splits_its_batch_along_the_kept_basis(scheme):
    layer = metis(scheme)
    step(layer, 1, batch(1))
    x = batch(2)
    state = layer.call_state(x, layer.call_keys(x))
    for tensor, operand in (
        ("input", layer.scheme.fprop_input),
        ("grad_output", layer.scheme.dgrad_grad_output),
    ):
        y = x if tensor == "input" else torch.randn(TOKENS, OUT)
        a, lam, v = operand.bind(state).conditioner.split(y, key=layer.key)
        assert torch.equal(v, buffers(layer)[f"{tensor}_basis"])
        torch.testing.assert_close((a * lam) @ v.T, y @ v @ v.T, rtol=1e-4, atol=1e-4)
    # The residual has what the basis misses, and a call without a search changes no buffer.
    x_hat = layer.scheme.fprop_input.bind(state)(
        x, dim=-1, key=layer.call_keys(x)[0], dtype=torch.float32
    )
    before = buffers(layer)
    layer(x)
    assert same(before, buffers(layer))
    assert (x_hat.values - x).norm() < 0.2 * x.norm()


def test_refinements_turn_it_towards_the_batch():
    """From a basis of another batch, and still for the first of several micro-batches."""
    kept, refined = metis(), metis(fields=REFINED)
    for layer in (kept, refined):
        step(layer, 1, batch(1))
    x = batch(2)
    of_last = buffers(refined)["input_basis"]
    assert torch.equal(of_last, buffers(kept)["input_basis"])
    step(refined, 2, x)
    now = buffers(refined)["input_basis"]
    assert energy(x, of_last) < 0.5
    assert energy(x, now) > 0.99
    torch.testing.assert_close(now.T @ now, torch.eye(RANK), rtol=0, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fields", [KEPT, REFINED])
def test_recomputation_repeats_the_call(fields, reentrant):
    """In steps with a search and without, of two micro-batches."""
    plain, other = metis(fields=fields), metis(fields=fields)
    for number in range(1, 6):
        batches = [batch(10 * number + i).requires_grad_() for i in range(2)]
        seen = step(plain, number, *batches)
        again = step(
            other, number, *batches, call=lambda x: checkpoint(other, x, use_reentrant=reentrant)
        )
        assert all(map(torch.equal, seen, again))
        assert same(buffers(plain), buffers(other))


@pytest.mark.parametrize("fields", [KEPT, REFINED])
def test_evaluation_neither_takes_nor_changes_them(fields):
    layer, fresh = metis(fields=fields), metis(fields={})
    for number in (1, 2):
        step(layer, number, batch(number))
    fresh.load_state_dict(layer.state_dict(), strict=False)
    before, x = buffers(layer), batch(5)
    assert torch.equal(layer.eval()(x), fresh.eval()(x))
    assert same(before, buffers(layer))


@pytest.mark.parametrize("fields", [KEPT, REFINED])
def test_layers_with_one_input_keep_one_subspace(fields):
    """As they would each by itself, to the bit."""

    def layers():
        torch.manual_seed(0)
        config = MetisConfig(rank=RANK, **fields)
        made = [convert_linear(nn.Linear(IN, OUT), config, name=f"l{i}") for i in range(3)]
        return nn.ModuleList(made).train()

    together, apart = layers(), layers()
    for number in range(1, 6):
        x = batch(number)
        seen = step(together, number, x, call=lambda x: sum(one(x) for one in together))
        each = step(apart, number, x, call=lambda x: sum(one(x.clone()) for one in apart))
        assert all(map(torch.equal, seen, each))
        for a, b in zip(together, apart):
            assert same(buffers(a), buffers(b))
        assert torch.equal(together[0].input_basis, together[2].input_basis)


def test_measuring_a_step_changes_nothing(tmp_path):
    """Neither health, nor an evaluation in between."""

    def weights(interval, **changes):
        callback = MetisCallback(health_interval=interval)
        made = trainer(tmp_path, converted(**KEPT), [callback], max_steps=5, **changes)
        made.train()
        return made.model.state_dict()

    plain, measured = weights(0), weights(1, eval_strategy="steps", eval_steps=1)
    assert same(measured, plain)


def test_a_copy_goes_on_as_the_layer(tmp_path):
    """A deep copy, and one saved and loaded; in the middle of an interval."""
    config = MetisConfig(rank=RANK, **KEPT)
    torch.manual_seed(0)
    model = get_metis_model(llama(num_hidden_layers=1), config).train()
    ids = torch.randint(0, 64, (2, 24))

    def train(model, number):
        return step(model, number, ids, call=lambda ids: model(input_ids=ids).logits.float())

    train(model, 1)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    copied = copy.deepcopy(model)
    wanted = [train(model, number) for number in (2, 3, 4)]
    for other in (loaded, copied):
        for number, seen in zip((2, 3, 4), wanted):
            assert all(map(torch.equal, seen, train(other, number)))


def test_a_state_that_is_loaded_counts():
    """Into a layer that has trained: what the host remembers of it is forgotten."""
    first, second = metis(), metis()
    step(first, 1, batch(1))
    kept = copy.deepcopy(first.state_dict())
    for number in (1, 2, 3):
        step(second, number, batch(10 + number))
    assert known(second) == [0, 0]
    second.load_state_dict(kept)
    assert all(map(torch.equal, step(first, 2, batch(2)), step(second, 2, batch(2))))


def test_without_after_step_each_call_finds_its_own():
    layer, plain = metis(), metis(fields={})
    for number in range(3):
        x = batch(number)
        assert torch.equal(layer(x), plain(x))
    assert known(layer) == [0, 0]


@pytest.mark.parametrize("fields", [KEPT, REFINED])
def test_few_rows(fields):
    """A batch shorter than the rank, then a longer one, and none."""
    layer = metis(fields=fields)
    for number, tokens in enumerate((2, TOKENS, 3, 0, 1, TOKENS), 1):
        x = batch(number, tokens)
        y = layer(x)
        assert y.shape == (tokens, OUT)
        assert y.isfinite().all()
        if tokens:
            y.square().mean().backward()
        after_step(layer, number, 10)
        for name, value in buffers(layer).items():
            assert value.isfinite().all(), name
    exact = nn.functional.linear(x, layer.weight, layer.bias)
    assert (layer(x) - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("fields", [KEPT, REFINED])
def test_a_broken_row_spoils_no_basis(fields, value):
    layer = metis(fields=fields)
    for number in (1, 2, 3, 4):
        x = batch(number)
        x[5, 7] = value
        layer(x).square().mean().backward()
        after_step(layer, number, 10)
        assert all(buffers(layer)[name].isfinite().all() for name in BASES)
    assert layer(batch(9)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    """Bases stay fp32, and a model in fp64 multiplies in fp64."""
    layer = metis(dtype=dtype)
    for number in (1, 2):
        y = layer(batch(number).to(dtype))
        y.square().mean().backward()
        after_step(layer, number, 10)
        assert y.dtype is dtype
        assert all(buffers(layer)[name].dtype is torch.float32 for name in BASES)
    if dtype is torch.float64:
        x = batch(2).double()
        state = layer.call_state(x, layer.call_keys(x))
        a, lam, v = layer.scheme.fprop_input.bind(state).conditioner.split(x, key=layer.key)
        torch.testing.assert_close((a * lam) @ v.T, x @ v @ v.T)


def test_a_frozen_layer_keeps_its_own_too():
    """As the base of an adapter; without gradients it has one of inputs alone."""
    layer = metis().requires_grad_(False)
    layer(batch(1))
    after_step(layer, 1, 10)
    assert known(layer) == [1, 0]
    layer(batch(2).requires_grad_()).sum().backward()
    after_step(layer, 4, 10)
    assert known(layer) == [1, 1]


def test_what_is_not_split_has_no_state():
    assert not metis("nvidia").state_buffers()
    names = metis(decompose=("activation",)).state_buffers().keys()
    assert names == {"input_basis", "subspaces_known"}
    mixed = get_metis_model(
        llama(num_hidden_layers=1), MetisConfig(scheme_pattern={"down_proj": "nvfp4"}, **KEPT)
    )
    with_state = {name.rsplit(".")[-1] for name, one in metis_layers(mixed) if one.state_names}
    assert with_state == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


def test_compiled_steps_are_refused(tmp_path):
    made = trainer(tmp_path, converted(**KEPT), [MetisCallback()], torch_compile=True)
    with pytest.raises(NotImplementedError, match=r"subspace_interval=3 .*q_proj.*Leave one"):
        made.train()
