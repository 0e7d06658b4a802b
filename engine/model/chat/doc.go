// Package chat turns conversations into token ids with the chat template of a
// model.
//
// A template comes out of a model file: it is a program of strangers. It runs
// as MiniJinja inside a WebAssembly module that imports nothing (the sources are
// in guest), with bounds on memory, instructions, output and time, and each
// render is a function of its conversation and the time that the caller passes.
// Whatever a template does, it ends in a typed error and other renders go on.
//
// # Life of an instance
//
//	instantiated -> template compiled -> (rendering -> restored)* -> closed
//
// An instance serves one template, and one render at a time. The memory right
// after the compilation is the template's image. After each render the memory is
// set back to the image, so no byte of a conversation outlives it there, and
// what a template leaves behind cannot reach the next conversation. An instance
// that trapped, was interrupted or grew is closed instead; the next render makes
// a new one out of the image. A Template owns its instances, an Engine owns the
// compiled module.
//
// # Control tokens never come out of messages
//
// The text of a message may spell a control token, and then it has to stay text.
// A conversation is encoded in five steps:
//
//  1. Each rune of a message that could begin a special token becomes a private
//     use rune that occurs neither in the conversation nor in the template. The
//     exchange is one to one, so lengths and positions stay and it can be undone.
//  2. The template renders these messages.
//  3. Special tokens are looked up in the rendered text. All that is found was
//     begun by the template.
//  4. Between them the private use runes become the original ones again.
//  5. These pieces are encoded as plain text. Nothing was cut elsewhere, so text
//     has the ids that it would have in one go.
//
// A special token whose text is white space only, such as a run of newlines, is
// text that has an id; it is neither replaced nor kept out of messages.
//
// A match that the template begins and a message completes is ruled out when a
// template is made: New renders probes and refuses a template that puts message
// text behind the beginning of a special token.
//
// # Templates that look for markup in messages
//
// Some templates test messages for markup, for example to cut off what comes
// before "</think>" in an answer. Step 1 hides it from them. New finds the
// literals for which a render would differ, by role, and for messages of that
// role Encode leaves them as they are. If a special token that could have come
// out of such a literal is in the rendered text, whoever wrote it, then the
// conversation is rendered again with the literal hidden: markup of a message
// stays text, unless the template surely removed it.
//
// # Which templates
//
// Supported are the templates whose SHA-256 is in the list of this package; each
// has a golden test against jinja2. Others are refused with an
// *UnsupportedTemplate unless the operator allows them, and then they must pass
// the same probes.
package chat
