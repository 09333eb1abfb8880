"""The layers that replace nn.Linear, Conv1D and fused experts, and the GEMMs that they run."""
