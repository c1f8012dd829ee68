"""The C++ kernels: vectorised, threaded, with the instruction set chosen at run time. No torch."""
