"""Fused experts at the edges: no tokens, frozen ones, refused ones, those of older versions."""

from __future__ import annotations

import pytest
import torch
from design import cases

from layers.expert_tools import HIDDEN, KINDS, TOP_K, Block, routing
from metis_hf import MetisConfig, get_metis_model, to_dense


@cases({"kind": list(KINDS)}, rotated={"scheme": ["bf16", "metis"]})
def test_no_token_gives_no_row(kind, scheme):
    """As before the conversion; gradients are zeros, so that processes reduce the same ones."""
    block = get_metis_model(Block(kind), MetisConfig(scheme=scheme, rank=4))
    x = torch.zeros(0, HIDDEN, requires_grad=True)
    weights = torch.zeros(0, TOP_K, requires_grad=True)
    y = block(x, torch.zeros(0, TOP_K, dtype=torch.long), weights)
    assert y.shape == (0, HIDDEN)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert weights.grad.shape == weights.shape
    for name, param in block.named_parameters():
        assert torch.equal(param.grad, torch.zeros_like(param)), name


def test_experts_that_do_not_tell_whether_they_are_parallel_run():
    """Those of transformers 5.10 have no such attribute."""
    block = get_metis_model(Block("mixtral"), MetisConfig(scheme="nvfp4"))
    expected = block(*routing())
    vars(block.experts).pop("_is_expert_parallel", None)
    assert torch.equal(block(*routing()), expected)


def test_unconverted_experts_refuse_our_implementation():
    block = Block("mixtral")
    block.experts.config._experts_implementation = "metis"
    with pytest.raises(ValueError, match="for converted experts, and these are not converted"):
        block(*routing())


def test_expert_parallelism_is_refused():
    block = get_metis_model(Block("mixtral"), MetisConfig())
    block.experts._is_expert_parallel = True
    with pytest.raises(NotImplementedError, match="expert parallelism gives each process"):
        block(*routing())


def test_frozen_experts_stay_frozen():
    """Through conversion and back; biases by themselves. One expert does not freeze the others."""
    block = Block("gpt-oss")
    block.experts.down_proj.requires_grad_(False)
    block.experts.gate_up_proj_bias.requires_grad_(False)
    before = {name: param.requires_grad for name, param in block.named_parameters()}
    get_metis_model(block, MetisConfig())
    for name, param in block.named_parameters():
        bias = name.endswith("bias")
        assert param.requires_grad is (("down" in name) is bias), name
    block.experts.metis_gate_up_proj[0].weight.requires_grad_(False)
    to_dense(block)
    assert {name: param.requires_grad for name, param in block.named_parameters()} == before
