"""Inner loops written with LLVM's builder, imported only by the compiler."""
