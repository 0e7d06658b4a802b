// Package model reads hyperparameters and weights of llama models out of GGUF
// files.
//
// LoadLlama is the only door: what it returns has been checked as a whole, so
// that a kernel never meets a missing tensor, a wrong shape, a number format it
// does not know, or a feature that it would silently leave out. A file that
// holds more than the plain llama architecture (biases, experts, other rotary
// scalings, unknown tensors) is refused, because computing it without that part
// would give wrong text instead of an error.
//
// Weights stay in the file: a gguf.Tensor points into its mapping and is valid
// until the file is closed.
package model
