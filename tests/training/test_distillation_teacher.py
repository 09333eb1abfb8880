"""The teacher of a distillation: the student itself, and teachers that do not fit."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from conftest import VOCAB, bart, gpt2
from peft import LoraConfig, get_peft_model
from tensors import assert_same, logits

from metis_hf import (
    MetisConfig,
    get_metis_model,
)
from metis_hf.training.distillation import token_mask
from metis_hf.training.distillation_teacher import Teacher
from training.distillation_tools import (
    collate,
    dense,
    other,
    rows,
    student,
    trainer,
)
from training.recomputation import recomputed
from training.trainer_tools import losses


def adapted(scheme="nvfp4-rne", **changes):
    model = student(scheme)
    return get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", **changes)
    )


class TestOwnTeacher:
    def test_is_the_dense_model(self, tmp_path):
        """Bit for bit, also when the adapter has trained, and the student trains on as it was."""
        model = adapted(lora_dropout=0.3, init_lora_weights=False)
        made = trainer(tmp_path, model, teacher=None)
        model.train()
        model.base_model.model.model.norm.eval()  # a module with a mode of its own
        modes = [module.training for module in model.modules()]
        batch = collate(rows(2, lengths=(24, 7)))
        with torch.no_grad():
            expected = (
                dense()
                .eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
                .logits
            )
        assert torch.equal(made.teacher.logits(model, batch), expected)
        assert [module.training for module in model.modules()] == modes
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        assert trained
        assert all("lora_" in name for name in trained)

    def test_drops_nothing_while_the_student_trains(self, token_ids):
        """Llama has no dropout that would show it, and that of adapters is off with them."""
        model = gpt2(resid_pdrop=0.5)
        expected = logits(model, token_ids)
        get_metis_model(model, MetisConfig(scheme="nvfp4-rne"))
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).train()
        teacher = Teacher(None, model, device=torch.device("cpu"), dtype=torch.float32)
        assert torch.equal(teacher.logits(model, {"input_ids": token_ids}), expected)
        assert all(module.training for module in model.modules())

    def test_trains_as_with_a_second_copy(self, tmp_path):
        own, copied = (
            trainer(tmp_path, adapted(), teacher=teacher, share=0.3, learning_rate=1e-2)
            for teacher in (None, dense())
        )
        for made in (own, copied):
            made.train()
        assert losses(own) == losses(copied)
        assert_same(own.model, copied.model)
        after, theirs = own.evaluate(), copied.evaluate()
        for key in ("eval_loss", "eval_kl"):
            assert after[key] == theirs[key]

    def test_what_is_frozen_stays_frozen(self, tmp_path):
        """PEFT lets all adapters train when they are turned on again."""
        model = adapted()
        for name, param in model.named_parameters():
            param.requires_grad = "lora_B" in name
        before = [(param, param.requires_grad) for param in model.parameters()]
        made = trainer(tmp_path, model, teacher=None)
        made.teacher.logits(model, collate(rows(2)))
        assert [param.requires_grad for param, _ in before] == [trains for _, trains in before]

    def test_modules_to_save_are_adapters(self, tmp_path):
        """PEFT keeps the original beside them, which teaches."""
        model = adapted(modules_to_save=["lm_head"])
        made = trainer(tmp_path, model, teacher=None, learning_rate=1e-2)
        batch = collate(rows(2))
        before = made.teacher.logits(model, batch)
        made.train()
        assert torch.equal(made.teacher.logits(model, batch), before)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_accumulation_and_checkpointing(self, reentrant, tmp_path):
        options = {"gradient_accumulation_steps": 2, "max_steps": 2, "teacher": None}
        recomputing = recomputed(use_reentrant=reentrant)
        plain = trainer(tmp_path, adapted("nvfp4"), **options)
        again = trainer(tmp_path, adapted("nvfp4"), **recomputing, **options)
        for made in (plain, again):
            made.train()
        assert losses(again) == losses(plain)
        assert_same(again.model, plain.model)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temperature": 0.0}, "temperature=0.0; expected a number > 0"),
            ({"share": 1.5}, "cross_entropy_share=1.5; expected a share"),
            ({"teacher": 3}, "the teacher is 3; expected a transformers model"),
        ],
    )
    def test_values(self, options, message, tmp_path):
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, student(), **options)

    @pytest.mark.parametrize("saved", [False, True])
    def test_another_vocabulary(self, saved, tmp_path):
        teacher = dense()
        teacher.resize_token_embeddings(VOCAB + 8)
        if saved:
            teacher.save_pretrained(tmp_path / "teacher")
            teacher = tmp_path / "teacher"
        with pytest.raises(
            ValueError, match=r"vocabulary of 264 tokens and the student one of 256.*resize"
        ):
            trainer(tmp_path, student(), teacher=teacher)

    def test_an_encoder_decoder(self, tmp_path):
        with pytest.raises(ValueError, match=r"teacher is an encoder-decoder \(bart\)"):
            trainer(tmp_path, student(), teacher=bart())

    def test_no_logits(self, tmp_path):
        with pytest.raises(ValueError, match="LlamaModel, which has no language model head"):
            trainer(tmp_path, student(), teacher=dense().model)
        classifier = transformers.LlamaForSequenceClassification(dense().config)
        with pytest.raises(ValueError, match="the student is a LlamaForSequenceClassification"):
            trainer(tmp_path, get_metis_model(classifier, MetisConfig(scheme="nvfp4")))

    def test_a_head_that_keeps_its_logits(self, tmp_path):
        teacher = dense()
        forward = teacher.forward
        teacher.forward = lambda **inputs: transformers.utils.ModelOutput(
            loss=forward(**inputs).logits.sum()
        )
        made = trainer(tmp_path, student(), teacher=teacher)
        with pytest.raises(ValueError, match=r"the teacher returned no logits.*use_liger_kernel"):
            made.train()

    def test_a_teacher_inside_the_student(self, tmp_path):
        plain = dense()
        model = get_metis_model(copy.copy(plain), MetisConfig(scheme="nvfp4"))
        with pytest.raises(ValueError, match=r"shares model\.embed_tokens\.weight with"):
            trainer(tmp_path, model, teacher=model)

    def test_no_teacher_where_dense_weights_train(self, tmp_path):
        with pytest.raises(ValueError, match=r"its dense weights train.*teacher=path or model"):
            trainer(tmp_path, student(), teacher=None)
        model = adapted()
        model.base_model.model.model.norm.weight.requires_grad_(True)
        with pytest.raises(
            ValueError, match=r"norm.weight and 0 more.*LoRA adapters on the frozen"
        ):
            trainer(tmp_path, model, teacher=None)
        plain = get_peft_model(dense(), LoraConfig(r=4, target_modules="all-linear"))
        with pytest.raises(ValueError, match="none of its layers is converted"):
            trainer(tmp_path, plain, teacher=None)

    def test_another_tokenizer(self, tmp_path):
        """A token that has another number; tokens that only one of them has are let through."""

        def tokenizer(words):
            from tokenizers import Tokenizer, models

            inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
            return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="a")

        other().save_pretrained(tmp_path / "teacher")
        tokenizer("abc").save_pretrained(tmp_path / "teacher")
        options = {"teacher": tmp_path / "teacher", "max_steps": 1}
        with pytest.raises(ValueError, match="token 1 is 'c' in the student's tokenizer and 'b'"):
            trainer(tmp_path, student(), processing_class=tokenizer("acb"), **options)
        for words in ("abc", "abcd", "ab"):
            trainer(tmp_path, student(), processing_class=tokenizer(words), **options)

    def test_another_form_of_mask(self):
        with pytest.raises(ValueError, match=r"attention_mask is \[2, 1, 3, 3\].*Leave the mask"):
            token_mask({"attention_mask": torch.ones(2, 1, 3, 3)})
        with pytest.raises(ValueError, match="no input_ids, only labels"):
            token_mask({"labels": torch.ones(2, 3)})
        assert token_mask({"inputs_embeds": torch.ones(2, 3, 4)}).all()

    def test_logits_of_another_shape(self, tmp_path):
        """A teacher whose head is wider than its config says."""
        teacher = gpt2()
        teacher.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB + 1, 64))
        made = trainer(tmp_path, student(), teacher=teacher)
        with pytest.raises(ValueError, match=r"logits have shape \[2, 24, 256\].*257"):
            made.train()
