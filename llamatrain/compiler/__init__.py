"""How kernels are declared, compiled, cached and shipped, and the thread pool that runs them.

Only these modules import Numba or LLVM, and only where something is compiled:

emit         compile a declared function to an object file
target       set up Numba for a class of processors
numba_types  the names that kernel bodies use, as Numba types
atomics      the atomic operations of the thread pool
simd         vectors
link         load an object file
"""
