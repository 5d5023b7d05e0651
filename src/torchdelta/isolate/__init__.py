"""A zygote and its workers: what may crash, hang or eat memory runs where it costs one process and nothing else."""
