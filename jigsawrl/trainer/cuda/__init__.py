"""Training on an NVIDIA GPU: kernels for what stands between the matrix products, forward and backward.

They take some seconds to compile, once on a machine, whatever the lengths of sequences are; a compiled model takes
longer, and again for other shapes.
"""
