"""Vectors in compiled code.

llvm_ops     constants, calls, splats, masks and bfloat16 with LLVM's builder
vector_type  Numba's side: vector types, operators, functions
vector       registers of the machine's width, for kernels; memory reads and writes them
vec16        16 numbers, each operation rounded by itself, for quantized blocks; float16 for their scales
"""
