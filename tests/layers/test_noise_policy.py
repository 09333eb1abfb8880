"""What noise depends on: seed, layer, role, process rank and content; on nothing else.

So recomputed forward passes repeat exactly. That a control run does not notice that a quantizer
exists is tested in test_generators.py, and that a resumed run continues exactly with the callback.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import VOCAB, llama
from design import cases
from tensors import assert_same
from torch import nn

from layers.layer_tools import (
    FP4_SCHEMES,
    FP4_STRUCTURES,
    STOCHASTIC,
    Call,
    distinct,
    key_values,
    layer_of,
    of_each_kind,
    record,
)
from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.layers.make import convert_linear
from metis_hf.layers.tensor_parallel import WHOLE, Shards
from metis_hf.noise import uniform
from metis_hf.operands import HotChannels, MeanRemoved, Spectral
from metis_hf.schemes import Role
from metis_hf.transforms import spectral

TOKENS, IN, OUT = 40, 48, 32
FP4_KINDS = of_each_kind(FP4_SCHEMES)


def converted(model, scheme, **changes):
    return get_metis_model(model, MetisConfig(scheme=scheme, **changes))


class TestCheckpointing:
    """Activation checkpointing recomputes the very forward pass, whatever it does with torch's RNG.

    Every forward rounding is stochastic here, so that a second draw would show.
    """

    SOME = ("q_proj", "k_proj", "down_proj")  # two read one input

    def loss_and_gradients(self, scheme, ids, checkpointing):
        torch.manual_seed(0)
        model = converted(llama(), scheme, target_modules=self.SOME, **STOCHASTIC).train()
        calls = []
        for name, layer in metis_layers(model):
            layer.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        # Two micro-batches, so that the second recomputation follows other noise than the first.
        losses = []
        for micro_batch in (ids, ids.flip(0).roll(1, 1)):
            loss = model(input_ids=micro_batch, labels=micro_batch).loss
            loss.backward()
            losses.append(loss.item())
        return losses, {name: p.grad for name, p in model.named_parameters()}, calls

    @pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
    @cases(
        {"scheme": FP4_KINDS},
        rotated={"use_reentrant": [False, True], "preserve_rng_state": [False, True]},
    )
    def test_recomputes_exactly(self, scheme, use_reentrant, preserve_rng_state, token_ids):
        losses, gradients, calls = self.loss_and_gradients(scheme, token_ids, None)
        options = {"use_reentrant": use_reentrant, "preserve_rng_state": preserve_rng_state}
        again = self.loss_and_gradients(scheme, token_ids, options)
        assert again[0] == losses
        assert_same(again[1], gradients)
        assert len(again[2]) == 2 * len(calls)  # it did recompute

    @pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_recomputes_with_its_own_mask(self, reentrant):
        """Two padded forward passes before one backward pass, as in preference optimization.

        The rows that a recomputed pass samples must exclude its own padding, not that of the
        pass that ran last.
        """
        ids = torch.randint(0, VOCAB, (4, 60), generator=torch.Generator().manual_seed(1))
        lengths = torch.tensor([[20, 60, 60, 60], [60, 40, 60, 30]])
        masks = (torch.arange(60) < lengths[..., None]).long()  # [2 4 60]

        def gradients(checkpointing):
            torch.manual_seed(0)
            model = converted(llama(), "metis", target_modules=self.SOME, **STOCHASTIC).train()
            if checkpointing:
                options = {"use_reentrant": reentrant}
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            losses = [
                model(input_ids=x, attention_mask=mask, labels=x).loss
                for x, mask in zip((ids, ids.flip(0)), masks)
            ]
            sum(losses).backward()
            return {name: p.grad for name, p in model.named_parameters()}

        expected, found = gradients(False), gradients(True)
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not different


def one_pass(layer, x=None, dy=None) -> list[Call]:
    """The distinct quantizations of a forward and backward pass."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, IN, generator=g) if x is None else x
    dy = torch.randn(TOKENS, OUT, generator=g) if dy is None else dy
    calls = record(layer)
    layer(x.requires_grad_()).backward(dy)
    return distinct(calls)


def stochastic_layer(scheme, mode=None, **changes):
    torch.manual_seed(0)
    return layer_of(scheme, mode, i=IN, o=OUT, **STOCHASTIC, **changes)[1]


def keys_of(calls):
    return [key_values(call.key) for call in calls]


def parts_of(operand):
    """How many tensors are quantized for it."""
    if operand.conditioner == MeanRemoved(exact=True):
        return 1
    return {Spectral: 3, MeanRemoved: 2, HotChannels: 2}.get(type(operand.conditioner), 1)


def parts_at(scheme, *roles):
    """How many tensors are quantized at some roles, a copy that several of them take once."""
    used = {scheme.resolve(role)[0] for role in roles}
    return sum(parts_of(scheme.operand(role)) for role in used)


def set_rank(monkeypatch, rank):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: rank)


class TestRanks:
    @pytest.mark.parametrize(("scheme", "mode"), FP4_STRUCTURES)
    def test_noise_differs(self, scheme, mode, monkeypatch):
        """Every operand of rank 0 and of rank 1, and equal ranks are equal."""
        layer = stochastic_layer(scheme, mode)
        original = layer.scheme
        passes = []
        for rank in (0, 1, 1):
            set_rank(monkeypatch, rank)
            layer.scheme = original
            passes.append(one_pass(layer))
        zero, one, again = passes
        for a, b, c in zip(zero, one, again, strict=True):
            assert c.repeats(b)
            assert key_values(a.key) != key_values(b.key)
            assert not torch.equal(a.after, b.after)

    def test_random_signs_differ(self, monkeypatch):
        """Of each GEMM's two operands, in which they are equal."""
        layer = stochastic_layer("quartet2")
        x = torch.randn(TOKENS, IN)
        found = []
        for rank in (0, 1):
            set_rank(monkeypatch, rank)
            keys = layer.call_keys(x)
            contents = layer.call_state(x, keys)
            own = keys[Role.DGRAD_WEIGHT].data, keys[Role.WGRAD_INPUT].data
            assert [int(each) for each in contents] == [int(each) for each in own]
            found += [int(each) for each in contents]
        assert len(set(found)) == 4

    @pytest.mark.parametrize("scheme", ["smoothquant", "quartet2"])
    def test_the_mark_of_a_weight_does_not(self, scheme, monkeypatch):
        """By it processes know the same optimizer step."""
        layer = stochastic_layer(scheme)
        marks = []
        for rank in (0, 1):
            set_rank(monkeypatch, rank)
            marks.append(int(layer.call_keys(torch.randn(TOKENS, IN)).mark))
        assert marks[0] == marks[1]

    def test_one_process_is_rank_zero(self, monkeypatch):
        """So that a run on one device does not depend on how it was launched."""
        alone = keys_of(one_pass(stochastic_layer("metis")))
        set_rank(monkeypatch, 0)
        assert keys_of(one_pass(stochastic_layer("metis"))) == alone

    def test_processes_of_one_batch_are_equal(self, monkeypatch):
        """Under tensor parallelism, here two processes for each batch."""
        layer = stochastic_layer("metis")
        layer.shards = Shards(WHOLE, 2)
        keys = []
        for rank in (0, 1, 2):
            set_rank(monkeypatch, rank)
            keys.append([key_values(key) for key in (layer.noise_key(), layer.input_noise_key())])
        first, second, of_other_batch = keys
        assert first == second
        assert all(a != b for a, b in zip(first, of_other_batch, strict=True))

    @pytest.mark.parametrize(
        ("scheme", "choice"), [("metis", "sum_rows"), ("metis-paper", "sample_rows")]
    )
    def test_rows_of_a_subspace_differ(self, scheme, choice, monkeypatch):
        """Sums have other signs, samples other rows."""
        layer = stochastic_layer(scheme)
        chosen = []
        choose = getattr(spectral, choice)

        def spy(x, count, key, row_mask=None):
            rows = choose(x, count, key, row_mask)
            if x.shape[0] == OUT:  # the weight, which is split by all of its rows
                assert rows is x
                return rows
            assert rows.shape[0] < x.shape[0]  # fewer, not everything
            chosen.append(rows)
            return rows

        monkeypatch.setattr(spectral, choice, spy)
        x = torch.randn(2048, IN)
        for rank in (0, 1, 1):
            set_rank(monkeypatch, rank)
            layer(x.clone())  # of one tensor they are made once
        zero, one, again = chosen
        assert torch.equal(one, again)
        assert not torch.equal(zero, one)

    @pytest.mark.parametrize("size", [96, 1040], ids=["exact-svd", "randomized"])
    def test_split_weights_are_equal(self, size, monkeypatch):
        """Neither conversion nor a refresh may differ: decompositions have the same noise."""
        linear = nn.Linear(size, size, bias=False)
        splits = []
        for rank in (0, 1):
            set_rank(monkeypatch, rank)
            layer = convert_linear(linear, MetisConfig(split_weight=True), name="layer")
            again = layer.weight_form.decompose(layer.weight.detach(), layer.key)
            splits.append([*(p.detach() for p in layer.parameters()), *again])
        assert all(torch.equal(a, b) for a, b in zip(*splits, strict=True))


class TestDistinct:
    """Different uses never share noise."""

    STREAM = 1 << 14

    @pytest.mark.parametrize(("scheme", "mode"), FP4_STRUCTURES)
    def test_seeds_layers_roles_and_micro_batches(self, scheme, mode):
        """All raw streams of 2 seeds x 2 layers x 2 micro-batches x every operand, pair by pair.

        The weight's noise does not depend on the micro-batch, and the input's not on the layer:
        those streams are the same in both, and are counted once.
        """
        keys, expected, of_layer = {}, 0, {}
        for seed, name in itertools.product((0, 1), ("a", "b")):
            micro_batches = []
            for batch in range(2):
                torch.manual_seed(0)
                linear = nn.Linear(IN, OUT)
                config = MetisConfig(scheme=scheme, operand_mode=mode, seed=seed, **STOCHASTIC)
                layer = convert_linear(linear, config, name=name).train()
                g = torch.Generator().manual_seed(batch)
                calls = one_pass(layer, torch.randn(TOKENS, IN, generator=g))
                micro_batches.append(keys_of(calls))
                keys |= {key_values(call.key): call.key for call in calls}
            first, second = map(set, micro_batches)
            assert len(first) == len(second) == len(calls)  # no role, no part shares a key
            weights = parts_at(layer.scheme, Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT)
            form = layer.scheme.weight
            factors = form.is_split and not form.exact_factors
            assert len(first & second) == (3 if factors else weights)
            of_layer[seed, name] = first | second
        for seed in (0, 1):
            first, second = of_layer[seed, "a"], of_layer[seed, "b"]
            inputs = parts_at(layer.scheme, Role.FPROP_INPUT, Role.WGRAD_INPUT)
            assert len(first & second) == 2 * inputs
            expected += len(first | second)
        assert len(keys) == expected  # no seed shares one with another
        streams = torch.stack([uniform((self.STREAM,), key).double() for key in keys.values()])
        correlation = torch.corrcoef(streams)
        pairs = correlation[tuple(torch.triu_indices(len(keys), len(keys), 1))]
        # Of at most 120 * 119 / 2 normal values one is beyond 5.5 sigma with probability 3e-4.
        assert len(keys) <= 120
        assert pairs.abs().max() < 5.5 / self.STREAM**0.5


class TestContent:
    """Noise follows what is quantized: the input of the call and the stored weight."""

    @cases(
        {"scheme, mode": FP4_STRUCTURES},
        rotated={"optimizer": [torch.optim.SGD, torch.optim.AdamW]},
        ids=lambda level: getattr(level, "__name__", level),
    )
    def test_only_an_optimizer_step_changes_it(self, scheme, mode, optimizer):
        """All but the noise of an equal input, which repeats, as recomputation needs it."""
        layer = stochastic_layer(scheme, mode)
        original = layer.scheme
        before = one_pass(layer)
        equal = one_pass(stochastic_layer(scheme, mode))
        assert all(a.repeats(b) for a, b in zip(before, equal, strict=True))
        optimizer(layer.parameters(), lr=1e-4).step()
        layer.scheme = original
        after = one_pass(layer)
        same = set(keys_of(before)) & set(keys_of(after))
        assert len(same) == parts_at(layer.scheme, Role.FPROP_INPUT, Role.WGRAD_INPUT)

    def test_steps_of_16_bit_weights(self):
        """The stored bits count: a step that rounds back to them changes nothing."""
        layer = stochastic_layer("nvfp4").to(torch.bfloat16)
        x = torch.randn(TOKENS, IN, dtype=torch.bfloat16)

        def keys():
            made = layer.call_keys(x)
            inputs = (Role.FPROP_INPUT, Role.WGRAD_INPUT)
            return [key_values(made[role]) for role in Role if role not in inputs]

        before = keys()
        layer.weight.data *= 1 + 2.0**-12
        assert keys() == before
        layer.weight.data *= 1 + 2.0**-6
        assert not set(keys()) & set(before)

    def test_noise_does_not_depend_on_what_ran_before(self):
        """No counter: other calls, of this layer and others, in any order."""
        layer, other = stochastic_layer("metis"), stochastic_layer("nvfp4")
        x = torch.randn(TOKENS, IN)
        y = layer(x)
        for _ in range(3):
            layer(torch.randn(7, IN)).sum().backward()
            other(x)
        layer.eval()(x)
        assert torch.equal(layer.train()(x), y)
