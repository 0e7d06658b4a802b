package gguf

// Limits of a file. They are far above every published model and low enough
// that a hostile file cannot make the reader allocate much more than its own
// size.
const (
	// maxKeys bounds the metadata entries; real models have under 100.
	maxKeys = 1 << 14
	// maxTensors bounds the tensors; the largest models have a few thousand.
	maxTensors = 1 << 16
	// maxDims is the number of dimensions a ggml tensor can have.
	maxDims = 4
	// maxKeyLen is the limit that the format sets for keys, in bytes.
	maxKeyLen = 1<<16 - 1
	// maxNameLen bounds tensor names, in bytes; the format says 64.
	maxNameLen = 255
	// maxStringLen bounds one string, in bytes. The longest are chat templates
	// of some 20 kB.
	maxStringLen = 1 << 24
	// maxArrayLen bounds the elements of an array. The longest are the merges
	// of a tokenizer, about 300,000.
	maxArrayLen = 1 << 24
	// maxAlignment bounds general.alignment, in bytes; the usual value is 32.
	maxAlignment = 1 << 20
	// defaultAlignment holds where the file sets none, in bytes.
	defaultAlignment = 32
	// minAlignment is the multiple that the format asks for, in bytes.
	minAlignment = 8
)

// keyAlignment names the alignment of the tensor data.
const keyAlignment = "general.alignment"
