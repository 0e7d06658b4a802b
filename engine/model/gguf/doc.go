// Package gguf reads and writes GGUF model files, versions 2 and 3.
//
// A file is untrusted input: it may be truncated, damaged, or made to harm.
// The reader checks every count, length and offset against the bytes that are
// there before it uses them, keeps to the limits in limits.go, and refuses a
// file in which two keys or two tensors share a name. What it accepts can be
// read without another check: the Data of a tensor is exactly as long as its
// dimensions and type say.
//
// Open maps a file into memory, so that several processes that serve one
// model share its pages and only touched weights are read from disk. Tensor
// data and array values point into that mapping and die with Close. A mapped
// file must not be changed or shortened while it is open: the operating system
// answers a read behind a new end with SIGBUS.
//
// The format is described in docs/gguf.md of the ggml project. This package
// leaves out big-endian files and arrays of arrays, which no model uses.
package gguf
