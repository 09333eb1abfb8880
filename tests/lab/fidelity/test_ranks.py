"""Ranks for a budget: errors and costs against plain computations, the choice, bad input."""

from __future__ import annotations

import io
import itertools
import json
import os
import re

import conftest
import pytest
import torch
from conftest import mixtral
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tensors import assert_same

from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.cli.main import main
from metis_hf.lab.cost import Overhead, model_overhead, overhead, tokens_of_layers
from metis_hf.lab.fidelity import ranks as ranks_module
from metis_hf.lab.fidelity.ranks import RANKS as ALL_RANKS
from metis_hf.lab.fidelity.ranks import LayerRanks, RankGroup, allocate_ranks, spend, write_ranks
from metis_hf.lab.fidelity.settings import Settings
from metis_hf.lab.fidelity.subject import ModelAndText, Subject

pytestmark = pytest.mark.usefixtures("no_pictures")

RANKS = (2, 4, 8, 16)


def llama():
    torch.manual_seed(0)
    return conftest.llama()


@pytest.fixture(scope="module")
def batches():
    return torch.randint(0, 97, (4, 32), generator=torch.Generator().manual_seed(1)).split(2)


@pytest.fixture(scope="module")
def plan(batches):
    return allocate_ranks(llama(), batches, 0.6, tokens=512, ranks=RANKS)


class TestPlan:
    def test_errors_are_those_of_plain_layers(self, plan, batches):
        """In the converted layer of that rank alone, on inputs and gradients of a plain model."""
        name = "model.layers.0.self_attn.k_proj"
        expected = [0.0] * len(RANKS)
        for ids in batches:
            model, kept = llama(), {}
            model.get_submodule(name).register_forward_hook(
                lambda _layer, inputs, y, kept=kept: kept.update(x=inputs[0].detach(), y=y)
            )
            loss = model(input_ids=ids, labels=ids).loss
            (dy,) = torch.autograd.grad(loss, kept["y"])
            for place, rank in enumerate(RANKS):
                layer = dict(metis_layers(get_metis_model(llama(), MetisConfig(rank=rank))))[name]
                with torch.no_grad():
                    e = (layer.eval()(kept["x"]) - kept["y"]).flatten(0, 1)
                expected[place] += sum(
                    float(e_s @ dy_t) ** 2 for e_s in e for dy_t in dy.flatten(0, 1)
                )
        assert plan.errors[name] == pytest.approx(expected, rel=1e-3)

    def test_cost_is_that_of_the_model_and_within_the_budget(self, plan):
        counted = model_overhead(llama().config, plan.config, tokens=512)
        assert plan.overhead.share == pytest.approx(counted.share)
        assert 0.3 < plan.overhead.share <= 0.6

    @pytest.mark.parametrize(("scheme", "budget"), [("svdquant", 0.2), ("quarot", 0.6)])
    def test_layers_of_other_schemes_cost_what_theirs_do(self, scheme, budget, batches):
        """Of those that split their weights, and of those that rotate and split nothing."""
        mixed = MetisConfig(scheme_pattern={r"model\.layers\.0\..*": scheme})
        plan = allocate_ranks(llama(), batches[:1], budget, mixed, tokens=512, ranks=RANKS)
        assert plan.overhead.share <= budget
        counted = model_overhead(llama().config, plan.config, tokens=512)
        assert plan.overhead.share == pytest.approx(counted.share)
        assert (plan.overhead.parts.get("rotation", 0) > 0.3) == (scheme == "quarot")

    def test_layers_of_one_input_have_one_rank(self, plan):
        for block in (0, 1):
            for module, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
                found = {plan.ranks[f"model.layers.{block}.{module}.{n}_proj"] for n in names}
                assert len(found) == 1

    def test_config_gives_every_layer_its_rank(self, plan):
        layers = dict(metis_layers(get_metis_model(llama(), plan.config)))
        assert {n: layer.scheme.rank for n, layer in layers.items()} == dict(plan.ranks)

    def test_leaves_the_model_as_it_was(self, batches):
        model, before = llama(), llama().state_dict()
        model.requires_grad_(False)
        allocate_ranks(model, batches[:1], 0.6, tokens=512, ranks=RANKS)
        assert not list(metis_layers(model))
        assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
        assert_same(model, before)

    def test_more_budget_leaves_less(self, plan, batches):
        more = allocate_ranks(llama(), batches, 1.2, tokens=512, ranks=RANKS)
        assert more.left < plan.left < 1
        assert all(more.ranks[n] >= plan.ranks[n] for n in plan.ranks)

    def test_no_layer_gets_more_than_conversion_takes(self, batches):
        """Of 32 outputs of keys and values at most 16 directions, whatever the budget."""
        ranks = (8, 16, 24, 32)
        plan = allocate_ranks(llama(), batches[:1], 100.0, tokens=512, ranks=ranks)
        layers = dict(metis_layers(get_metis_model(llama(), plan.config)))
        assert {n: layer.scheme.rank for n, layer in layers.items()} == dict(plan.ranks)
        for name, rank in plan.ranks.items():
            shared = name.endswith(("q_proj", "k_proj", "v_proj"))
            assert rank <= (16 if shared else 32), name
        assert max(plan.ranks.values()) == 32

    def test_experts_of_one_weight_have_one_rank_under_its_name(self, batches):
        """A config means the fused weight; the names of single experts it refuses."""

        plan = allocate_ranks(mixtral(3), batches[:1], 3.0, tokens=512, ranks=RANKS)
        experts = "model.layers.0.mlp.experts"
        assert {n for n in plan.config.rank_pattern if "experts" in n} == {
            f"{experts}.gate_up_proj", f"{experts}.down_proj"
        }  # fmt: skip
        model = get_metis_model(mixtral(3), plan.config)
        layers = dict(metis_layers(model))
        assert {n: layer.scheme.rank for n, layer in layers.items()} == dict(plan.ranks)
        assert len({plan.ranks[f"{experts}.metis_down_proj.{n}"] for n in range(3)}) == 1
        shapes = [((x.in_features, x.out_features), x.config) for x in layers.values()]
        reads = ["x" if name.endswith(("q_proj", "k_proj", "v_proj")) else name for name in layers]
        counted = overhead(shapes, [tokens_of_layers(model, 512)[name] for name in layers], reads)
        assert plan.overhead.share == pytest.approx(counted.share)
        assert plan.overhead.share <= 3.0


class TestSpending:
    @given(
        st.lists(st.lists(st.integers(1, 50), min_size=3, max_size=3), min_size=1, max_size=4),
        st.integers(0, 12),
    )
    def test_is_the_best_choice_where_steps_cost_alike_and_gain_less_and_less(self, gains, steps):
        groups = []
        for own in gains:
            falling = sorted(own, reverse=True)
            errors = [float(sum(falling[place:])) for place in range(4)]
            groups.append(RankGroup(["layer"], (1, 2, 3, 4), [0.0, 1.0, 2.0, 3.0], errors))
        at = spend(groups, float(steps))
        assert sum(at) <= steps
        left = sum(group.errors[place] for group, place in zip(groups, at))
        best = min(
            sum(group.errors[place] for group, place in zip(groups, choice))
            for choice in itertools.product(range(4), repeat=len(groups))
            if sum(choice) <= steps
        )
        assert left == best

    def test_steps_over_ranks(self):
        """Over one that gains nothing; and one that is too dear keeps those behind it."""
        group = RankGroup(["layer"], (1, 2, 3), [0.0, 1.0, 2.0], [5.0, 6.0, 1.0])
        assert [spend([group], budget) for budget in (1.0, 2.0)] == [[0], [2]]
        group = RankGroup(["layer"], (1, 2, 3), [0.0, 5.0, 6.0], [100.0, 40.0, 39.0])
        assert [spend([group], budget) for budget in (1.0, 5.0)] == [[0], [1]]


class TestRefusals:
    def test_says_why_before_anything_is_measured(self):
        def measured():
            raise AssertionError("measured")
            yield

        for changes, said in (
            ({"config": MetisConfig(scheme="nvidia")}, "does not split any operand"),
            (
                {"budget": 0.001},
                r"a budget of 0.1% is too small: rank 2 in all layers already costs \d+",
            ),
            ({"ranks": (8, 4)}, "expected ascending whole numbers"),
            ({"ranks": ()}, "expected ascending whole numbers"),
            ({"batches": []}, "at least one batch of text"),
            ({"budget": float("nan")}, "a budget of nan%; expected a number"),
            ({"tokens": 0}, "tokens=0 per step"),
        ):
            arguments = {"batches": measured(), "budget": 0.6, "ranks": RANKS, "tokens": 512}
            with pytest.raises(ValueError, match=said):
                allocate_ranks(llama(), **arguments | changes)

    def test_before_the_model_is_opened(self, tmp_path, monkeypatch):
        model = ModelAndText("no model", tmp_path / "no text")
        for changes, said in (
            ({"out": "nowhere/x.json"}, "x.json cannot be written; name a file in an existing"),
            ({"out": "."}, "cannot be written"),
            ({"budget": float("nan")}, "a budget of nan%"),
            ({"tokens": 0}, "tokens=0 per step"),
        ):
            arguments = {"budget": 0.6, "out": "x.json"} | changes
            arguments["out"] = tmp_path / arguments["out"]
            with pytest.raises(ValueError, match=said):
                write_ranks(model, **arguments)
        monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
        with pytest.raises(ValueError, match=r"x.json cannot be written; .* writable directory"):
            write_ranks(model, 0.6, tmp_path / "x.json")


def test_the_table_has_one_row_for_all_experts(tmp_path, monkeypatch):
    names = [f"model.layers.0.mlp.experts.metis_up_proj.{n}" for n in (0, 1)]
    found = LayerRanks(MetisConfig(), dict(zip(names, (4, 8))), Overhead({}, 4.5), {}, 1.0)
    subject = Subject(llama(), *torch.zeros(2, 1, 8, dtype=torch.int64), identity=None)
    monkeypatch.setattr(ModelAndText, "open", lambda self: subject)
    monkeypatch.setattr(ranks_module, "allocate_ranks", lambda *args, **options: found)
    console = Console(file=io.StringIO(), width=100)
    write_ranks(ModelAndText("m", tmp_path / "t"), 0.6, tmp_path / "x.json", console=console)
    assert re.search(r"metis_up_proj[ │]+2[ │]+4[ │]+6\.0[ │]+8 ", console.file.getvalue())


class TestCommand:
    @pytest.mark.slow
    def test_writes_a_config_that_fidelity_measures(self, place, tmp_path, monkeypatch, capsys):
        model, text = str(place / "model"), str(place / "text.txt")
        small = ["--sequence-length", "24", "--tokens-per-step", "512"]
        out = tmp_path / "budget.json"
        call = ["metis-hf", "ranks", model, "--text", text, "--budget", "90", "--out", str(out)]
        monkeypatch.setattr("sys.argv", [*call, "--limit", "3", *small])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        said = capsys.readouterr().out
        assert "down_proj" in said
        assert "more multiply-adds" in said
        assert str(out) in said
        config = MetisConfig.from_json(out.read_text())
        assert set(config.rank_pattern.values()) <= set(ALL_RANKS)

        call = ["metis-hf", "fidelity", model, "--text", text, "--out", str(tmp_path / "out")]
        chosen = ["--schemes", "nvfp4-rne", "--configs", str(out), "--alone", "none"]
        monkeypatch.setattr("sys.argv", [*call, *chosen, "--limit", "3", *small])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        record = json.loads((tmp_path / "out" / "results.json").read_text())
        assert [row["name"] for row in record["schemes"]] == ["nvfp4-rne", "budget"]
        plain, budget = record["schemes"]
        assert budget["batches"][0]["kl"] < plain["batches"][0]["kl"]
        assert 0.3 < sum(budget["overhead"].values()) <= 0.9

    def test_files_that_are_no_configs(self, tmp_path):
        path = tmp_path / "metis.json"
        path.write_text('{"rank": "many"}')
        with pytest.raises(
            ValueError, match=r"metis.json does not contain a valid config: rank='many'"
        ):
            Settings("model", path, configs=(path,)).candidates()
        path.write_bytes(b"\xff")
        with pytest.raises(ValueError, match=r"metis.json is not UTF-8 text"):
            Settings("model", path, configs=(path,)).candidates()
        path.write_text("{}")
        with pytest.raises(ValueError, match="two rows would be called metis"):
            Settings("model", path, schemes=("metis",), configs=(path,)).candidates()
