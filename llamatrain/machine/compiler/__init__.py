"""The compiler behind the fast kernels: Numba's front end and LLVM. Nothing here is imported where nothing is compiled.

emit   a declared function to an object file     target  Numba set up for a class of processors
known  what bodies name, in Numba's types        atomics what the thread team's words do
simd   vectors                                   link    an object file to what is loaded
"""
