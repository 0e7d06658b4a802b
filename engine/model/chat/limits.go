package chat

import "time"

// Bounds of the sandbox. Those of a render grow with the conversation, so that
// long ones fit and a template gains little by asking for one.
const (
	// maxSource is the length of a template in bytes. The largest known one has
	// 13 KiB.
	maxSource = 256 << 10
	// guestPages bounds the memory of an instance: 512 pages of 64 KiB, 32 MiB.
	guestPages = 512
	// compileTime is what compiling one template may take. It takes about 1 ms.
	compileTime = 500 * time.Millisecond
	// probeTime is what all the probes of one template may take together.
	probeTime = 10 * time.Second

	// renderTime is what a render of a short conversation may take. It takes
	// 0.1 to 0.7 ms of a core; the rest is for machines whose cores are taken,
	// since the bound is of time that passes.
	renderTime = 500 * time.Millisecond
	// renderTimePerKiB is added for each KiB of a conversation. It takes 0.1 ms.
	renderTimePerKiB = time.Millisecond
	// renderFuel is how many instructions a render may execute.
	renderFuel = 1 << 20
	// renderFuelPerMessage is added for each message. Templates take 50 to 500.
	renderFuelPerMessage = 1 << 10
	// maxOutput is how many bytes a render may write, beside twice the
	// conversation.
	maxOutput = 1 << 20

	// MaxMessages is the largest number of messages of a conversation. With the
	// smallest messages it takes half of an instance's memory.
	MaxMessages = 4096
	// MaxContent is the largest sum of the lengths of the messages in bytes. It
	// is beyond the context windows of today, and fits an instance also when each
	// byte becomes a replacement of four.
	MaxContent = 1 << 20

	// defaultInstances is how many instances a template has at most, and so how
	// many renders of it run at a time. Each has about 0.6 MiB; a render takes less
	// than a millisecond.
	defaultInstances = 4
	// maxLiterals is how many different string literals with markup a template
	// may have. Each is probed. The templates that are known have up to 40.
	maxLiterals = 128
	// maxLiteral is the length in bytes of the longest literal that is probed;
	// longer ones are prompts, not markup to look for.
	maxLiteral = 64
	// maxProtected is how many different runes may begin special tokens. Each
	// needs a private use rune of its own.
	maxProtected = 4096
)
