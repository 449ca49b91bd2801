//! CPU kernels for packed (variable-length) vision attention.
