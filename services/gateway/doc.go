// Package gateway takes a request of an authenticated principal through the
// platform: it makes the exact token ids, admits them, asks the two legs, lets
// bytes leave only with proof, and leaves evidence of whatever happened. The
// OpenAI surface and the Connect services are two faces of it.
//
// # Life of a request
//
//	prepare   model, template, token ids, limits      refusals leave no receipt
//	   |
//	admit     a pair of workers is chosen, the intent is recorded
//	   |      ------------------- from here on: exactly one receipt -----------
//	reserve   decode holds credits for prompt + output
//	   |
//	prefill   prefill computes, seals, offers; decode pulls, verifies, commits
//	   |
//	compare   edge, prefill and decode counted the same tokens, and both legs
//	   |      name the same manifest; no status and no byte before this
//	stream    text of the decode leg
//	   |
//	settle    usage and receipt are durable; only now finish_reason and [DONE]
//
// # Who owns what
//
// A Stream belongs to one goroutine of the surface. Its record is written by
// that goroutine only, and handed to the settler once, by the first of Finish,
// an error of Next, or Close. The prefill call runs in its own goroutine, whose
// result is read before anything leaves.
//
// # Failure
//
// A failing leg cancels the other: both calls run under one context. A worker
// that is reaped cancels it too, so that nobody waits for a socket to notice.
// Whatever a leg says in its refusal ends up in the receipt; the caller gets a
// fixed sentence.
package gateway
