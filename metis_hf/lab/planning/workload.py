"""The amount of a training run, in which portions it comes, and the names of plans of processes."""

from __future__ import annotations

from dataclasses import dataclass, fields

FP32, BF16 = 4, 2  # bytes
DDP, FSDP2, TP = "DDP", "FSDP2", "TP"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The amount of training: in which portions, on how many processes.

    Args:
        tokens: of the whole run.
        sequence_length: tokens per sequence.
        global_batch: sequences per optimizer step, over all processes.
        device_batch: sequences per process and forward pass.
        world_size: processes, one for each device.
        bf16: GEMMs under bf16 autocast; weights and optimizer stay in fp32.
        checkpointing: activations of blocks are computed again in the backward pass.

    Raises:
        ValueError: a number below 1, or a global batch that the processes cannot divide.
    """

    tokens: int
    sequence_length: int
    global_batch: int
    device_batch: int
    world_size: int = 1
    bf16: bool = True
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and value < 1:
                raise ValueError(f"{field.name}={value}; expected at least 1")
        portion = self.device_batch * self.world_size
        if self.global_batch % portion:
            raise ValueError(
                f"a global batch of {self.global_batch} sequences cannot be cut into equal parts "
                f"of {self.device_batch} on {self.world_size} processes; choose a global batch "
                f"that is a multiple of {portion}, or another batch per device"
            )

    @property
    def accumulation(self) -> int:
        """Forward passes per process and optimizer step."""
        return self.global_batch // (self.device_batch * self.world_size)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length

    @property
    def steps(self) -> int:
        """Optimizer steps that see at least `tokens` tokens."""
        return -(-self.tokens // self.tokens_per_step)

    @property
    def compute_size(self) -> int:
        """Bytes of an element of what GEMMs return, and of what FSDP2 communicates."""
        return BF16 if self.bf16 else FP32

    @property
    def device_tokens(self) -> int:
        """Tokens of one forward pass."""
        return self.device_batch * self.sequence_length
