"""Who looks up and updates rows: torch's kernels, fbgemm's on CPUs, Triton's on GPUs."""
