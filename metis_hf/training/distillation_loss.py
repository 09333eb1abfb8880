"""KL divergence of a student's next-token distributions from a teacher's, in bounded memory.

    loss = T^2 / n  sum over tokens of  sum_v p_v (log p_v - log q_v)
    p = softmax(teacher / T), q = softmax(student / T);  d loss / d student = T (q - p) / n

Logits are the largest tensors of a training step: 8192 tokens with a vocabulary of 262k take 4.3 GB
in BF16. So rows are processed in chunks, and the gradient overwrites the teacher's logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements in a chunk of rows: 32 MiB per fp32 temporary.
CHUNK_ELEMENTS = 2**23


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    tokens: Tensor | int | None = None,
) -> Tensor:
    """Return KL(teacher || student), the mean over tokens, times temperature^2.

    The factor keeps the gradient's magnitude independent of the temperature (Hinton et al., arXiv
    1503.02531). All arithmetic is fp32. A logit of -inf, such as in a padded vocabulary, has
    probability 0 and adds nothing if both models have it.

    The teacher gets no gradient. **Its logits are overwritten** with the student's gradient if the
    student needs one and both tensors have the same dtype, so that the loss allocates nothing of
    their size. Otherwise (dtypes or devices differ, or the teacher's logits require a gradient, are
    not contiguous or share memory with the student's) the gradient is allocated in the student's
    dtype.

    Args:
        student_logits: [... v]
        teacher_logits: [... v], the same shape; may be overwritten, see above.
        mask: [...] bool, the rows that count; other rows have a gradient of zero, even if their
            logits are not finite. None: all rows count.
        temperature: T > 0, divides both logits.
        tokens: divisor of the sum, such as the tokens in all micro-batches of a step; None: the
            number of rows that count.

    Returns:
        0-dim fp32 tensor; 0 if no row counts.

    Raises:
        ValueError: the shapes do not match, or the temperature is not positive and finite.
    """
    check_temperature(temperature)
    if student_logits.shape != teacher_logits.shape or student_logits.dim() == 0:
        raise ValueError(
            f"the student's logits have shape {list(student_logits.shape)} and the teacher's "
            f"{list(teacher_logits.shape)}; both models need the same tokens and the same "
            "vocabulary"
        )
    shape = student_logits.shape[:-1]
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool, device=student_logits.device)
    if mask.shape != shape:
        raise ValueError(
            f"mask has shape {list(mask.shape)} and the logits have shape "
            f"{list(student_logits.shape)}; give one boolean for each row of logits"
        )
    counted = mask.to(student_logits.device).bool().reshape(-1)
    divisor = torch.as_tensor(counted.sum() if tokens is None else tokens).to(counted.device)
    factor = temperature / divisor.clamp(min=1).float()
    if torch.is_grad_enabled() and student_logits.requires_grad:
        return _Divergence.apply(student_logits, teacher_logits, counted, factor, temperature)
    return _divergence(student_logits, teacher_logits, counted, factor, temperature, None)


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that is not positive and finite."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature={temperature}; expected a number > 0, such as 1.0")


class _Divergence(torch.autograd.Function):
    """The loss; forward also computes the gradient, over the teacher's logits if possible."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        counted: Tensor,
        factor: Tensor,
        temperature: float,
    ) -> Tensor:
        if _may_overwrite(teacher, student):
            gradient = teacher
        else:
            gradient = torch.empty_like(student, memory_format=torch.contiguous_format)
        loss = _divergence(student, teacher, counted, factor, temperature, gradient)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # A second backward pass raises autograd's error: the saved tensor was modified in place.
        (gradient,) = ctx.saved_tensors
        rows = gradient.view(-1, gradient.shape[-1])
        for chunk in _chunks(rows):  # in fp32: a factor of 0.7 would become 0.6992 in BF16
            rows[chunk] = rows[chunk].float() * grad_output
        return gradient, None, None, None, None


def _divergence(
    student: Tensor,
    teacher: Tensor,
    counted: Tensor,
    factor: Tensor,
    temperature: float,
    gradient: Tensor | None,
) -> Tensor:
    """Return the loss, and write the gradient of the student's logits to `gradient` unless None."""
    with torch.no_grad():
        width = student.shape[-1]
        student, teacher = student.reshape(-1, width), teacher.reshape(-1, width)
        out = None if gradient is None else gradient.view(-1, width)
        total = torch.zeros((), device=student.device)
        for chunk in _chunks(student):
            skipped = ~counted[chunk]
            log_p = torch.log_softmax(teacher[chunk].float() / temperature, -1)
            log_q = torch.log_softmax(student[chunk].float() / temperature, -1)
            p = log_p.exp()
            # 0 where p is 0, since -inf - -inf is NaN. NaN from the teacher stays NaN.
            terms = torch.where(p == 0, 0, p * (log_p - log_q))
            total += terms.sum(-1).masked_fill(skipped, 0).sum()
            if out is not None:
                difference = (log_q.exp() - p) * factor
                out[chunk] = difference.masked_fill(skipped[:, None], 0).to(out.dtype)
        return total * temperature * factor


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Yield slices that cover all rows of a matrix [t v]."""
    count = max(1, CHUNK_ELEMENTS // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], count):
        yield slice(start, start + count)


def _may_overwrite(teacher: Tensor, student: Tensor) -> bool:
    """Return whether the student's gradient can overwrite the teacher's logits."""
    return (
        teacher.dtype == student.dtype
        and teacher.device == student.device
        and not teacher.requires_grad
        and teacher.is_contiguous()
        and (not teacher.is_inference() or torch.is_inference_mode_enabled())
        and teacher.untyped_storage().data_ptr() != student.untyped_storage().data_ptr()
    )
