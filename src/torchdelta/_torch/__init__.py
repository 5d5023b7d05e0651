"""Every private or version-dependent corner of torch that torchdelta leans on, and nothing else."""
