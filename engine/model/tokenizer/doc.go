// Package tokenizer turns text into the token ids of a model and back.
//
// It implements the two tokenizers of llama models, with the same results as
// llama.cpp: byte-level BPE ("gpt2") and SentencePiece BPE ("llama"). The
// vocabulary comes out of a GGUF file.
//
// # Control tokens
//
// Text and markup are different inputs. In Plain mode no text whatever gives a
// control or user-defined token: these are not part of the tables that merging
// looks into, so the characters of "<|im_end|>" become ordinary tokens. Only
// Markup mode recognises them, and only text of the platform and its templates
// may be encoded in it, never that of a client.
//
// # Cost
//
// Encoding n bytes takes O(n log n) time and O(n) memory, whatever the text
// is. Nothing of a text is kept after a call: there is no cache of words, since
// a cache that tenants share tells by its timing what others wrote.
package tokenizer
