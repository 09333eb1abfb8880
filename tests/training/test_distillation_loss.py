"""The KL of a student from its teacher: torch's own in fp64, and the memory that it takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from metis_hf.training import distillation_loss as module
from metis_hf.training.distillation_loss import distillation_loss

EPS = torch.finfo(torch.float32).eps
# Log probabilities of about -10 are off by a few roundings each, relative to 10.
LOSS = {"rtol": 1e-5, "atol": 100 * EPS}
# Differences of probabilities are off by fp32 roundings, a BF16 result by half a step of its own
# too, and twice where backward multiplies by a number that is no power of two.
BF16_ROUNDING = 2**-8
GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 1.01 * BF16_ROUNDING}


def logits(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator)).to(dtype)


def reference(student, teacher, mask, temperature=1.0):
    """(loss, gradient for the student) by torch's kl_div and autograd, fp64, of the rows alone."""
    student = student.detach().double().requires_grad_()
    scaled = [x[mask] / temperature for x in (student, teacher.detach().double())]
    log_q, log_p = (F.log_softmax(x, -1) for x in scaled)
    loss = temperature**2 * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    loss.backward()
    return loss.detach(), student.grad


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """7 rows of 50, so that the last chunk of 33 rows is a short one."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 7 * 50 + 3)


def check(student, teacher, mask, temperature, expected):
    dtype = student.dtype
    loss, gradient = expected
    got = distillation_loss(student, teacher, mask, temperature=temperature)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), loss, **LOSS)
    got.backward()
    assert student.grad.dtype is dtype
    worst = (student.grad.double() - gradient).abs()
    bound = GRADIENT[dtype] * gradient.abs() + 100 * EPS * gradient.abs().max()
    assert bool((worst <= bound).all())


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 2.0), (torch.bfloat16, 1.0)])
def test_equals_kl_div(dtype, temperature):
    student, teacher = (logits(3, 11, 50, dtype=dtype, seed=seed) for seed in (1, 2))
    mask = torch.rand(3, 11, generator=torch.Generator().manual_seed(3)) < 0.6
    expected = reference(student, teacher, mask, temperature)
    check(student.requires_grad_(), teacher, mask, temperature, expected)
    assert student.grad is not None
    assert not student.grad[~mask].any()


def test_padded_vocabulary_adds_nothing():
    """Logits of -inf in both: the loss and the gradient of the vocabulary without them."""
    student, teacher = (logits(9, 50, seed=seed) for seed in (1, 2))
    mask = torch.ones(9, dtype=torch.bool)
    loss, gradient = reference(student[:, :43], teacher[:, :43], mask)
    gradient = F.pad(gradient, (0, 7))
    student[:, 43:] = teacher[:, 43:] = float("-inf")
    check(student.requires_grad_(), teacher, mask, 1.0, (loss, gradient))


def test_a_teacher_that_rules_a_token_out():
    """-inf in the teacher alone is a probability of 0."""
    student, teacher = logits(9, 50, seed=1), logits(9, 50, seed=2)
    teacher[:, 5] = float("-inf")
    finite = teacher.clone()
    finite[:, 5] = -1e4  # exp is 0 in fp64 as well
    mask = torch.ones(9, dtype=torch.bool)
    expected = reference(student, finite, mask)
    check(student.requires_grad_(), teacher, mask, 1.0, expected)


def test_rows_outside_the_mask_may_hold_anything():
    student, teacher = logits(8, 50, seed=1), logits(8, 50, seed=2)
    mask = torch.arange(8) % 2 == 0
    expected = reference(student, teacher, mask)
    student[1], teacher[3], student[5] = float("nan"), float("inf"), float("-inf")
    check(student.requires_grad_(), teacher, mask, 1.0, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_teacher_without_numbers_in_a_row_that_counts(value):
    """As that of a student: a loss of 0 would pass for a perfect one."""
    student, teacher = logits(4, 50, seed=1), logits(4, 50, seed=2)
    teacher[2, 7] = value
    mask = torch.ones(4, dtype=torch.bool)
    assert distillation_loss(student, teacher, mask).isnan()


@pytest.mark.parametrize("case", ["no token", "both agree"])
def test_zero(case):
    student = logits(4, 50, dtype=torch.bfloat16).requires_grad_()
    if case == "no token":
        loss = distillation_loss(student, logits(4, 50, seed=1), torch.zeros(4, dtype=torch.bool))
    else:
        loss = distillation_loss(student, student.detach().clone())
    loss.backward()
    assert loss == 0
    assert not student.grad.any()


def test_tokens_divide_the_sum():
    """Two parts with the whole's number of tokens add up to the whole."""
    student, teacher = logits(20, 50, seed=1).requires_grad_(), logits(20, 50, seed=2)
    mask = torch.arange(20) % 3 > 0
    loss, gradient = reference(student, teacher, mask)
    parts = [
        distillation_loss(student[part], teacher[part].clone(), mask[part], tokens=mask.sum())
        for part in (slice(0, 8), slice(8, 20))
    ]
    torch.testing.assert_close(sum(parts).double(), loss, **LOSS)
    sum(parts).backward()
    torch.testing.assert_close(student.grad.double(), gradient, rtol=1e-5, atol=1e-7)


def test_a_factor_behind_the_loss():
    """It multiplies the kept gradient in fp32: in BF16, 0.7 itself would be 0.6992."""
    student, teacher = (logits(9, 50, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    student.requires_grad_()
    (whole,) = torch.autograd.grad(distillation_loss(student, teacher.clone()), student)
    (0.7 * distillation_loss(student, teacher)).backward()
    assert torch.equal(student.grad, (whole.float() * 0.7).bfloat16())
    assert not torch.equal(student.grad, whole * torch.tensor(0.7).bfloat16())


class TestTheTeachersBuffer:
    def test_becomes_the_gradient(self):
        student, teacher = logits(9, 50, seed=1).requires_grad_(), logits(9, 50, seed=2)
        (gradient,) = torch.autograd.grad(distillation_loss(student, teacher), student)
        assert gradient.data_ptr() == teacher.data_ptr()

    def test_stays_where_no_gradient_is_wanted(self):
        student, teacher = logits(9, 50, seed=1), logits(9, 50, seed=2)
        before = teacher.clone()
        plain = distillation_loss(student, teacher)
        with torch.no_grad():
            assert distillation_loss(student.clone().requires_grad_(), teacher) == plain
        assert torch.equal(teacher, before)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: logits(9, 50, dtype=torch.bfloat16, seed=2),  # another dtype
            lambda: logits(9, 50, seed=2).requires_grad_(),
            lambda: logits(50, 9, seed=2).T,
            lambda: logits(1, 50, seed=2).expand(9, 50),
        ],
    )
    def test_stays_where_it_cannot_hold_it(self, make):
        student, teacher = logits(9, 50, seed=1), make()
        before = teacher.detach().clone()
        expected = reference(student, teacher, torch.ones(9, dtype=torch.bool))
        check(student.requires_grad_(), teacher, None, 1.0, expected)
        assert torch.equal(teacher, before)
        assert teacher.grad is None

    def test_stays_where_it_is_the_students(self):
        student = logits(9, 50).requires_grad_()
        before = student.detach().clone()
        distillation_loss(student, student.detach()).backward()
        assert torch.equal(student.detach(), before)

    def test_a_second_backward_pass_is_an_error(self):
        """The first one has scaled what it would read."""
        student = logits(9, 50).requires_grad_()
        loss = distillation_loss(student, logits(9, 50, seed=1))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Allocations(TorchDispatchMode):
    """Notes the storages that operations make: the largest, and the most bytes alive at once."""

    def __init__(self, *known):
        super().__init__()
        self.seen = {self.key(tensor) for tensor in known}
        self.alive, self.largest, self.peak = [], 0, 0

    @staticmethod
    def key(tensor):
        return StorageWeakRef(tensor.untyped_storage()).cdata

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and self.key(tensor) not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(self.key(tensor))
                self.alive.append((StorageWeakRef(storage), storage.nbytes()))
                self.largest = max(self.largest, storage.nbytes())
        gone = {id(entry) for entry in self.alive if entry[0].expired()}
        self.seen -= {entry[0].cdata for entry in self.alive if id(entry) in gone}
        self.alive = [entry for entry in self.alive if id(entry) not in gone]
        self.peak = max(self.peak, sum(size for _, size in self.alive))
        return out


class TestMemory:
    TOKENS, VOCABULARY, ROWS = 256, 1000, 8
    CHUNK = ROWS * VOCABULARY * 4  # bytes in fp32

    def measure(self, loss, dtype):
        student = logits(self.TOKENS, self.VOCABULARY, dtype=dtype, seed=1).requires_grad_()
        teacher = logits(self.TOKENS, self.VOCABULARY, dtype=dtype, seed=2)
        with Allocations(student, teacher) as seen:
            torch.autograd.grad(loss(student, teacher), student)
        return seen

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nothing_of_the_size_of_the_logits(self, dtype, monkeypatch):
        """Forward and backward pass: no tensor above a chunk's, and a few of those at once."""
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", self.ROWS * self.VOCABULARY)
        seen = self.measure(distillation_loss, dtype)
        assert seen.largest <= self.CHUNK
        assert seen.peak <= 8 * self.CHUNK
        assert seen.peak < self.TOKENS * self.VOCABULARY * dtype.itemsize / 2

    def test_what_is_measured_sees_the_copies_of_the_plain_formula(self):
        def plain(student, teacher):
            log_q, log_p = (F.log_softmax(x.float(), -1) for x in (student, teacher))
            return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)

        seen = self.measure(plain, torch.bfloat16)
        assert seen.largest == self.TOKENS * self.VOCABULARY * 4
        assert seen.peak >= 3 * seen.largest


class TestErrors:
    def test_shapes(self):
        with pytest.raises(ValueError, match=r"\[4, 50\].*\[4, 49\].*same vocabulary"):
            distillation_loss(logits(4, 50), logits(4, 49))
        with pytest.raises(ValueError, match=r"mask has shape \[5\]"):
            distillation_loss(logits(4, 50), logits(4, 50), torch.ones(5))

    @pytest.mark.parametrize("temperature", [0, float("nan")])
    def test_temperature(self, temperature):
        with pytest.raises(ValueError, match="expected a number > 0"):
            distillation_loss(logits(4, 50), logits(4, 50), temperature=temperature)
