"""One wrong expression each: what `mutation.py` puts into the package to see which test objects.

`place` is a file or a room of metis_hf; the old text stands in it exactly once.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One change of the package's source.

    Attributes:
        name: for people and for --only.
        place: file or directory below metis_hf.
        old: text to replace, found once.
        new: what stands there instead.
        breaks: what is then wrong.
        tests: files (and classes or tests in them) below tests/ that run first.
    """

    name: str
    place: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


FORMATS = ("numerics/test_formats.py", "numerics/test_format_properties.py")
SCALES = ("numerics/test_scale_rules.py", "numerics/test_formats.py")
STOCHASTIC = ("numerics/test_stochastic_rounding.py", "numerics/test_format_properties.py")
STORAGE = ("numerics/test_storage.py", "layers/test_saved_bits.py")
KERNELS = (
    "numerics/kernels/test_kernels.py",
    "numerics/kernels/test_kernels_packing.py",
)
SUMS = ("numerics/test_row_sums.py",)
SPLIT = ("numerics/test_spectral_split.py", "numerics/test_spectral_masks.py")
OPERANDS = ("operands/test_operands.py", "operands/test_conditioners.py")
EDEN = ("operands/test_ms_eden.py", "operands/test_operands.py")
OUTLIERS = ("schemes/test_outlier_schemes.py", "operands/test_operands.py")
ATTENTION = (
    "layers/test_attention_products.py",
    "layers/test_attention.py",
    "layers/test_attention_schemes.py",
)
GEMM = ("layers/test_gemm.py", "operands/test_operands.py")
CORRECTIONS = ("layers/test_corrections.py", "operands/test_operands.py")
NOISE = (
    "test_noise.py",
    "layers/test_noise_policy.py::TestDistinct",
    "layers/test_noise_policy.py::TestRanks",
    "layers/test_noise_policy.py::TestContent",
)
SAVED = ("layers/test_saved_bits.py", "layers/test_saved_memory.py")
SHARED = ("layers/test_saved_memory.py::test_what_is_shared_is_of_this_very_input",)
SCHEMES = ("operands/test_operands.py",)
KEPT = ("schemes/test_kept_subspaces.py",)
STATES = ("schemes/test_stateful_schemes.py",)


def _m(name: str, place: str, old: str, new: str, breaks: str, *tests: tuple[str, ...]) -> Mutant:
    return Mutant(name, place, old, new, breaks, tuple(file for group in tests for file in group))


MUTANTS = [
    # --- rounding and formats
    _m("magic-number", "numerics/rounding.py", "magic = 1.5 * 2.0 **", "magic = 2.0 **",
       "negative values round on half the spacing", FORMATS),
    _m("integer-zero", "numerics/rounding.py",
       "signed.masked_fill_(signed == 0, 0.0) if isinstance(fmt, IntFormat) else signed", "signed",
       "integers get a negative zero", FORMATS),
    _m("stochastic-half", "numerics/rounding.py", ".sub_(noise).ceil_()", ".sub_(noise).round_()",
       "stochastic rounding is biased", STOCHASTIC),
    _m("subnormal-spacing", "numerics/rounding.py", "clamp_(fmt.min_normal, fmt.max_power)",
       "clamp_(fmt.min_normal / 2, fmt.max_power)", "subnormal spacing is halved", FORMATS),
    _m("e3m2-max", "numerics/formats.py", "mantissa_bits=2, bias=3, max=28.0",
       "mantissa_bits=2, bias=3, max=24.0", "the largest FP6 value is missing", FORMATS),
    _m("e8m0-default", "numerics/formats.py", 'roundings=("floor", "up", "even"))',
       'roundings=("up", "floor", "even"))', "MX scales round up by default", SCALES, FORMATS),
    _m("sign-bit", "numerics/elements.py", "<< (self.bits - 1)\n", "<< self.bits\n",
       "the sign bit lies one place too high", FORMATS),
    # --- scales
    _m("reciprocal", "numerics/scaling.py", "torch.full_like(amax, largest).div_(amax)",
       "amax.reciprocal().mul_(largest)", "the tensor scale is rounded twice", SCALES),
    _m("scale-order", "numerics/scaling.py",
       "amax * (to_largest if tensor is None else tensor.encode * to_largest)",
       "amax * to_largest * (1 if tensor is None else tensor.encode)",
       "products of the block scale in another order", SCALES),
    _m("scale-up-tie", "numerics/scaling.py", "torch.where(scale < value, above, scale)",
       "torch.where(scale <= value, above, scale)", "exact E4M3 scales move up", SCALES),
    _m("e8m0-up-tie", "numerics/scaling.py", "amax > scale * fmt.element.max",
       "amax >= scale * fmt.element.max", "MX scales double where amax is the top code", SCALES),
    _m("infinite-scale", "numerics/scaling.py",
       "value = value.clamp(max=fmt.max).masked_fill_(value.isinf(), torch.nan)",
       "value = value.clamp(max=fmt.max)", "an infinite block scale saturates", FORMATS),
    _m("room-for-four", "numerics/scaling.py", "ScaleRule.FOUR_OVER_SIX: 256.0",
       "ScaleRule.FOUR_OVER_SIX: 448.0", "Four Over Six saturates its largest block", SCALES),
    _m("four-wins-ties", "numerics/scaling.py", "better = other.error < best.error",
       "better = other.error <= best.error", "a later scale wins a tie", SCALES),
    _m("eden-clip", "numerics/scaling.py", "EDEN_CLIP = 0.93 * 17 / 16", "EDEN_CLIP = 0.93",
       "MS-EDEN clips too much", EDEN, SCALES),
    _m("eden-factor", "numerics/scaling.py", "torch.where(usable, energy / projection,",
       "torch.where(usable, projection / energy,", "MS-EDEN corrects the wrong way", EDEN),
    _m("scale-neighbour", "numerics/scaling.py", "cast.float() > value, code - 1, code",
       "cast.float() >= value, code - 1, code",
       "exact scales are rounded between the wrong neighbours", EDEN, SCALES),
    _m("zero-scale", "numerics/scaling.py", "return decoded.reciprocal().clamp_(max=FLT_MAX)",
       "return decoded.reciprocal()", "a block whose scale is zero becomes NaN", FORMATS),
    _m("smallest-e8m0", "numerics/scaling.py", ".clamp_(min=_SMALLEST_E8M0)", "",
       "MX blocks of tiny values get a scale of zero", FORMATS),
    # --- blocks
    _m("square-axis", "numerics/layout.py", "return (-3, -1)", "return (-4, -1)",
       "a square tile's amax runs over tiles", FORMATS),
    _m("padding-side", "numerics/layout.py", "(x.dim() - 1 - dim) + [0, pad]",
       "(x.dim() - 1 - dim) + [pad, 0]", "rows are padded in front", FORMATS),
    _m("square-padding", "numerics/layout.py",
       "(0, -x.shape[-1] % size, 0, -x.shape[-2] % size)",
       "(0, -x.shape[-2] % size, 0, -x.shape[-1] % size)", "padding of tiles transposed", FORMATS),
    # --- quantizers
    _m("eden-clamp", "numerics",
       "y.clone() if eden else y", "y",
       "MS-EDEN corrects by clamped elements", EDEN, KERNELS),
    _m("eden-eval", "numerics", "rule = ScaleRule.FOUR_OVER_SIX if eden",
       "rule = ScaleRule.ABSMAX if eden", "evaluation of MS-EDEN takes another rule",
       EDEN, OUTLIERS),
    _m("scale-noise", "numerics", "noise.as_key(key).fold(SCALE_NOISE)",
       "noise.as_key(key)", "scales and elements share their noise", EDEN, KERNELS),
    _m("one-level", "numerics", 'resolve("two_level", self.fmt.scale.tensor_scale)',
       'resolve("two_level", False)', "no tensor scale by default", FORMATS),
    _m("straight-through", "numerics", "return grad, None, None, None",
       "return grad * (grad > 0), None, None, None", "negative gradients are lost",
       ("numerics/test_fake_quantize.py",)),
    _m("saturation", "numerics", "high = low * tensor.decode, high * tensor.decode",
       "high = low * tensor.encode, high * tensor.encode", "the share of clipped elements is wrong",
       ("numerics/test_sqnr.py",)),
    # --- noise
    _m("noise-streams", "noise.py", "blocks = _hash(index.add_(first)).add_(second)",
       "blocks = _hash(index.add_(first))", "close keys give shifted copies",
       NOISE),
    _m("noise-bits", "noise.py", "bitwise_right_shift(8).float().mul_(2.0**-24)",
       "bitwise_right_shift(16).float().mul_(2.0**-16)", "noise has 16 bits", STOCHASTIC, NOISE),
    _m("fold-data", "noise.py", "part * 0x9E3779B1 & _MASK32)), self.data, self.scratch)",
       "part * 0x9E3779B1 & _MASK32)), None, self.scratch)", "folded keys forget tensors", NOISE),
    _m("fingerprint-places", "noise.py", "% (behind - first)", "% 1",
       "fingerprints see one column of a matrix", NOISE),
    # --- storage
    _m("nibbles", "numerics/storage.py", "codes[..., place] << (bits * place)",
       "codes[..., place] << (bits * (group - place))", "codes lie in the wrong bits", STORAGE),
    _m("scale-axis", "numerics/storage.py",
       "return scale.squeeze(dim % ndim + 1).movedim(dim % ndim, -1)",
       "return scale.squeeze(dim % ndim + 1)", "block scales are not laid out by rows", STORAGE),
    _m("odd-blocks", "numerics/kernels/reference.py", "F.pad(scale, (0, len(scale) % 2))", "scale",
       "an odd number of blocks is stored as it is", KERNELS, SAVED),
    _m("sign-nibble", "numerics/kernels/reference.py", "(bits >> 12).bitwise_and_(8)",
       "(bits >> 12).bitwise_and_(4)", "packed codes lose signs", SAVED, KERNELS),
    _m("largest-sum", "numerics/kernels/reference.py",
       "values.clamp_(max=FLT_MAX).to(plus.dtype)", "values.to(plus.dtype)",
       "a sum at the end of fp32's range is infinite", KERNELS),
    # --- kernels
    _m("kernel-ties", "numerics/kernels/cpu.cpp", "((1 << 19) - 1);", "(1 << 19);",
       "kernels round E4M3 ties up", KERNELS),
    _m("kernel-four", "numerics/kernels/cpu.cpp", "k ? error < least",
       "k ? least > error - all(1)", "kernels let a later scale win ties", KERNELS),
    _m("operator-key", "numerics/kernels/operators.py", "else noise.Key(static, data)",
       "else noise.Key(static)", "operators of a graph forget the data of keys", KERNELS),
    _m("kernel-run", "numerics/kernels/layout.py",
       "return within // 2 if blocked[1] % 2 == 0 else within", "return within",
       "packed columns in another order than kernels read", KERNELS),
    # --- transforms
    _m("sampling-jitter", "transforms/spectral.py",
       "picks = (starts + uniform((count,), key, x.device)) * (t / count)",
       "picks = starts * (t / count)", "always the same rows are sampled", SPLIT),
    _m("padding-rows", "transforms/spectral.py",
       "return torch.where(mask[:, None], x, torch.zeros_like(x))", "return x",
       "padding enters the subspace", SPLIT),
    _m("sums-aligned", "transforms/spectral.py", "[:, None] + shift) % sums",
       "[:, None] + 0 * shift) % sums", "first tokens of sequences cancel in one sum", SUMS),
    _m("sums-unsigned", "transforms/spectral.py",
       "< 0.5, -1.0, torch", "< 0.5, 1.0, torch", "sums of rows without signs", SUMS),
    _m("sums-of-padding", "transforms/spectral.py", "taken = taken & mask[row.clamp(max=t - 1)]",
       "pass", "padding enters the sums of rows", SUMS),
    _m("smallest-directions", "transforms/spectral.py",
       "basis @ sample.T @ sample, basis", "basis, basis",
       "the split takes directions of the sketch", SPLIT),
    _m("projection-length", "transforms/products.py", "length * largest\n", "length\n",
       "lengths of a split are normalized", SPLIT),
    _m("unrotate", "transforms/hadamard.py", "_matrix(seed, x.device, x.dtype).T, dim)",
       "_matrix(seed, x.device, x.dtype), dim)", "blocks are rotated twice",
       ("operands/test_operands.py",)),
    _m("permutation-back", "transforms/rotation.py", "rotation.order.argsort()", "rotation.order",
       "the permutation is applied twice", ("operands/test_conditioners.py",)),
    _m("haar-signs", "transforms/rotation.py", "return q * r.diagonal().sign()", "return q",
       "random rotations have preferred directions", ("operands/test_conditioners.py",)),
    _m("hadamard-signs", "transforms/hadamard.py",
       "matrix * (1.0 - 2.0 * (random_bits(SIZE, seed, device) < 0))", "matrix",
       "the Hadamard rotation has no random signs", OPERANDS),
    # --- operands
    _m("residual-noise", "operands/conditioners/spectral.py",
       '"key": key.fold(3), "dtype": dtype}', '"key": key.fold(1), "dtype": dtype}',
       "residual and coordinates share their noise", SAVED, OPERANDS),
    _m("exact-residual", "operands/conditioners/spectral.py",
       "return low, dense, dense if self.compensated else", "return low, dense,",
       "residuals do not carry the rounding of the factors", OPERANDS, SAVED),
    _m("mean-of-padding", "operands/conditioners/mean.py", "return total / kept.sum()",
       "return total / x.shape[0]", "padding counts in the mean", OPERANDS),
    _m("requantized-axis", "operands/conditioners/requantized.py", "(x, dim=-1,", "(x, dim=0,",
       "the first quantization runs along tokens", OPERANDS),
    _m("eden-partner", "operands", "getattr(state, self.partner)", "state.weight",
       "wgrad's two operands are in different bases", EDEN),
    _m("estimator-power", "operands/conditioners/gradient_estimator.py",
       "z.abs().pow(1 / self.steepness - 1)", "z.abs().pow(1 / self.steepness)",
       "the estimator's slope is largest near codes", OUTLIERS),
    _m("affine-shift", "operands/conditioners/channelwise.py", "x - self.shift) / self.scale",
       "x + self.shift) / self.scale", "shifted the wrong way", STATES, OPERANDS),
    _m("outlier-count", "operands/conditioners",
       "highest = (x.numel() - upto > count).sum()", "highest = (x.numel() - upto >= count).sum()",
       "too few elements beyond the upper quantile", OUTLIERS),
    _m("hot-axis", "operands/conditioners", "error.abs().mean(1 - dim % 2)",
       "error.abs().mean(dim)", "channels are ranked across the contraction", OUTLIERS),
    _m("clip-slope", "operands", "* strength * (1 - strength)", "* strength",
       "the clipping strength's gradient lacks a factor", ("operands/test_clipping.py",)),
    _m("factor-gradient", "operands", "(u_hat * dw_v).sum(0)", "(u * dw_v).sum(0)",
       "the gradient of s is of the exact factor", ("layers/test_paper_equations.py",), GEMM),
    _m("kept-version", "operands/kept.py", "each._version,", "0,",
       "a changed weight keeps its old codes", ("training/test_weight_reuse.py",)),
    # --- layers
    _m("role-noise", "schemes", "return key.fold(16 + role)", "return key.fold(16)",
       "operands of one call share their noise", NOISE),
    _m("gradient-noise", "schemes", "self.call_key = self.weight_key.with_data(data)",
       "self.call_key = self.weight_key", "gradients' noise repeats for every batch", NOISE),
    _m("shared-noise", "schemes", "input_key = input_key or layer_key",
       "input_key = layer_key", "layers that read one tensor quantize it differently",
       NOISE, SAVED),
    _m("correction-noise", "schemes", "_COORDINATES = 32", "_COORDINATES = 16",
       "corrections share the noise of operands", NOISE, CORRECTIONS),
    _m("correction-dropped", "layers", "if Role.FPROP_WEIGHT in corrected:", "if False:",
       "the weight's error is not added in fprop", CORRECTIONS),
    _m("correction-lengths", "layers", "error_along(x, near, lengths,",
       "error_along(x, near, lengths.new_ones(len(lengths)),", "corrections lack the lengths",
       CORRECTIONS),
    _m("wgrad-axis", "schemes/roles.py", "Role.DGRAD_GRAD_OUTPUT) else 0",
       "Role.DGRAD_GRAD_OUTPUT, Role.WGRAD_GRAD_OUTPUT) else 0",
       "dy's blocks run along features in wgrad", OPERANDS),
    _m("tensor-scales", "numerics/kernels/epilogue.py",
       "if len(scales) == 1 else scales[0] * scales[1]", "",
       "one of two tensor scales is lost",
       ("layers/test_gemm.py::test_autocast_output_dtype_and_accuracy",)),
    _m("stale-input", "layers", "mark_of(tensor) if has_memory else (tensor._version,)", "()",
       "an input changed in place is taken for the old one", SHARED),
    _m("lent-kept", "layers/gemm.py", "memory.release(saved.tensors)", "memory.release()",
       "the next layer writes over what is saved for backward", ("layers/test_workspace.py",)),
    _m("lent-twice", "numerics/kernels/workspace.py", "free.pop(fitting - 1)",
       "free[fitting - 1]",
       "memory is lent to two layers at once", ("layers/test_workspace.py",)),
    _m("stale-mask", "layers", "(id(tensor), id(row_mask), ", "(id(tensor), ",
       "layers share what was sampled under another mask", SHARED),
    _m("eval-scheme", "layers/linear.py", "self.scheme if self.training else self.eval_scheme",
       "self.scheme", "evaluation rounds stochastically",
       ("layers/test_gemm.py::test_eval_is_deterministic_and_rounds_to_nearest",)),
    _m("process-noise", "layers/linear.py", "return self.key.fold(self.batch_rank())",
       "return self.key", "all processes round weights alike", NOISE),
    _m("attention-rows", "layers/attention.py", "x = x.mT if by_rows else x",
       "by_rows = False", "backward operands have the blocks of fprop", ATTENTION),
    _m("attention-noise", "layers/attention.py", "config.seed, self.name, kind)",
       "config.seed, self.name)",
       "both products of a call have one noise", ATTENTION),
    _m("attention-mask", "layers/attention.py",
       "probabilities if blocked is None else probabilities.masked_fill(blocked, 0.0)",
       "probabilities", "a row that attends to nothing attends to everything", ATTENTION),
    _m("attention-tiles", "layers/attention.py", "return _in_own_blocks(scheme)",
       "return scheme", "keys have square tiles, shared with dQ", ATTENTION),
    _m("attention-window", "conversion/attention.py", "return ~mask, None, keys",
       "return None, None, keys", "boolean masks are ignored",
       ("conversion/test_attention.py::TestArchitectures",)),
    # --- schemes
    _m("square-weights", "schemes/parts.py", "replace(weight.quantizer, tile=Tile.SQUARE)",
       "weight.quantizer", "weights in contraction mode have row blocks", SCHEMES),
    _m("gradient-scales", "schemes/parts.py",
       'scale_rounding="nearest")\n    return forward, quantizer(config, rounding="stochastic", '
       'scale_rounding="up"',
       'scale_rounding="nearest")\n    return forward, quantizer(config, rounding="stochastic", '
       'scale_rounding="nearest"', "gradients clip", SCHEMES),
    _m("mxfp4-gradients", "schemes/mxfp4.py", 'rounding="stochastic", scale_rounding="up"',
       'rounding="nearest", scale_rounding="up"', "MXFP4 gradients are biased", SCHEMES),
    _m("metis-rows", "schemes/metis.py", "replace(split, sample_frac=1.0)", "split",
       "a weight's subspace is found from a few rows", ("schemes/test_metis.py",)),
    _m("metis-correction", "schemes/metis.py", '"gradient": Role.DGRAD_WEIGHT',
       '"gradient": Role.DGRAD_GRAD_OUTPUT', "another operand of dgrad is corrected",
       SCHEMES, CORRECTIONS),
    _m("halo-axis", "schemes/halo.py", "dgrad_grad_output=Operand(backward, across)",
       "dgrad_grad_output=Operand(backward, along)", "HALO rotates gradients along features",
       SCHEMES),
    _m("quartet-partner", "schemes/quartet2.py", 'replace(wgrad, partner="input")',
       'replace(wgrad, partner="weight")', "wgrad's operands are rotated apart", SCHEMES, EDEN),
    _m("smoothing-power", "schemes/channel_ranges.py", "of_weight ** (1 - self.alpha)",
       "of_weight**self.alpha / 2", "SmoothQuant's scales are doubled", STATES),
    _m("range-step", "schemes/channel_ranges.py",
       "torch.where(new & step.isfinite(), mixed, running)",
       "torch.where(step.isfinite(), mixed, running)", "averages move within a step", STATES),
    _m("nvidia-weights", "schemes/nvidia.py", "tile=Tile.SQUARE", "tile=Tile.ROW",
       "NVIDIA's weights have row blocks", SCHEMES),
    _m("kept-recomputed", "schemes/subspaces.py", "if writes and not again else", "if writes else",
       "recomputed forward passes change what is kept", KEPT),
    _m("kept-in-evaluation", "schemes/base.py",
       "replace(operand.conditioner, reuse=None)", "operand.conditioner",
       "evaluation splits along the subspaces of training", KEPT),
    _m("kept-search", "schemes/subspaces.py", "if step % self.interval == 0:",
       "if (step + 1) % self.interval == 0:", "subspaces are found one step early", KEPT),
    _m("kept-micro-batches", "schemes/subspaces.py", "target = buffers[names[-1]]",
       "target = buffers[names[0]]", "a micro-batch refines what another has found", KEPT),
    _m("kept-shared", "layers/saved_input.py", "operand.conditioner.take_over(found.found)",
       "pass", "of layers with one input the first alone keeps a subspace", KEPT),
]  # fmt: skip
