"""Kernels that stand in for functions of the same name on a GPU."""
