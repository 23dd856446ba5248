"""Declaration, compilation, cache and prebuilt libraries of kernels, and the thread pool that runs them.

docs/KERNELS.md explains how a kernel is called. Only these modules import Numba or LLVM, and only when
something is compiled:

emit         compile a declared function to an object file
target       set up Numba for a class of processors
numba_types  the names that kernel bodies use, as Numba types
atomics      the atomic operations of the thread pool
simd         vectors
link         link an object file
"""
