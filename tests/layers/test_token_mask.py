"""Masks of padding under threads: who shares a model never sees another's rows."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import bart
from tensors import same
from torch import nn

from layers.mask_tools import THREADS, batches, llama_with, masks_of, t5
from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.layers.token_mask import TokenMask

ROUNDS = 2
SCHEMES = ("metis", "mean")  # both depend on which rows are padding
SMALL = {"layers": 1, "target_modules": ["q_proj", "k_proj", "down_proj"]}


def in_threads(work: Callable[[int], object], count: int = THREADS) -> list:
    """The results of work(0), work(1), .. in a thread each."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def together(model, count: int = THREADS):
    """Make every call of the model wait, once it has its mask, until all threads have theirs."""
    barrier = threading.Barrier(count, timeout=60)

    def wait(*args):
        barrier.wait()

    return model.model.embed_tokens.register_forward_hook(wait)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_threads_that_evaluate_one_model(scheme):
    model, inputs = llama_with(scheme, **SMALL).eval(), batches()
    with torch.no_grad():
        alone = [model(**batch).logits for batch in inputs]
        unmasked = model(input_ids=inputs[1]["input_ids"]).logits
    assert not torch.equal(unmasked[:, 0], alone[1][:, 0])  # the mask shows in the results

    def evaluate(index):
        with torch.no_grad():
            return [model(**inputs[index]).logits for _ in range(ROUNDS)]

    handle = together(model)
    found = in_threads(evaluate)
    handle.remove()
    for expected, rounds in zip(alone, found):
        assert all(torch.equal(logits, expected) for logits in rounds)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(("scheme", "checkpointing"), [("metis", True), ("mean", False)])
def test_threads_that_differentiate_one_model(scheme, checkpointing):
    """A recomputed layer gets the mask of its own call, whoever has begun another since."""
    model, inputs = llama_with(scheme, checkpointing, **SMALL), batches()
    params = list(model.parameters())

    def gradients(index):
        return torch.autograd.grad(model(**inputs[index]).loss, params)

    alone = [gradients(index) for index in range(THREADS)]
    handle = together(model)
    found = in_threads(lambda index: [gradients(index) for _ in range(ROUNDS)])
    handle.remove()
    for expected, rounds in zip(alone, found):
        assert all(same(grads, expected) for grads in rounds)


def replicas_of(model: nn.Module, count: int) -> list[tuple[nn.Module, list[torch.Tensor]]]:
    """Copies and their parameters, as `torch.nn.parallel.replicate` (for GPUs) makes them."""
    modules = list(model.modules())
    replicas = []
    for _ in range(count):
        copies = {module: module._replicate_for_data_parallel() for module in modules}
        params = {p: p.clone() for p in model.parameters()}
        for module, made in copies.items():
            for name, child in module._modules.items():
                setattr(made, name, copies[child])
            for name, param in module._parameters.items():
                if param is None:
                    made._parameters[name] = None
                else:
                    setattr(made, name, params[param])
            for name, buffer in module._buffers.items():
                made._buffers[name] = None if buffer is None else buffer.clone()
        replicas.append((copies[model], list(params.values())))
    return replicas


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(("scheme", "checkpointing"), [("metis", True), ("mean", False)])
def test_replicas_of_data_parallel(scheme, checkpointing):
    """New threads for each forward pass, and one backward pass through all of them elsewhere."""
    model, inputs = llama_with(scheme, checkpointing, **SMALL), batches()[:-1]

    def step(run):
        """Losses and gradients; of each replica, since their sum has no fixed order."""
        replicas = replicas_of(model, len(inputs))
        losses = run(lambda index: replicas[index][0](**inputs[index]).loss)
        return losses + list(
            torch.autograd.grad(sum(losses), [p for _, copied in replicas for p in copied])
        )

    expected = step(lambda forward: [forward(index) for index in range(len(inputs))])
    handle = together(model, len(inputs))  # a hook of the model is one of its replicas
    for _ in range(2):
        assert same(step(lambda forward: in_threads(forward, len(inputs))), expected)
    handle.remove()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_a_call_is_remembered_as_long_as_its_graph():
    """And its mask with it, which nothing else holds here."""
    model, (first, second, *_) = llama_with("metis", checkpointing=True), batches()
    masks = []

    def call(batch):
        mask = batch["attention_mask"].clone()
        masks.append(weakref.ref(mask))
        return model(**batch | {"attention_mask": mask}).loss

    def remembered():
        return sum(mask() is not None for mask in masks)

    losses = [call(batch) for batch in (first, second)]
    assert remembered() == 2
    losses.pop(0).backward()
    assert remembered() == 1
    losses.pop().backward()
    assert remembered() == 1  # the last one, until another begins
    with torch.no_grad():
        call(first)
    assert remembered() == 0


def test_a_pickled_one_shares_nothing():
    mask, x = TokenMask("decoder_attention_mask"), torch.randn(2, 3, 4)

    class Model(nn.Module):
        def forward(self, decoder_attention_mask):
            other = pickle.loads(pickle.dumps(mask))
            assert other.argument == mask.argument
            return mask.rows(x, "layer"), other.rows(x, "layer")

    model = Model()
    mask.register(model)
    own, others = model(torch.ones(2, 3))
    assert own.tolist() == [True] * 6
    assert others is None


def test_keys_and_values_of_cross_attention_read_the_encoders_tokens():
    layers = dict(metis_layers(t5()))
    cross = "decoder.block.0.layer.1.EncDecAttention"
    of_encoder = layers["encoder.block.0.layer.0.SelfAttention.q"].token_mask
    of_decoder = layers["decoder.block.0.layer.0.SelfAttention.k"].token_mask
    assert layers[f"{cross}.k"].token_mask is layers[f"{cross}.v"].token_mask is of_encoder
    assert layers[f"{cross}.q"].token_mask is layers[f"{cross}.o"].token_mask is of_decoder
    assert of_decoder is not of_encoder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_positional_mask_is_the_mask(scheme):
    model, batch = llama_with(scheme), batches()[1]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits
        assert torch.equal(model(ids, mask).logits, wanted)
        assert not torch.equal(model(ids).logits, wanted)


def test_layers_that_read_one_tensor_have_one_mask():
    """So they share what was encoded of it: four inputs of a block, read by seven layers."""
    model, batch = llama_with("metis"), batches()[1]
    with torch.no_grad():
        seen = masks_of(model, lambda: model(**batch))
    assert len(seen) == 14
    assert len({id(mask) for mask in seen.values()}) == 1


def test_a_decoder_without_a_mask_has_the_rows_with_labels():
    """As transformers' collators leave batches: labels of -100, and no mask for them."""
    model = t5()
    ids, labels = torch.ones(2, 5, dtype=torch.long), torch.full((2, 4), 3)
    labels[1, 2:] = -100

    def mask(**inputs):
        seen = masks_of(model, lambda: model(input_ids=ids, **inputs))
        return seen["decoder.block.0.layer.0.SelfAttention.q"]

    assert mask(labels=labels).tolist() == [True] * 6 + [False] * 2
    assert mask(labels=labels, decoder_attention_mask=torch.ones(2, 4)).all()
    # Trainer takes labels away where it smooths them; the last token's row is one more.
    tokens = model.prepare_decoder_input_ids_from_labels(labels)
    assert mask(decoder_input_ids=tokens).tolist() == [True] * 7 + [False]
    model.eval()
    assert mask(decoder_input_ids=tokens) is None


@pytest.mark.parametrize("labels", [torch.tensor([0, 1]), torch.zeros(2, 3), None], ids=str)
def test_a_decoder_that_is_given_the_encoders_tokens_has_their_mask(labels):
    """As of Bart's classifier: labels of sequences mark no tokens, which are shifted by one."""
    model = bart("ForSequenceClassification", num_labels=3)
    get_metis_model(model, MetisConfig(scheme="metis", rank=4))
    ids = torch.tensor([[5, 6, 2, 1, 1, 1], [5, 6, 7, 8, 9, 2]])
    batch = {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": labels}
    seen = masks_of(model, lambda: model(**batch))["model.decoder.layers.0.fc1"]
    assert seen.tolist() == [True] * 4 + [False] * 2 + [True] * 6
