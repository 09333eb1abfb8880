"""Distillation through Trainer: gradients by hand, evaluation, resuming, TRL."""

from __future__ import annotations

import contextlib
import copy
import doctest
import io

import huggingface_hub
import pytest
import torch
import transformers
from conftest import VOCAB
from tensors import assert_same
from texts import documents

from metis_hf import (
    DistillTrainer,
    DistillTrainerMixin,
    MetisConfig,
    MetisTrainer,
    MetisTrainerMixin,
    get_metis_model,
    metis_layers,
)
from metis_hf.training import distillation
from metis_hf.training.distillation_loss import distillation_loss
from training.distillation_tools import (
    Gradients,
    arguments,
    collate,
    cross_entropy,
    dense,
    divergence,
    other,
    rows,
    student,
    trainer,
)
from training.trainer_tools import losses, records


class TestGradient:
    """Of one optimizer step, for a model without quantizers; those see a micro-batch at a time."""

    DATA = rows(4, lengths=(24, 7, 15, 3), prompt=2)

    @pytest.mark.parametrize(
        ("accumulation", "temperature", "share"), [(1, 1.0, 0.0), (2, 2.0, 0.0), (4, 2.0, 0.3)]
    )
    def test_is_that_of_the_mean_over_all_tokens(self, accumulation, temperature, share, tmp_path):
        """However they are spread over micro-batches: prompts teach, padding does not."""
        seen = Gradients()
        made = trainer(
            tmp_path, student("bf16"), data=self.DATA, callbacks=[seen], temperature=temperature,
            share=share, max_steps=1, per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation, max_grad_norm=0.0,
        )  # fmt: skip
        made.train()
        model = student("bf16")
        loss = (1 - share) * divergence(model, other(), self.DATA, temperature)
        loss = loss + share * cross_entropy(model, self.DATA)
        loss.backward()
        assert losses(made) == pytest.approx([loss.item()], rel=1e-4)
        seen.check(model)

    @pytest.mark.parametrize(
        ("counts", "share", "scaled"),
        [(False, 0.0, None), (False, 0.3, None), (True, 0.0, True), (True, 0.0, False)],
    )
    def test_however_trainer_is_about_to_divide_the_loss(self, counts, share, scaled, tmp_path):
        """By the micro-batches of a model that takes no count, or as a subclass says.

        The cross entropy is then Trainer's own mean of means; all rows are of one length here.
        """
        data, seen, model = rows(4), Gradients(), student("bf16")
        model.accepts_loss_kwargs = counts
        made = trainer(
            tmp_path, model, data=data, callbacks=[seen], share=share, max_steps=1,
            gradient_accumulation_steps=2, max_grad_norm=0.0,
        )  # fmt: skip
        if scaled is not None:
            if not hasattr(made, "loss_is_scaled_for_ga"):
                pytest.skip("this version of transformers does not ask")
            made.loss_is_scaled_for_ga = scaled
        made.train()
        model = student("bf16")
        loss = (1 - share) * divergence(model, other(), data) + share * cross_entropy(model, data)
        loss.backward()
        seen.check(model)

    def test_without_labels(self, tmp_path):
        data = [{"input_ids": row["input_ids"]} for row in rows(4)]
        made = DistillTrainer(
            student(), arguments(tmp_path, max_steps=1), train_dataset=data, teacher=other()
        )
        made.remove_callback(transformers.PrinterCallback)
        made.train()
        with torch.no_grad():
            expected = divergence(student().train(), other(), data[:2]).item()
        # Rows one by one or two at a time: the tensor scale of the quantizers differs.
        assert losses(made) == pytest.approx([expected], rel=0.02)


class TestTraining:
    def test_the_count_of_tokens_stays_where_it_is(self, monkeypatch, tmp_path):
        """A recorded step reads it there again; rows have different lengths."""
        seen = []

        def spy(*args, tokens, **options):
            seen.append((tokens.data_ptr(), tokens.item()))
            return distillation_loss(*args, tokens=tokens, **options)

        monkeypatch.setattr(distillation, "distillation_loss", spy)
        data = rows(16, lengths=(24, 10, 17))
        made = trainer(tmp_path, student("bf16"), data=data, max_steps=3)
        made.train()
        places, counts = map(set, zip(*seen))
        assert len(places) == 1
        assert len(counts) > 1

    def test_comes_closer_to_the_teacher(self, tmp_path):
        """The model that the student was made from, of which quantizers took some off."""
        teacher = dense()
        made = trainer(
            tmp_path, student(), teacher=teacher, max_steps=8, per_device_train_batch_size=8
        )
        before = made.evaluate()["eval_kl"]
        made.train()
        assert before > 1e-3
        assert made.evaluate()["eval_kl"] < 0.9 * before

    def test_resume_is_exact(self, tmp_path):
        """2 + 2 steps equal 4; what is saved is the student."""
        whole, resumed = (
            trainer(tmp_path, student("nvfp4"), save_strategy="steps", save_steps=2)
            for _ in range(2)
        )
        whole.train()
        checkpoint = tmp_path / "checkpoint-2"
        assert [path.name for path in checkpoint.glob("*.safetensors")] == ["model.safetensors"]
        loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        assert loaded.state_dict().keys() == whole.model.state_dict().keys()
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert losses(resumed) == losses(whole)
        assert_same(resumed.model, whole.model)

    def test_the_teacher_stays_as_it_is(self, tmp_path):
        """Frozen, in evaluation mode, the same after training."""
        teacher = other()
        before = copy.deepcopy(teacher.state_dict())
        made = trainer(tmp_path, student(), teacher=teacher.train())
        made.train()
        assert made.teacher.model is teacher
        assert not teacher.training
        assert not any(param.requires_grad for param in teacher.parameters())
        assert_same(teacher, before)

    def test_from_a_path(self, tmp_path):
        """A path loads what a model gives, in the dtype that the student computes in."""
        other().save_pretrained(tmp_path / "teacher")
        path = tmp_path / "teacher"
        given = trainer(tmp_path, student(), max_steps=1)
        loaded = trainer(tmp_path, student(), teacher=str(path), max_steps=1)
        for made in (given, loaded):
            made.train()
        assert losses(loaded) == losses(given)
        mixed = trainer(tmp_path, student(), teacher=path, max_steps=1, bf16=True)
        assert {param.dtype for param in mixed.teacher.model.parameters()} == {torch.bfloat16}
        mixed.train()
        assert losses(mixed) == pytest.approx(losses(given), rel=0.02)  # BF16 GEMMs in one block

    def test_a_converted_teacher_runs_unquantized(self, tmp_path):
        converted = get_metis_model(other(), MetisConfig(scheme="nvfp4-rne"))
        made = trainer(tmp_path, student(), teacher=converted, max_steps=1)
        plain = trainer(tmp_path, student(), max_steps=1)
        for run in (made, plain):
            run.train()
        assert losses(made) == losses(plain)

    def test_called_by_hand(self, tmp_path):
        """The mean over the batch, and the student's outputs if wanted; after a training too."""
        made = trainer(tmp_path, student("bf16"), max_steps=1, learning_rate=0.0)
        made.train()
        batch = collate(rows(2, lengths=(24, 7)))
        loss, outputs = made.compute_loss(made.model.train(), batch, return_outputs=True)
        expected = divergence(student("bf16"), other(), rows(2, lengths=(24, 7)))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        assert outputs.logits.shape == (2, 24, VOCAB)


class TestEvaluation:
    @pytest.mark.parametrize("bf16", [False, True])
    def test_before_training(self, bf16, tmp_path):
        """The cross entropy of a Trainer without a teacher, to the bit, and the KL."""
        made = trainer(tmp_path, student(), bf16=bf16, temperature=3.0, share=0.5)
        plain = trainer(tmp_path, student(), cls=MetisTrainer, bf16=bf16)
        seen = made.evaluate()
        assert seen["eval_loss"] == plain.evaluate()["eval_loss"]
        assert made.state.log_history[-1]["eval_kl"] == seen["eval_kl"]
        if not bf16:
            with torch.no_grad():
                expected = divergence(student().eval(), other().eval(), rows(4, lengths=(24, 10)))
            # Rows are quantized one by one there: another tensor scale.
            assert seen["eval_kl"] == pytest.approx(expected.item(), rel=0.02)

    def test_kl_of_an_unquantized_student(self, tmp_path):
        made = trainer(tmp_path, student("bf16"), temperature=3.0)
        with torch.no_grad():
            expected = divergence(student("bf16"), other(), rows(4, lengths=(24, 10)))
        assert made.evaluate()["eval_kl"] == pytest.approx(expected.item(), rel=1e-5)
        assert made.evaluate(rows(3), metric_key_prefix="test")["test_kl"] > 0

    def test_in_training(self, tmp_path):
        """It changes nothing for the steps after it."""
        plain = trainer(tmp_path, student("nvfp4"))
        evaluated = trainer(tmp_path, student("nvfp4"), eval_strategy="steps", eval_steps=1)
        for made in (plain, evaluated):
            made.train()
        assert losses(evaluated) == losses(plain)
        seen = [entry["eval_kl"] for entry in evaluated.state.log_history if "eval_kl" in entry]
        assert len(seen) == 4
        assert seen[-1] < seen[0]


def test_the_example_of_the_docstring_runs(tmp_path):
    dense().save_pretrained(tmp_path / "model")
    names = {"path": tmp_path / "model", "rows": rows(4)}
    names["arguments"] = arguments(tmp_path, max_steps=1)
    examples = doctest.DocTestParser().get_examples(DistillTrainerMixin.__doc__)
    assert len(examples) <= 8
    with contextlib.redirect_stdout(io.StringIO()):
        for example in examples:
            exec(example.source, names)
    assert names["after"]["eval_kl"] != names["before"]["eval_kl"]
    assert len(dict(metis_layers(names["student"]))) == 7


@pytest.mark.slow
def test_sft_trainer(tmp_path):
    """Over a Trainer whose own loss makes no logits; prompts teach, and the cross entropy joins."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    import datasets

    from metis_hf.data.corpus import train_tokenizer

    class QadSFT(DistillTrainerMixin, MetisTrainerMixin, trl.SFTTrainer):
        """SFTTrainer with a teacher."""

    class Sft(MetisTrainerMixin, trl.SFTTrainer):
        """SFTTrainer without."""

    tokenizer = train_tokenizer(documents()[:5], vocab_size=VOCAB + 64)

    def model():
        plain = dense()
        plain.resize_token_embeddings(len(tokenizer))
        return plain

    data = datasets.Dataset.from_dict({"text": ["def f(x): return x + 1", "import this"] * 4})

    def made(cls, **given):
        run = cls(
            get_metis_model(model(), MetisConfig(scheme="nvfp4-rne", split_weight=True)),
            trl.SFTConfig(
                str(tmp_path), max_steps=4, per_device_train_batch_size=2, logging_steps=1,
                use_cpu=True, bf16=False, learning_rate=1e-3, report_to="none", disable_tqdm=True,
                max_length=32, gradient_accumulation_steps=2, weight_decay=0.1,
            ),
            train_dataset=data,
            eval_dataset=data,
            processing_class=tokenizer,
            **given,
        )  # fmt: skip
        run.remove_callback(transformers.PrinterCallback)
        return run

    run = made(QadSFT, teacher=model())
    before = run.evaluate()
    assert before["eval_loss"] == pytest.approx(made(Sft).evaluate()["eval_loss"], rel=1e-5)
    run.train()
    assert len(losses(run)) == 4
    assert "metis/weight/sqnr_db" in records(run)[0]
    names = run.get_decay_parameter_names(run.model)
    assert not any(name.endswith((".u", ".vh")) for name in names)
    assert run.evaluate()["eval_kl"] < before["eval_kl"]
    run.create_model_card()  # TRL's own, and our part of it
    tags = huggingface_hub.ModelCard.load(tmp_path / "README.md").data.tags
    assert {"sft", "fp4-training", "scheme:nvfp4-rne"} <= {*tags}
    mixed = made(QadSFT, teacher=model(), cross_entropy_share=0.5)
    mixed.train()
    after = mixed.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert sum(after[key] - before[key] for key in ("eval_kl", "eval_loss")) < 0
