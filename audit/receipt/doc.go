// Package receipt defines the receipt of a request: what was asked, what was
// computed, by which workers, over which pages, and what became of it. It
// holds no text of a prompt or an answer.
//
// # Format, version 1
//
// A receipt is one CBOR map (RFC 8949) in the core deterministic encoding of
// its section 4.2.1: definite lengths, shortest forms, keys in ascending order,
// no key twice. Keys are unsigned integers; key 1 is the version. A key whose
// value is absent is left out, never null or zero, so that there is exactly
// one encoding of a receipt. Ids and digests are byte strings, times are Unix
// microseconds. The digest of a receipt is SHA-256 of its bytes.
//
//	 1 version            uint, 1
//	 2 request id         16 bytes
//	 3 tenant             16 bytes
//	 4 project            16 bytes
//	 5 API key            16 bytes, the id
//	 6 model              text, the name
//	 7 model digest       32 bytes, SHA-256 of the model file
//	 8 surface            text, "openai.chat" and so on
//	 9 streamed           bool
//	10 received           int, Unix microseconds; the request was read
//	11 admitted           int; it was accepted for computing
//	12 committed          int; the decode leg had verified every page
//	13 first byte         int; the first byte of the answer left
//	14 finished           int; the last thing happened
//	15 edge tokens        uint; length of the prompt, measured at the edge
//	16 prefill            leg, below
//	17 decode             leg, below
//	18 transport          text; how page bytes moved: "inproc", "shm", "tcp", "unix"
//	19 output tokens      uint
//	20 max output tokens  uint
//	21 outcome            text, see Outcome
//	22 refusal            map: 1 leg (text), 2 reason (text)
//	23 finish reason      text: "stop", "length"
//	24 response digests   map: 1 key id (text), 2 over the ids (32 bytes), 3 over the text (32 bytes)
//	25 isolation          text: the class delivered, "shared"
//	26 withheld           bool; the evidence came too late, the end of the answer was withheld
//	27 replica            16 bytes; epoch of the gateway
//
// A leg is a map of what that leg measured itself, nothing echoed:
//
//	1 worker epoch       16 bytes
//	2 build              text
//	3 tokens             uint; KV positions written (prefill) or in verified pages (decode); absent: not measured
//	4 extents            array of [first page, pages, generation, scrubbed pages]
//	5 manifest root      32 bytes; absent: the leg never got that far
//	6 handoff bytes      uint
//	7 compute            uint, microseconds
//	8 handoff            uint, microseconds
//	9 queue              uint, microseconds
//
// [Decode] accepts nothing else: it encodes what it decoded and compares, so an
// unknown key, a zero that should be absent or a longer form of a number is
// refused.
package receipt
