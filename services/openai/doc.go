// Package openai serves the HTTP surface that OpenAI's SDKs speak: chat
// completions, completions and models.
//
// # Bodies
//
// A body is decoded into the types of this package and nothing of it is ever
// forwarded. Names match in exact case and may occur once. A field that OpenAI
// documents and we do not serve is refused where it would change the answer
// ([unsupported]); a field that nobody documents is ignored, which is also what
// happens to the control fields of other engines: there is no type here that
// could hold them.
//
// # When bytes leave
//
// No status is written before the gateway has the proof that the answer is
// computed from this prompt. A stream then carries text as it comes; the chunk
// with finish_reason, the usage and [DONE] wait until the receipt is durable.
// A whole answer waits as a whole. A failure after the status is a data frame
// with an error, and then the connection ends without [DONE].
//
// # Sizes
//
// Chunks of a stream are as long as their text, which an observer of encrypted
// traffic can count. stream_options.include_obfuscation pads them to multiples
// of 32 bytes. It is off unless asked for: padding costs bandwidth, and only
// who runs the client knows whether the network between is hostile.
package openai
