"""Distillation through Trainer: gradients by hand, evaluation, resuming, LoRA, refusals."""

from __future__ import annotations

import contextlib
import copy
import doctest
import io

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import VOCAB, gpt2, llama
from peft import LoraConfig, get_peft_model

from metis_hf import (
    DistillTrainer,
    DistillTrainerMixin,
    MetisCallback,
    MetisConfig,
    MetisTrainer,
    MetisTrainerMixin,
    get_metis_model,
    metis_layers,
)
from metis_hf.training.distillation import token_mask

# Sums over tokens in another order, of numbers that are about 1e-3 at most.
FP32 = {"rtol": 1e-4, "atol": 1e-7}
LOSS = {"rtol": 1e-5, "abs": 1e-6}


def dense(**changes):
    torch.manual_seed(0)
    changes = {
        "initializer_range": 0.2
    } | changes  # so that distributions differ from token to token
    return llama(num_hidden_layers=1, **changes)


def student(scheme="nvfp4-rne", **changes):
    """The dense model, converted."""
    return get_metis_model(dense(**changes), MetisConfig(scheme=scheme))


def other():
    """A teacher that no student agrees with."""
    torch.manual_seed(1)
    return llama(num_hidden_layers=1, initializer_range=0.2)


def rows(count=16, lengths=(24,), prompt=0):
    """Sequences of several lengths, whose first labels are of a prompt."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for index in range(count):
        ids = torch.randint(0, VOCAB, (lengths[index % len(lengths)],), generator=generator)
        labels = ids.clone()
        labels[:prompt] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def collate(batch):
    """Pads on the right, with an attention mask."""
    longest = max(len(row["input_ids"]) for row in batch)
    fill = {"input_ids": 0, "labels": -100}
    out = {
        key: torch.stack([F.pad(row[key], (0, longest - len(row[key])), value=value)
                          for row in batch])
        for key, value in fill.items()
    }  # fmt: skip
    sizes = torch.tensor([len(row["input_ids"]) for row in batch])
    return out | {"attention_mask": (torch.arange(longest) < sizes[:, None]).long()}


def arguments(directory, **changes):
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    } | changes
    return transformers.TrainingArguments(str(directory), **options)


def trainer(
    directory, model, *, data=None, cls=DistillTrainer, callbacks=(), processing_class=None,
    teacher="other", temperature=None, share=None, **changes,
):  # fmt: skip
    given = {"temperature": temperature, "cross_entropy_share": share}
    given = {key: value for key, value in given.items() if value is not None}
    if issubclass(cls, DistillTrainerMixin):
        given["teacher"] = other() if teacher == "other" else teacher
    made = cls(
        model,
        arguments(directory, **changes),
        data_collator=collate,
        train_dataset=data or rows(),
        eval_dataset=rows(4, lengths=(24, 10)),
        callbacks=[MetisCallback(health_interval=0), *callbacks],
        processing_class=processing_class,
        **given,
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def losses(made):
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def states_equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class Gradients(transformers.TrainerCallback):
    """Keeps the gradients of each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = model.named_parameters()
        self.steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def divergence(model, teacher, data, temperature=1.0):
    """Mean KL per token, row by row without padding, by torch's kl_div; with a graph."""
    total, tokens = 0.0, 0
    for row in data:
        ids = row["input_ids"][None]
        with torch.no_grad():
            log_p = F.log_softmax(teacher(input_ids=ids).logits / temperature, -1)
        log_q = F.log_softmax(model(input_ids=ids).logits / temperature, -1)
        total = total + F.kl_div(log_q, log_p, reduction="sum", log_target=True) * temperature**2
        tokens += ids.numel()
    return total / tokens


def cross_entropy(model, data):
    """Mean over all labels but each row's first."""
    total, labels = 0.0, 0
    for row in data:
        logits = model(input_ids=row["input_ids"][None]).logits[0, :-1]
        total = total + F.cross_entropy(logits, row["labels"][1:], reduction="sum")
        labels += (row["labels"][1:] != -100).sum()
    return total / labels


class TestGradient:
    """Of one optimizer step, for a model without quantizers; those see a micro-batch at a time."""

    DATA = rows(4, lengths=(24, 7, 15, 3), prompt=2)

    @pytest.mark.parametrize("accumulation", [1, 2, 4])
    @pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.0), (2.0, 0.0), (2.0, 0.3)])
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
        for name, param in model.named_parameters():
            torch.testing.assert_close(seen.steps[0][name], param.grad, **FP32, msg=name)

    @pytest.mark.parametrize("share", [0.0, 0.3])
    def test_of_a_model_that_takes_no_count(self, share, tmp_path):
        """Trainer divides its loss by the number of micro-batches, and the KL is made for that.

        The cross entropy is then Trainer's own mean of means; all rows are of one length here.
        """
        data = rows(4)
        seen = Gradients()
        model = student("bf16")
        model.accepts_loss_kwargs = False
        made = trainer(
            tmp_path, model, data=data, callbacks=[seen], share=share, max_steps=1,
            gradient_accumulation_steps=2, max_grad_norm=0.0,
        )  # fmt: skip
        made.train()
        model = student("bf16")
        loss = (1 - share) * divergence(model, other(), data) + share * cross_entropy(model, data)
        loss.backward()
        for name, param in model.named_parameters():
            torch.testing.assert_close(seen.steps[0][name], param.grad, **FP32, msg=name)

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

    @pytest.mark.parametrize("scheme", ["nvfp4-rne", "metis"])
    def test_resume_is_exact(self, scheme, tmp_path):
        """2 + 2 steps equal 4; what is saved is the student."""
        whole, resumed = (
            trainer(tmp_path, student(scheme), save_strategy="steps", save_steps=2)
            for _ in range(2)
        )
        whole.train()
        checkpoint = tmp_path / "checkpoint-2"
        assert [path.name for path in checkpoint.glob("*.safetensors")] == ["model.safetensors"]
        loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        assert loaded.state_dict().keys() == whole.model.state_dict().keys()
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert losses(resumed) == losses(whole)
        assert states_equal(resumed.model, whole.model)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_activation_checkpointing_changes_nothing(self, reentrant, tmp_path):
        plain, checkpointed = (
            trainer(tmp_path, student("metis"), max_steps=2, **options)
            for options in (
                {},
                {
                    "activation_checkpointing": True,
                    "activation_checkpointing_kwargs": {"use_reentrant": reentrant},
                },
            )
        )
        plain.train()
        checkpointed.train()
        assert losses(checkpointed) == losses(plain)
        assert states_equal(checkpointed.model, plain.model)

    def test_the_teacher_stays_as_it_is(self, tmp_path):
        """Frozen, in evaluation mode, the same after training."""
        teacher = other()
        before = copy.deepcopy(teacher.state_dict())
        made = trainer(tmp_path, student(), teacher=teacher.train())
        made.train()
        assert made.teacher.model is teacher
        assert not teacher.training
        assert not any(param.requires_grad for param in teacher.parameters())
        assert all(torch.equal(value, before[key]) for key, value in teacher.state_dict().items())

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
        plain = trainer(tmp_path, student("metis"))
        evaluated = trainer(tmp_path, student("metis"), eval_strategy="steps", eval_steps=1)
        for made in (plain, evaluated):
            made.train()
        assert losses(evaluated) == losses(plain)
        seen = [entry["eval_kl"] for entry in evaluated.state.log_history if "eval_kl" in entry]
        assert len(seen) == 4
        assert seen[-1] < seen[0]


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

    @pytest.mark.parametrize("share", [0.0, 0.3])
    def test_trains_as_with_a_second_copy(self, share, tmp_path):
        own = trainer(tmp_path, adapted(), teacher=None, share=share, learning_rate=1e-2)
        copied = trainer(tmp_path, adapted(), teacher=dense(), share=share, learning_rate=1e-2)
        before = own.evaluate()
        for made in (own, copied):
            made.train()
        assert losses(own) == losses(copied)
        assert states_equal(own.model, copied.model)
        after, theirs = own.evaluate(), copied.evaluate()
        for key in ("eval_loss", "eval_kl"):
            assert after[key] == theirs[key]
        if not share:
            assert after["eval_kl"] < before["eval_kl"]

    def test_modules_to_save_are_adapters(self, tmp_path):
        """PEFT keeps the original beside them, which teaches."""
        model = adapted(modules_to_save=["lm_head"])
        made = trainer(tmp_path, model, teacher=None, learning_rate=1e-2)
        batch = collate(rows(2))
        before = made.teacher.logits(model, batch)
        made.train()
        assert torch.equal(made.teacher.logits(model, batch), before)

    def test_accumulation_and_checkpointing(self, tmp_path):
        options = {"gradient_accumulation_steps": 2, "max_steps": 2}
        plain = trainer(tmp_path, adapted(), teacher=None, **options)
        again = trainer(tmp_path, adapted(), teacher=None, activation_checkpointing=True, **options)
        for made in (plain, again):
            made.train()
        assert losses(again) == losses(plain)
        assert states_equal(again.model, plain.model)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temperature": 0.0}, "temperature=0.0; expected a number > 0"),
            ({"share": 1.5}, "cross_entropy_share=1.5; expected a share"),
            ({"share": -0.1}, "cross_entropy_share=-0.1; expected a share"),
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
        with pytest.raises(ValueError, match=r"vocabulary of 264, the student of 256.*resize"):
            trainer(tmp_path, student(), teacher=teacher)

    @pytest.mark.parametrize("saved", [False, True])
    def test_an_encoder_decoder(self, saved, tmp_path):
        config = transformers.BartConfig(
            vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
            decoder_ffn_dim=16,
        )  # fmt: skip
        teacher = transformers.BartForConditionalGeneration(config)
        if saved:
            teacher.save_pretrained(tmp_path / "teacher")
            teacher = tmp_path / "teacher"
        with pytest.raises(ValueError, match=r"teacher is an encoder-decoder \(bart\)"):
            trainer(tmp_path, student(), teacher=teacher)

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
        with pytest.raises(ValueError, match=r"norm.weight and 0 more.*LoRA over the frozen"):
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
        with pytest.raises(ValueError, match="token 1 is 'c' to the student's tokenizer and 'b'"):
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

    from metis_hf.data.corpus import stdlib_documents, train_tokenizer

    class QadSFT(DistillTrainerMixin, MetisTrainerMixin, trl.SFTTrainer):
        """SFTTrainer with a teacher."""

    class Sft(MetisTrainerMixin, trl.SFTTrainer):
        """SFTTrainer without."""

    tokenizer = train_tokenizer(stdlib_documents()[:5], vocab_size=VOCAB + 64)

    def model():
        plain = dense()
        plain.resize_token_embeddings(len(tokenizer))
        return plain

    data = datasets.Dataset.from_dict({"text": ["def f(x): return x + 1", "import this"] * 4})

    def made(cls, **given):
        run = cls(
            get_metis_model(model(), MetisConfig(scheme="nvfp4-rne")),
            trl.SFTConfig(
                str(tmp_path), max_steps=4, per_device_train_batch_size=2, logging_steps=1,
                use_cpu=True, bf16=False, learning_rate=1e-3, report_to="none", disable_tqdm=True,
                max_length=32, gradient_accumulation_steps=2,
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
    assert run.evaluate()["eval_kl"] < before["eval_kl"]
    mixed = made(QadSFT, teacher=model(), cross_entropy_share=0.5)
    mixed.train()
    after = mixed.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert sum(after[key] - before[key] for key in ("eval_kl", "eval_loss")) < 0
