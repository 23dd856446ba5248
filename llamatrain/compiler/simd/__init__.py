"""Vectors as compiled code computes with them.

lowering  what all of them say to LLVM's builder            typed  Numba's side: types of lanes, operators, functions
vector    registers of the machine's width, for kernels     memory  reading and writing those
sixteen   sixteen numbers, each operation rounded by itself, for blocks of quantised weights; halves  their half floats
"""
