"""What is done differently on NVIDIA's GPUs, and nowhere else."""
